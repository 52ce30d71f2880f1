"""How few loads there could be."""

from jaxinfer.experts.scheduling.bounds import compulsory_loads


def test_compulsory():
    assert compulsory_loads("abca", {"b", "z"}) == 2
    assert compulsory_loads("", {"a"}) == 0

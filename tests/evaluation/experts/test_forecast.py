"""How few loads there could be."""

from jaxinfer.evaluation.experts.forecast import compulsory_loads


def test_compulsory():
    assert compulsory_loads("abca", {"b", "z"}) == 2
    assert compulsory_loads("", {"a"}) == 0

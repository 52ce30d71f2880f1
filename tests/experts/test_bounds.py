"""How few loads there could be, against trying everything."""

import functools

from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.experts.scheduling.bounds import belady_loads, compulsory_loads


def fewest_loads(order, slots, resident):
    """By trying every expert that could leave."""

    @functools.cache
    def rest(place, there):
        if place == len(order):
            return 0
        name = order[place]
        if name in there:
            return rest(place + 1, there)
        if len(there) < slots:
            return 1 + rest(place + 1, there | {name})
        return 1 + min(rest(place + 1, there - {other} | {name}) for other in there)

    return rest(0, frozenset(resident))


@given(st.lists(st.sampled_from("abcde"), max_size=10), st.integers(1, 4), st.sets(st.sampled_from("abcde")))
def test_belady(order, slots, resident):
    resident = set(sorted(resident)[:slots])
    assert belady_loads(order, slots, resident) == fewest_loads(tuple(order), slots, resident)


def test_belady_examples():
    assert belady_loads([], 1) == 0
    assert belady_loads("abab", 1) == 4
    assert belady_loads("abab", 2) == 2
    assert belady_loads("aaaa", 1, "a") == 0


def test_compulsory():
    assert compulsory_loads("abca", {"b", "z"}) == 2
    assert compulsory_loads("", {"a"}) == 0

"""Which experts are there at the start."""

from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.experts.scheduling.experts import ExpertInfo
from jaxinfer.experts.scheduling.placement import place


def experts(*sizes):
    return [ExpertInfo(name=str(place), architecture="resnet", bytes=size) for place, size in enumerate(sizes)]


def test_deals_in_turn():
    assert place(experts(1, 1, 1, 1, 1), [2, 2, 1]) == [["0", "3"], ["1", "4"], ["2"]]


def test_passes_over_full_pools_and_tries_smaller_experts():
    assert place(experts(1, 1, 1, 1), [1, 3]) == [["0"], ["1", "2", "3"]]
    assert place(experts(5, 2, 3, 1), [2, 2]) == [["1"], ["3"]]


def test_exact_fit_and_nothing():
    assert place(experts(2, 2), [4]) == [["0", "1"]]
    assert place([], [4, 4]) == [[], []]
    assert place(experts(1), [0]) == [[]]


@given(st.lists(st.integers(1, 5), max_size=12), st.lists(st.integers(1, 10), min_size=1, max_size=4))
def test_fits_and_leaves_no_room_for_what_is_left_out(sizes, budgets):
    placed = place(experts(*sizes), budgets)
    free = [budget - sum(sizes[int(name)] for name in names) for budget, names in zip(budgets, placed, strict=True)]
    names = [name for pool in placed for name in pool]
    assert min(free) >= 0
    assert len(names) == len(set(names))
    assert all(size > max(free) for number, size in enumerate(sizes) if str(number) not in names)
    assert all(pool == sorted(pool, key=int) for pool in placed)

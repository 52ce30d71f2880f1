"""Which executor gets a request: the paper's example, and brute force."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.experts.scheduling.assignment import assign


@pytest.mark.parametrize(
    ("totals", "additions", "chosen"),
    [
        ([4, 5, 9], [3, 1, 1], 1),  # the paper's Figure 8: both 0 and 1 end before 2 does, 1 adds less
        ([4, 9], [6, 0.5], 1),
        ([0, 0], [2, 2], 0),
        ([7], [1], 0),
        ([0, 0], [None, 2], 1),
        ([5, 1, 9], [1, 1, 1], 1),  # equal additions: the earliest end
        ([1.0, 1.0 + 1e-9, 9], [2, 2 - 1e-9, 5], 0),  # rounding does not decide
    ],
)
def test_examples(totals, additions, chosen):
    assert assign(totals, additions) == chosen


@given(st.lists(st.tuples(st.integers(0, 9), st.none() | st.integers(0, 9)), min_size=1, max_size=5))
def test_is_the_first_of_the_best(executors):
    totals, additions = zip(*executors, strict=True)
    able = [x for x, addition in enumerate(additions) if addition is not None]
    if able:
        best = min(
            able,
            key=lambda x: (
                max([total for y, total in enumerate(totals) if y != x] + [totals[x] + additions[x]]),
                additions[x],
                totals[x] + additions[x],
                x,
            ),
        )
        assert assign(totals, additions) == best

"""Which executor gets a request (paper section 4.2): the one that keeps the total time least, then the work."""

import heapq
from collections.abc import Sequence

ABSOLUTE_TOLERANCE = 1e-6
"""Seconds; times that differ by less are equal, so that rounding cannot decide."""
RELATIVE_TOLERANCE = 1e-9


def assign(totals: Sequence[float], additions: Sequence[float | None]) -> int:
    """The executor to choose, by its place.

    Executor x would end at totals[x] + additions[x], and all of them at the latest of these and the other totals. The
    earliest such end wins; of equal ones the least addition, then the earliest own end, then the first.

    Most ties are between executors that all end before another one does, so that the least addition decides: that of
    the executor that has the expert already. This is what keeps requests with their experts.

    Args:
      totals: seconds until each executor has done what it has.
      additions: seconds that the request would add; None: the executor cannot take it.

    >>> assign([4, 5, 9], [3, 1, 1])  # the paper's Figure 8
    1
    """
    able = [x for x, addition in enumerate(additions) if addition is not None]
    assert able, "the caller has seen that one can take it"
    first, second = heapq.nlargest(2, [*totals, 0.0])
    ends = {x: totals[x] + (additions[x] or 0.0) for x in able}
    spans = {x: max(second if totals[x] == first else first, ends[x]) for x in able}
    for times in (spans, dict(enumerate(additions)), ends):
        least = min(times[x] or 0.0 for x in able)
        bound = least + max(ABSOLUTE_TOLERANCE, RELATIVE_TOLERANCE * least)
        able = [x for x in able if (times[x] or 0.0) <= bound]
    return able[0]

"""Request assignment (paper section 4.2): minimise the overall finish time; break ties by least added work."""

from collections.abc import Sequence

ABSOLUTE_TOLERANCE = 1e-6
"""Seconds within which times count as equal, so that rounding decides nothing."""
RELATIVE_TOLERANCE = 1e-9


def assign(totals: Sequence[float], additions: Sequence[float | None]) -> int:
    """Return the index of the executor for a request.

    Executor x would end at totals[x] + additions[x], and all of them at the latest of these and the other totals. The
    earliest such end wins; ties go to the least addition, then to the executor's earliest end, then to the first.

    Most ties are between executors that all end before another one does, so that the least addition decides: that of
    the executor that has the expert already. This keeps requests with their experts.

    Args:
      totals: seconds until each executor has finished its work.
      additions: seconds that the request would add; None: the executor cannot take it. Not all are None.

    >>> assign([4, 5, 9], [3, 1, 1])  # the paper's Figure 8
    1
    """
    latest = second = 0.0
    for total in totals:
        if total > latest:
            latest, second = total, latest
        elif total > second:
            second = total
    chosen, best = -1, (0.0, 0.0, 0.0)
    for x, addition in enumerate(additions):
        if addition is not None:
            end = totals[x] + addition
            others = second if totals[x] == latest else latest
            times = (max(end, others), addition, end)
            if chosen < 0 or _is_before(times, best):
                chosen, best = x, times
    return chosen


def _is_before(times: tuple[float, ...], others: tuple[float, ...]) -> bool:
    """Check whether the first times that differ are less."""
    for mine, other in zip(times, others, strict=True):
        difference = mine - other
        if abs(difference) > max(ABSOLUTE_TOLERANCE, RELATIVE_TOLERANCE * other):
            return difference < 0
    return False

"""Dividing a memory between experts and their activations (paper section 4.4)."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import numpy as np

from jaxinfer.experts.errors import ConfigError

W0 = 15.0
"""Size of the first window in percent."""
MARGIN = 0.05
"""Share of the line's prediction by which throughput must fall short of it."""
FIRST_FIT = 2
"""Number of points of the first line; each further line has one more."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """A step of the search.

    Attributes:
      lower: the window's lower end, in percent of usage or of experts.
      upper: its upper end.
      experts: the smallest and the largest number of experts in it.
      throughput: measured with the largest number.
    """

    lower: float
    upper: float
    experts: tuple[int, int]
    throughput: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryChoice:
    """The number of experts to keep in memory, and why.

    Attributes:
      experts: the number.
      windows: all measured windows; the choice is from the last one.
      line: slope and intercept of throughput over the windows' numbers, from 1, without the last; None if
        there were too few.
      error: share of the line's prediction by which the last window falls short of it.
    """

    experts: int
    windows: Sequence[Window]
    line: tuple[float, float] | None
    error: float


def decay_windows(w0: float = W0) -> Iterator[tuple[float, float]]:
    """Yield windows' lower and upper ends in percent: each is (1 - w0 / 100) times as large as the one before (Eq. 1).

    The windows never end; together they make 100.

    >>> [round(upper, 2) for _, upper in itertools.islice(decay_windows(15), 5)]
    [15.0, 27.75, 38.59, 47.8, 55.63]
    """
    if not 0 < w0 < 100:
        raise ConfigError(f"w0 must be in (0, 100), got {w0}.")
    decay = 1 - w0 / 100
    return ((100 * (1 - decay**k), 100 * (1 - decay ** (k + 1))) for k in itertools.count())


def search_memory(
    usage: Iterable[float],
    measure: Callable[[int], float],
    *,
    w0: float = W0,
    margin: float = MARGIN,
    axis: Literal["usage", "count"] = "usage",
    choose: Literal["random", "argmax"] = "random",
    limit: int | None = None,
    seed: int = 0,
) -> MemoryChoice:
    """Search for the number of experts to keep where compute is sufficient (paper section 4.4, Eqs. 1 to 3).

    Each window reaches further into the experts, the most used first. Throughput grows about linearly, until batches
    have too little memory: the choice is in the first window that falls short of the line through all before it by more
    than `margin` of its prediction.

    Args:
      usage: how often each expert is used, in any unit and order.
      measure: returns the throughput of a sample of the work with this number of experts in memory.
      w0: size of the first window in percent.
      margin: share of the prediction.
      axis: the windows' percentages are of all usage, or of the number of experts.
      choose: any number in the window (the paper's choice), or the better one of its two ends.
      limit: largest number of experts that fit beside one request; None: all fit.
      seed: seed of the random choice.

    Raises ConfigError if an argument is impossible, or throughput is not more than 0.
    """
    cumulative = _cumulative(usage) if axis == "usage" else _cumulative([1.0] * len(list(usage)))
    if not margin > 0:
        raise ConfigError(f"margin must be more than 0, got {margin}.")
    last = int(np.searchsorted(cumulative, 1.0)) + 1
    if limit is not None:
        if limit < 1:
            raise ConfigError(f"limit must be at least 1 expert, got {limit}.")
        last = min(last, limit)
    measured: dict[int, float] = {}
    windows: list[Window] = []
    line, error = None, 0.0
    for lower, upper in decay_windows(w0):
        experts = (min(_reaching(cumulative, lower), last), min(_reaching(cumulative, upper), last))
        if experts[1] not in measured:
            measured[experts[1]] = _require_throughput(measure(experts[1]), experts[1])
        windows.append(Window(lower=lower, upper=upper, experts=experts, throughput=measured[experts[1]]))
        if len(windows) > FIRST_FIT:
            line = _fit([window.throughput for window in windows[:-1]])
            predicted = line[0] * len(windows) + line[1]
            error = (predicted - windows[-1].throughput) / predicted if predicted > 0 else 0.0
        if error > margin or experts[1] == last:
            break
    return MemoryChoice(experts=_chosen(windows, choose, seed), windows=tuple(windows), line=line, error=error)


def _cumulative(usage: Iterable[float]) -> np.ndarray:
    """Compute the share of all usage of the n most used experts, for n from 1; it ends in exactly 1."""
    values = np.array(sorted(usage, reverse=True), float)
    if not values.size:
        raise ConfigError("there is no expert to search over.")
    if not np.all(np.isfinite(values) & (values >= 0)) or not values[0] > 0:
        raise ConfigError("usage must be at least 0 for all experts, and more than 0 for one.")
    cumulative = np.cumsum(values)
    return cumulative / cumulative[-1]


def _reaching(cumulative: np.ndarray, percent: float) -> int:
    """The smallest number of experts, at least one, with this percentage of all usage."""
    return min(int(np.searchsorted(cumulative, percent / 100 - 1e-12)) + 1, len(cumulative))


def _fit(throughputs: Sequence[float]) -> tuple[float, float]:
    """Fit a least-squares line over numbers from 1; return slope and intercept (Eq. 2)."""
    slope, intercept = np.polyfit(np.arange(1, len(throughputs) + 1), throughputs, 1)
    return float(slope), float(intercept)


def _require_throughput(value: float, experts: int) -> float:
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(
            f"throughput with {experts} experts must be more than 0, got {value}: is the sample of requests empty?"
        )
    return value


def _chosen(windows: Sequence[Window], choose: Literal["random", "argmax"], seed: int) -> int:
    low, high = windows[-1].experts
    match choose:
        case "random":
            return int(np.random.default_rng(seed).integers(low, high, endpoint=True))
        case "argmax":
            before = windows[-2].throughput if len(windows) > 1 else 0.0
            return low if before > windows[-1].throughput else high

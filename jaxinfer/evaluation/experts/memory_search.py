"""How much of a memory is for experts, and how much for their activations (paper section 4.4)."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import numpy as np

from jaxinfer.experts.errors import ConfigError

W0 = 15.0
"""Percent of the first window."""
MARGIN = 0.05
"""By which part of what the line predicts throughput must fall short of it."""
FIRST_FIT = 2
"""Points of the first line; each further one has one more."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """One step of the search.

    Attributes:
      lower, upper: its ends, in percent of usage or of experts.
      experts: the least and the largest number of experts in it.
      throughput: measured with the largest number.
    """

    lower: float
    upper: float
    experts: tuple[int, int]
    throughput: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryChoice:
    """How many experts to keep in memory, and why.

    Attributes:
      experts: how many.
      windows: all that were measured; the choice is from the last one.
      line: slope and intercept of throughput over the windows' places, which begin with 1, without the last; None if
        there were too few.
      error: by which part of the line's prediction the last window falls short of it.
    """

    experts: int
    windows: Sequence[Window]
    line: tuple[float, float] | None
    error: float


def decay_windows(w0: float = W0) -> Iterator[tuple[float, float]]:
    """Lower and upper ends of windows, in percent: each is (1 - w0 / 100) times as large as the one before (Eq. 1).

    There is no last one; together they are 100.

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
    choose: Literal["random", "midpoint", "argmax"] = "random",
    limit: int | None = None,
    seed: int = 0,
) -> MemoryChoice:
    """Search for how many experts to keep where compute is sufficient (paper section 4.4, Eqs. 1 to 3).

    Each window reaches further into the experts, the most used first. Throughput grows with them about as a line does,
    until batches have too little memory: the first window that falls short of the line through all before it, by more
    than `margin` of its prediction, has the choice.

    Args:
      usage: how often each expert is used, in any unit and order.
      measure: throughput of a sample of the work with so many experts in memory.
      w0: percent of the first window.
      margin: of the prediction.
      axis: what windows are percent of: all usage, or the number of experts.
      choose: any number in the window (the paper's choice), its middle, or the better one of its two ends.
      limit: no more experts fit beside one request; None: all do.
      seed: of the random choice.

    Raises ConfigError if an argument cannot be, or throughput is not more than 0.
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
    """Of all usage, the part of the n most used experts, for n from 1; ends in exactly 1."""
    values = np.array(sorted(usage, reverse=True), float)
    if not values.size:
        raise ConfigError("there is no expert to search over.")
    if not np.all(np.isfinite(values) & (values >= 0)) or not values[0] > 0:
        raise ConfigError("usage must be at least 0 for all experts, and more than 0 for one.")
    cumulative = np.cumsum(values)
    return cumulative / cumulative[-1]


def _reaching(cumulative: np.ndarray, percent: float) -> int:
    """The least number of experts with at least so many percent of all usage, and at least one expert."""
    return min(int(np.searchsorted(cumulative, percent / 100 - 1e-12)) + 1, len(cumulative))


def _fit(throughputs: Sequence[float]) -> tuple[float, float]:
    """Slope and intercept of the line over places that begin with 1, by least squares (Eq. 2)."""
    slope, intercept = np.polyfit(np.arange(1, len(throughputs) + 1), throughputs, 1)
    return float(slope), float(intercept)


def _require_throughput(value: float, experts: int) -> float:
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(
            f"throughput with {experts} experts must be more than 0, got {value}: is the sample of requests empty?"
        )
    return value


def _chosen(windows: Sequence[Window], choose: Literal["random", "midpoint", "argmax"], seed: int) -> int:
    low, high = windows[-1].experts
    match choose:
        case "random":
            return int(np.random.default_rng(seed).integers(low, high, endpoint=True))
        case "midpoint":
            return (low + high) // 2
        case "argmax":
            before = windows[-2].throughput if len(windows) > 1 else 0.0
            return low if before > windows[-1].throughput else high

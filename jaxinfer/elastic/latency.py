"""How long batches take at each level, as measured here."""

import logging
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from jaxinfer.compiled import Bucket, Cost, Costs
from jaxinfer.elastic.errors import ProfileError
from jaxinfer.elastic.programs import PROGRAM

log = logging.getLogger(__name__)

REPEATS = 5
"""How often a batch is timed for the profile at least."""
DRIFT = 1.3
"""Where the median of the newest batches is this many times longer or shorter than the profile's, they take the place
of all before."""
NEWEST = 16


LevelAndSize = tuple[int, int]
"""A level, and how many images a batch is padded to."""


class Latency(NamedTuple):
    """Seconds of a batch.

    Attributes:
      p50, p95: half of all batches, and all but a twentieth, took at most this long.
    """

    p50: float
    p95: float


class LatencyProfile:
    """What batches take, by level and batch size; follows a machine that becomes slower or faster.

    Args:
      costs: the record of costs, which earlier processes have added to.
      merged: how many tokens a level merges in all layers, which its schedule decides.

    Attributes:
      refreshed: how often the time of a level and batch size was taken anew, because it had drifted.
    """

    def __init__(self, costs: Costs, merged: Callable[[int], int]):
        self.costs, self.refreshed, self._merged = costs, 0, merged
        self._known: dict[LevelAndSize, Latency] = {}
        self._newest: dict[LevelAndSize, deque[float]] = {}

    def missing(self, levels: Iterable[int], sizes: Iterable[int]) -> list[LevelAndSize]:
        """Levels with batch sizes of which too few batches were timed."""
        sizes = tuple(sizes)
        return [
            (level, batch)
            for level in levels
            for batch in sizes
            if (cost := self._cost(level, batch)) is None or cost.calls < REPEATS
        ]

    def of(self, level: int, batch: int) -> Latency:
        """Of a batch that a program is compiled for. Raises ProfileError if it was not measured."""
        if (known := self._known.get((level, batch))) is None:
            known = self._known[level, batch] = self._on_record(level, batch)
        return known

    def renew(self, level: int, batch: int, seconds: Iterable[float]) -> None:
        """Go by these batches alone from now on, in later processes too."""
        self.costs.replace(PROGRAM, self._bucket(level, batch), seconds)
        self._known[level, batch] = self._on_record(level, batch)

    def _on_record(self, level: int, batch: int) -> Latency:
        if (cost := self._cost(level, batch)) is None:
            raise ProfileError(f"batches of {batch} at level {level} were never timed here: call `profile`.")
        return Latency(cost.p50, cost.p95)

    def _bucket(self, level: int, batch: int) -> Bucket:
        return ("level", level), ("merged", self._merged(level)), ("batch", batch)

    def _cost(self, level: int, batch: int) -> Cost | None:
        return self.costs.of(PROGRAM, level=level, merged=self._merged(level), batch=batch)

    def observe(self, level: int, batch: int, seconds: float) -> bool:
        """Count a batch; where its level and size have drifted, take their profile anew and say so."""
        self.costs.record(PROGRAM, self._bucket(level, batch), seconds)
        newest = self._newest.setdefault((level, batch), deque(maxlen=NEWEST))
        newest.append(seconds)
        if len(newest) < NEWEST or (known := self._known.get((level, batch))) is None:
            return False
        median = statistics.median(newest)
        if abs(math.log(median / known.p50)) <= math.log(DRIFT):
            return False
        log.info("Batches of %d at level %d take %.3g s, not %.3g.", batch, level, median, known.p50)
        self.renew(level, batch, newest)
        self.refreshed += 1
        newest.clear()
        return True

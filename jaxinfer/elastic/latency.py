"""How long batches take at each level, as measured here."""

import logging
import math
import statistics
import threading
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
"""Where the median of the newest batches of a level and size is this many times longer or shorter than what is known,
they take its place."""
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
    """What batches take, by level and batch size: as measured, or where serving finds otherwise, as found there.

    The record of costs has what was measured alone. What serving finds holds for this process, and a slowdown no longer
    than until a batch of any level and size is quick again: it is the machine's, and levels that it has made look slow
    are not chosen, and so could not be seen to be quick.

    Args:
      costs: the record of costs, which earlier processes have added to.
      merged: how many tokens a level merges in all layers, which its schedule decides.

    Attributes:
      refreshed: how often the time of a level and batch size was taken anew, because it had drifted.
    """

    def __init__(self, costs: Costs, merged: Callable[[int], int]):
        self.costs, self.refreshed, self._merged = costs, 0, merged
        self._measured: dict[LevelAndSize, Latency] = {}
        self._slower: dict[LevelAndSize, float] = {}  # how many times than was measured, where it has drifted
        self._newest: dict[LevelAndSize, deque[float]] = {}
        self._lock = threading.Lock()

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
        with self._lock:
            measured, slower = self._measured_of(level, batch), self._slower.get((level, batch), 1.0)
            return Latency(slower * measured.p50, slower * measured.p95)

    def renew(self, level: int, batch: int, seconds: Iterable[float]) -> None:
        """Go by these batches alone from now on, in later processes too."""
        with self._lock:
            self.costs.replace(PROGRAM, self._bucket(level, batch), seconds)
            for known in (self._measured, self._slower, self._newest):
                known.pop((level, batch), None)

    def observe(self, level: int, batch: int, seconds: float) -> bool:
        """Take in what a batch took; whether that has changed what batches are said to take.

        Raises ProfileError if its level and size were not measured.
        """
        with self._lock:
            newest = self._newest.setdefault((level, batch), deque(maxlen=NEWEST))
            newest.append(seconds)
            if len(newest) < NEWEST:
                return False
            measured = self._measured_of(level, batch).p50
            found, known = statistics.median_low(newest) / measured, self._slower.get((level, batch), 1.0)
            if not _differ(found, known):
                return False
            log.info(
                "Batches of %d at level %d take %.3g times as long as measured, not %.3g.", batch, level, found, known
            )
            if found < known:
                self._forget_slowdown()
            self._slower.pop((level, batch), None)
            if _differ(found, 1.0):
                self._slower[level, batch] = found
            newest.clear()
            self.refreshed += 1
            return True

    def _forget_slowdown(self) -> None:
        for key in [key for key, slower in self._slower.items() if slower > 1]:
            del self._slower[key]
            self._newest[key].clear()

    def _measured_of(self, level: int, batch: int) -> Latency:
        if (known := self._measured.get((level, batch))) is None:
            if (cost := self._cost(level, batch)) is None:
                raise ProfileError(f"batches of {batch} at level {level} were never timed here: call `profile`.")
            known = self._measured[level, batch] = Latency(cost.p50, cost.p95)
        return known

    def _bucket(self, level: int, batch: int) -> Bucket:
        return ("level", level), ("merged", self._merged(level)), ("batch", batch)

    def _cost(self, level: int, batch: int) -> Cost | None:
        return self.costs.of(PROGRAM, level=level, merged=self._merged(level), batch=batch)


def _differ(one: float, other: float) -> bool:
    return abs(math.log(one / other)) > math.log(DRIFT)

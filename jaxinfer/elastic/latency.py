"""Measured latency of batches at each level."""

import logging
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

from jaxinfer.compiled import Bucket, Cost, Costs, Drift
from jaxinfer.compiled.costs import SHORTEST
from jaxinfer.compiled.drift import NEWEST
from jaxinfer.elastic.errors import ProfileError
from jaxinfer.elastic.programs import PROGRAM, LevelAndSize

log = logging.getLogger(__name__)

REPEATS = 5
"""Minimum number of timed batches per level and size in the profile."""
DRIFT = 1.3
"""Factor by which the newest batches of a level and size must differ from the known time to change it."""


class Latency(NamedTuple):
    """Seconds that a batch takes.

    Attributes:
      p50: the median.
      p95: the 95th percentile.
    """

    p50: float
    p95: float


class LatencyProfile:
    """Batch latency by level and size: as measured, or as found while serving where that differs.

    The record of costs has measurements alone. Times found while serving hold for this process, and a slowdown only
    until a batch of any level and size is fast again: the machine causes it, and levels that it made look slow would
    not be chosen, so that they could never be seen to be fast.

    Args:
      costs: the record of costs, which earlier processes have added to.
      merged: returns the number of tokens that a level merges over all layers, which depends on its schedule.

    Attributes:
      refreshed: number of times that a level and size changed its latency because it had drifted.
    """

    def __init__(self, costs: Costs, merged: Callable[[int], int]):
        self.costs, self.refreshed, self._merged = costs, 0, merged
        self._drift: Drift[LevelAndSize] = Drift(least=NEWEST, tolerance=DRIFT)
        self._lock = threading.Lock()

    def missing(self, levels: Iterable[int], sizes: Iterable[int]) -> list[LevelAndSize]:
        """The levels and batch sizes for which too few batches were timed."""
        sizes = tuple(sizes)
        return [
            (level, batch)
            for level in levels
            for batch in sizes
            if (cost := self._cost(level, batch)) is None or cost.calls < REPEATS
        ]

    def seconds(self, level: int, batch: int) -> Latency:
        """The latency of batches of a size. Raises ProfileError if it was not measured."""
        with self._lock:
            cost, factor = self._measured(level, batch), self._drift.factors.get((level, batch), 1.0)
        return Latency(factor * cost.p50, factor * cost.p95)

    def renew(self, level: int, batch: int, seconds: Iterable[float]) -> None:
        """Replace the record of a level and size by these batches, in later processes too."""
        with self._lock:
            self.costs.replace(PROGRAM, self._bucket(level, batch), seconds)
            self._drift.forget((level, batch))

    def observe(self, level: int, batch: int, seconds: float) -> bool:
        """Record the seconds of a batch; return whether that has changed the latency.

        Raises ProfileError if its level and size were not measured.
        """
        key = level, batch
        with self._lock:
            known = self._drift.factors.get(key, 1.0)
            if not self._drift.note(key, max(seconds, SHORTEST) / self._measured(level, batch).p50):
                return False
            factor = self._drift.factors.get(key, 1.0)
            log.info(
                "Batches of %d at level %d take %.3g times as long as measured, not %.3g.", batch, level, factor, known
            )
            if factor < known:
                self._forget_slowdown(but=key)
            self.refreshed += 1
            return True

    def _forget_slowdown(self, but: LevelAndSize) -> None:
        for key in [key for key, factor in self._drift.factors.items() if factor > 1 and key != but]:
            self._drift.forget(key)

    def _measured(self, level: int, batch: int) -> Cost:
        if (cost := self._cost(level, batch)) is None:
            raise ProfileError(f"batches of {batch} at level {level} were never timed here: call `profile`.")
        return cost

    def _bucket(self, level: int, batch: int) -> Bucket:
        return ("level", level), ("merged", self._merged(level)), ("batch", batch)

    def _cost(self, level: int, batch: int) -> Cost | None:
        return self.costs.for_sizes(PROGRAM, level=level, merged=self._merged(level), batch=batch)

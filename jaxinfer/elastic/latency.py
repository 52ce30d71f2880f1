"""How long batches take at each level, as measured here."""

import logging
import threading
from collections.abc import Callable, Iterable
from typing import NamedTuple

from jaxinfer.compiled import Bucket, Cost, Costs, Drift
from jaxinfer.compiled.costs import SHORTEST
from jaxinfer.compiled.drift import NEWEST
from jaxinfer.elastic.errors import ProfileError
from jaxinfer.elastic.programs import PROGRAM

log = logging.getLogger(__name__)

REPEATS = 5
"""How often a batch is timed for the profile at least."""
DRIFT = 1.3
"""How many times longer or shorter than what is known the newest batches of a level and size must take to count."""


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
        self._drift: Drift[LevelAndSize] = Drift(least=NEWEST, tolerance=DRIFT)
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
            cost, factor = self._measured(level, batch), self._drift.factors.get((level, batch), 1.0)
        return Latency(factor * cost.p50, factor * cost.p95)

    def renew(self, level: int, batch: int, seconds: Iterable[float]) -> None:
        """Go by these batches alone from now on, in later processes too."""
        with self._lock:
            self.costs.replace(PROGRAM, self._bucket(level, batch), seconds)
            self._drift.forget((level, batch))

    def observe(self, level: int, batch: int, seconds: float) -> bool:
        """Take in what a batch took; whether that has changed what batches are said to take.

        Raises ProfileError if its level and size were not measured.
        """
        key = level, batch
        with self._lock:
            known = self._drift.factors.get(key, 1.0)
            if not self._drift.note(key, max(seconds, SHORTEST) / self._measured(level, batch).p50):
                return False
            found = self._drift.factors.get(key, 1.0)
            log.info(
                "Batches of %d at level %d take %.3g times as long as measured, not %.3g.", batch, level, found, known
            )
            if found < known:
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
        return self.costs.of(PROGRAM, level=level, merged=self._merged(level), batch=batch)

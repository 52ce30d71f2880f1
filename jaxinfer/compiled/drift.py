"""Drift: how much longer calls take now than on record, and the one rule by which serving corrects for it."""

import math
import statistics
import time
from collections import deque
from collections.abc import Hashable

from jaxinfer.compiled.device_time import Clock

NEWEST = 16
"""How many of the newest calls count, by their median."""


class Drift[Key: Hashable]:
    """Factors on recorded costs, from the newest calls.

    The median of the newest calls replaces the recorded cost if the two differ by more than `tolerance`. So noise
    changes nothing, and a slow spell counts as long as it lasts. The record itself stays as it was measured.

    Args:
      least: how many calls must have been seen, at most `NEWEST`.
      tolerance: a ratio; smaller differences are noise.
      forget: seconds after which calls count no more: what looks slow is not chosen again, so nothing else would show
        that the slow spell is over.
      clock: in seconds.

    Attributes:
      factors: how many times as long as on record calls take, where that is not 1.
    """

    def __init__(
        self,
        *,
        least: int,
        tolerance: float,
        forget: float = math.inf,
        clock: Clock = time.monotonic,
    ):
        self.factors: dict[Key, float] = {}
        self._least, self._tolerance, self._forget, self._clock = least, tolerance, forget, clock
        self._newest: dict[Key, deque[float]] = {}
        self._seen: dict[Key, float] = {}

    def note(self, key: Key, ratio: float) -> bool:
        """Take a call into account; returns whether any factor has changed.

        Args:
          key: what was called.
          ratio: its time over the recorded time; > 0.
        """
        now, before = self._clock(), dict(self.factors)
        for old in [other for other, seen in self._seen.items() if now - seen > self._forget]:
            self.forget(old)
        self._seen[key] = now
        newest = self._newest.setdefault(key, deque(maxlen=NEWEST))
        newest.append(ratio)
        if len(newest) >= self._least:
            self._correct(key, statistics.median_low(newest))
        return self.factors != before

    def forget(self, key: Key) -> None:
        """Drop the newest calls of `key`, so that its recorded cost counts again."""
        for known in (self.factors, self._newest, self._seen):
            known.pop(key, None)

    def _correct(self, key: Key, factor: float) -> None:
        if not self._differ(factor, self.factors.get(key, 1.0)):
            return
        self.factors.pop(key, None)
        if self._differ(factor, 1.0):
            self.factors[key] = factor

    def _differ(self, factor: float, other: float) -> bool:
        return not 1 / self._tolerance <= factor / other <= self._tolerance

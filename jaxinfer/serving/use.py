"""How often something is used."""

import math
import time

USE_SECONDS = 300.0
"""Seconds over which uses are counted."""


class Use:
    """How often something, such as a model, was asked lately.

    Attributes:
      last: when it was asked last, by `time.perf_counter`.
    """

    def __init__(self) -> None:
        self.last, self._count = time.perf_counter(), 0.0

    def note(self) -> None:
        """Count a request."""
        now = time.perf_counter()
        self._count, self.last = self._decayed(now) + 1, now

    def per_second(self, now: float) -> float:
        """The requests a second, over about the last `USE_SECONDS`."""
        return self._decayed(now) / USE_SECONDS

    def expected(self) -> float:
        """The seconds between two requests, over about the last `USE_SECONDS`; infinity if there was none."""
        rate = self.per_second(time.perf_counter())
        return 1 / rate if rate else math.inf

    def _decayed(self, now: float) -> float:
        return self._count * math.exp((self.last - now) / USE_SECONDS)

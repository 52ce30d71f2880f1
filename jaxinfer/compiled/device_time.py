"""How long calls have a device to themselves, which calls that overlap would else count for one another."""

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

Clock = Callable[[], float]
"""Seconds since some moment, never going back: `time.perf_counter`, or the time of a simulation."""


class Interval(NamedTuple):
    """When a device did something, in seconds of its clock."""

    begun: float
    ended: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended - self.begun


class DeviceTime:
    """When a device was last seen free: a call that was sent before has begun only then.

    All threads that send calls to the device share one.

    Args:
      clock: its own.

    Attributes:
      free: when the device was last seen to end a call.
    """

    def __init__(self, clock: Clock = time.perf_counter):
        self.clock, self.free = clock, float("-inf")
        self._lock = threading.Lock()

    def end(self, sent: float) -> Interval:
        """The time of a call whose results have just come.

        Args:
          sent: when it was sent to the device.
        """
        with self._lock:
            now = self.clock()
            begun, self.free = max(sent, self.free), now
        return Interval(begun, now)

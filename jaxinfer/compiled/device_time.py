"""Time that calls have a device to themselves; the plain times of overlapping calls would count twice."""

import threading
import time
from collections.abc import Callable
from typing import NamedTuple

Clock = Callable[[], float]
"""Seconds since some moment, never going back: `time.perf_counter`, or a simulation's time."""


class Interval(NamedTuple):
    """The beginning and end of a call on a device, in seconds of its clock."""

    begun: float
    ended: float

    @property
    def seconds(self) -> float:
        """The length of the interval."""
        return self.ended - self.begun


class DeviceTime:
    """Tracks when a device was last seen free: a call that was sent earlier has begun only then.

    All threads that send calls to the device share one.

    Args:
      clock: the time that calls are measured by.

    Attributes:
      free: when the device was last seen to end a call.
    """

    def __init__(self, clock: Clock = time.perf_counter):
        self.clock, self.free = clock, float("-inf")
        self._lock = threading.Lock()

    def end(self, sent: float) -> Interval:
        """Return the interval of a call whose results have just arrived.

        Args:
          sent: when the call was sent to the device.
        """
        with self._lock:
            now = self.clock()
            begun, self.free = max(sent, self.free), now
        return Interval(begun, now)

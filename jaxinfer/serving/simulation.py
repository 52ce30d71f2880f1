"""A simulated clock and its events, by which both simulators drive their deciders."""

import heapq
import itertools
from collections.abc import Callable


class Simulation[Event]:
    """A clock that advances from event to event until none is left.

    Attributes:
      now: the simulated clock, in seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, bool, int, Event]] = []
        self._count = itertools.count()

    def arrive(self, at: float, event: Event) -> None:
        """Schedule an arrival; ends at the same moment come before it."""
        heapq.heappush(self._events, (at, True, next(self._count), event))

    def end(self, at: float, event: Event) -> None:
        """Schedule the end of something that has begun."""
        heapq.heappush(self._events, (at, False, next(self._count), event))

    def run(self, handle: Callable[[Event], None], begin: Callable[[], None]) -> None:
        """Run until no event is left.

        Args:
          handle: called with every event, in order; events of the same moment come in the order of scheduling.
          begin: called after all events of a moment: begins what may begin now, and schedules its end.
        """
        while self._events:
            self.now = self._events[0][0]
            while self._events and self._events[0][0] == self.now:
                handle(heapq.heappop(self._events)[-1])
            begin()

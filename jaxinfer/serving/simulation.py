"""A simulated clock, and the events that it stops at: what both simulators drive their deciders with."""

import heapq
import itertools
from collections.abc import Callable


class Simulation[Event]:
    """Goes from moment to moment at which something happens, until nothing is left.

    Attributes:
      now: the simulated clock, in seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, bool, int, Event]] = []
        self._count = itertools.count()

    def arrive(self, at: float, event: Event) -> None:
        """Have something arrive; what ends at the same moment comes before it."""
        heapq.heappush(self._events, (at, True, next(self._count), event))

    def end(self, at: float, event: Event) -> None:
        """Have something end that has begun."""
        heapq.heappush(self._events, (at, False, next(self._count), event))

    def run(self, handle: Callable[[Event], None], begin: Callable[[], None]) -> None:
        """Run until no event is left.

        Args:
          handle: told of every event, in their order; of those at the same moment, in the order in which they were
            given.
          begin: called after all events of a moment: has what may begin now begin, and says when that ends.
        """
        while self._events:
            self.now = self._events[0][0]
            while self._events and self._events[0][0] == self.now:
                handle(heapq.heappop(self._events)[-1])
            begin()

"""The line in which requests wait until their loop accepts them, and when room is to be expected."""

import math
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Any

from jaxinfer.serving.errors import OverloadedError
from jaxinfer.serving.ticket import Ticket

RECENT = 0.1
"""Weight of the last interval in the mean time between ends."""


class Line[AnyTicket: Ticket[Any]]:
    """Requests that are to be accepted, first come, first served; called under the loop's lock.

    Ctrl-C may interrupt a caller anywhere, so `add`, which callers use, changes the line by one step.

    Args:
      max_tickets: maximum number of accepted tickets; None: no limit.
      max_line: maximum number of requests beyond these; None: no limit.

    Attributes:
      next_deadline: the first deadline of those in line, or earlier; infinite if there is none.
    """

    def __init__(self, max_tickets: int | None = None, max_line: int | None = None):
        self._max_tickets, self._max_line = max_tickets, max_line
        # A plain dict is slow to find its first key after many deletions.
        self._tickets: OrderedDict[Hashable, AnyTicket] = OrderedDict()
        self.next_deadline = math.inf

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[AnyTicket]:
        """Yield the requests in line, the first that came first."""
        return iter(self._tickets.values())

    def has_room(self, num_tickets: int) -> bool:
        """Check whether another request can be accepted beside so many."""
        return self._max_tickets is None or num_tickets < self._max_tickets

    def check(self, num_tickets: int, *, may_wait: bool, retry_after: float | None) -> None:
        """Raise OverloadedError for a request without room, unless it may wait and the line is not full.

        Args:
          num_tickets: those accepted and in line. Those that are about to be accepted are in line, too.
          may_wait: whether it may stand in line.
          retry_after: the seconds after which to try again, for the error.
        """
        assert self._max_tickets is not None, "otherwise there is room"
        full = self._max_line is not None and num_tickets >= self._max_tickets + self._max_line
        if full or not may_wait:
            line = f", and {self._max_line} in line" if full else ""
            raise OverloadedError(
                f"{num_tickets} requests are in flight already, and the limit ({self._max_tickets}{line}) allows no "
                "more; try later.",
                retry_after,
            )

    def add(self, ticket: AnyTicket) -> None:
        """Put a request at the end."""
        self._tickets[ticket.key] = ticket
        if ticket.deadline is not None and self._max_tickets is not None:  # without a limit none waits here
            self.next_deadline = min(self.next_deadline, ticket.deadline)

    def find(self, key: Hashable) -> AnyTicket | None:
        """Find the request of this key."""
        return self._tickets.get(key)

    def pop_first(self) -> AnyTicket:
        """Take the request that came first out of the line."""
        return self._tickets.popitem(last=False)[1]

    def pop(self, ticket: AnyTicket) -> bool:
        """Take a request out; return whether it was in line."""
        if self._tickets.get(ticket.key) is not ticket:
            return False
        del self._tickets[ticket.key]
        return True

    def pop_late(self, now: float) -> list[AnyTicket]:
        """Take the requests out whose deadline has passed."""
        timed = [(ticket, ticket.deadline) for ticket in self if ticket.deadline is not None]
        late = [ticket for ticket, deadline in timed if deadline <= now]
        for ticket in late:
            del self._tickets[ticket.key]
        self.next_deadline = min((deadline for _, deadline in timed if deadline > now), default=math.inf)
        return late


class Pace:
    """How fast requests end.

    Args:
      now: the time of the start, in seconds.

    Attributes:
      between_ends: mean seconds between the last ends; None before the first.
    """

    def __init__(self, now: float):
        self._last, self.between_ends = now, None

    def begin(self, now: float) -> None:
        """Note a request that is accepted when there is no other: the time before does not count."""
        self._last = now

    def end(self, now: float) -> None:
        """Note the end of a request."""
        seconds, mean = max(now - self._last, 0.0), self.between_ends
        self._last = now
        self.between_ends = seconds if mean is None else mean + RECENT * (seconds - mean)

"""The limit of the time that requests wait for a place in the batch: admission control of an engine."""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator

from jaxinfer.generation.engine.stats import EngineStats, SchedulerStats
from jaxinfer.generation.engine.ticket import RequestTicket
from jaxinfer.serving.errors import OverloadedError
from jaxinfer.serving.line import RECENT
from jaxinfer.serving.loop import Loop

EXPECTED_SHARE = 0.5
"""A request is admitted if it is expected to wait at most this share of the limit. The rest is for wrong estimates."""


class Queue:
    """Requests that wait for a place in the batch, and the limit of their time.

    The loop's lock protects it. Only the loop's thread changes it.

    A request that arrives is refused if it is expected to wait too long behind the others of its priority or a higher
    one. If it is admitted and the queue is too long, the last request of the lowest priority gives way. A request that
    has waited for the whole limit gives way, too. All of them end with OverloadedError.

    Args:
      slots: how many completions can run at once.
      max_seconds: the limit; None: none.
    """

    def __init__(self, slots: int, max_seconds: float | None):
        self._slots, self._max_seconds = slots, max_seconds
        self._tickets: dict[Hashable, RequestTicket] = {}  # in the order of arrival
        self._counts = Counter[int]()  # completions by priority
        self._capacity = slots  # how many run at once: fewer than the slots when pages or prefill limit them
        self._resumed = -math.inf  # since when requests can begin
        self._interval: float | None = None  # mean seconds between starts when so many run

    def __iter__(self) -> Iterator[RequestTicket]:
        return iter(self._tickets.values())

    def check(self, priority: int, in_line: Iterable[RequestTicket], load: SchedulerStats) -> None:
        """Raise OverloadedError for a request that would wait too long.

        Args:
          priority: the request's.
          in_line: requests that arrived before and are not in the queue yet.
          load: the scheduler's.
        """
        if self._max_seconds is None:
            return
        ahead = sum(count for other, count in self._counts.items() if other <= priority)
        ahead += sum(len(each.sequences) for each in in_line if each.priority <= priority)
        wait = self._wait(ahead, load)
        if wait > EXPECTED_SHARE * self._max_seconds:
            raise self._error(f"It would wait for about {wait:.1f} s", wait)

    def _wait(self, ahead: int, load: SchedulerStats) -> float:
        """Estimate the seconds that a completion waits behind so many others: on average, half an interval is over."""
        free = max(self._capacity - load.running, 0)
        return max(ahead - free + 0.5, 0.0) * (self._interval or 0.0)

    def _error(self, what: str, wait: float) -> OverloadedError:
        assert self._max_seconds is not None
        retry_after = max(wait - EXPECTED_SHARE * self._max_seconds, self._interval or 0.0)
        return OverloadedError(
            f"The model has too many requests. {what}, and max_queue_time is {self._max_seconds:g} s.", retry_after
        )

    def add(self, ticket: RequestTicket, load: SchedulerStats) -> RequestTicket | None:
        """Add a request that was checked; return the one that gives way to it, which has its error."""
        self._tickets[ticket.key] = ticket
        self._counts[ticket.priority] += len(ticket.sequences)
        if self._max_seconds is None:
            return None
        if self._wait(self._counts.total() - 1, load) <= EXPECTED_SHARE * self._max_seconds:
            return None
        limited = [each for each in self if each.limited]
        last = max(limited, key=lambda each: (each.priority, each.arrived), default=ticket)
        if last.priority <= ticket.priority:
            return None
        self._remove(last)
        last.error = self._error("It gave way to a request of higher priority", self._max_seconds)
        return last

    def with_waiting(self, stats: EngineStats, loop: Loop[RequestTicket]) -> EngineStats:
        """Add to an engine's state the requests that it does not have yet, and the adapters of all."""
        with loop.lock:
            in_line = list(loop.in_line)
            waiting = _adapters([*self, *in_line])
            running = _adapters(loop.tickets[key] for key in loop.tickets.keys() - self._tickets.keys())
            num_waiting = max(stats.waiting, self._counts.total()) + sum(len(each.sequences) for each in in_line)
        return dataclasses.replace(stats, waiting=num_waiting, running_adapters=running, waiting_adapters=waiting)

    def _remove(self, ticket: RequestTicket) -> None:
        del self._tickets[ticket.key]
        self._counts[ticket.priority] -= len(ticket.sequences)
        if not self._counts[ticket.priority]:
            del self._counts[ticket.priority]

    def resume(self, now: float) -> None:
        """Count the time that requests wait from now on: before, the model was not there."""
        self._resumed = now

    def update(self, begun: Iterable[RequestTicket], now: float, *, limited: bool = True) -> list[RequestTicket]:
        """Remove the requests that have begun in a step; return those that have waited too long, with their errors.

        limited: whether any may have waited too long.
        """
        for ticket in begun:
            self._remove(ticket)
            ticket.started = now
        limit = self._max_seconds
        if limit is None or not limited or now - self._resumed <= limit:
            return []
        late = [each for each in itertools.takewhile(lambda each: now - each.arrived > limit, self) if each.limited]
        for ticket in late:
            self._remove(ticket)
            ticket.error = self._error(f"It has waited for {now - ticket.arrived:.1f} s", limit)
        return late

    def ended(self, ticket: RequestTicket, now: float, load: SchedulerStats) -> None:
        """Learn from the time that a request has run. load: the scheduler's after its end."""
        if ticket.started is None:
            return
        self._capacity = load.running + 1 if load.waiting else self._slots
        seconds = (now - ticket.started) / self._capacity
        mean = self._interval
        self._interval = seconds if mean is None else mean + RECENT * (seconds - mean)


def _adapters(tickets: Iterable[RequestTicket]) -> dict[str, int]:
    """Count requests by their adapter."""
    return dict(Counter(name for ticket in tickets if (name := ticket.sequences[0].params.adapter) is not None))

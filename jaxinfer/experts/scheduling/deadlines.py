"""The deadlines of requests, the earliest first."""

import heapq
import itertools
from collections.abc import Callable, Iterator

from jaxinfer.experts.scheduling.request import Request


class Deadlines:
    """Deadlines of requests that wait. Requests that begin or are cancelled stay until `keep`, or their deadline."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []  # deadline, number, request
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def next(self) -> float | None:
        """The earliest deadline; None if there is none."""
        return self._heap[0][0] if self._heap else None

    def add(self, request: Request, deadline: float) -> None:
        """Add a request's deadline."""
        heapq.heappush(self._heap, (deadline, next(self._numbers), request))

    def keep(self, waits: Callable[[Request], bool]) -> None:
        """Drop the deadlines of all requests that do not wait any more."""
        self._heap = [entry for entry in self._heap if waits(entry[-1])]
        heapq.heapify(self._heap)

    def pop_passed(self, now: float) -> Iterator[Request]:
        """Remove the deadlines that have passed, and yield their requests."""
        while self._heap and self._heap[0][0] < now:
            yield heapq.heappop(self._heap)[-1]

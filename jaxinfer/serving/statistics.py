"""Counters of a service's requests."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError

from jaxinfer.compiled import Clock
from jaxinfer.serving.errors import DeadlineExceededError, NotLoadedError, OverloadedError, ShedError


@dataclasses.dataclass(kw_only=True)
class Statistics:
    """A loop's counters.

    Attributes:
      answered: number of requests with a result.
      shed: number of requests that were given up for lack of time, and those that gave way to others.
      cancelled: number of requests that their callers cancelled.
      failed: number of requests that ended with an error.
      late: number of answers after their deadlines.
      batches: number of batches of requests; steps of an engine.
    """

    answered: int = 0
    late: int = 0
    shed: int = 0
    cancelled: int = 0
    failed: int = 0
    batches: int = 0

    @contextlib.contextmanager
    def timing(self, field: str, clock: Clock = time.thread_time) -> Iterator[None]:
        """Add the body's seconds to a field, in the thread's CPU time or on another clock."""
        begun = clock()
        try:
            yield
        finally:
            setattr(self, field, getattr(self, field) + clock() - begun)

    def __str__(self) -> str:
        ended = f"{self.answered} answered ({self.late} late), {self.shed} shed, {self.cancelled} cancelled"
        return f"{ended}, {self.failed} failed"

    def count(self, outcome: object, *, late: bool) -> None:
        """Count the end of a request."""
        match outcome:
            case ShedError() | DeadlineExceededError() | OverloadedError() | NotLoadedError():
                self.shed += 1
            case CancelledError():
                self.cancelled += 1
            case Exception():
                self.failed += 1
            case _:
                self.answered += 1
                self.late += late

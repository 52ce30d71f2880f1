"""What became of the requests of a service."""

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError

from jaxinfer.compiled import Clock
from jaxinfer.serving.errors import DeadlineExceededError, ShedError


@dataclasses.dataclass(kw_only=True)
class Statistics:
    """What a loop has done so far.

    Attributes:
      answered, shed, cancelled, failed: how many requests ended so; those whose deadline passed before they began are
        shed.
      late: how many of the answers came after their deadlines.
      batches: that ran, of requests together; steps of an engine.
    """

    answered: int = 0
    late: int = 0
    shed: int = 0
    cancelled: int = 0
    failed: int = 0
    batches: int = 0

    @contextlib.contextmanager
    def timing(self, field: str, clock: Clock = time.thread_time) -> Iterator[None]:
        """Add to a field the seconds that something takes, of the thread's CPU or on another clock."""
        begun = clock()
        try:
            yield
        finally:
            setattr(self, field, getattr(self, field) + clock() - begun)

    def count(self, outcome: object, *, late: bool) -> None:
        """A request has ended."""
        match outcome:
            case ShedError() | DeadlineExceededError():
                self.shed += 1
            case CancelledError():
                self.cancelled += 1
            case Exception():
                self.failed += 1
            case _:
                self.answered += 1
                self.late += late

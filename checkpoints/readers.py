"""Threads that read files; a disk that hangs holds up neither who waits for it nor the end of the process."""

import time
from collections.abc import Callable
from typing import Any

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.futures import INTERVAL, DaemonThreads, InterruptibleFuture

READERS = 4
"""Threads that read blocks: enough to keep an NVMe disk busy, and together a tenth of a core at 1 GB/s."""
READ_SECONDS = 60.0
"""How long a block may take to be read, all attempts together, before it is given up: a network file system that hangs
never says so."""


class Readers:
    """Threads that read blocks, in the order in which they are asked for.

    One that hangs is not replaced, so that no more than `READERS` buffers are lost to reads that were given up; it goes
    on when its read ends.
    """

    def __init__(self) -> None:
        self._threads, self._closed = DaemonThreads(READERS, "jaxinfer-reader"), False

    def submit[**Given, Made](
        self, function: Callable[Given, Made], *args: Given.args, **kwargs: Given.kwargs
    ) -> InterruptibleFuture[Made]:
        """Have a thread call the function."""
        return self._threads.submit(function, *args, **kwargs)

    def result[Made](self, read: InterruptibleFuture[Made], what: str) -> Made:
        """The result of a read, or raise its error.

        Raises CheckpointError, which names `what` it reads, if that takes more than `READ_SECONDS`, or after `close`.
        """
        left = READ_SECONDS
        while not read.wait(min(left, INTERVAL)) and not self._closed:
            left = self._since(read) + READ_SECONDS - time.monotonic()
            if left <= 0:
                raise CheckpointError(f"{what}: not read within {READ_SECONDS:g} s; check the disk.")
        if self._closed:
            raise CheckpointError(f"{what}: not read, because its reader was closed.")
        return read.result()

    def _since(self, read: InterruptibleFuture[Any]) -> float:
        """Return when a read began; for one that waits for a thread, when the newest began that it waits for."""
        if read.begun is not None:
            return read.begun
        others = [other.begun for other in list(self._threads.running) if other.begun is not None]
        return max(others) if len(others) == READERS else time.monotonic()

    def close(self) -> None:
        """Have every `result` that waits, or will, raise within `INTERVAL`; from any thread; may be repeated."""
        self._closed = True
        self._threads.close()

"""Threads that read files; a disk that hangs holds up neither who waits for it nor the end of the process."""

import contextlib
import functools
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from typing import Any

from jaxinfer.checkpoints.errors import CheckpointError

READERS = 4
"""Threads that read blocks: enough to keep an NVMe disk busy, and together a tenth of a core at 1 GB/s."""
READ_SECONDS = 60.0
"""How long a block may take to be read, all attempts together, before it is given up: a network file system that hangs
never says so."""

type _Task = tuple[Future[Any], Callable[[], Any]]


class Readers:
    """Threads that read blocks, in the order in which they are asked for.

    They are daemons: the process ends without them, whereas it would wait for those of `ThreadPoolExecutor`. One that
    hangs is not replaced, so that no more than `READERS` buffers are lost to reads that were given up; it goes on when
    its read ends.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._begun: dict[Future[Any], float] = {}
        self._closed: Future[None] = Future()
        for number in range(READERS):
            serving = self._tasks, self._begun, self._closed
            threading.Thread(target=_serve, args=serving, name=f"jaxinfer-reader-{number}", daemon=True).start()
        self._end = weakref.finalize(self, _end, self._tasks)
        self._end.atexit = False

    def submit[**Given, Made](
        self, function: Callable[Given, Made], *args: Given.args, **kwargs: Given.kwargs
    ) -> Future[Made]:
        """Have a thread call the function."""
        task: Future[Made] = Future()
        self._tasks.put((task, functools.partial(function, *args, **kwargs)))
        return task

    def result[Made](self, task: Future[Made], what: str) -> Made:
        """Return the result of a task, or raise its error.

        Raises CheckpointError, which names `what` it reads, if that takes more than `READ_SECONDS`, or after `close`.
        """
        either: set[Future[Any]] = {task, self._closed}
        while not task.done():
            if self._closed.done():
                raise CheckpointError(f"{what}: no longer read, since its reader was closed.")
            left = self._since(task) + READ_SECONDS - time.monotonic()
            if left <= 0:
                raise CheckpointError(f"{what}: not read within {READ_SECONDS:g} s, so given up; check the disk.")
            wait(either, left, FIRST_COMPLETED)
        return task.result()

    def _since(self, task: Future[Any]) -> float:
        """Return when a task began; for one that waits for a thread, when the newest began that it waits for."""
        begun = self._begun.get(task)
        if begun is None:
            others = list(self._begun.values())
            begun = max(others) if len(others) == READERS else time.monotonic()
        return begun

    def close(self) -> None:
        """Have every `result` that waits, or will, raise at once. May be called from any thread, and again."""
        with contextlib.suppress(InvalidStateError):  # it is closed
            self._closed.set_result(None)
        self._end()


def _end(tasks: queue.SimpleQueue[_Task | None]) -> None:
    for _ in range(READERS):
        tasks.put(None)


def _serve(tasks: queue.SimpleQueue[_Task | None], begun: dict[Future[Any], float], closed: Future[None]) -> None:
    """Do tasks until the end; has no reference to the `Readers`, whose end it is to see."""
    while (given := tasks.get()) is not None:
        _do(*given, begun, closed)
        del given  # what it reads to is freed while this waits for the next


def _do(task: Future[Any], read: Callable[[], Any], begun: dict[Future[Any], float], closed: Future[None]) -> None:
    if closed.done():
        task.cancel()
    if not task.set_running_or_notify_cancel():
        return
    begun[task] = time.monotonic()
    try:
        result = read()
    except BaseException as error:
        task.set_exception(error)
    else:
        task.set_result(result)
    finally:
        del begun[task]

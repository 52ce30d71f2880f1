"""Futures, events and threads by which whoever waits may be interrupted anywhere.

A handler of a signal that raises, as that of Ctrl-C does, can end any Python code between two of its instructions, also
`Condition.__enter__`, which then leaves its lock taken for ever: whoever is to end a `Future` waits for it in vain.
Lists and `SimpleQueue`, which are used here, are written in C and always whole.
"""

import contextlib
import functools
import math
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Any

INTERVAL = 0.2
"""Seconds between looks for a signal: one that comes just before a thread waits for a lock does not end its wait."""


class Event:
    """As `threading.Event`, but once set it stays so; a signal's handler may set it, wherever it has come."""

    def __init__(self) -> None:
        self._set = False
        self._waiting: list[queue.SimpleQueue[None]] = []  # one of each who waits

    def is_set(self) -> bool:
        """Return whether it has been set."""
        return self._set

    def set(self) -> None:
        """Wake all who wait."""
        self._set = True
        for woken in list(self._waiting):
            woken.put(None)

    def wait(self, seconds: float = math.inf) -> bool:
        """Wait until it is set, at most so long; return whether it is."""
        woken: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._waiting.append(woken)
        until = time.monotonic() + seconds
        while not self._set and (left := until - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                woken.get(timeout=min(left, INTERVAL))
        self._waiting.remove(woken)
        return self._set


class InterruptibleFuture[Result]:
    """As `concurrent.futures.Future`, with the function that is called once, unless it is cancelled before.

    Args:
      function: what is called.

    Attributes:
      begun: when the call began, by `time.monotonic`; None before.
      error: what it raised; `CancelledError` if it was cancelled.
    """

    def __init__(self, function: Callable[[], Result]):
        self.begun: float | None = None
        self.error: BaseException | None = None
        self._not_begun = [function]  # who takes it out makes the call, or cancels it
        self._result: Result | None = None
        self._ended = Event()

    def done(self) -> bool:
        """Return whether it has ended, or was cancelled."""
        return self._ended.is_set()

    def run(self) -> None:
        """Make the call, unless it was cancelled; what it raises is for those who want its result."""
        if (function := self._begin()) is not None:
            self.begun = time.monotonic()
            try:
                self._result = function()
            except BaseException as error:
                self.error = error
            del function  # what it reads to may be freed before this returns
            self._ended.set()
        del self  # its error refers to this frame, and would keep it

    def cancel(self) -> None:
        """Have the call never be made; does nothing if it has begun."""
        if self._begin() is not None:
            self.error = CancelledError()
            self._ended.set()

    def _begin(self) -> Callable[[], Result] | None:
        try:
            return self._not_begun.pop()
        except IndexError:
            return None

    def wait(self, seconds: float = math.inf) -> bool:
        """Wait for its end, at most so long; return whether it has ended."""
        return self._ended.wait(seconds)

    def result(self, seconds: float = math.inf) -> Result:
        """Return what it returned, or raise its error. Raises TimeoutError if it has not ended so soon."""
        if not self.wait(seconds):
            raise TimeoutError(f"not ended within {seconds:g} s")
        try:
            if self.error is not None:
                raise self.error
            return self._result  # type: ignore[return-value]
        finally:
            del self  # as above


class DaemonThreads:
    """Threads that make calls, in the order in which they are submitted, until the end of this object.

    The process ends without them, whereas it would wait for those of `ThreadPoolExecutor`.

    Args:
      count: the number of threads.
      name: the beginning of their names.

    Attributes:
      running: the futures of calls that run.
      threads: the threads.
    """

    def __init__(self, count: int, name: str) -> None:
        self.running: set[InterruptibleFuture[Any]] = set()
        self._waiting: queue.SimpleQueue[InterruptibleFuture[Any] | None] = queue.SimpleQueue()
        serving = self._waiting, self.running
        self.threads = [
            threading.Thread(target=_serve, args=serving, name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self.threads:
            thread.start()
        self._end = weakref.finalize(self, _end, self._waiting, count)
        self._end.atexit = False

    def submit[**Given, Result](
        self, function: Callable[Given, Result], *args: Given.args, **kwargs: Given.kwargs
    ) -> InterruptibleFuture[Result]:
        """Have a thread call the function."""
        future = InterruptibleFuture(functools.partial(function, *args, **kwargs))
        self._waiting.put(future)
        return future

    def close(self) -> None:
        """Cancel all calls that have not begun, and end the threads once the others have. May be called again."""
        self._end()


def _end(waiting: queue.SimpleQueue[InterruptibleFuture[Any] | None], count: int) -> None:
    with contextlib.suppress(queue.Empty):
        while (future := waiting.get_nowait()) is not None:
            future.cancel()
    for _ in range(count):
        waiting.put(None)


def _serve(waiting: queue.SimpleQueue[InterruptibleFuture[Any] | None], running: set[InterruptibleFuture[Any]]) -> None:
    """Make calls until the end; has no reference to their owner, whose end it is to see."""
    while (future := waiting.get()) is not None:
        running.add(future)
        future.run()
        running.discard(future)
        del future  # what it refers to is freed while this waits for the next

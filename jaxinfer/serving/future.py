"""The future of a request: what a caller does with it, and what happens to the caller, harms nobody else."""

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, InvalidStateError
from concurrent.futures._base import CANCELLED, CANCELLED_AND_NOTIFIED, FINISHED, RUNNING
from queue import SimpleQueue
from typing import Any, ClassVar, NamedTuple

from jaxinfer.futures import Event

log = logging.getLogger(__name__)

HELD_SECONDS = 0.1
"""Seconds after which a lock that is held for a few instructions counts as lost."""
LOST_SECONDS = 1e-3
"""Seconds after which it does once a lock has been lost."""


class Desk(NamedTuple):
    """Where futures report to a loop. It holds neither the loop, and so the model, nor a request's input.

    Attributes:
      ended: futures whose callbacks are to run.
      given_up: futures that their callers have ended.
      news: wakes the loop.
    """

    ended: "SimpleQueue[TicketFuture[Any] | None]"
    given_up: "SimpleQueue[TicketFuture[Any]]"
    news: "SimpleQueue[None]"


_RLock: Any = type(threading.RLock())  # in C


class _Lock(_RLock):
    """In place of a future's `threading.Condition`, which is notified once, when the future ends.

    It is entered and left in C. `Condition` does so in Python, where a signal's handler that raises, as that of Ctrl-C
    does, would leave its lock taken for ever, and a loop that ends the future would wait for ever.
    """

    def __init__(self, ended: Event):
        self.ended = ended

    def release(self) -> None:
        """Release it, if this thread still has it."""
        if self._is_owned():
            super().release()

    def wait(self, timeout: float | None = None) -> bool:
        """Return whether the future has ended: who wants its result has waited before, without this lock."""
        del timeout
        return self.ended.is_set()

    def notify_all(self) -> None:
        """Wake all who wait."""
        self.ended.set()


class TicketFuture[Outcome](Future[Outcome]):
    """The future that a caller gets for its request.

    Its result is there at once. Its callbacks run in a thread of the loop, one after the other: one that blocks delays
    other callbacks, but no results. Those of asyncio (`asyncio.wrap_future`), which block nobody, run at once.

    Args:
      key: the request's.

    Attributes:
      desk: of the loop that serves the request; None before.
    """

    _patience: ClassVar[float] = HELD_SECONDS

    def __init__(self, key: object):
        super().__init__()
        self._condition: Any = _Lock(Event())
        self._state: str
        self._done_callbacks: list[Callable[[Future[Outcome]], object]]
        self._at_once: list[Callable[[Future[Outcome]], object]] = []
        self._ended_by_loop = False
        self.key = key
        self.desk: Desk | None = None

    # Looks take no lock, which a caller may hold

    def cancelled(self) -> bool:
        """Return whether it was cancelled."""
        return self._state in (CANCELLED, CANCELLED_AND_NOTIFIED)

    def running(self) -> bool:
        """Return whether it can be cancelled no more, and has not ended."""
        return self._state == RUNNING

    def done(self) -> bool:
        """Return whether it has ended."""
        return self._state in (CANCELLED, CANCELLED_AND_NOTIFIED, FINISHED)

    def add_done_callback(self, fn: Callable[[Future[Outcome]], object]) -> None:
        """Have a function called with this future when it ends; at once if it has ended."""
        if getattr(fn, "__module__", None) != "asyncio.futures":
            super().add_done_callback(fn)
            return
        with self._condition:
            if not self.done():
                self._at_once.append(fn)
                return
        fn(self)

    def result(self, timeout: float | None = None) -> Outcome:
        """Wait for the result, and return it. Raises as that of `Future`."""
        self._wait(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end, and return the error; None for a result. Raises as that of `Future`."""
        self._wait(timeout)
        return super().exception(0)

    def __await__(self) -> Generator[Any, None, Outcome]:
        """Wait for the result in a coroutine; cancelling its task cancels the future."""
        return asyncio.wrap_future(self).__await__()

    def _wait(self, timeout: float | None) -> None:
        self._condition.ended.wait(math.inf if timeout is None else timeout)

    def begin(self) -> bool:
        """Protect it from cancellation; return False if its caller has cancelled it, or given it an outcome."""
        self._find_lock()
        return self._begin()

    def _begin(self) -> bool:
        if self.done() and self._state != CANCELLED:  # nobody has yet told those who wait of a CANCELLED one
            return False
        try:
            return self.set_running_or_notify_cancel()
        except RuntimeError:  # its caller was faster
            return False

    def end(self, outcome: Outcome | Exception) -> None:
        """Give it its outcome, for the loop, unless its caller has ended it."""
        self._ended_by_loop = True
        self._find_lock()
        try:
            if not self.running() and not self._begin():
                self._invoke_callbacks()  # its caller may have been interrupted just before
            elif isinstance(outcome, Exception):
                self.set_exception(outcome)
            else:
                self.set_result(outcome)  # type: ignore[arg-type]
        except InvalidStateError:  # its caller was faster
            pass

    def _find_lock(self) -> None:
        """Replace its lock, if a caller has lost it: `concurrent.futures.wait` takes those of many, one by one."""
        if self._condition.acquire(timeout=TicketFuture._patience):
            self._condition.release()
        else:
            TicketFuture._patience = LOST_SECONDS  # such a caller may have lost many
            self._condition = _Lock(self._condition.ended)

    def run_callbacks(self) -> None:
        """Run the callbacks that have not run yet; what they raise is logged only."""
        _run(self, self._done_callbacks)

    def _invoke_callbacks(self) -> None:
        """Have callbacks run. Called by `Future` whenever it has ended, by the loop or by its caller."""
        _run(self, self._at_once)
        if self.desk is None:
            self.run_callbacks()
            return
        if not self._ended_by_loop:
            self.desk.given_up.put(self)
            self.desk.news.put(None)
        self.desk.ended.put(self)


def _run(future: TicketFuture[Any], callbacks: list[Callable[[Any], object]]) -> None:
    while callbacks:
        callback = callbacks.pop(0)
        try:
            callback(future)
        except BaseException as error:
            log.error("A callback of request %s has failed.", future.key, exc_info=error)

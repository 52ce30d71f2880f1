"""A request between its caller, in any thread or event loop, and the loop that serves it."""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import Any

from jaxinfer.futures import Event
from jaxinfer.serving.future import TicketFuture


class Reader[Snapshot]:
    """A task's view of its requests; a loop's thread writes.

    It holds only the newest snapshot of a stream, and the task makes an output of it. Each snapshot includes all before
    it, so that a task slower than the device skips some and loses nothing, delays nobody, and lets nothing grow.

    Attributes:
      loop: the task's event loop, which is told of changes; set by `attach`.
      newest: the newest snapshot; None before there is one.
      final_only: whether the task wants the last output alone.
    """

    loop: asyncio.AbstractEventLoop

    def __init__(self) -> None:
        self.newest: Snapshot | None = None
        self.final_only = False
        self._told = False  # whether the event loop knows of a change that the task has not looked at yet
        self._changed = False  # whether it has told so
        self._waiter: asyncio.Future[None] | None = None  # not an asyncio.Event: each token would take longer

    def attach(self) -> None:
        """Read in the event loop that runs now."""
        self.loop = asyncio.get_running_loop()

    def must_tell(self) -> bool:
        """Check whether the event loop must be told of a new change; then the caller must. In a loop's thread."""
        if self._told:  # and the task will see this change too: it clears the flag before it looks
            return False
        self._told = True
        return True

    def wake(self) -> None:
        """Report a change; in the event loop's thread."""
        self._changed = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait(self) -> None:
        """Wait for a change, possibly a spurious one. One task may wait, in the event loop that reads."""
        if not self._changed:
            self._waiter = self.loop.create_future()
            await self._waiter
        self._changed = self._told = False


class Ticket[Outcome]:
    """A request that has not ended.

    Args:
      key: a unique key.
      deadline: time on the loop's clock; None: no deadline.
      owner: an object that must live until the request has ended.
      reader: reader of the task that waits for it, which may be shared between requests; None for callers in threads.

    Attributes:
      future: for callers in threads: ends once, as `outcome` says, or cancelled by its caller; None with a reader.
      outcome: an answer or an error; None until it has ended.
      turn: set once it is accepted or has ended; None unless its caller stands in line.
      arrived: when it was submitted, on the loop's clock.
    """

    def __init__(
        self,
        key: Hashable,
        *,
        deadline: float | None = None,
        owner: object = None,
        reader: Reader[Any] | None = None,
    ):
        self.key, self.deadline, self.owner, self.reader = key, deadline, owner, reader
        self.future: TicketFuture[Outcome] | None = TicketFuture(key) if reader is None else None
        self.outcome: Outcome | Exception | None = None
        self.turn: Event | None = None
        self.arrived = 0.0

    @property
    def cancelled(self) -> bool:
        """Whether the caller has cancelled its future."""
        return self.future is not None and self.future.cancelled()

    @property
    def begun(self) -> bool:
        """Whether its future can be cancelled no more."""
        return self.future is not None and self.future.running()

    def begin(self) -> bool:
        """Protect its future from cancellation; return False if its caller has cancelled it, or given it an outcome."""
        return self.future is None or self.future.begin()

    def end(self, outcome: Outcome | Exception) -> None:
        """Give its caller the outcome."""
        self.outcome, self.owner = outcome, None
        if self.future is not None:
            self.future.end(outcome)
        else:
            tell_readers([self])

    async def wait(self) -> Outcome:
        """Wait for the outcome, in the task that reads. Raises the error that it ended with."""
        assert self.reader is not None
        while self.outcome is None:
            await self.reader.wait()
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def tell_readers[AnyTicket: Ticket[Any]](changed: Iterable[AnyTicket]) -> list[AnyTicket]:
    """Wake the tasks that wait for these requests, by one call per event loop.

    Returns the requests whose event loop is closed, so that nobody will read them.
    """
    loops: dict[asyncio.AbstractEventLoop, list[AnyTicket]] = defaultdict(list)
    for ticket in changed:
        if ticket.reader is not None:
            loops[ticket.reader.loop].append(ticket)
    unread = []
    for loop, tickets in loops.items():
        if readers := [t.reader for t in tickets if t.reader is not None and t.reader.must_tell()]:
            with contextlib.suppress(RuntimeError):  # closed
                loop.call_soon_threadsafe(_wake, readers)
        if loop.is_closed():
            unread += tickets
    return unread


def _wake(readers: list[Reader[Any]]) -> None:
    for reader in readers:
        reader.wake()

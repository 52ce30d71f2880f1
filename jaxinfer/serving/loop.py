"""Threads between callers and devices: a `Decider` says what to do; a `Loop` does it, and ends each request once."""

import abc
import contextlib
import copy
import dataclasses
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError
from queue import Empty, SimpleQueue
from typing import Any

from jaxinfer.compiled import Clock, Origin, close_at_exit
from jaxinfer.futures import Event
from jaxinfer.serving.errors import (
    ClosedError,
    DeadlineExceededError,
    DiedError,
    caused,
    closed_error,
)
from jaxinfer.serving.future import Desk, TicketFuture
from jaxinfer.serving.line import Line, Pace
from jaxinfer.serving.statistics import Statistics
from jaxinfer.serving.threads import join_threads, make_thread
from jaxinfer.serving.ticket import Ticket

log = logging.getLogger(__name__)

HANGING_SECONDS = 300.0
"""Seconds after which work counts as hanging when its loop is to end; a streamed model may need minutes for a step."""
CALLBACK_SECONDS = 10.0
"""Seconds after which a callback counts as hanging."""
LAST_CALLBACK_SECONDS = 1.0
"""Seconds for callbacks that `close` leaves beyond its timeout, for those of requests that it has ended."""


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """A piece of work for a loop.

    Attributes:
      run: does the work.
      lane: the index of the thread that does it, one piece at a time; None: the loop's own, which decides nothing
        meanwhile.
      what: the decider's value, for when it is done.
    """

    run: Callable[[], Any]
    lane: int | None = None
    what: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
    """Work that has ended.

    Attributes:
      result: the result of `run`.
      error: the error it raised, in place of a result.
      began: the time on the loop's clock.
      ended: the time on the loop's clock.
    """

    work: Work
    result: Any
    error: BaseException | None
    began: float
    ended: float


class Decider[AnyTicket: Ticket[Any]](abc.ABC):
    """The choice of the next work: a paper's policy, or an engine, without threads.

    All but `interrupt` is called under the loop's lock, so never twice at once. It ends tickets by `Loop.end`. What is
    called in the loop's threads alone may change things in several steps: no signal interrupts these.
    """

    def check(self, ticket: AnyTicket, now: float) -> None:  # noqa: B027 (many take every request)
        """Raise the error with which a request is refused at once. In its caller's thread; changes nothing."""

    @abc.abstractmethod
    def submit(self, ticket: AnyTicket, now: float) -> None:
        """Take a request that was checked, in the loop's thread. It ends with an error that is raised here."""

    @abc.abstractmethod
    def poll(self, now: float) -> Sequence[Work]:
        """The work that begins now, in this order. In the loop's thread, after any event or at `next_time`."""

    @property
    def next_time(self) -> float | None:
        """The time to be polled if nothing happens before; None: no time."""
        return None

    @abc.abstractmethod
    def done(self, done: Done) -> None:
        """Note that work has ended, in the thread that did it.

        An error of the loop's own work ends the loop instead.
        """

    @abc.abstractmethod
    def cancel(self, ticket: AnyTicket) -> bool:
        """Withdraw a request, in the loop's thread; return whether that ends it, rather than itself later."""

    @abc.abstractmethod
    def drain(self, error: Exception) -> Sequence[Work]:
        """End all requests that have not begun, with this error; return the work still needed for others.

        The last decision: it is not polled any more.
        """

    def interrupt(self) -> None:  # noqa: B027 (most cannot)
        """Cut short the present work, if possible. From any thread, without the lock."""

    def release(self) -> None:  # noqa: B027 (most have nothing)
        """Let devices come to rest.

        The last call, before remaining requests end; in the loop's thread, without the lock.
        """


class Loop[AnyTicket: Ticket[Any]]:
    """Server of tickets from any thread and event loop.

    One thread polls the decider after every event; each lane has one that does work, one piece after the other; one
    runs the callbacks of futures, which delay nothing else.

    Callers put requests into a line, from which the loop's thread accepts them: at most `max_tickets` at a time, first
    come, first served. Ctrl-C may interrupt a caller anywhere, so a caller changes nothing but by one step.

    Args:
      decider: chooses the work.
      what: the served thing as the subject of errors: "This system".
      name: the threads' name: "jaxinfer-NAME".
      lanes: names of the threads that do work.
      max_tickets: maximum number of accepted tickets; None: no limit.
      max_line: maximum number of requests in line; None: no limit.
      statistics: counts how requests end.
      clock: time in seconds, never going back.

    Attributes:
      lock: held while the decider is called.
    """

    def __init__(
        self,
        decider: Decider[AnyTicket],
        *,
        what: str,
        name: str,
        lanes: Sequence[str] = (),
        max_tickets: int | None = None,
        max_line: int | None = None,
        statistics: Statistics | None = None,
        clock: Clock = time.perf_counter,
    ):
        self.statistics, self.clock = Statistics() if statistics is None else statistics, clock
        self._decider, self._what = decider, what
        self.lock = threading.RLock()
        self._tickets: dict[Hashable, AnyTicket] = {}
        self._line: Line[AnyTicket] = Line(max_tickets, max_line)
        self._withdrawn: SimpleQueue[AnyTicket] = SimpleQueue()
        self._closed = self._drain = False
        self._cause: BaseException | None = None  # the cause of its death, or of giving up
        self._num_running = self._num_done = self._num_called_back = 0
        self._pace = Pace(clock())
        self._origin = Origin(what)
        self._news: SimpleQueue[None] = SimpleQueue()  # not a condition: finalizers may put, wherever they run
        self._desk = Desk(ended=SimpleQueue(), given_up=SimpleQueue(), news=self._news)
        self._lanes: list[SimpleQueue[Work | None]] = [SimpleQueue() for _ in lanes]
        self._thread = make_thread(self._run, name)
        self._callbacks = make_thread(self._run_callbacks, f"{name}-callbacks")
        workers = [make_thread(self._run_lane, *lane) for lane in zip(lanes, self._lanes, strict=True)]
        self._threads = [self._thread, *workers, self._callbacks]
        close_at_exit(self, lambda loop: loop.close(drain=False))

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    # From any thread

    @property
    def num_tickets(self) -> int:
        """The number of requests that have not ended, including those in line."""
        return 0 if self._origin.forked else len(self._tickets) + len(self._line)

    @property
    def num_waiting(self) -> int:
        """The number of requests that the decider does not have yet."""
        return len(self._line)

    @property
    def in_line(self) -> Iterable[AnyTicket]:
        """The requests that the decider does not have yet; for deciders. It changes under the lock."""
        return self._line

    def stats(self) -> Any:
        """Return a copy of its statistics."""
        if self._origin.forked:
            return copy.deepcopy(self.statistics)
        with self.lock:
            return copy.deepcopy(self.statistics)

    @property
    def tickets(self) -> Mapping[Hashable, AnyTicket]:
        """Accepted requests that have not ended, by key; for deciders. It changes under the lock."""
        return self._tickets

    @property
    def is_running(self) -> bool:
        """Whether requests are accepted."""
        return not self._closed and not self._origin.forked

    def end_error(self) -> ClosedError | DiedError:
        """Return the error of a request that comes after the end, or has not ended by then."""
        if self._cause is None:
            return closed_error(self._what)
        why = f"{type(self._cause).__name__}: {self._cause}"
        return caused(DiedError(f"{self._what} has died of {why}. Make another one."), self._cause)

    def check_process(self) -> None:
        """Raise ClosedError in a forked process, where another thread's locks stay taken for ever."""
        self._origin.check(ClosedError)

    def stop_when_dropped(self, owner: object) -> None:
        """Stop when the owner is collected.

        At the end of the process the loop is closed, which waits for its threads.
        """
        weakref.finalize(owner, self.stop).atexit = False

    def wake(self) -> None:
        """Have the decider polled after an event."""
        self._news.put(None)

    def submit(self, ticket: AnyTicket, *, block: bool = False) -> None:
        """Serve a request.

        If too many are accepted, a caller that may `block` waits here for its turn; with a reader, it waits while it
        reads. A request whose deadline passes in line ends with DeadlineExceededError.

        Raises ClosedError, also in a forked process; DiedError; OverloadedError instead of waiting, if the caller may
        not, if the line is full, or in one of the loop's own threads (a future's callback), which would wait for
        itself; ValueError for a request that is served already; any error of the decider.
        """
        self.check_process()
        with self.lock:
            self._check(ticket, block=block)
            if ticket.future is not None:
                ticket.future.desk = self._desk
            self._line.add(ticket)
        self._news.put(None)
        if ticket.turn is not None:
            self._wait_in_line(ticket, ticket.turn)

    def serve(self, ticket: AnyTicket, *, block: bool = False) -> TicketFuture[Any]:
        """Submit a request of a caller in a thread; return its future. Raises as `submit`."""
        assert ticket.future is not None
        self.submit(ticket, block=block)
        return ticket.future

    def cancel(self, ticket: AnyTicket) -> None:
        """Have a request withdrawn soon; does nothing if it has ended."""
        if not self._origin.forked and ticket.outcome is None:
            self._withdrawn.put(ticket)
            self._news.put(None)

    def find(self, key: Hashable) -> AnyTicket | None:
        """Find the request of this key that has not ended."""
        if self._origin.forked:
            return None
        with self.lock:
            return self._tickets.get(key) or self._line.find(key)

    def end(self, ticket: AnyTicket, outcome: Any, *, at: float | None = None) -> None:
        """End a request, unless it has ended.

        Args:
          outcome: its answer or error.
          at: its end on the loop's clock; None: now.
        """
        with self.lock:
            if self._tickets.get(ticket.key) is not ticket:
                return
            del self._tickets[ticket.key]
            outcome = CancelledError() if ticket.cancelled else outcome
            self._count(ticket, outcome, self.clock() if at is None else at)
            ticket.end(outcome)
            if self._line or not self._tickets:  # the loop may wait for room, or for the last one
                self._news.put(None)

    def end_waiting(self, error: Exception) -> None:
        """End all requests that have not begun."""
        with self.lock:
            for ticket in list(self._tickets.values()):
                if not ticket.begun:
                    self.end(ticket, error)

    def stop(self, *, drain: bool = False) -> None:
        """Take no more requests, and end soon: after all requests (`drain`), or after the work that runs now.

        Takes no lock, since it is also called when an object is collected, which may be anywhere.
        """
        if self._origin.forked:
            return
        self._drain = drain and (self._drain or not self._closed)
        self._closed = True
        self._news.put(None)
        if not self._drain:
            self._decider.interrupt()

    def close(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """Stop, and wait for the end, at most `timeout` seconds; not at all in a forked process.

        Requests that have not ended by then end with ClosedError, and the threads that work on them are left alone.
        Without a timeout, raises DiedError if work hangs: if none has ended for `HANGING_SECONDS`.
        """
        if self._origin.forked:
            return
        until = None if timeout is None else time.monotonic() + timeout
        self.stop(drain=drain)
        if threading.current_thread() in self._threads or not self._thread.ident:
            return
        hangs = not join_threads(self._threads[:-1], until, lambda: self._num_done, HANGING_SECONDS)
        if hangs:
            self.stop()
            if timeout is None:
                self._cause = TimeoutError(f"its work has not ended for {HANGING_SECONDS:g} s")
            self._end_all()
        until = None if until is None else max(until, time.monotonic() + LAST_CALLBACK_SECONDS)
        if not join_threads([self._callbacks], until, lambda: self._num_called_back, CALLBACK_SECONDS):
            log.warning("%s is closed, though a callback of a future has not ended.", self._what)
        if hangs and self._cause is not None:
            raise self.end_error()

    # Under the lock

    def _check(self, ticket: AnyTicket, *, block: bool) -> None:
        """Raise the error with which a request is refused; give it an event if its caller must stand in line."""
        if self._closed:
            raise self.end_error()
        if ticket.key in self._tickets or self._line.find(ticket.key) is not None:
            raise ValueError(
                f"Request {ticket.key!r} is in flight already: give another id, or prepare the prompt once for each "
                "time it is to run."
            )
        ticket.arrived = self.clock()
        self._decider.check(ticket, ticket.arrived)
        if self._line.has_room(self.num_tickets):
            return
        may_wait = block and threading.current_thread() not in self._threads
        self._line.check(self.num_tickets, may_wait=may_wait, retry_after=self._pace.between_ends)
        if ticket.reader is None:
            ticket.turn = Event()

    def _accept_line(self) -> None:
        """Accept requests while there is room, and withdraw those that are not wanted any more."""
        while self._line and self._line.has_room(len(self._tickets)):
            self._accept(self._line.pop_first())
        if self.clock() >= self._line.next_deadline:
            self._end_late()
        with contextlib.suppress(Empty):
            while True:
                future = self._desk.given_up.get_nowait()
                ticket = self.find(future.key)
                if ticket is not None and ticket.future is future:
                    self._withdraw(ticket)
        with contextlib.suppress(Empty):
            while True:
                self._withdraw(self._withdrawn.get_nowait())

    def _end_late(self) -> None:
        """End the requests in line whose deadline has passed."""
        now = self.clock()
        for ticket in self._line.pop_late(now):
            error = DeadlineExceededError("The deadline passed before the request began.")
            self._count(ticket, error, now)
            ticket.end(error)
            if ticket.turn is not None:
                ticket.turn.set()

    def _withdraw(self, ticket: AnyTicket) -> None:
        if self._line.pop(ticket):  # exceeds `max_tickets`, but only to end at once
            self._accept(ticket)
        if self._tickets.get(ticket.key) is ticket and self._decider.cancel(ticket):
            self.end(ticket, CancelledError())

    def _accept(self, ticket: AnyTicket) -> None:
        now = self.clock()
        if not self._tickets:
            self._pace.begin(now)
        self._tickets[ticket.key] = ticket
        if ticket.turn is not None:
            ticket.turn.set()
        try:
            self._decider.submit(ticket, now)
        except Exception as error:
            del self._tickets[ticket.key]
            self._count(ticket, error, now)
            ticket.end(error)

    def _count(self, ticket: AnyTicket, outcome: Any, now: float) -> None:
        self.statistics.count(outcome, late=ticket.deadline is not None and now >= ticket.deadline)
        self._pace.end(now)

    # In the caller's thread

    def _wait_in_line(self, ticket: AnyTicket, turn: Event) -> None:
        try:
            turn.wait()
        except BaseException:  # Ctrl-C
            self.cancel(ticket)
            raise

    # In the loop's threads

    def _run(self) -> None:
        try:
            while self._turn():
                pass
            with self.lock:
                works = self._decider.drain(self.end_error())
                self._num_running += len(works)
            self._begin(works)
            while self._num_running:  # what has begun may end
                self._news.get()
            if self._cause is not None:
                raise self._cause
        except BaseException as error:
            log.critical("%s has died; all its requests end with an error.", self._what, exc_info=error)
            self._cause = error
        try:
            self._decider.release()
        except BaseException as error:
            log.error("%s could not bring its devices to rest.", self._what, exc_info=error)
        self._end_all()

    def _turn(self) -> bool:
        """Wait for an event and begin what may begin; return False at the end."""
        self._sleep()
        with self.lock:
            self._accept_line()
            if self._closed and not (self._drain and self.num_tickets):
                return False
            works = self._decider.poll(self.clock())
            self._num_running += len(works)
        self._begin(works)
        return True

    def _begin(self, works: Sequence[Work]) -> None:
        for work in works:
            if work.lane is None:
                self._do(work)
                self.wake()
            else:
                self._lanes[work.lane].put(work)

    def _sleep(self) -> None:
        with self.lock:
            until = self._decider.next_time
            until = min(math.inf if until is None else until, self._line.next_deadline)
        seconds = None if until == math.inf else until - self.clock()
        with contextlib.suppress(Empty):
            if seconds is None or seconds > 0:
                self._news.get(timeout=None if seconds is None else min(seconds, threading.TIMEOUT_MAX))
            while True:
                self._news.get_nowait()
        if self._cause is not None:
            raise self._cause

    def _run_lane(self, works: "SimpleQueue[Work | None]") -> None:
        while (work := works.get()) is not None:
            try:
                self._do(work)
            except BaseException as mistake:  # the decider's: no request may wait for ever
                self._cause = mistake
            del work  # it must not live while this waits for the next
            self._news.put(None)

    def _do(self, work: Work) -> None:
        began, result, error = self.clock(), None, None
        try:
            result = work.run()
        except BaseException as raised:
            error = raised
        ended = self.clock()
        with self.lock:
            self._num_running -= 1
            self._num_done += 1
            if error is not None and work.lane is None:
                raise error
            self._decider.done(Done(work, result, error, began, ended))

    def _run_callbacks(self) -> None:
        while (future := self._desk.ended.get()) is not None:
            future.run_callbacks()
            self._num_called_back += 1
            del future  # it must not live while this waits for the next

    def _end_all(self) -> None:
        """End every request and the other threads."""
        with self.lock:
            self._closed, error = True, self.end_error()
            ending = [*self._tickets.values(), *self._line]
            self._tickets, self._line = {}, Line()
            for ticket in ending:
                self.statistics.count(error, late=False)
                ticket.end(error)
                if ticket.turn is not None:
                    ticket.turn.set()
            self._decider = _NOTHING  # it may be large, and may refer to the loop's owner
        for queue in (*self._lanes, self._desk.ended):
            queue.put(None)


class _Nothing(Decider[Any]):
    """A placeholder for the decider after the end."""

    def submit(self, ticket: Ticket[Any], now: float) -> None: ...

    def poll(self, now: float) -> Sequence[Work]:
        return ()

    def done(self, done: Done) -> None: ...

    def cancel(self, ticket: Ticket[Any]) -> bool:
        return False

    def drain(self, error: Exception) -> Sequence[Work]:
        return ()


_NOTHING = _Nothing()

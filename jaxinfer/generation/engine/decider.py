"""The decider of an engine's loop: steps the engine while there are requests, one step at a time."""

import functools
import heapq
import logging
from collections.abc import Callable, Iterable, Sequence

from jaxinfer.futures import Event
from jaxinfer.generation.engine.engine import Engine
from jaxinfer.generation.engine.queue_time import Queue
from jaxinfer.generation.engine.request import Sequence as TokenSequence
from jaxinfer.generation.engine.ticket import RequestTicket
from jaxinfer.serving.errors import (
    ClosedError,
    DeadlineExceededError,
    FailedError,
    NotLoadedError,
    ServingError,
    caused,
)
from jaxinfer.serving.loop import Decider, Done, Loop, Work
from jaxinfer.serving.ticket import tell_readers

log = logging.getLogger(__name__)

MANY = 1024
"""Deadlines of requests that have ended, beyond which they are forgotten together."""


class RequestDecider(Decider[RequestTicket]):
    """Steps an engine in its loop's thread.

    Only this thread may touch the engine, except for `Engine.prepare`. Requests that arrive during a step are added
    together before the next one; requests that were given up are removed then. Requests that arrive while none runs
    wait for the programs that they need together; later ones for each program that a step needs. All others are
    compiled in the background once the first request has its answer.

    A request whose deadline passes, or that waits too long, ends with the step that runs then.

    While it is paused, requests that have begun go on and others wait. Once it is halted, those that have begun wait,
    too. Their waiting is not limited then, but by their deadlines.

    Attributes:
      on_waiting: called with the loop's lock when a request comes while it is paused.
      loop: the loop, which serves at most `max_requests` at a time while at most `max_waiting` wait (None: any number).
      queue: the requests that wait for a place in the batch, at most `max_queue_time` seconds (None: any time).
    """

    def __init__(
        self,
        engine: Engine,
        *,
        max_requests: int,
        max_waiting: int | None = None,
        max_queue_time: float | None = None,
    ):
        self._engine = engine
        self._arrived: list[RequestTicket] = []  # not in the engine yet
        self._aborts: list[RequestTicket] = []
        self._deadlines: list[tuple[float, str]] = []  # a heap, with the keys of tickets, which may have ended
        self._interrupted = self._compiles_others = False
        self._paused = self._halting = self._steps = False
        self._halted: float | None = None  # since when, on the loop's clock
        self._granted: list[RequestTicket] = []  # that arrived before it was paused
        self._drained = Event()
        self.on_waiting: Callable[[], None] = lambda: None
        self.queue = Queue(engine.scheduler.slots, max_queue_time)
        self.loop = Loop(self, what="This AsyncLLM", name="engine", max_tickets=max_requests, max_line=max_waiting)
        self.loop.start()

    # The protocol of a decider

    def check(self, ticket: RequestTicket, now: float) -> None:
        if ticket.limited:
            self.queue.check(ticket.priority, self.loop.in_line, self._engine.scheduler.load)

    def submit(self, ticket: RequestTicket, now: float) -> None:
        self._arrived.append(ticket)
        if (last := self.queue.add(ticket, self._engine.scheduler.load)) is not None:
            self._aborts.append(last)
        if ticket.deadline is not None:
            heapq.heappush(self._deadlines, (ticket.deadline, ticket.key))
        if self._paused:
            self.on_waiting()

    def poll(self, now: float) -> Sequence[Work]:
        self._give_up_late(now)
        arrived, aborts, self._arrived, self._aborts = self._arrived, self._aborts, [], []
        if self._paused:
            given_up, granted, self._granted = set(aborts), self._granted, []
            self._arrived = [ticket for ticket in arrived if ticket not in given_up]
            arrived = granted + [ticket for ticket in arrived if ticket in given_up]
        if self._halting:
            self._arrived, self._aborts, self._steps = arrived + self._arrived, aborts + self._aborts, True
            return [Work(self._halt)]
        runs = self._engine.scheduler.sequences and self._halted is None
        self._steps = bool(arrived or aborts or runs if self._paused else self.loop.tickets)
        return [Work(functools.partial(self._step, arrived, aborts))] if self._steps else ()

    @property
    def next_time(self) -> float | None:
        """The next deadline of requests that wait while no step ends them."""
        return self._deadlines[0][0] if self._paused and self._deadlines else None

    def pause(self) -> Event:
        """Begin no requests that come from now on; return the event that all others are at their end. From any thread.

        Requests that have waited for `resume` have their turn first, however soon another pause comes.
        """
        with self.loop.lock:
            if not self._paused:
                self._granted, self._arrived = self._arrived, []
            self._paused, self._drained = True, Event()
            self._note_drained()
        self.loop.wake()
        return self._drained

    def halt(self) -> Event:
        """Let those that have begun wait, too, after `pause`; return the event that they do. From any thread."""
        with self.loop.lock:
            self._halting = not self._drained.is_set()
        self.loop.wake()
        return self._drained

    def resume(self) -> None:
        """Begin requests again, and go on with those that have begun. From any thread."""
        with self.loop.lock:
            self._halting, self._halted = False, None
            self._paused, self._arrived, self._granted = False, self._granted + self._arrived, []
            self.queue.resume(self.loop.clock())
        self.loop.wake()

    def _note_drained(self) -> None:
        if self._paused and not (self._granted or self._steps or self._engine.scheduler.sequences):
            self._drained.set()

    @property
    def is_halted(self) -> bool:
        """Whether requests that had begun wait for `resume`."""
        return self._halted is not None and bool(self._engine.scheduler.sequences)

    def _halt(self) -> None:
        """End the steps in flight, and give their results to the requests."""
        self._deliver(dict.fromkeys(sequence.request_id for sequence in self._engine.drain()))

    def fail_waiting(self, error: ServingError) -> None:
        """End the requests that wait for `resume` with an error. From any thread."""
        with self.loop.lock:
            waiting = self._arrived if self._halted is None else list(self.loop.tickets.values())
            for ticket in waiting:
                ticket.error = error
            self._aborts += waiting
        self.loop.wake()

    @property
    def waiting_since(self) -> float | None:
        """Since when the first request waits for `resume`, on the loop's clock; None: no request does.

        A request that had begun waits since it was halted.
        """
        with self.loop.lock:
            arrived = [self._arrived[0].arrived] if self._paused and self._arrived else []
            halted = [self._halted] if self._halted is not None and self.is_halted else []
            return min(arrived + halted, default=None)

    def _give_up_late(self, now: float) -> None:
        """Give up the requests whose deadline has passed."""
        tickets = self.loop.tickets
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, key = heapq.heappop(self._deadlines)
            if (ticket := tickets.get(key)) is not None and ticket.deadline == deadline:
                ticket.error = self._late_error(ticket)
                self._aborts.append(ticket)
        if len(self._deadlines) > 2 * len(tickets) + MANY:
            self._deadlines = [(t.deadline, t.key) for t in tickets.values() if t.deadline is not None]
            heapq.heapify(self._deadlines)

    def _late_error(self, ticket: RequestTicket) -> ServingError:
        if self._paused and ticket in self._arrived:
            return NotLoadedError("The deadline passed before the model was loaded.")
        return DeadlineExceededError("The deadline passed before the request had ended.")

    def done(self, done: Done) -> None:
        self.loop.statistics.batches += 1
        waits, tickets = self._engine.scheduler.waits, self.loop.tickets
        not_added = {*self._granted, *self._arrived}
        begun = [x for x in self.queue if x.key not in tickets or not (x in not_added or all(map(waits, x.sequences)))]
        self._aborts += self.queue.update(begun, done.ended, limited=not self._paused)
        self._steps = False
        if self._halting and done.work.run == self._halt:  # a step that ran then has left others in flight
            self._halting, self._halted = False, done.ended
            self._drained.set()
        self._note_drained()

    def cancel(self, ticket: RequestTicket) -> bool:
        """End the ticket with the next step, as it is then; returns False, since that is later."""
        self._aborts.append(ticket)
        return False

    def drain(self, error: Exception) -> Sequence[Work]:
        for ticket in self.loop.tickets.values():
            self._engine.abort(ticket.key)
        return ()

    def interrupt(self) -> None:
        self._interrupted = True
        self._engine.interrupt()

    def release(self) -> None:
        """Drain and close the engine: the device must be idle when the process ends."""
        try:
            self._engine.drain()
        finally:
            self._engine.close()

    # A step: without the lock

    def _step(self, arrived: list[RequestTicket], given_up: list[RequestTicket]) -> None:
        """Run one step, with the changes since the last one."""
        if not self._compile_for(arrived):
            return
        new = [sequence for ticket in arrived for sequence in ticket.sequences]
        aborts = [ticket.key for ticket in given_up if self.loop.tickets.get(ticket.key) is ticket]
        try:
            advanced = self._advance(new, aborts)
        except BaseException as error:  # the engine starts over; if that does not help, the thread dies
            log.error("A step was interrupted; its requests begin again.", exc_info=error)
            known = set(self._engine.scheduler.sequences)
            advanced = self._advance([s for s in new if s not in known and not s.finished], aborts)
        if not self._interrupted:  # an interrupt may have cut the step short
            self._deliver(dict.fromkeys(sequence.request_id for sequence in advanced))
        if not self.loop.tickets:
            self._engine.drain(lambda: self.loop.num_waiting > 0)
        if self.loop.statistics.answered and not self._compiles_others:
            self._compiles_others = True
            self._engine.compile_in_background()

    def _compile_for(self, arrived: list[RequestTicket]) -> bool:
        """Compile what requests need that arrive while none runs; return whether they can be added."""
        if not arrived or self._paused or self._engine.scheduler.sequences:
            return True
        try:
            self._engine.compile_for([sequence for ticket in arrived for sequence in ticket.sequences])
        except ClosedError:  # the loop is ending, and so are its requests
            return False
        except Exception as error:
            for ticket in arrived:
                self.loop.end(ticket, caused(FailedError(f"{type(error).__name__}: {error}"), error))
            return False
        return True

    def _advance(self, new: list[TokenSequence], aborts: list[str]) -> list[TokenSequence]:
        """Run one step with new sequences and without aborted ones; returns all that have advanced or ended."""
        self._engine.add(new)
        for request_id in aborts:
            self._engine.abort(request_id)
        return self._engine.step()

    def _deliver(self, request_ids: Iterable[str]) -> None:
        """Give callers the results of a step, and end finished tickets."""
        changed = []
        for request_id in request_ids:
            if (ticket := self.loop.tickets.get(request_id)) is None:  # it was in flight when it ended
                continue
            try:
                if ticket.finished:
                    self._end(ticket)
                elif ticket.advance():
                    changed.append(ticket)
            except BaseException as error:  # the next output holds this one
                log.error("An output of request %s could not be made.", request_id, exc_info=error)
        for unread in tell_readers(changed):
            self.loop.cancel(unread)

    def _end(self, ticket: RequestTicket) -> None:
        try:
            outcome = ticket.result()
        except BaseException as error:
            outcome = caused(FailedError(f"Its output could not be made: {type(error).__name__}: {error}"), error)
        self.queue.ended(ticket, self.loop.clock(), self._engine.scheduler.load)
        self.loop.end(ticket, outcome)

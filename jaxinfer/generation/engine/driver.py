"""The thread that steps an engine, for requests that come from any thread and any event loop."""

import contextlib
import functools
import logging
import queue
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future

from jaxinfer.compiled import Origin, close_at_exit
from jaxinfer.generation.engine.engine import Engine
from jaxinfer.generation.engine.pending import EngineGenerateError, PendingRequest
from jaxinfer.generation.engine.request import Sequence
from jaxinfer.serving.ticket import tell_readers

log = logging.getLogger(__name__)

HANGING_SECONDS = 300.0
"""A step that takes so long when its engine is to end is taken to hang; a streamed model may need minutes for one."""


class EngineDeadError(RuntimeError):
    """The engine takes no requests, and has ended those it had: it was closed, or its thread died of `__cause__`."""


class Driver:
    """Steps an engine in a thread of its own while there are requests, and sleeps while there are none.

    Nothing but this thread may touch the engine, except for `Engine.prepare`. What arrives during a step is added
    before the next one, all together.

    At most `max_requests` are accepted at a time. The next callers stand in line, first come, first served, and each is
    held up until its turn: the inbox cannot grow.
    """

    def __init__(self, engine: Engine, *, max_requests: int):
        self._engine, self._max_requests = engine, max_requests
        self._lock = threading.RLock()
        self._accepted: dict[str, PendingRequest] = {}
        self._line: OrderedDict[str, PendingRequest] = OrderedDict()  # a dict is slow to find its first after many left
        self._turns: dict[str, threading.Event] = {}  # of threads that stand in line
        self._inbox: queue.SimpleQueue[PendingRequest | None] = queue.SimpleQueue()  # accepted, not in the engine yet
        self._aborts: list[PendingRequest] = []
        self._closed = self._finish = False  # no more requests; but those there are go on to their end
        self._cause: BaseException | None = None  # what the thread died of, or why it is given up
        self._hangs = False
        self._origin = Origin("This AsyncLLM")
        self._num_turns = 0  # of the thread
        self._thread = threading.Thread(target=self._run, name="jaxinfer-engine", daemon=True)
        close_at_exit(self, Driver.close)
        self._thread.start()

    # From any thread

    @property
    def num_requests(self) -> int:
        """How many requests have not ended, those in line included."""
        if self._origin.forked:
            return 0
        with self._lock:
            return len(self._accepted) + len(self._line)

    @property
    def is_running(self) -> bool:
        """Whether requests are taken."""
        return not self._closed and not self._origin.forked

    def submit(self, pending: PendingRequest, *, block: bool = True) -> None:
        """Run a request.

        Where `max_requests` are accepted already, a caller without a reader is held up here until its turn, one with
        a reader while it reads.

        Raises EngineDeadError, also in a process that was forked; ValueError for a request that runs already; or
        queue.Full rather than to wait, if `block` is false or this is the engine's thread (a future's callback), which
        would wait for itself.
        """
        self._origin.check(EngineDeadError)
        request_id = pending.request_id
        with self._lock:
            if self._closed:
                raise self._dead_error()
            if request_id in self._accepted or request_id in self._line:
                raise ValueError(
                    "This prepared request runs already: prepare the prompt once for each time it is to run."
                )
            if pending.future is not None:
                pending.future.add_done_callback(functools.partial(_abort_if_cancelled, weakref.ref(self), request_id))
            if len(self._accepted) < self._max_requests:
                self._accept(pending)
                return
            if not block or threading.current_thread() is self._thread:
                raise queue.Full(
                    f"{len(self._accepted)} requests are in flight already, and max_requests allows no more."
                )
            self._line[request_id] = pending
            if pending.reader is not None:
                return
            turn = self._turns[request_id] = threading.Event()
        try:
            turn.wait()
        except BaseException:  # Ctrl-C
            self.abort(request_id, pending)
            raise

    def abort(self, request_id: str, only: PendingRequest | Future | None = None) -> None:
        """Give a request up; does nothing if it has ended, or is not this one (`only`), or this future's."""
        if self._origin.forked:
            return
        with self._lock:
            pending = self._line.get(request_id) or self._accepted.get(request_id)
            if pending is None or only not in (None, pending, pending.future):
                return
            if request_id in self._line:  # beyond `max_requests`, but only to end at once
                self._leave_line(request_id)
            self._aborts.append(pending)

    def stop(self, *, finish: bool = False) -> None:
        """Take no more requests, and end the thread soon: when those there are have ended by themselves (`finish`), or
        after this step, which ends them with EngineDeadError.

        Takes no lock, since it is also called when an object is collected, which may be anywhere in this class.
        """
        if self._origin.forked:
            return
        self._finish = finish and (self._finish or not self._closed)
        self._closed = True
        self._inbox.put(None)
        if not self._finish:
            self._engine.close()

    def close(self, *, finish: bool = False) -> None:
        """`stop`, and wait until the thread has ended; not at all in a process that was forked.

        Raises EngineDeadError, which all requests then end with too, if a step hangs: if none has ended for
        `HANGING_SECONDS`.
        """
        self.stop(finish=finish)
        if threading.current_thread() is self._thread or self._origin.forked:
            return
        turns = -1
        while self._thread.is_alive() and turns != self._num_turns:
            turns = self._num_turns
            self._thread.join(HANGING_SECONDS)
        if self._thread.is_alive():
            self._hangs, self._cause = True, TimeoutError(f"a step has not ended for {HANGING_SECONDS:g} s")
            self._end_all()
            raise self._dead_error()

    def _leave_line(self, request_id: str) -> None:
        self._accept(self._line.pop(request_id))
        if (turn := self._turns.pop(request_id, None)) is not None:
            turn.set()

    def _accept(self, pending: PendingRequest) -> None:
        self._accepted[pending.request_id] = pending
        self._inbox.put(pending)

    def _dead_error(self) -> EngineDeadError:
        if self._cause is None:
            return EngineDeadError("The engine is closed.")
        what = "hangs" if self._hangs else "has died"
        error = EngineDeadError(f"The engine's thread {what}: {type(self._cause).__name__}: {self._cause}")
        error.__cause__ = self._cause
        return error

    # In the engine's thread

    def _run(self) -> None:
        try:
            while self._turn():
                pass
            self._give_up()
        except BaseException as error:
            log.critical("The engine's thread has died; all its requests end with an error.", exc_info=error)
            self._cause = error
            with contextlib.suppress(Exception):  # the device must not be at work still when the process ends
                self._engine.drain()
        finally:
            self._end_all()

    def _turn(self) -> bool:
        """One step, with what has come since the last one; false if it was the end."""
        work = self._take()
        if work is None:
            return False
        arrivals, aborts = work
        new = [sequence for pending in arrivals for sequence in pending.sequences]
        try:
            advanced = self._advance(new, aborts)
        except BaseException as error:  # the engine begins anew; if that does not help, the thread dies
            log.error("A step was interrupted; its requests begin again.", exc_info=error)
            known = set(self._engine.scheduler.sequences)
            advanced = self._advance([s for s in new if s not in known and not s.finished], aborts)
        self._num_turns += 1
        if self._closed and not self._finish:  # which may have cut the step short
            return False
        self._deliver(dict.fromkeys(sequence.request_id for sequence in advanced))
        if not self._accepted:
            self._engine.drain()
        return True

    def _advance(self, new: list[Sequence], aborts: list[PendingRequest]) -> list[Sequence]:
        """One step, with new sequences and without those given up; all that have advanced or ended."""
        self._engine.add(new)
        for pending in aborts:
            if self._accepted.get(pending.request_id) is pending:  # it has not ended since
                self._engine.abort(pending.request_id)
        return self._engine.step()

    def _take(self) -> tuple[list[PendingRequest], list[PendingRequest]] | None:
        """What has come since the last step, as soon as there is anything to do; None at the end."""
        arrived = [self._inbox.get()] if not (self._accepted or self._closed) else []
        with self._lock:
            if self._closed and not (self._finish and self._accepted):
                return None
            while not self._inbox.empty():
                arrived.append(self._inbox.get())
            aborts, self._aborts = self._aborts, []
        return [pending for pending in arrived if pending is not None], aborts

    def _deliver(self, request_ids: Iterable[str]) -> None:
        """Give callers what a step has brought, and end what has ended."""
        changed = []
        for request_id in request_ids:
            pending = self._accepted.get(request_id)
            if pending is None:  # it was in flight when it ended
                continue
            try:
                told = self._tell(pending)
            except BaseException as error:  # the next output holds this one
                log.error("An output of request %s could not be made.", request_id, exc_info=error)
            else:
                changed += [pending] if told else []
        for unread in tell_readers(changed):
            self.abort(unread.request_id)

    def _tell(self, pending: PendingRequest) -> bool:
        """Give a caller what there is; whether that is anything new."""
        if not pending.finished:
            return pending.advance()
        self._end(pending)
        return True

    def _end(self, pending: PendingRequest) -> None:
        try:
            result = pending.result()
        except BaseException as error:
            result = EngineGenerateError(f"Its output could not be made: {type(error).__name__}: {error}")
            result.__cause__ = error
        with self._lock:
            del self._accepted[pending.request_id]
            while self._line and len(self._accepted) < self._max_requests:
                self._leave_line(next(iter(self._line)))
        pending.end(result)

    def _give_up(self) -> None:
        with self._lock:
            request_ids = list(self._accepted)
        for request_id in request_ids:
            self._engine.abort(request_id)
        self._engine.drain()

    def _end_all(self) -> None:
        """The end of every request there is."""
        with self._lock:
            self._closed = True
            ending = [*self._accepted.values(), *self._line.values()]
            turns = list(self._turns.values())
            self._accepted, self._line, self._turns, self._aborts = {}, OrderedDict(), {}, []
        for turn in turns:
            turn.set()
        for pending in ending:
            pending.end(self._dead_error())
        tell_readers(ending)


def _abort_if_cancelled(driver: weakref.ref[Driver], request_id: str, future: Future) -> None:
    """A future's callback; it does not keep the driver, and so the model, alive."""
    if future.cancelled() and (running := driver()) is not None:
        running.abort(request_id, future)

"""Real executors: two threads each, one that runs batches and one that loads experts, told by the scheduler what to do.

All decisions are made under one lock, between compiled steps: they take microseconds.
"""

import contextlib
import dataclasses
import functools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

import numpy as np

from jaxinfer.compiled import Origin, close_at_exit, end_future
from jaxinfer.experts.errors import CollaborationError, LoadError, ShutdownError
from jaxinfer.experts.execution.architectures import Architecture, ArchitecturePrograms
from jaxinfer.experts.execution.kinds import Judgement
from jaxinfer.experts.execution.loader import ExpertLoader, OpenedExpert, is_out_of_memory
from jaxinfer.experts.execution.observed import LoadTimes, ObservedProfiles
from jaxinfer.experts.scheduling.request import Action, Batch, Evict, Failure, Load, Request
from jaxinfer.experts.scheduling.scheduler import Scheduler

log = logging.getLogger(__name__)

GRACE = 30.0
"""Seconds that a batch or a load which has begun is waited for when a system is closed."""
SOON = 1e-3
"""Seconds after a deadline that it counts as passed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """An expert's part of a result.

    Attributes:
      judgement: its answer.
      executor: where it ran.
      batch: how many inputs it judged together.
      waited: seconds until it began, from when it was asked.
      seconds: of the batch.
    """

    expert: str
    judgement: Judgement
    executor: str
    batch: int
    waited: float
    seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """What came of an input.

    Attributes:
      stages: of all experts that judged it, in their order.
      latency: seconds from when it was submitted.
    """

    stages: tuple[Stage, ...]
    latency: float

    @property
    def verdict(self) -> str:
        """The last expert's."""
        return self.stages[-1].judgement.verdict


@dataclasses.dataclass
class _Input:
    """An input on its way: its value, what was said of it so far, and who waits."""

    value: np.ndarray | Any
    submitted: float
    deadline: float | None
    future: Future[Result]
    request: Request | None = None
    stages: tuple[Stage, ...] = ()


@dataclasses.dataclass(kw_only=True)
class Times:
    """Where time went, in seconds.

    Attributes:
      scheduling: of the CPU, in assigning requests.
      managing: of the CPU, in all other decisions: which batches and loads begin, which experts leave.
      running: batches, all executors together.
      loading: loads, all executors together.
    """

    scheduling: float = 0.0
    managing: float = 0.0
    running: float = 0.0
    loading: float = 0.0

    @property
    def management_share(self) -> float:
        """The paper's overhead of expert management ("overhead analysis"): for each second of executors' work."""
        return self.managing / (self.running + self.loading) if self.running else 0.0


class Executors:
    """Runs what a scheduler decides.

    Args:
      scheduler: with its experts placed.
      profiles: the scheduler's; told of what loads and batches take.
      experts: by name.
      programs: by architecture and device.
      loader: has the weights of the experts that are placed.
      devices: of each executor.
      clock: seconds.

    Attributes:
      times: where time went.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        profiles: ObservedProfiles,
        experts: Mapping[str, OpenedExpert],
        programs: Mapping[tuple[Architecture, Any], ArchitecturePrograms],
        loader: ExpertLoader,
        devices: Sequence[Any],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.scheduler, self.times, self._profiles = scheduler, Times(), profiles
        self._experts, self._programs, self._loader, self._devices = experts, programs, loader, list(devices)
        self._clock, self._load_times = clock, LoadTimes()
        self._lock = threading.RLock()
        self._idle = threading.Condition(self._lock)
        self._deadline = threading.Condition(self._lock)  # notified of one that is earlier than all before, and the end
        self._inputs: dict[int, _Input] = {}
        self._ended: deque[tuple[Future[Result], Result | Exception]] = deque()  # to be told once the lock is free
        self._next_id, self._closed, self._ending = 0, False, False
        self._origin = Origin("This system")
        self._batches: list[SimpleQueue[Batch | Callable[[], None] | None]] = []
        self._loads: list[SimpleQueue[tuple[Load, Callable[[], None]] | None]] = []
        self._threads: list[threading.Thread] = []
        for index, executor in enumerate(scheduler.executors):
            self._batches.append(SimpleQueue())
            self._loads.append(SimpleQueue())
            for kind, loop in (("executor", self._run_batches), ("loader", self._run_loads)):
                name = f"jaxinfer-{kind}-{executor.config.name}"
                self._threads.append(threading.Thread(target=loop, args=(index,), name=name, daemon=True))
        self._threads.append(threading.Thread(target=self._run_deadlines, name="jaxinfer-deadlines", daemon=True))
        close_at_exit(self, lambda executors: executors.close(drain=False))
        for thread in self._threads:
            thread.start()

    def submit(self, expert: str, value: Any, *, deadline: float | None = None) -> Future[Result]:
        """Have an expert, and those that follow it, judge an input.

        Args:
          expert: the first one.
          value: the input, as it goes into a batch.
          deadline: seconds from now within which each expert must begin.
        Raises what `Scheduler.submit` raises; ShutdownError once it is closed, and in a process that was forked.
        """
        self._origin.check(ShutdownError)
        now = self._clock()
        with self._deciding():
            if self._closed:
                raise ShutdownError("the system is closed.")
            self._next_id += 1
            until = None if deadline is None else now + deadline
            found = _Input(value, now, until, Future())
            request = Request(id=self._next_id, expert=expert, arrival=now, deadline=until)
            self._submit(request, now)
            self._inputs[request.id], found.request = found, request
            self._begin(now)
            if until is not None and until == self.scheduler.next_deadline:
                self._deadline.notify()
        number = request.id
        found.future.add_done_callback(lambda future: self._cancel(number) if future.cancelled() else None)
        return found.future

    def close(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """End. `drain` waits for what was submitted, at most `timeout` seconds; what has not begun then fails.

        A batch or a load that has begun may end, within `timeout` or `GRACE` seconds; then its thread is left alone.
        Does nothing in a process that was forked.
        """
        if self._origin.forked:
            return
        error = ShutdownError("the system was closed before the request was done.")
        with self._deciding():
            self._closed = True
            if drain:
                self._idle.wait_for(lambda: not self._inputs, timeout)
            self._end(self.scheduler.drain(error))
            for queue in (*self._batches, *self._loads):
                queue.put(None)
            self._ending = True
            self._deadline.notify()
        until = time.monotonic() + (GRACE if timeout is None else timeout)
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0.0))
        with self._deciding():
            for number in list(self._inputs):
                self._finish(number, error)

    def retry(self, expert: str) -> None:
        """As of `Scheduler`."""
        with self._lock:
            self.scheduler.retry(expert)

    def perform(self, action: Action) -> Sequence[Judgement]:
        """Do an action here and now, with zeros as inputs: for a `Simulator` that has everything really done.

        Returns a batch's answers.
        """
        match action:
            case Load():
                self._loader.prepare(action)()
            case Evict():
                self._loader.note(action.pool, action.evictions, action.dropped)()
            case Batch():
                return self._judge(action.executor, action)
        return ()

    # -- decisions, under the lock --

    @contextlib.contextmanager
    def _deciding(self) -> Iterator[None]:
        """Holds the lock. Futures that end meanwhile do so after it: their callbacks may take long, or wait."""
        try:
            with self._lock:
                yield
        finally:
            with contextlib.suppress(IndexError):  # there are no more
                while True:
                    end_future(*self._ended.popleft(), "an input")

    def _submit(self, request: Request, now: float) -> None:
        begun = time.thread_time()
        try:
            self.scheduler.submit(request, now)
        finally:
            self.times.scheduling += time.thread_time() - begun

    def _manage[**Given, Made](
        self, decision: Callable[Given, Made], *args: Given.args, **kwargs: Given.kwargs
    ) -> Made:
        begun = time.thread_time()
        try:
            return decision(*args, **kwargs)
        finally:
            self.times.managing += time.thread_time() - begun

    def _begin(self, now: float) -> None:
        """Have begun what may begin now."""
        for action in self._manage(self.scheduler.poll, now):
            match action:
                case Load():
                    begin = functools.partial(self._note_begin, action)
                    copied = functools.partial(self._note_copy, action.executor)
                    self._loads[action.executor].put((action, self._loader.prepare(action, begin, copied)))
                case Batch():
                    self._batches[action.executor].put(action)
                case Evict():  # before its batch; not here: it may wait for other evictions
                    copied = functools.partial(self._note_copy, action.executor)
                    leave = self._loader.note(action.pool, action.evictions, action.dropped, copied)
                    self._batches[action.executor].put(leave)
                case Failure():
                    self._end([action])

    def _end(self, failures: Sequence[Failure]) -> None:
        for failure in failures:
            self._finish(failure.request.id, failure.error)

    def _finish(self, number: int, result: Result | Exception) -> None:
        found = self._inputs.pop(number, None)
        if found is not None:
            self._ended.append((found.future, result))
        if not self._inputs:
            self._idle.notify_all()

    def _cancel(self, number: int) -> None:
        with self._deciding():
            found = self._inputs.get(number)
            if found is not None and found.request is not None and self.scheduler.cancel(found.request):
                self._finish(number, ShutdownError("cancelled"))
                self._begin(self._clock())

    # -- threads --

    def _run_deadlines(self) -> None:
        """End requests as soon as their deadlines have passed, whatever else happens."""
        while not self._ending:
            with self._deciding():
                until = self.scheduler.next_deadline
                left = None if until is None else until - self._clock()
                if left is not None and left < 0:
                    self._begin(self._clock())
                elif not self._ending:
                    self._deadline.wait(None if left is None else left + SOON)

    def _run_loads(self, index: int) -> None:
        try:
            while (item := self._loads[index].get()) is not None:
                self._run_load(*item)
        except BaseException:
            self._die(index)

    def _run_load(self, load: Load, run: Callable[[], None]) -> None:
        begun, error = self._clock(), None
        try:
            run()
        except BaseException as raised:  # of whatever kind: the expert cannot be used, the others can
            error = raised if isinstance(raised, Exception) else LoadError(f"its load has ended with {raised!r}.")
            log.warning("expert %s: %s", load.expert, raised)
        with self._deciding():
            now = self._clock()
            self.times.loading += now - begun
            if (alone := self._load_times.end(load, now)) is not None and error is None:
                self._profiles.note_load(self._cost_key(load.executor, load.expert), load.tier, alone)
            self._end(self._manage(self.scheduler.loaded, load, now, error))
            self._begin(now)

    def _note_begin(self, load: Load) -> None:
        with self._lock:
            self._load_times.begin(load, self._clock())

    def _note_copy(self, index: int, expert: str, seconds: float) -> None:
        with self._lock:
            self._profiles.note_eviction(self._cost_key(index, expert), seconds)

    def _die(self, index: int) -> None:
        """A thread of an executor ends by an error that is nobody's: others do its work."""
        log.exception("executor %s has ended", self.scheduler.executors[index].config.name)
        with self._deciding():
            now = self._clock()
            self._end(self.scheduler.remove_executor(index, now))
            self._begin(now)

    def _run_batches(self, index: int) -> None:
        try:
            while (item := self._batches[index].get()) is not None:
                if isinstance(item, Batch):
                    self._run_batch(index, item)
                else:
                    item()
        except BaseException:  # what a batch's own errors are not: the thread ends
            self._die(index)

    def _run_batch(self, index: int, batch: Batch) -> None:
        begun = self._clock()
        judgements, error = [], None
        try:
            judgements = self._judge(index, batch)
        except Exception as raised:
            error = raised
        with self._deciding():
            now = self._clock()
            self.times.running += now - begun
            if error is None:
                self._profiles.note_batch(self._cost_key(index, batch.expert), len(batch.requests), now - begun)
            self._end(self._manage(self.scheduler.executed, batch, now, error))
            for request, judgement in zip(batch.requests if not error else (), judgements, strict=True):
                stage = Stage(
                    expert=batch.expert,
                    judgement=judgement,
                    executor=self.scheduler.executors[index].config.name,
                    batch=len(batch.requests),
                    waited=begun - request.arrival,
                    seconds=now - begun,
                )
                self._follow(request, stage, now)
            self._begin(now)

    def _cost_key(self, index: int, expert: str) -> tuple[str, str]:
        """Which profile says what an expert costs on an executor."""
        return self.scheduler.graph.experts[expert].architecture, self.scheduler.executors[index].config.processor

    def _judge(self, index: int, batch: Batch) -> Sequence[Judgement]:
        """The answers of a batch; if the device has too little memory, of its halves."""
        expert, device = self._experts[batch.expert], self._devices[index]
        programs = self._programs[expert.architecture, device]
        leaves = self._loader.leaves(self.scheduler.executors[index].pool.index, batch.expert)
        with self._lock:
            values = [self._inputs[r.id].value if r.id in self._inputs else None for r in batch.requests]
        values = [np.zeros(expert.kind.shape, expert.kind.dtype) if value is None else value for value in values]

        def judge(part: list[np.ndarray]) -> list[Judgement]:
            return list(expert.kind.judge(programs.run(leaves, part), len(part)))

        try:
            return judge(values)
        except Exception as error:
            if not is_out_of_memory(error) or len(values) == 1:
                raise
            log.warning("a batch of %d does not fit the device; it runs in halves", len(values))
            half = len(values) // 2
            return judge(values[:half]) + judge(values[half:])

    def _follow(self, request: Request, stage: Stage, now: float) -> None:
        """Have the next expert judge the input, if its rules say so; otherwise it is done."""
        found = self._inputs.get(request.id)
        if found is None or found.future.cancelled():  # nobody waits for what would follow
            self._finish(request.id, ShutdownError("cancelled"))
            return
        found.stages += (stage,)
        following = self.scheduler.graph.next(request.expert, stage.judgement.verdict)
        if following is None:
            self._finish(request.id, Result(stages=found.stages, latency=now - found.submitted))
            return
        follow_up = Request(
            id=request.id, expert=following, arrival=now, stage=request.stage + 1, deadline=found.deadline
        )
        try:
            self._submit(follow_up, now)
            found.request = follow_up
        except CollaborationError as error:
            self._finish(request.id, error)

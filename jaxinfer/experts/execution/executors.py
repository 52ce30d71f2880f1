"""Real executors: what the scheduler decides, as work for a loop's threads, and inputs on their way through experts."""

import dataclasses
import functools
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

import numpy as np

from jaxinfer.experts.errors import LoadError
from jaxinfer.experts.execution.architectures import Architecture, ArchitecturePrograms
from jaxinfer.experts.execution.kinds import Judgement
from jaxinfer.experts.execution.loader import ExpertLoader, OpenedExpert, is_out_of_memory
from jaxinfer.experts.execution.observed import LoadTimes, ObservedProfiles
from jaxinfer.experts.scheduling.request import Action, Batch, Evict, Failure, Load, Request
from jaxinfer.experts.scheduling.scheduler import Scheduler
from jaxinfer.serving.errors import ServingError
from jaxinfer.serving.loop import Decider, Done, Loop, Work
from jaxinfer.serving.ticket import Ticket

log = logging.getLogger(__name__)

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


class Input(Ticket[Result]):
    """An input on its way.

    Args:
      id: its number.
      expert: the first that judges it.
      value: as it goes into a batch.
      within: seconds from when it is submitted within which each expert must begin.
      owner: what must live until it has ended.
    """

    def __init__(self, id: int, expert: str, value: np.ndarray, *, within: float | None, owner: object):
        super().__init__(id, owner=owner)
        self.id, self.expert, self.value, self.within = id, expert, value, within
        self.submitted = 0.0
        self.request: Request | None = None
        self.stages: tuple[Stage, ...] = ()


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


class Executors(Decider[Input]):
    """Has done what a scheduler decides: each executor has a lane that runs batches and one that loads experts.

    Args:
      scheduler: with its experts placed.
      profiles: the scheduler's; told of what loads and batches take.
      experts: by name.
      programs: by architecture and device.
      loader: has the weights of the experts that are placed.
      devices: of each executor.

    Attributes:
      loop: which serves.
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
    ):
        self.scheduler, self.times, self._profiles = scheduler, Times(), profiles
        self._experts, self._programs, self._loader, self._devices = experts, programs, loader, list(devices)
        self._load_times = LoadTimes()
        self._inputs: dict[int, Input] = {}
        self._numbers = itertools.count()
        names = [executor.config.name for executor in scheduler.executors]
        lanes = [f"{kind}-{name}" for name in names for kind in ("executor", "loader")]
        self.loop = Loop(self, what="This system", name="experts", lanes=lanes)
        self.loop.start()

    def serve(self, expert: str, value: np.ndarray, *, within: float | None, owner: object) -> Future[Result]:
        """Have an expert, and those that follow it, judge an input; arguments as of `Input`.

        Raises what `Loop.submit` and `Scheduler.submit` raise.
        """
        ticket = Input(next(self._numbers), expert, value, within=within, owner=owner)
        self.loop.submit(ticket)
        assert ticket.future is not None
        return ticket.future

    def retry(self, expert: str) -> None:
        """As of `Scheduler`."""
        with self.loop.lock:
            self.scheduler.retry(expert)
        self.loop.wake()

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
                return self._judge(action)
        return ()

    # -- what a loop asks --

    @property
    def next_time(self) -> float | None:
        deadline = self.scheduler.next_deadline
        return None if deadline is None else deadline + SOON

    def submit(self, ticket: Input, now: float) -> None:
        ticket.submitted = now
        ticket.deadline = None if ticket.within is None else now + ticket.within
        self._ask(ticket, Request(id=ticket.id, expert=ticket.expert, arrival=now, deadline=ticket.deadline))
        self._inputs[ticket.id] = ticket

    def poll(self, now: float) -> Sequence[Work]:
        return [work for action in self._manage(self.scheduler.poll, now) if (work := self._begin(action)) is not None]

    def done(self, done: Done) -> None:
        match done.work.what:
            case Load() as load:
                self._loaded(load, done)
            case Batch() as batch:
                self._executed(batch, done)
            case Evict() as evict if done.error is not None:
                self._die(evict.executor, done.error, done.ended)

    def cancel(self, ticket: Input) -> bool:
        if ticket.request is None or not self.scheduler.cancel(ticket.request):
            return False
        del self._inputs[ticket.id]
        return True

    def drain(self, error: Exception) -> Sequence[Work]:
        self._fail(self.scheduler.drain(error))
        return ()

    def release(self) -> None:
        self._loader.close()

    # -- what begins --

    def _begin(self, action: Action) -> Work | None:
        match action:
            case Load():
                begin = functools.partial(self._note_begin, action)
                load = self._loader.prepare(action, begin, self._copied(action))
                return Work(load, 2 * action.executor + 1, action)
            case Batch():
                return Work(functools.partial(self._judge, action), 2 * action.executor, action)
            case Evict():  # before its batch; not here: it may wait for other evictions
                leave = self._loader.note(action.pool, action.evictions, action.dropped, self._copied(action))
                return Work(leave, 2 * action.executor, action)
            case Failure():
                self._fail([action])
        return None

    def _ask(self, found: Input, request: Request) -> None:
        """Have a request for an input assigned."""
        begun = time.thread_time()
        try:
            self.scheduler.submit(request, request.arrival)
        finally:
            self.times.scheduling += time.thread_time() - begun
        found.request = request

    def _manage[**Given, Made](
        self, decision: Callable[Given, Made], *args: Given.args, **kwargs: Given.kwargs
    ) -> Made:
        begun = time.thread_time()
        try:
            return decision(*args, **kwargs)
        finally:
            self.times.managing += time.thread_time() - begun

    def _note_begin(self, load: Load) -> None:
        with self.loop.lock:
            self._load_times.begin(load, self.loop.clock())

    def _copied(self, action: Load | Evict) -> Callable[[str, float], None]:
        """What is told of the copies to the host's memory that an action makes."""

        def copied(expert: str, seconds: float) -> None:
            with self.loop.lock:
                self._profiles.note_eviction(self._cost_key(action.executor, expert), seconds)

        return copied

    # -- what has ended --

    def _loaded(self, load: Load, done: Done) -> None:
        error = done.error
        if error is not None:  # of whatever kind: the expert cannot be used, the others can
            log.warning("expert %s: %s", load.expert, error)
            error = error if isinstance(error, Exception) else LoadError(f"its load has ended with {error!r}.")
        self.times.loading += done.ended - done.began
        if (alone := self._load_times.end(load, done.ended)) is not None and error is None:
            self._profiles.note_load(self._cost_key(load.executor, load.expert), load.tier, alone)
        self._fail(self._manage(self.scheduler.loaded, load, done.ended, error))

    def _executed(self, batch: Batch, done: Done) -> None:
        executor, error, seconds = self.scheduler.executors[batch.executor], done.error, done.ended - done.began
        if not executor.alive:  # it ended before its batch, whose requests have ended with it
            return
        if error is not None and not isinstance(error, Exception):  # what a batch's own errors are not
            self._die(batch.executor, error, done.ended)
            return
        self.times.running += seconds
        if error is None:
            self._profiles.note_batch(self._cost_key(batch.executor, batch.expert), len(batch.requests), seconds)
        self._fail(self._manage(self.scheduler.executed, batch, done.ended, error))
        for request, judgement in zip(batch.requests, done.result, strict=True) if error is None else ():
            stage = Stage(
                expert=batch.expert,
                judgement=judgement,
                executor=executor.config.name,
                batch=len(batch.requests),
                waited=done.began - request.arrival,
                seconds=seconds,
            )
            self._follow(request, stage, done.ended)

    def _die(self, index: int, error: BaseException, now: float) -> None:
        """An executor ends by an error that is no request's: others do its work."""
        log.error("executor %s has ended", self.scheduler.executors[index].config.name, exc_info=error)
        self._fail(self.scheduler.remove_executor(index, now))

    def _follow(self, request: Request, stage: Stage, now: float) -> None:
        """Have the next expert judge the input, if its rules say so; otherwise it is done."""
        found = self._inputs.get(request.id)
        if found is None or found.cancelled:  # nobody waits for what would follow
            self._end(request.id, CancelledError())
            return
        found.stages += (stage,)
        following = self.scheduler.graph.next(request.expert, stage.judgement.verdict)
        if following is None:
            self._end(request.id, Result(stages=found.stages, latency=now - found.submitted))
            return
        follow_up = Request(
            id=request.id, expert=following, arrival=now, stage=request.stage + 1, deadline=found.deadline
        )
        try:
            self._ask(found, follow_up)
        except (ServingError, ValueError) as error:
            self._end(request.id, error)

    def _fail(self, failures: Sequence[Failure]) -> None:
        for failure in failures:
            self._end(failure.request.id, failure.error)

    def _end(self, number: int, outcome: Result | Exception) -> None:
        if (found := self._inputs.pop(number, None)) is not None:
            self.loop.end(found, outcome)

    # -- batches, in their lanes --

    def _cost_key(self, index: int, expert: str) -> tuple[str, str]:
        """Which profile says what an expert costs on an executor."""
        return self.scheduler.graph.experts[expert].architecture, self.scheduler.executors[index].config.processor

    def _judge(self, batch: Batch) -> Sequence[Judgement]:
        """The answers of a batch; if the device has too little memory, of its halves."""
        expert, device = self._experts[batch.expert], self._devices[batch.executor]
        programs = self._programs[expert.architecture, device]
        leaves = self._loader.leaves(self.scheduler.executors[batch.executor].pool.index, batch.expert)
        with self.loop.lock:
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

"""The decider of inputs: the scheduler says which experts are loaded and which batches run, a loop runs them."""

import functools
import itertools
import logging
from collections.abc import Sequence

import numpy as np

from jaxinfer.experts.errors import LoadError
from jaxinfer.experts.execution.lender import ExpertLender
from jaxinfer.experts.execution.loader import ExpertLoader
from jaxinfer.experts.execution.observed import ObservedProfiles, Observer
from jaxinfer.experts.execution.runner import ExpertRunner
from jaxinfer.experts.results import Judgement, Result, Stage
from jaxinfer.experts.scheduling.request import Action, Batch, Evict, Failure, Load, Request
from jaxinfer.experts.scheduling.scheduler import Scheduler
from jaxinfer.serving.errors import ServingError, with_output
from jaxinfer.serving.future import TicketFuture
from jaxinfer.serving.loop import Decider, Done, Loop, Work
from jaxinfer.serving.ticket import Ticket

log = logging.getLogger(__name__)

SOON = 1e-3
"""Seconds after a deadline at which it counts as passed."""


class InputTicket(Ticket[Result]):
    """An input on its way through experts.

    Attributes:
      value: the input as it goes into a batch.
      request: the request for the expert that it waits for or that judges it.
      stages: the stages of the experts that have judged it.
    """

    def __init__(self, request: Request, value: np.ndarray, owner: object):
        super().__init__(request.id, deadline=request.deadline, owner=owner)
        self.request, self.value, self.submitted = request, value, request.arrival
        self.stages: tuple[Stage, ...] = ()


class InputDecider(Decider[InputTicket]):
    """Decider that carries out a scheduler's decisions.

    Each executor has a lane for batches and one for loading experts.

    Args:
      scheduler: the scheduler, with its experts placed.
      profiles: the scheduler's; told the times of loads and batches.
      runner: runs batches and loads experts.

    Attributes:
      loop: the loop that serves.
    """

    def __init__(self, scheduler: Scheduler, profiles: ObservedProfiles, runner: ExpertRunner):
        self.scheduler, self.statistics, self._runner = scheduler, scheduler.statistics, runner
        self._observer = Observer(scheduler, profiles)
        self._numbers = itertools.count()
        names = [executor.config.name for executor in scheduler.executors]
        lanes = [f"{kind}-{name}" for name in names for kind in ("executor", "loader")]
        self.loop = Loop(self, what="This system", name="experts", lanes=lanes, statistics=self.statistics)
        self._lender: ExpertLender | None = None
        self.loop.start()

    @property
    def loader(self) -> ExpertLoader:
        """The holder of the experts' weights."""
        return self._runner.loader

    def lend(self, lender: ExpertLender) -> None:
        """Take back by this lender, once there is work, what it has lent to others."""
        self._lender = lender

    def serve(self, expert: str, value: np.ndarray, *, within: float | None, owner: object) -> TicketFuture[Result]:
        """Have an expert, and those that follow it, judge an input; `owner` lives until then.

        Args:
          within: seconds from now within which the last expert must have begun; None: any.

        Raises what `Loop.submit` and `Scheduler.submit` raise.
        """
        number, now = next(self._numbers), self.loop.clock()
        deadline = None if within is None else now + within
        request = Request(id=number, expert=expert, arrival=now, deadline=deadline)
        return self.loop.serve(InputTicket(request, value, owner))

    def retry(self, expert: str) -> None:
        """Allow an expert that failed to load to be loaded again; see `Scheduler.retry`."""
        self.loop.check_process()
        with self.loop.lock:
            self.scheduler.retry(expert)
        self.loop.wake()

    # Asked by the loop

    @property
    def next_time(self) -> float | None:
        deadline = self.scheduler.next_deadline
        return None if deadline is None else deadline + SOON

    def check(self, ticket: InputTicket, now: float) -> None:
        self.scheduler.check(ticket.request, now, ahead=self.loop.num_waiting)

    def submit(self, ticket: InputTicket, now: float) -> None:
        with self.statistics.timing("scheduling_seconds"):
            self.scheduler.admit(ticket.request, now)
        if self._lender is not None:
            self._lender.use.note()

    def poll(self, now: float) -> Sequence[Work]:
        with self.statistics.timing("managing_seconds"):
            actions = self.scheduler.poll(now)
        works = [work for action in actions if (work := self._begin(action)) is not None]
        if self._lender is not None and self._lender.wants_back():  # in a lane: others give it meanwhile
            works.append(Work(self._lender.take_back, 1))
        return works

    def done(self, done: Done) -> None:
        match done.work.what:
            case Load() as load:
                self._loaded(load, done)
            case Batch() as batch:
                self._executed(batch, done)
            case Evict() as evict if done.error is not None:
                self._die(evict.executor, done.error, done.ended)

    def cancel(self, ticket: InputTicket) -> bool:
        return self.scheduler.cancel(ticket.request)

    def drain(self, error: Exception) -> Sequence[Work]:
        self._fail(self.scheduler.drain(error))
        return ()

    def release(self) -> None:
        self._runner.loader.close()

    # Beginnings

    def _begin(self, action: Action) -> Work | None:
        loader = self._runner.loader
        match action:
            case Load():
                begins = functools.partial(self._load_begins, action)
                load = loader.prepare(action, begins, functools.partial(self._copied, action.executor))
                return Work(load, 2 * action.executor + 1, action)
            case Batch():
                return Work(functools.partial(self._judge, action), 2 * action.executor, action)
            case Evict():  # before its batch; in the lane, because it may wait for other evictions
                copied = functools.partial(self._copied, action.executor)
                leave = loader.begin_eviction(action.pool, action.evictions, action.dropped, copied)
                return Work(leave, 2 * action.executor, action)
            case Failure():
                self._fail([action])
        return None

    def _judge(self, batch: Batch) -> Sequence[Judgement]:
        tickets = [self.loop.tickets.get(request.id) for request in batch.requests]
        return self._runner.judge(batch, [None if ticket is None else ticket.value for ticket in tickets])

    def _load_begins(self, load: Load) -> None:
        with self.loop.lock:
            self._observer.load_begins(load, self.loop.clock())

    def _copied(self, executor: int, expert: str, seconds: float) -> None:
        with self.loop.lock:
            self._observer.copied(executor, expert, seconds)

    # Endings

    def _loaded(self, load: Load, done: Done) -> None:
        error = done.error
        if error is not None:  # any kind of error: this expert cannot be used, the others can
            log.warning("expert %s: %s", load.expert, error)
            error = error if isinstance(error, Exception) else LoadError(f"its load has ended with {error!r}.")
        self.statistics.loading_seconds += done.ended - done.began
        self._observer.load_ended(load, done.ended, loaded=error is None)
        with self.statistics.timing("managing_seconds"):
            failures = self.scheduler.loaded(load, done.ended, error)
        self._fail(failures)

    def _executed(self, batch: Batch, done: Done) -> None:
        executor, error, seconds = self.scheduler.executors[batch.executor], done.error, done.ended - done.began
        if not executor.alive:  # it died before its batch ended; its requests have ended with it
            return
        if error is not None and not isinstance(error, Exception):  # a batch's own errors are `Exception`s
            self._die(batch.executor, error, done.ended)
            return
        self.statistics.running_seconds += seconds
        if error is None:
            self._observer.batch_ended(batch, seconds)
        with self.statistics.timing("managing_seconds"):
            failures = self.scheduler.executed(batch, done.ended, error)
        self._fail(failures)
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
        """End an executor after an error that is no request's fault: others take over its work."""
        log.error("executor %s has ended", self.scheduler.executors[index].config.name, exc_info=error)
        self._fail(self.scheduler.remove_executor(index, now))

    def _follow(self, request: Request, stage: Stage, now: float) -> None:
        """Submit the input to the next expert by its rules, or end it."""
        if (ticket := self.loop.tickets.get(request.id)) is None:
            return
        ticket.stages += (stage,)
        following = self.scheduler.graph.next(request.expert, stage.judgement.verdict)
        if following is None or ticket.cancelled:  # nobody waits for what would follow
            self.loop.end(ticket, Result(stages=ticket.stages, latency=now - ticket.submitted))
            return
        ticket.request = Request(
            id=request.id, expert=following, arrival=now, stage=request.stage + 1, deadline=request.deadline
        )
        try:
            self.submit(ticket, now)
        except (ServingError, ValueError) as error:
            self._end(ticket, error)

    def _fail(self, failures: Sequence[Failure]) -> None:
        for failure in failures:
            if (ticket := self.loop.tickets.get(failure.request.id)) is not None:
                self._end(ticket, failure.error)

    def _end(self, ticket: InputTicket, error: Exception) -> None:
        """End an input with an error, which has the stages that it has been through."""
        if ticket.stages and isinstance(error, ServingError):
            error = with_output(error, Result(stages=ticket.stages, latency=self.loop.clock() - ticket.submitted))
        self.loop.end(ticket, error)

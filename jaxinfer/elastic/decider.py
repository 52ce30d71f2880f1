"""The decider of queries: between compiled batches the controller chooses the next batch and its level."""

import dataclasses
import functools
import itertools
import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxinfer.compiled import DeviceTime, Interval
from jaxinfer.elastic.answers import Answer, QueryStatistics
from jaxinfer.elastic.errors import ProfileError
from jaxinfer.elastic.runner import Runner
from jaxinfer.elastic.scheduling.controller import Controller
from jaxinfer.elastic.scheduling.policies import Policy
from jaxinfer.elastic.scheduling.profile import ServingProfile
from jaxinfer.elastic.scheduling.query import Query
from jaxinfer.serving.errors import FailedError, ShedError, caused
from jaxinfer.serving.future import TicketFuture
from jaxinfer.serving.loop import Decider, Done, Loop, Work
from jaxinfer.serving.ticket import Ticket

log = logging.getLogger(__name__)

LEAD = 4e-3
"""Seconds before a batch is expected to end at which the next one is planned, so that the device does not wait."""


class QueryTicket(Ticket[Answer]):
    """A query that waits for its answer."""

    def __init__(self, query: Query, owner: object):
        super().__init__(query.id, deadline=query.deadline, owner=owner)
        self.query = query


@dataclasses.dataclass(eq=False)
class _InFlight:
    """A batch sent to the device, where it may wait for another one."""

    tickets: list[QueryTicket]
    level: int
    launched: Any  # the runner's handle to its answers
    sent: float
    expected_seconds: float
    expected_end: float


class QueryDecider(Decider[QueryTicket]):
    """Decider that serves queries.

    A batch runs while the next one is chosen. That happens just before the device is expected to be free, or as soon as
    it is, so that the choice knows all queries that have arrived by then. A lane waits for the batches, so that each is
    timed when it ends, whatever else goes on.

    Args:
      runner: runs batches.
      policy: chooses batches and levels.
      max_waiting: waiting queries beyond which more are refused.
      device: times the batches and has the clock; shared by everything that sends batches to the device.

    Attributes:
      loop: the loop that serves.
    """

    def __init__(self, runner: Runner, policy: Policy, *, max_waiting: int, device: DeviceTime | None = None):
        self._runner, self._controller, self._time = runner, Controller(policy), device or DeviceTime()
        self._inbox: list[Query] = []  # queries that the controller does not have yet
        self._withdrawn: set[int] = set()  # cancelled queries that the controller still has
        self._sent: _InFlight | None = None  # the batch sent last, until a lane waits for it
        self._running: deque[_InFlight] = deque()  # at most two: one runs, one was sent ahead
        self._numbers = itertools.count()
        self.statistics = QueryStatistics()
        self.loop = Loop(
            self,
            what="This service",
            name="elastic",
            lanes=["elastic-device"],
            max_tickets=max_waiting,
            statistics=self.statistics,
            clock=self._time.clock,
        )
        self.loop.start()

    def serve(
        self, task: str, payload: Any, *, latency: float, utility: float, owner: object = None
    ) -> TicketFuture[Answer]:
        """Submit a query and return the future of its answer; `owner` lives until then.

        The future raises ShedError where the answer could not have been in time. Raises what `Loop.submit` does,
        ProfileError for a task that is not in the profile, ValueError for a latency or utility that is negative or not
        finite.
        """
        number, now = next(self._numbers), self.loop.clock()
        query = Query(id=number, task=task, arrival=now, latency=latency, utility=utility, payload=payload)
        return self.loop.serve(QueryTicket(query, owner))

    def use(self, profile: ServingProfile) -> None:
        """Decide by another profile from now on. Raises ValueError for one that the policy cannot use."""
        self._controller.policy.use(profile)

    # Asked by the loop

    @property
    def next_time(self) -> float | None:
        if not self._unplanned or len(self._running) > 1:
            return None
        return self._running[0].expected_end - LEAD if self._running else 0.0  # at once

    @property
    def _unplanned(self) -> bool:
        """Whether queries wait that are in no batch yet."""
        return bool(self._inbox) or self._controller.waiting > 0

    def check(self, ticket: QueryTicket, now: float) -> None:
        if (task := ticket.query.task) not in self._controller.policy.profile.tasks:
            raise ProfileError(f"task {task!r} is being registered, or the policy cannot serve it at its levels.")

    def submit(self, ticket: QueryTicket, now: float) -> None:
        self._inbox.append(ticket.query)

    def poll(self, now: float) -> Sequence[Work]:
        if sent := self._take_sent():
            return sent
        if (due := self.next_time) is None or now < due:
            return ()
        start = max(now, self._running[0].expected_end) if self._running else now
        arrived, withdrawn, self._inbox, self._withdrawn = self._inbox, self._withdrawn, [], set()
        return [Work(functools.partial(self._plan, start, arrived, withdrawn))]

    def done(self, done: Done) -> None:
        if done.work.what is None:
            self._sent = done.result
        else:
            self._end_batch(done.work.what, done)

    def cancel(self, ticket: QueryTicket) -> bool:
        if not ticket.begun:
            self._withdrawn.add(ticket.query.id)
        return not ticket.begun

    def drain(self, error: Exception) -> Sequence[Work]:
        self.loop.end_waiting(error)
        return self._take_sent()

    def release(self) -> None:
        del self._runner  # and the weights with it; statistics stay
        self._forget_waiting()

    def _take_sent(self) -> Sequence[Work]:
        """Return the work that waits for the last batch in its lane, so that the next one can be planned meanwhile."""
        sent, self._sent = self._sent, None
        return [] if sent is None else [Work(functools.partial(self._collect, sent), 0, sent)]

    # Batches, without the lock: planning blocks nobody

    def _plan(self, start: float, arrived: list[Query], withdrawn: set[int]) -> _InFlight | None:
        """Choose a batch for when the device is free, at `start`, and send it there."""
        with self.statistics.timing("planning_seconds", self.loop.clock):
            for query in arrived:
                self._controller.submit(query)
            if withdrawn:
                self._controller.withdraw(withdrawn)
            try:
                decision, shed = self._controller.next(start)
            except Exception as error:  # a policy's mistake: perhaps it can handle none of the waiting queries
                self._fail_waiting(error)
                return None
        for ticket in self._begin(shed):
            why = "too many queries wait, or a batch takes longer."
            self.loop.end(ticket, ShedError(f"no answer could have come within {ticket.query.latency:g} s: {why}"))
        if decision is None:
            return None
        self.statistics.fallbacks += decision.fell_back
        tickets = self._begin(decision.batch.queries)
        return self._launch(tickets, decision.level, start) if tickets else None

    def _begin(self, queries: Sequence[Query]) -> list[QueryTicket]:
        """The tickets that were not cancelled; from now on they cannot be."""
        with self.loop.lock:
            return [x for query in queries if (x := self.loop.tickets.get(query.id)) is not None and x.begin()]

    def _launch(self, tickets: list[QueryTicket], level: int, start: float) -> _InFlight | None:
        sent = self.loop.clock()
        try:
            launched = self._runner.launch(level, [ticket.query for ticket in tickets])
            expected = self._runner.expected_seconds(level, len(tickets))
        except Exception as error:  # the error of this batch alone
            self._fail_batch(tickets, error)
            return None
        with self.loop.lock:
            expected_end = start + expected if self._running else max(sent, self._time.free) + expected
            self._running.append(_InFlight(tickets, level, launched, sent, expected, expected_end))
            return self._running[-1]

    def _collect(self, batch: _InFlight) -> tuple[list[tuple[str, np.ndarray] | FailedError], Interval]:
        """Collect a batch's answers and its time, from when the device was free until they were there."""
        return self._runner.collect(batch.launched), self._time.end(batch.sent)

    # Endings

    def _end_batch(self, batch: _InFlight, done: Done) -> None:
        self._running.remove(batch)
        for ahead in self._running:
            ahead.expected_end = max(ahead.sent, self._time.free) + ahead.expected_seconds
        if done.error is not None:
            self._fail_batch(batch.tickets, done.error)
            return
        self.statistics.batches += 1
        self.statistics.levels[batch.level] += len(batch.tickets)
        answers, time = done.result
        for ticket, answered in zip(batch.tickets, answers, strict=True):
            outcome = answered if isinstance(answered, FailedError) else self._answer(ticket, batch, answered, time)
            self.loop.end(ticket, outcome, at=time.ended)
        try:
            self._runner.observe(batch.level, len(batch.tickets), time.seconds)
        except Exception:
            log.exception("What a batch took could not be taken in; plans go by what is known.")

    def _answer(
        self, ticket: QueryTicket, batch: _InFlight, answered: tuple[str, np.ndarray], time: Interval
    ) -> Answer:
        query, (label, probabilities) = ticket.query, answered
        in_time = time.ended < query.deadline
        self.statistics.utility += query.utility if in_time else 0.0
        return Answer(
            label=label,
            probabilities=probabilities,
            level=batch.level,
            queue_seconds=max(time.begun - query.arrival, 0.0),
            compute_seconds=time.seconds,
            in_time=in_time,
            batch=self.statistics.batches,
        )

    def _fail_batch(self, tickets: Sequence[QueryTicket], error: BaseException) -> None:
        """End the queries of a batch that could not run."""
        if not isinstance(error, Exception):
            raise error
        log.warning("A batch of %d queries failed: %r", len(tickets), error)
        for ticket in tickets:
            self.loop.end(ticket, error)

    def _fail_waiting(self, cause: Exception) -> None:
        """End all waiting queries after the policy has failed."""
        log.error("The policy has failed; the queries that wait end with an error.", exc_info=cause)
        error = caused(FailedError(f"the policy has failed at the queries that waited: {cause!r}"), cause)
        with self.loop.lock:
            self.loop.end_waiting(error)
            self._forget_waiting()

    def _forget_waiting(self) -> None:
        self._inbox.clear()
        self._controller = Controller(self._controller.policy)

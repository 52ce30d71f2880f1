"""Serving on a simulated clock by the real controller: the device takes the measured seconds of batches."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from jaxinfer.elastic.scheduling.controller import Controller
from jaxinfer.elastic.scheduling.policies import Decision, Policy
from jaxinfer.elastic.scheduling.profile import ServingProfile
from jaxinfer.elastic.scheduling.query import Outcome, Query
from jaxinfer.serving.simulation import Simulation

Sampler = Callable[[int, int], float]
"""Function of level and number of queries: returns a batch's seconds."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedQuery:
    """A query's outcome.

    Attributes:
      level: the level it ran at; None if it was shed.
      batch: the number of its batch; None if it was shed.
      began: the time in seconds.
      ended: the time in seconds, `began` if it was shed.
    """

    query: Query
    outcome: Outcome
    level: int | None
    batch: int | None
    began: float
    ended: float

    @property
    def utility(self) -> float:
        """The utility earned."""
        return self.query.utility if self.outcome is Outcome.CORRECT else 0.0


def shed_query(query: Query, at: float) -> ServedQuery:
    """The outcome of a query that was shed at this time."""
    return ServedQuery(query=query, outcome=Outcome.SHED, level=None, batch=None, began=at, ended=at)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedTrace:
    """The outcomes of a trace under a policy.

    Attributes:
      answers: each query's outcome.
      best: upper bound of utility: every query answered in time at its task's best level.
    """

    answers: Sequence[ServedQuery]
    best: float

    @property
    def utility(self) -> float:
        """The total utility."""
        return sum(answer.utility for answer in self.answers)

    @property
    def normalised(self) -> float:
        """The total utility as a share of the best."""
        return self.utility / self.best if self.best else 1.0

    @property
    def outcomes(self) -> Counter[Outcome]:
        """The number of queries by outcome."""
        return Counter(answer.outcome for answer in self.answers)

    @property
    def levels(self) -> Counter[int]:
        """The number of queries that ran at each level."""
        return Counter(answer.level for answer in self.answers if answer.level is not None)

    def share(self, outcome: Outcome) -> float:
        """The share of queries with this outcome."""
        return self.outcomes[outcome] / len(self.answers) if self.answers else 0.0


def best_utility(queries: Sequence[Query], profile: ServingProfile) -> float:
    """Compute the expected utility if each query ran at its task's most accurate level, in time."""
    best = {task: profile.best(task) for task in profile.tasks}
    return sum(query.utility * best[query.task] for query in queries)


def simulate(
    queries: Sequence[Query],
    policy: Policy,
    profile: ServingProfile,
    *,
    seconds: Sampler | None = None,
    right: Callable[[Query, int], bool] | None = None,
    seed: int = 0,
) -> ServedTrace:
    """Serve a trace on a simulated clock.

    Args:
      queries: the queries, in any order.
      policy: chooses batches and levels.
      profile: the profile of the levels.
      seconds: returns the seconds of a batch; None: as in the profile.
      right: returns whether the answer to a query at a level is right; None: drawn by the profile's accuracies, where a
        query that is right at one level is right at all more accurate ones, and the same for all policies.
      seed: seed of all that is drawn.
    """
    given = sorted(queries, key=lambda query: (query.arrival, query.id))
    draws = np.random.default_rng((seed, 2)).random(len(given)) if right is None else np.zeros(0)
    drawn = {query.id: draw for query, draw in zip(given, draws, strict=False)}
    is_right = right or (lambda query, level: bool(drawn[query.id] < profile.accuracy_at(query.task, level)))
    device = _Device(Controller(policy), seconds or profile.batch_seconds, is_right)
    return ServedTrace(answers=device.serve(given), best=best_utility(queries, profile))


class _Device:
    """A device that takes one batch at a time from a controller.

    Args:
      controller: decides.
      seconds: returns the seconds of a batch.
      right: returns whether the answer to a query at a level is right.
    """

    def __init__(self, controller: Controller, seconds: Sampler, right: Callable[[Query, int], bool]):
        self._controller, self._seconds, self._right = controller, seconds, right
        self._simulation = Simulation[Query | Decision]()
        self._answers: list[ServedQuery] = []
        self._batches, self._is_free = 0, True

    def serve(self, queries: Sequence[Query]) -> list[ServedQuery]:
        """The queries' outcomes, those of a batch after those shed before it began."""
        for query in queries:
            self._simulation.arrive(query.arrival, query)
        self._simulation.run(self._handle, self._begin)
        return self._answers

    def _handle(self, event: Query | Decision) -> None:
        if isinstance(event, Query):
            self._controller.submit(event)
        else:
            self._is_free = True

    def _begin(self) -> None:
        """Begin the next batch if queries wait and none runs."""
        if not (self._is_free and self._controller.waiting):
            return
        now = self._simulation.now
        decision, shed = self._controller.next(now)
        self._answers += [shed_query(query, now) for query in shed]
        if decision is not None:
            self._execute(decision, now)

    def _execute(self, decision: Decision, now: float) -> None:
        ended = now + decision.setup + self._seconds(decision.level, len(decision.batch))
        self._answers += [
            ServedQuery(
                query=query,
                outcome=self._outcome(query, decision.level, ended),
                level=decision.level,
                batch=self._batches,
                began=now,
                ended=ended,
            )
            for query in decision.batch.queries
        ]
        self._simulation.end(ended, decision)
        self._batches, self._is_free = self._batches + 1, False

    def _outcome(self, query: Query, level: int, ended: float) -> Outcome:
        if ended >= query.deadline:
            return Outcome.LATE
        return Outcome.CORRECT if self._right(query, level) else Outcome.WRONG

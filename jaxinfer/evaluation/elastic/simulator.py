"""Serving on a simulated clock, with the same controller: a device that takes as long as batches were seen to take."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from jaxinfer.elastic.scheduling.controller import Controller
from jaxinfer.elastic.scheduling.policies import Policy
from jaxinfer.elastic.scheduling.profile import ServingProfile
from jaxinfer.elastic.scheduling.query import Outcome, Query

Sampler = Callable[[int, int], float]
"""Seconds that a batch takes, from level and number of queries."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedQuery:
    """How a query ended.

    Attributes:
      level: that it ran at; None if it was shed.
      batch: counts batches; None if it was shed.
      began, ended: seconds; when it was shed they are the same.
    """

    query: Query
    outcome: Outcome
    level: int | None
    batch: int | None
    began: float
    ended: float

    @property
    def utility(self) -> float:
        """What it earned."""
        return self.query.utility if self.outcome is Outcome.CORRECT else 0.0


def shed_query(query: Query, at: float) -> ServedQuery:
    """One that was given up at this time."""
    return ServedQuery(query=query, outcome=Outcome.SHED, level=None, batch=None, began=at, ended=at)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """What a policy earned with a trace.

    Attributes:
      answers: one for each query.
      best: what all would have earned at the most accurate level in time: more than anybody can know how to earn.
    """

    answers: Sequence[ServedQuery]
    best: float

    @property
    def utility(self) -> float:
        """In all."""
        return sum(answer.utility for answer in self.answers)

    @property
    def normalised(self) -> float:
        """As a share of the best."""
        return self.utility / self.best if self.best else 1.0

    @property
    def outcomes(self) -> Counter[Outcome]:
        """How many queries ended in each way."""
        return Counter(answer.outcome for answer in self.answers)

    @property
    def levels(self) -> Counter[int]:
        """How many queries ran at each level."""
        return Counter(answer.level for answer in self.answers if answer.level is not None)

    def share(self, outcome: Outcome) -> float:
        """Of the queries, those that ended so."""
        return self.outcomes[outcome] / len(self.answers) if self.answers else 0.0


def best_utility(queries: Sequence[Query], profile: ServingProfile) -> float:
    """What queries would earn on average if each ran at its task's most accurate level, in time."""
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
) -> Served:
    """Serve a trace.

    Args:
      queries: in any order.
      policy: chooses batches and levels.
      profile: of the levels.
      seconds: of a batch; None: those of the profile.
      right: whether the answer to a query at a level is right; None: drawn by the profile's accuracies, where a query
        that is right at one level is so at all that are more accurate, and the same for all policies.
      seed: of what is drawn.
    """
    waiting = sorted(queries, key=lambda query: (query.arrival, query.id))
    draws = np.random.default_rng((seed, 2)).random(len(waiting)) if right is None else np.zeros(0)
    drawn = {query.id: draw for query, draw in zip(waiting, draws, strict=False)}
    is_right = right or (lambda query, level: bool(drawn[query.id] < profile.right(query.task, level)))
    take = seconds or profile.batch_seconds
    controller, answers, free, at, batches = Controller(policy), list[ServedQuery](), 0.0, 0, 0
    while at < len(waiting) or controller.waiting:
        if not controller.waiting:
            free = max(free, waiting[at].arrival)
        while at < len(waiting) and waiting[at].arrival <= free:
            controller.submit(waiting[at])
            at += 1
        decision, shed = controller.next(free)
        answers += [shed_query(query, free) for query in shed]
        if decision is None:
            continue
        ended = free + decision.setup + take(decision.level, len(decision.batch))
        for query in decision.batch.queries:
            outcome = Outcome.LATE
            if ended < query.deadline:
                outcome = Outcome.CORRECT if is_right(query, decision.level) else Outcome.WRONG
            answers.append(
                ServedQuery(query=query, outcome=outcome, level=decision.level, batch=batches, began=free, ended=ended)
            )
        free, batches = ended, batches + 1
    return Served(answers=answers, best=best_utility(queries, profile))

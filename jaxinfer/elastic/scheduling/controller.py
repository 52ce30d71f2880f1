"""The controller between batches: takes queries, sheds hopeless ones, and chooses the next batch."""

from collections import deque
from collections.abc import Set
from typing import NamedTuple

from jaxinfer.elastic.scheduling.batching import BatchQueue
from jaxinfer.elastic.scheduling.policies import Decision, Policy
from jaxinfer.elastic.scheduling.query import Query


class Choice(NamedTuple):
    """A controller's choice.

    Attributes:
      decision: the batch to run; None: no batch waits.
      shed: the queries to shed.
    """

    decision: Decision | None
    shed: list[Query]


class Controller:
    """Queries in, batches out. One thread at a time; the clock is the caller's.

    Args:
      policy: chooses batches and levels.
    """

    def __init__(self, policy: Policy):
        self.policy = policy
        self._queue = BatchQueue(policy.batching)
        self._arrivals: deque[float] = deque()
        self._window = policy.batching.rate_window

    @property
    def waiting(self) -> int:
        """The number of queries that wait."""
        return self._queue.queries

    def submit(self, query: Query) -> None:
        """Queue a query."""
        self._queue.add(query)
        self._arrivals.append(query.arrival)

    def withdraw(self, ids: Set[int]) -> None:
        """Remove the queries with these ids."""
        self._queue.remove_where(lambda query: query.id in ids)

    def next(self, start: float) -> Choice:
        """Choose a batch for when the device is free, at `start`. The batch is no longer waiting then."""
        shed = self._queue.shed(start + self.policy.least_seconds(1))
        rate = self._rate(start)
        while len(self._queue):
            decision = self.policy.choose(list(self._queue), start, rate)
            if decision is not None:
                self._queue.remove(decision.batch)
                if self.policy.batching.fill:
                    self._fill(decision, start)
                return Choice(decision, shed)
            shed += self._shed_most_urgent(start)
        return Choice(None, shed)

    def _fill(self, decision: Decision, start: float) -> None:
        """Fill the padding's places in a batch with other queries."""
        profile, count = self.policy.profile, len(decision.batch)
        if room := profile.padded(count) - count:
            ends = start + decision.setup + profile.batch_seconds(decision.level, count)
            self._queue.fill(decision.batch, room, ends)

    def _shed_most_urgent(self, start: float) -> list[Query]:
        """Shed queries of the most urgent batch that it cannot answer together with all its others."""
        batch = min(self._queue, key=lambda batch: batch.deadline)
        ends = max(start + self.policy.least_seconds(len(batch)), batch.deadline)
        return self._queue.shed_of(batch, ends)

    def _rate(self, now: float) -> float:
        while self._arrivals and self._arrivals[0] < now - self._window:
            self._arrivals.popleft()
        return len(self._arrivals) / self._window

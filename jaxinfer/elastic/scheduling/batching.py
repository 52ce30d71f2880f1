"""Batching: OTAS's Algorithm 1 for arriving queries, and filling up the batch that runs."""

import bisect
import dataclasses
import heapq
from collections.abc import Callable, Iterator
from typing import Self

from jaxinfer.elastic.scheduling.query import Query


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchingConfig:
    """Algorithm 1's thresholds, with the paper's values.

    Attributes:
      max_wait: seconds after its first query in which a batch takes others (delta).
      max_batch: maximum number of queries in a batch (epsilon).
      max_deadline_gap: maximum seconds between the deadlines in a batch (eta).
      max_utility_gap: maximum difference between a query's utility and that of the batch's first one (mu).
      rate_window: seconds over which the rate of arrivals is measured.
      fill: whether waiting queries take the padding's places in the batch that runs, the cheapest first: they cost
        nothing there, and would be shed otherwise.
      paper: whether deadlines are compared with the batch's earliest alone, which lets them drift apart.
    """

    max_wait: float = 0.5
    max_batch: int = 64
    max_deadline_gap: float = 0.5
    max_utility_gap: float = 0.8
    rate_window: float = 1.0
    fill: bool = False
    paper: bool = False

    def __post_init__(self) -> None:
        if self.max_batch < 1:
            raise ValueError(f"BatchingConfig.max_batch must be >= 1, got {self.max_batch}.")
        for name in ("max_wait", "max_deadline_gap", "max_utility_gap"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"BatchingConfig.{name} must be >= 0, got {getattr(self, name)}.")
        if not self.rate_window > 0:
            raise ValueError(f"BatchingConfig.rate_window must be > 0, got {self.rate_window}.")

    def by_worth(self) -> Self:
        """Batch queries of about the same utility: cheap ones delay nothing, and fill up other batches.

        Not in the paper.
        """
        return dataclasses.replace(self, max_utility_gap=0.2, fill=True)

    def scaled(self, factor: float) -> Self:
        """Scale the times for a device whose batches and deadlines take `factor` times as long as the paper's."""
        names = ("max_wait", "max_deadline_gap", "rate_window")
        return dataclasses.replace(self, **{name: factor * getattr(self, name) for name in names})


@dataclasses.dataclass(eq=False)
class Batch:
    """Queries that run together.

    Attributes:
      queries: the queries in the order of arrival.
      arrival: the earliest arrival.
      deadline: the earliest deadline.
      last_deadline: the latest deadline.
      utility: the first query's utility.
    """

    queries: list[Query]
    arrival: float
    deadline: float
    last_deadline: float
    utility: float

    @classmethod
    def from_query(cls, query: Query) -> "Batch":
        """Start a batch with one query."""
        return cls([query], query.arrival, query.deadline, query.deadline, query.utility)

    def add(self, query: Query) -> None:
        """Add a query."""
        self.queries.append(query)
        self.arrival = min(self.arrival, query.arrival)
        self.deadline = min(self.deadline, query.deadline)
        self.last_deadline = max(self.last_deadline, query.deadline)

    def __len__(self) -> int:
        return len(self.queries)


class BatchQueue:
    """The waiting batches, in the order of their first queries. A batch that runs is not among them."""

    def __init__(self, config: BatchingConfig):
        self._config = config
        self._batches: list[Batch] = []

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches)

    def __len__(self) -> int:
        return len(self._batches)

    @property
    def queries(self) -> int:
        """The number of queries that wait."""
        return sum(map(len, self._batches))

    def add(self, query: Query) -> None:
        """Add a query to the newest batch that it fits, or to a new one."""
        for batch in reversed(self._batches):
            if batch.arrival + self._config.max_wait < query.arrival:
                break  # all batches before are older still
            if self._fits(batch, query):
                batch.add(query)
                return
        # Clocks may step back: keep the order of arrivals.
        bisect.insort(self._batches, Batch.from_query(query), key=lambda batch: batch.arrival)

    def _fits(self, batch: Batch, query: Query) -> bool:
        config, deadline = self._config, query.deadline
        if len(batch) >= config.max_batch or abs(batch.utility - query.utility) > config.max_utility_gap + 1e-9:
            return False
        if config.paper:
            return abs(batch.deadline - deadline) <= config.max_deadline_gap
        return max(batch.last_deadline, deadline) - min(batch.deadline, deadline) <= config.max_deadline_gap

    def remove(self, batch: Batch) -> None:
        """Remove a batch."""
        self._batches.remove(batch)

    def fill(self, batch: Batch, room: int, ends: float) -> None:
        """Add waiting queries whose deadlines are after its end to a batch that was removed.

        Args:
          room: number of queries to add, the cheapest first, and of equal ones the most urgent.
        """
        waiting = (query for other in self._batches for query in other.queries if query.deadline > ends)
        chosen = {query.id: query for query in heapq.nsmallest(room, waiting, key=lambda q: (q.utility, q.deadline))}
        if chosen:
            self.remove_where(lambda query: query.id in chosen)
        for query in chosen.values():
            batch.add(query)

    def shed(self, ends: float) -> list[Query]:
        """Remove the queries that must be answered by `ends`, when the soonest possible answer is ready."""
        late = [batch for batch in self._batches if batch.deadline <= ends]
        return [query for batch in late for query in self.shed_of(batch, ends)]

    def shed_of(self, batch: Batch, ends: float) -> list[Query]:
        """Remove the queries of a batch that must be answered by `ends`."""
        return self._remove_from(batch, lambda query: query.deadline <= ends)

    def remove_where(self, gone: Callable[[Query], bool]) -> None:
        """Remove the queries for which the function is true."""
        for batch in list(self._batches):
            self._remove_from(batch, gone)

    def _remove_from(self, batch: Batch, gone: Callable[[Query], bool]) -> list[Query]:
        removed = [query for query in batch.queries if gone(query)]
        batch.queries = [query for query in batch.queries if not gone(query)]
        if not batch.queries:
            self._batches.remove(batch)
        elif removed:
            deadlines = [query.deadline for query in batch.queries]
            batch.deadline, batch.last_deadline = min(deadlines), max(deadlines)
        return removed

"""The thread that serves queries: between compiled batches the controller says what runs next, and at which level."""

import dataclasses
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxinfer.compiled import Origin, close_at_exit
from jaxinfer.elastic.answers import Answer
from jaxinfer.elastic.errors import ElasticError, OverloadedError, ShedError, ShutdownError
from jaxinfer.elastic.scheduling.controller import Controller
from jaxinfer.elastic.scheduling.policies import Policy
from jaxinfer.elastic.scheduling.profile import ServingProfile
from jaxinfer.elastic.scheduling.query import Query

log = logging.getLogger(__name__)

LEAD = 4e-3
"""Seconds before a batch is expected to end at which the next one is planned, so that the device does not wait."""


class Runner(Protocol):
    """The device side."""

    def launch(self, level: int, queries: Sequence[Query]) -> Any:
        """Send a batch to the device, without waiting for it."""
        ...

    def collect(self, launched: Any, queries: Sequence[Query]) -> list[tuple[str, np.ndarray]]:
        """Wait for a batch; label and probabilities of each query."""
        ...

    def expected_seconds(self, level: int, count: int) -> float:
        """What a batch of so many queries usually takes."""
        ...

    def observe(self, level: int, count: int, seconds: float) -> None:
        """What one took."""
        ...


class _InFlight(NamedTuple):
    launched: Any
    queries: list[Query]
    level: int
    sent: float
    expected_seconds: float
    expected_end: float


@dataclasses.dataclass(kw_only=True)
class Statistics:
    """What a driver has done so far.

    Attributes:
      answered, shed, cancelled, failed: how many queries ended so.
      late: how many of the answers came after their deadlines.
      utility: of the queries that were answered in time, whether rightly or not.
      levels: queries answered at each level.
      batches: how many ran.
      planning_seconds: of the controller's decisions, all together.
      fallbacks: how many of them a simpler rule has taken, since planning took too long.
    """

    answered: int = 0
    late: int = 0
    shed: int = 0
    cancelled: int = 0
    failed: int = 0
    utility: float = 0.0
    levels: Counter[int] = dataclasses.field(default_factory=Counter)
    batches: int = 0
    planning_seconds: float = 0.0
    fallbacks: int = 0


class Driver:
    """Serves queries of any thread in a thread of its own.

    A batch runs while the next one is chosen: just before the device is expected to be free, so that the choice knows
    all that has come by then.

    Args:
      runner: runs batches.
      policy: chooses them.
      max_waiting: more queries are refused.
      clock: seconds, never going back.
    """

    def __init__(
        self, runner: Runner, policy: Policy, *, max_waiting: int, clock: Callable[[], float] = time.perf_counter
    ):
        self._runner, self._controller = runner, Controller(policy)
        self._max_waiting, self._clock = max_waiting, clock
        self._changed = threading.Condition()
        self._inbox: deque[Query] = deque()
        self._futures: dict[int, Future[Answer]] = {}
        self._ids, self._closed, self._drain = 0, False, True
        self._free = float("-inf")  # when the device was last seen to end a batch
        self.statistics = Statistics()
        self._origin = Origin("This service")
        self._thread = threading.Thread(target=self._run, name="jaxinfer-elastic", daemon=True)
        self._thread.start()
        close_at_exit(self, lambda driver: driver.close(drain=False))

    def submit(self, task: str, payload: Any, *, latency: float, utility: float) -> "Future[Answer]":
        """Let a query wait for its answer.

        The future raises ShedError where the answer could not have been in time. Raises OverloadedError where too many
        wait, ShutdownError when closed, ElasticError in a process that was forked, ValueError for a latency or utility
        that is negative or not finite.
        """
        self._origin.check(ElasticError)
        with self._changed:
            if self._closed:
                raise ShutdownError("the service was closed; it takes no more queries.")
            if len(self._futures) >= self._max_waiting:
                raise OverloadedError(f"{len(self._futures)} queries wait, and max_waiting allows no more; try later.")
            arrival = self._clock()
            query = Query(id=self._ids, task=task, arrival=arrival, latency=latency, utility=utility, payload=payload)
            self._ids += 1
            future: Future[Answer] = Future()
            self._futures[query.id] = future
            self._inbox.append(query)
            self._changed.notify()
        return future

    @property
    def waiting(self) -> int:
        """How many queries have no answer yet."""
        return len(self._futures)

    def use(self, profile: ServingProfile) -> None:
        """Decide by another profile from now on. Raises ValueError for one that the policy cannot go by."""
        self._controller.policy.use(profile)

    def close(self, *, drain: bool = True) -> None:
        """Take no more queries, and wait for those there are (`drain`), or end them with ShutdownError.

        Does nothing in a process that was forked.
        """
        if self._origin.forked:
            return
        with self._changed:
            self._closed, self._drain = True, drain
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        in_flight: _InFlight | None = None
        cause: BaseException = ShutdownError("the service was closed before the query was answered.")
        try:
            while self._wait(in_flight):
                launched = self._launch_next(in_flight)
                self._finish(in_flight)
                in_flight = self._begun(launched)
            self._finish(in_flight)
        except BaseException as error:  # a mistake in here: no query may wait for ever
            log.exception("The thread that serves queries has died.")
            cause = ElasticError(f"the thread that serves queries has died: {error!r}")
        del self._runner  # which holds whoever holds this
        with self._changed:
            self._closed = True
            left = list(self._futures.values())
            self._futures.clear()
        for future in left:
            if future.running() or (not future.done() and future.set_running_or_notify_cancel()):
                future.set_exception(cause)

    def _wait(self, in_flight: _InFlight | None) -> bool:
        """Until something can be planned or collected; whether there is anything left to do."""
        with self._changed:
            if in_flight is None:
                self._changed.wait_for(lambda: self._inbox or self._controller.waiting or self._closed)
            elif (pause := in_flight.expected_end - LEAD - self._clock()) > 0:
                # Arrivals need not wake it: it plans when the device is about to be free.
                self._changed.wait_for(lambda: self._closed and not self._drain, timeout=pause)
            while self._inbox:
                self._controller.submit(self._inbox.popleft())
            if self._closed and not self._drain:
                return False
            return in_flight is not None or self._controller.waiting > 0 or not self._closed

    def _launch_next(self, in_flight: _InFlight | None) -> _InFlight | None:
        """Send the next batch to the device, if there is one."""
        now = self._clock()
        start = now if in_flight is None else max(now, in_flight.expected_end)
        decision, shed = self._controller.next(start)
        self.statistics.planning_seconds += self._clock() - now
        for query in shed:
            error = ShedError(
                f"no answer could have come within {query.latency:g} s: too many queries wait, or a batch takes longer."
            )
            if self._is_wanted(query):
                self.statistics.shed += 1
                self._pop(query).set_exception(error)
        if decision is None:
            return None
        self.statistics.fallbacks += decision.fell_back
        queries = [query for query in decision.batch.queries if self._is_wanted(query)]
        if not queries:
            return None
        sent = self._clock()
        try:
            launched = self._runner.launch(decision.level, queries)
        except Exception as error:  # this batch's alone
            self._fail(queries, error)
            return None
        expected = self._runner.expected_seconds(decision.level, len(queries))
        return _InFlight(launched, queries, decision.level, sent, expected, start + expected)

    def _finish(self, batch: _InFlight | None) -> None:
        """Wait for a batch, and answer its queries."""
        if batch is None:
            return
        try:
            answers = self._runner.collect(batch.launched, batch.queries)
        except Exception as error:
            self._fail(batch.queries, error)
            return
        ended = self._clock()
        begun = max(batch.sent, self._free)
        self._free = ended
        self._runner.observe(batch.level, len(batch.queries), ended - begun)
        self.statistics.batches += 1
        self.statistics.levels[batch.level] += len(batch.queries)
        for query, (label, probabilities) in zip(batch.queries, answers, strict=True):
            in_time = ended < query.deadline
            self.statistics.answered += 1
            self.statistics.late += not in_time
            self.statistics.utility += query.utility if in_time else 0.0
            answer = Answer(
                label=label,
                probabilities=probabilities,
                level=batch.level,
                queue_seconds=max(begun - query.arrival, 0.0),
                compute_seconds=ended - begun,
                in_time=in_time,
                batch=self.statistics.batches,
            )
            self._pop(query).set_result(answer)

    def _begun(self, batch: _InFlight | None) -> _InFlight | None:
        """A batch that was sent ahead, with what is known now that the one before it has ended."""
        if batch is None:
            return None
        return batch._replace(expected_end=max(batch.sent, self._free) + batch.expected_seconds)

    def _fail(self, queries: Sequence[Query], error: Exception) -> None:
        """End the queries of a batch that could not run."""
        log.warning("A batch of %d queries failed: %r", len(queries), error)
        for query in queries:
            self.statistics.failed += 1
            self._pop(query).set_exception(error)

    def _is_wanted(self, query: Query) -> bool:
        """Whether a query was not cancelled, which from now on it cannot be."""
        if self._futures[query.id].set_running_or_notify_cancel():
            return True
        self._pop(query)
        self.statistics.cancelled += 1
        return False

    def _pop(self, query: Query) -> "Future[Answer]":
        with self._changed:
            return self._futures.pop(query.id)

"""The threads that serve queries: between compiled batches the controller says what runs next, and at which level."""

import dataclasses
import functools
import logging
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxinfer.compiled import DeviceTime, Interval, Origin, close_at_exit, end_future
from jaxinfer.elastic.answers import Answer
from jaxinfer.elastic.errors import ElasticError, OverloadedError, ProfileError, ShedError, ShutdownError
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

    def collect(self, launched: Any) -> list[tuple[str, np.ndarray] | ElasticError]:
        """Wait for a batch; label and probabilities of each query, or why it has none."""
        ...

    def expected_seconds(self, level: int, count: int) -> float:
        """What a batch of so many queries usually takes."""
        ...

    def observe(self, level: int, count: int, seconds: float) -> None:
        """What one took."""
        ...


class _Results(NamedTuple):
    """Of a batch.

    Attributes:
      answers: as of `Runner.collect`.
      time: from when the device was free until they were there.
    """

    answers: list[tuple[str, np.ndarray] | ElasticError]
    time: Interval


class _InFlight(NamedTuple):
    launched: Any
    queries: list[Query]
    level: int
    sent: float
    expected_seconds: float
    expected_end: float
    results: "Future[_Results]"


@dataclasses.dataclass(kw_only=True)
class Statistics:
    """What a driver has done so far.

    Attributes:
      answered, shed, cancelled, failed: how many queries ended so.
      late: how many of the answers came after their deadlines.
      utility: of the queries that were answered in time, whether rightly or not.
      levels: queries answered at each level.
      batches: how many ran.
      planning_seconds: of the controller: putting queries into batches, and choosing what runs.
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


class _Worker[Item]:
    """Does something with one item after another, in a thread of its own."""

    def __init__(self, do: Callable[[Item], None], name: str):
        self._items: SimpleQueue[Item | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(do,), name=name, daemon=True)
        self._thread.start()

    def add(self, item: Item) -> None:
        self._items.put(item)

    def end(self) -> None:
        """Let it end after the items that it has."""
        self._items.put(None)

    def join(self) -> None:
        """Wait for its end; not in its own thread."""
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self, do: Callable[[Item], None]) -> None:
        while (item := self._items.get()) is not None:
            do(item)
            del item  # while it waits for the next


class Driver:
    """Serves queries of any thread, in three of its own.

    One plans and launches: a batch runs while the next one is chosen, just before the device is expected to be free, so
    that the choice knows all that has come by then, or as soon as it is. One waits for the batches, so that each is
    timed when it ends, whatever else goes on. One ends the futures, so that callbacks hold nothing up.

    Args:
      runner: runs batches.
      policy: chooses them.
      max_waiting: more queries are refused.
      device: times the batches, and has the clock; shared with all that send others to the device.
    """

    def __init__(self, runner: Runner, policy: Policy, *, max_waiting: int, device: DeviceTime | None = None):
        self._runner, self._controller = runner, Controller(policy)
        self._max_waiting, self._time = max_waiting, device or DeviceTime()
        self._clock = self._time.clock
        self._changed = threading.Condition()
        self._inbox: deque[Query] = deque()
        self._futures: dict[int, Future[Answer]] = {}
        self._withdrawn: set[int] = set()  # queries whose futures were cancelled, and that the controller still has
        self._ids, self._closed, self._drain = 0, False, True
        self._cause: BaseException | None = None  # what the thread died of
        self.statistics = Statistics()
        self._origin = Origin("This service")
        self._device = _Worker(self._collect, "jaxinfer-elastic-device")
        self._answers = _Worker(_end_futures, "jaxinfer-elastic-answers")
        self._thread = threading.Thread(target=self._run, name="jaxinfer-elastic", daemon=True)
        self._thread.start()
        close_at_exit(self, lambda driver: driver.close(drain=False))

    def submit(self, task: str, payload: Any, *, latency: float, utility: float) -> "Future[Answer]":
        """Let a query wait for its answer.

        The future raises ShedError where the answer could not have been in time. Raises OverloadedError where too many
        wait, ShutdownError when closed, ElasticError if its thread has died or in a process that was forked,
        ProfileError for a task that is not in the profile, ValueError for a latency or utility that is negative or not
        finite.
        """
        self._origin.check(ElasticError)
        if task not in self._controller.policy.profile.tasks:
            raise ProfileError(f"task {task!r} is being registered, or the policy cannot serve it at its levels.")
        with self._changed:
            if self._closed:
                raise self._closed_error()
            if len(self._futures) >= self._max_waiting:
                raise OverloadedError(f"{len(self._futures)} queries wait, and max_waiting allows no more; try later.")
            arrival = self._clock()
            query = Query(id=self._ids, task=task, arrival=arrival, latency=latency, utility=utility, payload=payload)
            self._ids += 1
            future: Future[Answer] = Future()
            future.add_done_callback(functools.partial(_withdraw_if_cancelled, weakref.ref(self), query.id))
            self._futures[query.id] = future
            self._inbox.append(query)
            self._changed.notify()
        return future

    @property
    def waiting(self) -> int:
        """How many queries have no answer yet."""
        return len(self._futures)

    @property
    def is_running(self) -> bool:
        """Whether queries are taken."""
        return not self._closed and not self._origin.forked

    def use(self, profile: ServingProfile) -> None:
        """Decide by another profile from now on. Raises ValueError for one that the policy cannot go by."""
        self._controller.policy.use(profile)

    def withdraw(self, query_id: int) -> None:
        """Give a query up that was cancelled, so that no plan counts it."""
        with self._changed:
            if self._futures.pop(query_id, None) is not None:
                self._withdrawn.add(query_id)
                self.statistics.cancelled += 1

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
            self._answers.join()

    def _closed_error(self) -> ElasticError:
        if self._cause is None:
            return ShutdownError("the service was closed: it takes no more queries, and has ended those it had.")
        error = ElasticError(f"the thread that serves queries has died: {self._cause!r}; make another service.")
        error.__cause__ = self._cause
        return error

    # In the thread that waits for the device

    def _collect(self, batch: _InFlight) -> None:
        try:
            answers = self._runner.collect(batch.launched)
            batch.results.set_result(_Results(answers, self._time.end(batch.sent)))
        except BaseException as error:
            batch.results.set_exception(error)
        with self._changed:
            self._changed.notify()

    # In the thread that plans

    def _run(self) -> None:
        in_flight: _InFlight | None = None
        try:
            while self._wait(in_flight):
                launched = self._launch_next(in_flight)
                self._finish(in_flight)
                in_flight = self._begun(launched)
            self._finish(in_flight)
        except BaseException as error:  # a mistake in here: no query may wait for ever
            log.exception("The thread that serves queries has died.")
            self._cause = error
        with self._changed:
            self._closed = True
        self._end_waiting(self._closed_error())
        self._answers.end()
        self._device.end()
        self._device.join()
        del self._runner  # which holds whoever holds this

    def _wait(self, in_flight: _InFlight | None) -> bool:
        """Until something can be planned or collected; whether there is anything left to do."""
        with self._changed:
            if in_flight is None:
                self._changed.wait_for(lambda: self._inbox or self._controller.waiting or self._closed)
            elif (pause := in_flight.expected_end - LEAD - self._clock()) > 0:
                # Arrivals need not wake it: it plans when the device is about to be free.
                self._changed.wait_for(
                    lambda: in_flight.results.done() or (self._closed and not self._drain), timeout=pause
                )
            begun = self._clock()
            while self._inbox:
                self._controller.submit(self._inbox.popleft())
            self.statistics.planning_seconds += self._clock() - begun
            if self._withdrawn:
                self._controller.withdraw(self._withdrawn)
                self._withdrawn = set()
            if self._closed and not self._drain:
                return False
            return in_flight is not None or self._controller.waiting > 0 or not self._closed

    def _launch_next(self, in_flight: _InFlight | None) -> _InFlight | None:
        """Send the next batch to the device, if there is one."""
        now = self._clock()
        start = now if in_flight is None or in_flight.results.done() else max(now, in_flight.expected_end)
        try:
            decision, shed = self._controller.next(start)
        except Exception as error:  # a policy's mistake: those that wait may all be of the kind that it cannot take
            log.exception("The policy has failed; the queries that wait end with an error.")
            failure = ElasticError(f"the policy has failed at the queries that waited: {error!r}")
            failure.__cause__ = error
            self.statistics.failed += self._end_waiting(failure, but=in_flight.queries if in_flight else ())
            return None
        self.statistics.planning_seconds += self._clock() - now
        self._shed(shed)
        if decision is None:
            return None
        self.statistics.fallbacks += decision.fell_back
        queries = [query for query in decision.batch.queries if self._is_wanted(query)]
        if not queries:
            return None
        sent = self._clock()
        try:
            launched = self._runner.launch(decision.level, queries)
            expected = self._runner.expected_seconds(decision.level, len(queries))
        except Exception as error:  # this batch's alone
            self._fail(queries, error)
            return None
        batch = _InFlight(launched, queries, decision.level, sent, expected, start + expected, Future())
        self._device.add(batch)
        return batch

    def _finish(self, batch: _InFlight | None) -> None:
        """Wait for a batch, and answer its queries."""
        if batch is None:
            return
        try:
            answers, (begun, ended) = batch.results.result()
        except Exception as error:
            self._fail(batch.queries, error)
            return
        self.statistics.batches += 1
        self.statistics.levels[batch.level] += len(batch.queries)
        found: list[Answer | Exception] = []
        for query, answered in zip(batch.queries, answers, strict=True):
            if isinstance(answered, ElasticError):
                self.statistics.failed += 1
                found.append(answered)
                continue
            (label, probabilities), in_time = answered, ended < query.deadline
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
            found.append(answer)
        self._end(batch.queries, found)
        try:
            self._runner.observe(batch.level, len(batch.queries), ended - begun)
        except Exception:
            log.exception("What a batch took could not be taken in; plans go by what is known.")

    def _begun(self, batch: _InFlight | None) -> _InFlight | None:
        """A batch that was sent ahead, with what is known now that the one before it has ended."""
        if batch is None:
            return None
        return batch._replace(expected_end=max(batch.sent, self._time.free) + batch.expected_seconds)

    def _shed(self, queries: Sequence[Query]) -> None:
        wanted = [query for query in queries if self._is_wanted(query)]
        self.statistics.shed += len(wanted)
        why = "too many queries wait, or a batch takes longer."
        self._end(wanted, [ShedError(f"no answer could have come within {q.latency:g} s: {why}") for q in wanted])

    def _fail(self, queries: Sequence[Query], error: Exception) -> None:
        """End the queries of a batch that could not run."""
        log.warning("A batch of %d queries failed: %r", len(queries), error)
        self.statistics.failed += len(queries)
        self._end(queries, [error] * len(queries))

    def _end(self, queries: Sequence[Query], outcomes: Sequence[Answer | Exception]) -> None:
        """End queries that can no longer be cancelled."""
        with self._changed:
            futures = [self._futures.pop(query.id) for query in queries]
        self._answers.add(list(zip(futures, outcomes, strict=True)))

    def _end_waiting(self, error: Exception, but: Sequence[Query] = ()) -> int:
        """End all queries with an error, but those of a batch that runs; how many."""
        with self._changed:
            kept = {query.id: self._futures[query.id] for query in but}
            ended = [future for id, future in self._futures.items() if id not in kept]
            self._futures = kept
            self._inbox.clear()
            self._controller = Controller(self._controller.policy)
        self._answers.add([(future, error) for future in ended])
        return len(ended)

    def _is_wanted(self, query: Query) -> bool:
        """Whether a query was not cancelled, which from now on it cannot be."""
        future = self._futures.get(query.id)
        return future is not None and future.set_running_or_notify_cancel()


def _withdraw_if_cancelled(driver: weakref.ref[Driver], query_id: int, future: "Future[Answer]") -> None:
    """A future's callback; it does not keep the driver, and so the model, alive."""
    if future.cancelled() and (running := driver()) is not None:
        running.withdraw(query_id)


def _end_futures(endings: "Sequence[tuple[Future[Answer], Answer | Exception]]") -> None:
    for future, outcome in endings:
        end_future(future, outcome, "a query")

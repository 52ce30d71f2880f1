"""Sending queries to a service live, each with its image when it is due."""

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future

from jaxinfer.elastic.answers import Answer
from jaxinfer.elastic.scheduling.query import Outcome, Query
from jaxinfer.elastic.service import Service
from jaxinfer.elastic.tasks.datasets import Dataset
from jaxinfer.evaluation.elastic.simulator import ServedQuery, shed_query
from jaxinfer.serving.errors import OverloadedError, ShedError

TICK = 1e-3
"""Seconds between checks for due queries: they arrive as from a network, a few at a time."""


def send_queries(
    service: Service,
    queries: Sequence[Query],
    tests: Mapping[str, Dataset],
    *,
    watch: Callable[[int], None] = lambda sent: None,
    stop: threading.Event | None = None,
) -> list[ServedQuery]:
    """Send queries when they are due, and return how each ended; refused queries count as shed.

    Args:
      service: answers them.
      queries: queries with arrivals in seconds from now; payloads are indices of images.
      tests: each task's images with labels.
      watch: called repeatedly with the number of queries sent, in this thread; it should be quick.
      stop: once it is set, no more queries are sent, and those that have ended are returned.
    """
    stop = stop or threading.Event()
    given = sorted(queries, key=lambda query: (query.arrival, query.id))
    if not given:
        return []
    service.start()
    futures: list[Future[Answer] | None] = []
    with _no_garbage_collection():
        begun = time.perf_counter()
        while len(futures) < len(given) and not stop.is_set():
            now = time.perf_counter() - begun
            while len(futures) < len(given) and given[len(futures)].arrival <= now:
                futures.append(_send(service, given[len(futures)], tests))
            watch(len(futures))
            time.sleep(TICK)
        while service.num_requests and not stop.is_set():  # checking all futures would delay those still to come
            watch(len(futures))
            time.sleep(TICK)
    return [
        _end_of(query, future, tests[query.task])
        for query, future in zip(given, futures, strict=False)
        if future is None or not stop.is_set() or future.done()
    ]


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection.

    Answers are kept here, as clients would not: walking them all stops everything for 50 ms or more.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _send(service: Service, query: Query, tests: Mapping[str, Dataset]) -> "Future[Answer] | None":
    image = tests[query.task].images[query.payload]
    try:
        return service.submit(image, query.task, deadline=query.latency, utility=query.utility)
    except OverloadedError:
        return None


def _end_of(query: Query, future: "Future[Answer] | None", test: Dataset) -> ServedQuery:
    if future is None or isinstance(future.exception(), ShedError):
        return shed_query(query, query.arrival)
    answer = future.result()
    is_right = answer.label == test.names[test.labels[query.payload]]
    outcome = (Outcome.CORRECT if is_right else Outcome.WRONG) if answer.in_time else Outcome.LATE
    began = query.arrival + answer.queue_seconds
    return ServedQuery(
        query=query,
        outcome=outcome,
        level=answer.level,
        batch=answer.batch,
        began=began,
        ended=began + answer.compute_seconds,
    )

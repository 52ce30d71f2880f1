"""Policies served live: real images, real futures, the wall clock. The same cells are simulated, to compare."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait

import numpy as np
import rich

from benchmarks.otas.setting import BACKBONE, TRACES, Setting, policies, test_images
from benchmarks.otas.virtual import Cell, serve
from benchmarks.report import Report
from jaxinfer.elastic import Dataset, Service, ShedError
from jaxinfer.elastic.scheduling.policies import Policy
from jaxinfer.elastic.scheduling.query import Outcome, Query
from jaxinfer.elastic.scheduling.simulator import Served, ServedQuery

CELLS: tuple[Cell, ...] = (("wandering", 0.8), ("wandering", 1.1))
COMPARED = ("elastic", "paper", "pets", "slack", "slackfit")
TICK = 1e-3
"""Seconds between looks at which queries are due: they come as a network brings them, a few at a time."""
CALM_RATE = 300.0
"""Queries a second at which the controller's share of a core is taken."""


def live(report: Report, setting: Setting, *, seeds: int, seconds: float) -> None:
    """All policies that adapt, and PetS, in two cells.

    Args:
      report: where rows and checks go.
      setting: what is served.
      seeds: of each cell.
      seconds: of each run.
    """
    errors, late = [], []
    for cell in CELLS:
        made, queries = policies(setting), round(seconds * cell[1] * setting.capacity)
        for seed in range(seeds):
            for name in COMPARED:
                served = serve_live(setting, cell, made[name], seed=seed, queries=queries)
                simulated = serve(setting, cell, made[name], seed=seed, queries=queries)
                errors.append(abs(served.normalised - simulated.normalised))
                if name == "elastic":
                    late.append(served.share(Outcome.LATE))
                report.row(
                    figure="live",
                    trace=cell[0],
                    load=cell[1],
                    policy=name,
                    seed=seed,
                    utility=round(served.normalised, 4),
                    simulated=round(simulated.normalised, 4),
                    outcomes=[round(served.share(outcome), 4) for outcome in Outcome],
                )
                rich.print(f"{cell} {name}, seed {seed}: {served.normalised:.3f}, simulated {simulated.normalised:.3f}")
    report.check("late_share_real", statistics.mean(late), "of queries", target=0.01, better="lower")
    report.check("sim_vs_real", 100 * statistics.median(errors), "points, median", target=2.0, better="lower")
    report.check(
        "controller_share", controller_share(setting, seconds=seconds), "of a core", target=0.05, better="lower"
    )


def serve_live(setting: Setting, cell: Cell, make: Callable[[], Policy], *, seed: int, queries: int) -> Served:
    """One run of the same queries as `virtual.serve`."""
    trace, load = cell
    rate = load * setting.capacity
    arrivals = setting.scale * TRACES[trace](rate * setting.scale, queries / rate / setting.scale, seed=seed)
    given = setting.queries(arrivals, seed)
    with Service.from_checkpoint(BACKBONE, policy=lambda profile: make(), max_waiting=100_000) as service:
        answers = send(service, given, test_images(service))
    return Served(answers=answers, best=setting.best(given))


def send(service: Service, queries: Sequence[Query], tests: Mapping[str, Dataset]) -> list[ServedQuery]:
    """Send queries when they are due, and say how each ended."""
    warm = tests[queries[0].task].images[0]
    service.make_query(warm, queries[0].task, latency=60.0).result()
    futures, begun, at = [], time.perf_counter(), 0
    while at < len(queries):
        now = time.perf_counter() - begun
        while at < len(queries) and queries[at].arrival <= now:
            query = queries[at]
            image = tests[query.task].images[query.payload]
            futures.append(service.make_query(image, query.task, latency=query.latency, utility=query.utility))
            at += 1
        time.sleep(TICK)
    wait(futures)
    answers = []
    for query, future in zip(queries, futures, strict=True):
        error = future.exception()
        if isinstance(error, ShedError):
            answers.append(ServedQuery(query=query, outcome=Outcome.SHED, level=None, began=0.0, ended=0.0))
            continue
        found, test = future.result(), tests[query.task]
        right = found.label == test.names[test.labels[query.payload]]
        outcome = (Outcome.CORRECT if right else Outcome.WRONG) if found.in_time else Outcome.LATE
        began = query.arrival + found.queue_seconds
        ended = began + found.compute_seconds
        answers.append(ServedQuery(query=query, outcome=outcome, level=found.level, began=began, ended=ended))
    return answers


def controller_share(setting: Setting, *, seconds: float) -> float:
    """The controller's time, of a core's, at 300 queries a second."""
    count = round(CALM_RATE * seconds)
    given = setting.queries(np.arange(count) / CALM_RATE, seed=0)
    with Service.from_checkpoint(BACKBONE) as service:
        send(service, given, test_images(service))
        return service.statistics.planning_seconds / seconds

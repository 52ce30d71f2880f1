"""Policies served live: real images, real futures, the wall clock. The same cells are simulated, to compare.

Each is simulated twice: with batch times measured before all runs, which is a prediction, and with those of the live
run itself, so that a machine that has become slower since does not count.
"""

import contextlib
import dataclasses
import itertools
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import rich

from benchmarks.otas.setting import BACKBONE, Cell, Setting
from benchmarks.report import Report
from jaxinfer.elastic import Service
from jaxinfer.elastic.latency import LevelAndSize
from jaxinfer.elastic.options import PLAN_SECONDS
from jaxinfer.elastic.scheduling.policies import make_policy
from jaxinfer.elastic.scheduling.query import Outcome, Query
from jaxinfer.evaluation.elastic.live import send_queries
from jaxinfer.evaluation.elastic.measurements import Measurements
from jaxinfer.evaluation.elastic.runs import batches_of
from jaxinfer.evaluation.elastic.simulator import ServedQuery, ServedTrace
from jaxinfer.evaluation.elastic.workloads import table_ii
from jaxinfer.sizes import round_up

CELLS = (Cell("wandering", 0.8), Cell("wandering", 1.1))
COMPARED = ("elastic", "paper", "paper_profiled", "pets", "slack", "slackfit")
TARGETS = {0.8: 0.95, 1.1: 0.95}
"""The target utility of `elastic`, simulated and live."""
SLOWED = Cell("wandering", 0.8)
CALM_RATE = 300.0
"""Queries a second at which the controller's share of a core is measured."""


def live(report: Report, setting: Setting, *, seeds: int, seconds: float, save: Callable[[], None]) -> None:
    """Run all policies that adapt, and PetS, in two cells.

    Args:
      report: collects rows and checks.
      setting: the measured setting.
      seeds: number of seeds per cell.
      seconds: duration of each run.
      save: called after each seed.
    """
    errors: dict[str, list[float]] = {"simulated": [], "predicted": []}
    late, utilities = [], defaultdict[Cell, list[float]](list)
    for seed, cell in itertools.product(range(seeds), CELLS):
        count = round(seconds * cell.load * setting.levels.capacity)
        queries = setting.queries(cell, seed=seed, count=count)
        for name in COMPARED:
            served = serve_live(setting, queries, name)
            measured = setting._replace(levels=with_times_of(setting.levels, served.answers))
            simulated = {
                what: chosen.simulate(queries, name, seed=seed).normalised
                for what, chosen in (("simulated", measured), ("predicted", setting))
            }
            for what, value in simulated.items():
                errors[what].append(abs(served.normalised - value))
            if name == "elastic":
                late.append(served.share(Outcome.LATE))
                utilities[cell].append(served.normalised)
            report.row(
                figure="live",
                **cell._asdict(),
                policy=name,
                seed=seed,
                utility=round(served.normalised, 4),
                **{what: round(value, 4) for what, value in simulated.items()},
                outcomes=[round(served.share(outcome), 4) for outcome in Outcome],
            )
            rich.print(f"{cell} {name}, seed {seed}: {served.normalised:.3f}, {simulated}")
        save()
    report.check("late_share_real", statistics.mean(late), "of queries", target=0.01, better="lower")
    for cell, shares in utilities.items():
        name = f"utility_live_{cell.load}x".replace(".", "_")
        report.check(name, statistics.mean(shares), "of all there is", target=TARGETS[cell.load])
    for name, what in (("sim_vs_real", "simulated"), ("prediction_vs_real", "predicted")):
        report.check(name, 100 * statistics.median(errors[what]), "points, median", target=2.0, better="lower")
        report.check(f"{name}_max", 100 * max(errors[what]), "points, all runs", target=2.0, better="lower")
    after_slowdown(report, setting, seconds=seconds)
    share = controller_share(setting, seconds=seconds)
    report.check("controller_share", share, "of a core", target=0.05, better="lower")


def serve_live(setting: Setting, queries: Sequence[Query], policy: str) -> ServedTrace:
    """Serve queries live, once."""
    with _service(setting, policy) as service:
        service.measure_latency()
        answers = send_queries(service, queries, setting.tests)
    return ServedTrace(answers=answers, best=setting.levels.best(queries))


def _service(setting: Setting, policy: str) -> Service:
    return Service.from_checkpoint(
        BACKBONE,
        policy=lambda profile: make_policy(policy, profile, scale=setting.levels.scale, time_limit=PLAN_SECONDS),
        max_waiting=100_000,
    )


def after_slowdown(report: Report, setting: Setting, *, seconds: float) -> None:
    """Serve the same queries before, during and after other processes take all cores; by one service."""
    utilities = {}
    with _service(setting, "elastic") as service:
        service.measure_latency()
        for when in ("before", "during", "after"):
            queries = setting.queries(SLOWED, seed=0, count=round(seconds / 3 * SLOWED.load * setting.levels.capacity))
            with busy_cores() if when == "during" else contextlib.nullcontext():
                answers = send_queries(service, queries, setting.tests)
            utilities[when] = ServedTrace(answers=answers, best=setting.levels.best(queries)).normalised
    report.row(figure="slowdown", **SLOWED._asdict(), **{when: round(value, 4) for when, value in utilities.items()})
    rich.print(f"a slow spell: {utilities}")
    report.check("utility_after_slowdown", utilities["after"] / utilities["before"], "of before", target=0.98)


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """Run processes that compute, two per core."""
    command = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(command) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        yield
    finally:
        for process in others:
            process.kill()
            process.wait()


def with_times_of(measured: Measurements, answers: Sequence[ServedQuery]) -> Measurements:
    """Replace the measured batch times by those of a run, where the run has batches of that level and size."""
    times: dict[LevelAndSize, list[float]] = defaultdict(list)
    for batch in batches_of(answers).values():
        level, size = batch[0].level, round_up(len(batch), measured.profile.sizes)
        assert level is not None
        times[level, size].append(batch[0].ended - batch[0].began)
    samples = {key: np.array(seconds) for key, seconds in times.items()}
    return dataclasses.replace(measured, samples={**measured.samples, **samples})


def controller_share(setting: Setting, *, seconds: float) -> float:
    """Measure the controller's share of a core at 300 queries a second: batching queries, and planning."""
    arrivals = np.arange(round(CALM_RATE * seconds)) / CALM_RATE
    queries = setting.levels.queries(arrivals, seed=0, kinds=table_ii(setting.levels.profile.tasks))
    with Service.from_checkpoint(BACKBONE) as service:
        service.measure_latency()
        send_queries(service, queries, setting.tests)
        return service.stats().planning_seconds / seconds

"""Policies served live: real images, real futures, the wall clock. The same cells are simulated, to compare.

Each is simulated twice: with batches that take as long as they were measured to before all runs, which is a prediction,
and with those of the live run itself, so that a machine that has become slower since does not count.
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
from jaxinfer.elastic.scheduling.policies import make_policy
from jaxinfer.elastic.scheduling.query import Outcome
from jaxinfer.elastic.service import PLAN_SECONDS
from jaxinfer.evaluation.elastic.live import send_queries
from jaxinfer.evaluation.elastic.measurements import Measurements
from jaxinfer.evaluation.elastic.runs import batches_of
from jaxinfer.evaluation.elastic.simulator import Served, ServedQuery
from jaxinfer.evaluation.elastic.workloads import table_ii
from jaxinfer.generation.engine.buckets import round_up

CELLS = (Cell("wandering", 0.8), Cell("wandering", 1.1))
COMPARED = ("elastic", "paper", "paper_profiled", "pets", "slack", "slackfit")
TARGETS = {0.8: 0.95, 1.1: 0.95}
"""The utility that `elastic` is to reach, simulated and live."""
SLOWED = Cell("wandering", 0.8)
CALM_RATE = 300.0
"""Queries a second at which the controller's share of a core is taken."""


def live(report: Report, setting: Setting, *, seeds: int, seconds: float, save: Callable[[], None]) -> None:
    """All policies that adapt, and PetS, in two cells.

    Args:
      report: where rows and checks go.
      setting: what is served.
      seeds: of each cell.
      seconds: of each run.
      save: called when a seed is done.
    """
    errors: dict[str, list[float]] = {"simulated": [], "predicted": []}
    late, utilities = [], defaultdict[Cell, list[float]](list)
    for seed, cell in itertools.product(range(seeds), CELLS):
        count = round(seconds * cell.load * setting.levels.capacity)
        for name in COMPARED:
            served = serve_live(setting, cell, name, seed=seed, count=count)
            own = setting._replace(levels=with_times_of(setting.levels, served.answers))
            found = {
                what: of.simulate(cell, name, seed=seed, count=count).normalised
                for what, of in (("simulated", own), ("predicted", setting))
            }
            for what, value in found.items():
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
                **{what: round(value, 4) for what, value in found.items()},
                outcomes=[round(served.share(outcome), 4) for outcome in Outcome],
            )
            rich.print(f"{cell} {name}, seed {seed}: {served.normalised:.3f}, {found}")
        save()
    report.check("late_share_real", statistics.mean(late), "of queries", target=0.01, better="lower")
    for cell, found in utilities.items():
        name = f"utility_live_{cell.load}x".replace(".", "_")
        report.check(name, statistics.mean(found), "of all there is", target=TARGETS[cell.load])
    for name, what in (("sim_vs_real", "simulated"), ("prediction_vs_real", "predicted")):
        report.check(name, 100 * statistics.median(errors[what]), "points, median", target=2.0, better="lower")
        report.check(f"{name}_max", 100 * max(errors[what]), "points, all runs", target=2.0, better="lower")
    after_slowdown(report, setting, seconds=seconds)
    share = controller_share(setting, seconds=seconds)
    report.check("controller_share", share, "of a core", target=0.05, better="lower")


def serve_live(setting: Setting, cell: Cell, policy: str, *, seed: int, count: int) -> Served:
    """One run of the same queries as `Setting.simulate`."""
    queries = setting.queries(cell, seed=seed, count=count)
    with _service(setting, policy) as service:
        service.measure_latency()
        answers = send_queries(service, queries, setting.tests)
    return Served(answers=answers, best=setting.levels.best(queries))


def _service(setting: Setting, policy: str) -> Service:
    return Service.from_checkpoint(
        BACKBONE,
        policy=lambda profile: make_policy(policy, profile, scale=setting.levels.scale, time_limit=PLAN_SECONDS),
        max_waiting=100_000,
    )


def after_slowdown(report: Report, setting: Setting, *, seconds: float) -> None:
    """The same queries before, during and after a spell in which other processes take all cores; one service."""
    found = {}
    with _service(setting, "elastic") as service:
        service.measure_latency()
        for when in ("before", "during", "after"):
            queries = setting.queries(SLOWED, seed=0, count=round(seconds / 3 * SLOWED.load * setting.levels.capacity))
            with busy_cores() if when == "during" else contextlib.nullcontext():
                answers = send_queries(service, queries, setting.tests)
            found[when] = Served(answers=answers, best=setting.levels.best(queries)).normalised
    report.row(figure="slowdown", **SLOWED._asdict(), **{when: round(value, 4) for when, value in found.items()})
    rich.print(f"a slow spell: {found}")
    report.check("utility_after_slowdown", found["after"] / found["before"], "of before", target=0.98)


@contextlib.contextmanager
def busy_cores() -> Iterator[None]:
    """Processes that compute, two for each core."""
    command = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(command) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        yield
    finally:
        for process in others:
            process.kill()
            process.wait()


def with_times_of(measured: Measurements, answers: Sequence[ServedQuery]) -> Measurements:
    """The same with batches as long as they were in a run; of levels and sizes that it had none of, as before."""
    found: dict[LevelAndSize, list[float]] = defaultdict(list)
    for batch in batches_of(answers).values():
        level, size = batch[0].level, round_up(len(batch), measured.profile.sizes)
        assert level is not None
        found[level, size].append(batch[0].ended - batch[0].began)
    own = {key: np.array(seconds) for key, seconds in found.items()}
    return dataclasses.replace(measured, samples={**measured.samples, **own})


def controller_share(setting: Setting, *, seconds: float) -> float:
    """The controller's time, of a core's, at 300 queries a second: putting queries into batches, and planning."""
    arrivals = np.arange(round(CALM_RATE * seconds)) / CALM_RATE
    queries = setting.levels.queries(arrivals, seed=0, kinds=table_ii(setting.levels.profile.tasks))
    with Service.from_checkpoint(BACKBONE) as service:
        service.measure_latency()
        send_queries(service, queries, setting.tests)
        return service.statistics.planning_seconds / seconds

"""Policies served live: real images, real futures, the wall clock. The same cells are simulated, to compare.

Each is simulated twice: with batches that take as long as they were measured to before all runs, which is a prediction,
and with those of the live run itself, so that a machine that has become slower since does not count.
"""

import dataclasses
import itertools
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
import rich

from benchmarks.otas.setting import BACKBONE, Cell, Setting
from benchmarks.report import Report
from jaxinfer.elastic import Service
from jaxinfer.elastic.latency import LevelAndSize
from jaxinfer.elastic.measurements import Measurements
from jaxinfer.elastic.replay import replay
from jaxinfer.elastic.reporting.runs import batches_of
from jaxinfer.elastic.scheduling.policies import make_policy
from jaxinfer.elastic.scheduling.query import Outcome
from jaxinfer.elastic.scheduling.simulator import Served, ServedQuery
from jaxinfer.elastic.scheduling.workloads import table_ii
from jaxinfer.elastic.service import PLAN_SECONDS
from jaxinfer.generation.engine.buckets import round_up

CELLS: tuple[Cell, ...] = (("wandering", 0.8), ("wandering", 1.1))
COMPARED = ("elastic", "paper", "pets", "slack", "slackfit")
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
    late = []
    for seed, cell in itertools.product(range(seeds), CELLS):
        count = round(seconds * cell[1] * setting.levels.capacity)
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
            report.row(
                figure="live",
                trace=cell[0],
                load=cell[1],
                policy=name,
                seed=seed,
                utility=round(served.normalised, 4),
                **{what: round(value, 4) for what, value in found.items()},
                outcomes=[round(served.share(outcome), 4) for outcome in Outcome],
            )
            rich.print(f"{cell} {name}, seed {seed}: {served.normalised:.3f}, {found}")
        save()
    report.check("late_share_real", statistics.mean(late), "of queries", target=0.01, better="lower")
    for name, what in (("sim_vs_real", "simulated"), ("prediction_vs_real", "predicted")):
        report.check(name, 100 * statistics.median(errors[what]), "points, median", target=2.0, better="lower")
    share = controller_share(setting, seconds=seconds)
    report.check("controller_share", share, "of a core", target=0.05, better="lower")


def serve_live(setting: Setting, cell: Cell, policy: str, *, seed: int, count: int) -> Served:
    """One run of the same queries as `Setting.simulate`."""
    queries, scale = setting.queries(cell, seed=seed, count=count), setting.levels.scale
    with Service.from_checkpoint(
        BACKBONE,
        policy=lambda profile: make_policy(policy, profile, scale=scale, time_limit=PLAN_SECONDS),
        max_waiting=100_000,
    ) as service:
        service.measure_latency()
        answers = replay(service, queries, setting.tests)
    return Served(answers=answers, best=setting.levels.best(queries))


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
    """The controller's time, of a core's, at 300 queries a second."""
    arrivals = np.arange(round(CALM_RATE * seconds)) / CALM_RATE
    queries = setting.levels.queries(arrivals, seed=0, kinds=table_ii(setting.levels.profile.tasks))
    with Service.from_checkpoint(BACKBONE) as service:
        service.measure_latency()
        replay(service, queries, setting.tests)
        return service.statistics.planning_seconds / seconds

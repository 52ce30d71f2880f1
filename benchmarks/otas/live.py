"""Policies served live: real images, real futures, the wall clock. The same cells are simulated, to compare."""

import itertools
import statistics
from collections.abc import Callable

import numpy as np
import rich

from benchmarks.otas.setting import BACKBONE, Cell, Setting, test_images
from benchmarks.report import Report
from jaxinfer.elastic import Service
from jaxinfer.elastic.replay import replay
from jaxinfer.elastic.scheduling.policies import make_policy
from jaxinfer.elastic.scheduling.query import Outcome
from jaxinfer.elastic.scheduling.simulator import Served
from jaxinfer.elastic.scheduling.workloads import table_ii
from jaxinfer.elastic.service import PLAN_SECONDS

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
    errors, late = [], []
    for seed, cell in itertools.product(range(seeds), CELLS):
        count = round(seconds * cell[1] * setting.levels.capacity)
        for name in COMPARED:
            served = serve_live(setting, cell, name, seed=seed, count=count)
            simulated = setting.simulate(cell, name, seed=seed, count=count)
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
        save()
    report.check("late_share_real", statistics.mean(late), "of queries", target=0.01, better="lower")
    report.check("sim_vs_real", 100 * statistics.median(errors), "points, median", target=2.0, better="lower")
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
        answers = replay(service, queries, test_images(service))
    return Served(answers=answers, best=setting.levels.best(queries))


def controller_share(setting: Setting, *, seconds: float) -> float:
    """The controller's time, of a core's, at 300 queries a second."""
    arrivals = np.arange(round(CALM_RATE * seconds)) / CALM_RATE
    queries = setting.levels.queries(arrivals, seed=0, kinds=table_ii(setting.levels.profile.tasks))
    with Service.from_checkpoint(BACKBONE) as service:
        service.measure_latency()
        replay(service, queries, test_images(service))
        return service.statistics.planning_seconds / seconds

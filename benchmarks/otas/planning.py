"""The planner by itself: correct, and fast enough to run between batches."""

import gc
import itertools
import time
from collections.abc import Sequence

import numpy as np

from benchmarks.report import Report
from jaxinfer.elastic.scheduling.planner import POINTS, Job, LevelPlan, Option, plan_exact, plan_paper

INSTANCES, TIMED = 1000, 500
BATCHES, LEVELS = 10, 8


def planning(report: Report) -> None:
    """Compare plans with trying everything on small instances, and time larger ones."""
    rng = np.random.default_rng(0)
    equal, shares = 0, []
    for _ in range(INSTANCES):
        jobs = draw(rng, int(rng.integers(1, 6)), int(rng.integers(1, 4)), span=0.4)
        plan, best = plan_exact(jobs, 0.0, points=POINTS), brute_force(jobs)
        equal += abs(plan.utility - best) < 1e-9
        shares.append(earned(jobs, plan_paper(jobs, 0.0)) / best if best else 1.0)
    report.check("planner_optimal", equal / INSTANCES, "of instances", target=1.0)
    report.row(
        figure="planner", what="algorithm 2 of the best", mean=round(float(np.mean(shares)), 4), worst=min(shares)
    )
    for batches, span in ((BATCHES, 0.6), (20, 1.0), (40, 2.0)):
        taken = []
        for _ in range(TIMED):
            jobs = draw(rng, batches, LEVELS, span=span)
            gc.disable()
            begun = time.perf_counter()
            plan_exact(jobs, 0.0, points=POINTS)
            taken.append(1e3 * (time.perf_counter() - begun))
            gc.enable()
        p50, p99 = np.percentile(taken, (50, 99))
        report.row(figure="planner", batches=batches, levels=LEVELS, p50_ms=round(p50, 3), p99_ms=round(p99, 3))
        if batches == BATCHES:
            report.check("plan_p99_ms", p99, "ms", target=2.0, better="lower")


def draw(rng: np.random.Generator, count: int, levels: int, *, span: float) -> list[Job]:
    """Draw batches as in a queue: more tokens take longer and are mostly more accurate."""
    jobs = []
    for _ in range(count):
        seconds, accuracy = np.sort(rng.uniform(0.01, 0.12, levels)), np.sort(rng.uniform(0.4, 1, levels))
        utilities = rng.uniform(0.2, 1.0) * np.clip(accuracy + rng.normal(0, 0.05, levels), 0, 1)
        options = [Option(n, float(s), float(u)) for n, (s, u) in enumerate(zip(seconds, utilities, strict=True))]
        jobs.append(Job(float(rng.uniform(0.02, span)), tuple(options)))
    return jobs


def brute_force(jobs: Sequence[Job]) -> float:
    """Find the best utility over all choices of levels."""
    ordered = sorted(jobs, key=lambda job: job.deadline)
    best = 0.0
    for chosen in itertools.product(*((None, *job.options) for job in ordered)):
        clock = utility = 0.0
        for job, option in zip(ordered, chosen, strict=True):
            if option is None:
                continue
            clock += option.seconds
            if clock >= job.deadline:
                break
            utility += option.utility
        else:
            best = max(best, utility)
    return best


def earned(jobs: Sequence[Job], plan: LevelPlan) -> float:
    """Compute the utility of a plan when it is carried out; late batches earn nothing."""
    clock = utility = 0.0
    for job, level in sorted(zip(jobs, plan.levels, strict=True), key=lambda pair: pair[0].deadline):
        option = next((option for option in job.options if option.level == level), None)
        if option is not None:
            clock += option.seconds
            utility += option.utility if clock < job.deadline else 0.0
    return utility

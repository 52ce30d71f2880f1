"""Planning: a level for each batch of a queue, to maximise the utility of queries answered in time (OTAS, eq. 1).

A batch earns its utility if it ends before its deadline. All batches are known, so that those which run can run in the
order of their deadlines (an exchange argument), and a plan is a level, or none, for each.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

POINTS = 400
"""Points of a Pareto front, where a plan must be ready before the running batch has ended."""


class Option(NamedTuple):
    """A level for a batch.

    Attributes:
      level: the level.
      seconds: seconds that the batch takes.
      utility: the expected utility of its queries, if it ends in time.
    """

    level: int
    seconds: float
    utility: float


class Job(NamedTuple):
    """A batch as planners see it.

    Attributes:
      deadline: time before which it must end.
      options: its possible levels.
    """

    deadline: float
    options: tuple[Option, ...]


class LevelPlan(NamedTuple):
    """A planner's decision.

    Attributes:
      levels: each job's level, in the order of jobs; None: it does not run.
      utility: its total utility.
      end: when the last job ends.
    """

    levels: list[int | None]
    utility: float
    end: float


class PlanTimeoutError(Exception):
    """A planner exceeded its time limit; a faster way to decide is needed."""


def plan_exact(
    jobs: Sequence[Job],
    start: float,
    *,
    points: int | None = None,
    time_limit: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> LevelPlan:
    """Find the best plan, by a Pareto front of (end, utility) after each job.

    A partial plan that ends later than another and earns no more can be dropped: anything that can follow it can follow
    the other. This is a dynamic programme for one machine, weighted late jobs and several ways to run each (Lawler and
    Moore, 1969).

    Args:
      jobs: any number of jobs.
      start: when the device is free.
      points: points of the front kept after each job, which bounds the work: if it has more, its time span is cut into
        this many intervals, and the best point of each is kept. A plan still meets its deadlines, and may lose a little
        utility; jobs with later deadlines do not change the plan of those before. None: all.
      time_limit: maximum seconds of planning, checked after each job; None: any.
      clock: measures these seconds.

    Raises ValueError for times that are negative or not finite, PlanTimeoutError.
    """
    _check(jobs, start)
    stop = None if time_limit is None else clock() + time_limit
    order = sorted(range(len(jobs)), key=lambda index: jobs[index].deadline)
    options = [_useful(job, start) for job in jobs]
    ends, utilities = np.array([float(start)]), np.array([0.0])
    steps: list[tuple[np.ndarray, np.ndarray]] = []  # per job: each point's predecessor, and its option
    for index in order:
        if stop is not None and clock() > stop:
            raise PlanTimeoutError(f"planning {len(jobs)} batches took more than {time_limit:g} s.")
        count = len(ends)
        seconds = np.array([0.0, *(option.seconds for option in options[index])])
        earned = np.array([0.0, *(option.utility for option in options[index])])
        new_ends, new_utilities = (ends + seconds[:, None]).ravel(), (utilities + earned[:, None]).ravel()
        feasible = new_ends < jobs[index].deadline
        feasible[:count] = True  # without the job
        candidates = np.flatnonzero(feasible)
        candidates = candidates[np.argsort(new_ends[candidates], kind="stable")]
        kept = candidates[_rises(new_utilities[candidates])]
        if points is not None and len(kept) > points:
            cells = np.searchsorted(np.linspace(start, new_ends[kept[-1]], points + 1), new_ends[kept])
            kept = kept[np.append(cells[1:] > cells[:-1], True)]
        steps.append((kept % count, kept // count))
        ends, utilities = new_ends[kept], new_utilities[kept]
    levels: list[int | None] = [None] * len(jobs)
    at = len(ends) - 1
    for index, (previous, chosen) in zip(reversed(order), reversed(steps), strict=True):
        if chosen[at]:
            levels[index] = options[index][chosen[at] - 1].level
        at = previous[at]
    return LevelPlan(levels, float(utilities[-1]), float(ends[-1]))


def _rises(values: np.ndarray) -> np.ndarray:
    """Return where a value is above all before it."""
    return np.concatenate(([True], values[1:] > np.maximum.accumulate(values)[:-1]))


def plan_paper(jobs: Sequence[Job], start: float) -> LevelPlan:
    """Plan by OTAS's Algorithm 2 as printed: its plans can be far from the best and even miss deadlines.

    It keeps one end and one utility for each job and level, the rows begin with utility 0 and previous level 1, and a
    level whose predecessors all earn nothing keeps them; index 0 means that the job does not run.
    """
    _check(jobs, start)
    order = sorted(range(len(jobs)), key=lambda index: jobs[index].deadline)
    count = max((len(job.options) for job in jobs), default=0)
    utilities, ends = np.zeros((len(jobs) + 1, count + 1)), np.full((len(jobs) + 1, count + 1), float(start))
    previous = np.ones((len(jobs) + 1, count + 1), int)
    for row, index in enumerate(order, 1):
        for level in range(count + 1):
            feasible = level == 0
            option = jobs[index].options[level - 1] if 0 < level <= len(jobs[index].options) else None
            for before in range(count + 1):
                if utilities[row - 1, before] == -np.inf or (level and option is None):
                    continue
                end, earned = ends[row - 1, before], utilities[row - 1, before]
                if option is not None:
                    end, earned = end + option.seconds, earned + option.utility
                    if end >= jobs[index].deadline:
                        continue
                    feasible = True
                if earned > utilities[row, level]:
                    utilities[row, level], ends[row, level], previous[row, level] = earned, end, before
            if not feasible:
                utilities[row, level], ends[row, level] = -np.inf, np.inf
    levels: list[int | None] = [None] * len(jobs)
    at = int(np.argmax(utilities[-1]))
    end, utility = float(ends[-1, at]), float(utilities[-1, at])
    for row in range(len(jobs), 0, -1):
        options = jobs[order[row - 1]].options
        levels[order[row - 1]] = options[at - 1].level if 0 < at <= len(options) else None
        at = previous[row, at]
    return LevelPlan(levels, utility, end)


def _useful(job: Job, start: float) -> list[Option]:
    """The options that can end in time and earn more than every one that takes no longer."""
    useful: list[Option] = []
    for option in sorted(job.options, key=lambda option: (option.seconds, -option.utility)):
        if start + option.seconds < job.deadline and option.utility > (useful[-1].utility if useful else 0.0):
            useful.append(option)
    return useful


def _check(jobs: Sequence[Job], start: float) -> None:
    values = [start, *(job.deadline for job in jobs)]
    values += [value for job in jobs for option in job.options for value in option[1:]]
    if not all(map(math.isfinite, values)) or any(option[1] < 0 for job in jobs for option in job.options):
        raise ValueError("a plan needs times and utilities that are finite, and seconds >= 0.")

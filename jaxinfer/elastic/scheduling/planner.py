"""Which level each batch of a queue gets, so that the queries that are answered in time earn the most (OTAS, eq. 1).

A batch earns its utility if it ends before its deadline. All batches are there, so that those which run may run in the
order of their deadlines (an exchange argument), and a plan is a level, or none, for each.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

POINTS = 400
"""Of a Pareto front, where a plan must be there before the batch that runs has ended."""


class Option(NamedTuple):
    """A level for a batch.

    Attributes:
      level: which one.
      seconds: that the batch takes.
      utility: what its queries earn on average, if it ends in time.
    """

    level: int
    seconds: float
    utility: float


class Job(NamedTuple):
    """A batch as planners see it.

    Attributes:
      deadline: before which it must end.
      options: its levels.
    """

    deadline: float
    options: tuple[Option, ...]


class Plan(NamedTuple):
    """What a planner decides.

    Attributes:
      levels: of each job, in their order; None: it does not run.
      utility: what it earns.
      end: when the last one ends.
    """

    levels: list[int | None]
    utility: float
    end: float


class PlanTimeoutError(Exception):
    """A planner took longer than it may; another way to decide is needed."""


def plan_exact(
    jobs: Sequence[Job],
    start: float,
    *,
    points: int | None = None,
    time_limit: float | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Plan:
    """The best plan, by a Pareto front of (end, utility) after each job.

    Of two partial plans, one that ends later and earns no more can be forgotten: whatever follows it can follow the
    other. This is a dynamic programme for one machine, weighted late jobs and several ways to run each (Lawler and
    Moore, 1969).

    Args:
      jobs: any number of them.
      start: when the device is free.
      points: that the front keeps after each job, which bounds the work: where it has more, the time that it spans is
        cut into so many intervals, and of each the point that earns most is kept. A plan still keeps its deadlines, and
        may miss a little utility; jobs with later deadlines change nothing in how those before are planned. None: all.
      time_limit: seconds that planning may take, looked at after each job; None: any.
      clock: that they are taken from.
    Raises ValueError for times that are negative or not finite, PlanTimeoutError.
    """
    _check(jobs, start)
    stop = None if time_limit is None else clock() + time_limit
    order = sorted(range(len(jobs)), key=lambda index: jobs[index].deadline)
    options = [_useful(job, start) for job in jobs]
    ends, utilities = np.array([float(start)]), np.array([0.0])
    steps: list[tuple[np.ndarray, np.ndarray]] = []  # of each job: the point that each one comes from, and its option
    for index in order:
        if stop is not None and clock() > stop:
            raise PlanTimeoutError(f"planning {len(jobs)} batches took more than {time_limit:g} s.")
        count = len(ends)
        seconds = np.array([0.0, *(option.seconds for option in options[index])])
        earned = np.array([0.0, *(option.utility for option in options[index])])
        new_ends, new_utilities = (ends + seconds[:, None]).ravel(), (utilities + earned[:, None]).ravel()
        feasible = new_ends < jobs[index].deadline
        feasible[:count] = True  # without the job
        found = np.flatnonzero(feasible)
        found = found[np.argsort(new_ends[found], kind="stable")]
        kept = found[_rises(new_utilities[found])]
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
    return Plan(levels, float(utilities[-1]), float(ends[-1]))


def _rises(values: np.ndarray) -> np.ndarray:
    """Where a value is above all before it."""
    return np.concatenate(([True], values[1:] > np.maximum.accumulate(values)[:-1]))


def plan_paper(jobs: Sequence[Job], start: float) -> Plan:
    """OTAS's Algorithm 2 as it is printed, whose plans can be far from the best one and even miss deadlines.

    It keeps one end and one utility for each job and level, the rows begin with utility 0 and previous level 1, and a
    level of which no predecessor earns anything keeps them; index 0 means that the job does not run.
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
    return Plan(levels, utility, end)


def _useful(job: Job, start: float) -> list[Option]:
    """The options that can end in time, and earn more than every one that takes no longer."""
    found: list[Option] = []
    for option in sorted(job.options, key=lambda option: (option.seconds, -option.utility)):
        if start + option.seconds < job.deadline and option.utility > (found[-1].utility if found else 0.0):
            found.append(option)
    return found


def _check(jobs: Sequence[Job], start: float) -> None:
    values = [start, *(job.deadline for job in jobs)]
    values += [value for job in jobs for option in job.options for value in option[1:]]
    if not all(map(math.isfinite, values)) or any(option[1] < 0 for job in jobs for option in job.options):
        raise ValueError("a plan needs times and utilities that are finite, and seconds >= 0.")

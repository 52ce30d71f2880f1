"""Measurements for a new task: accuracy, batch latency, and the best division of each level's merges."""

import time
from collections.abc import Collection, Sequence

import numpy as np

from jaxinfer.elastic.accuracy import LevelAccuracy
from jaxinfer.elastic.levels import Levels
from jaxinfer.elastic.programs import LevelAndSize, LevelPrograms
from jaxinfer.elastic.tasks.datasets import Dataset
from jaxinfer.elastic.tasks.repository import Task
from jaxinfer.models.layers.token_adaptation import MergeSchedule, TokenAdaptation
from jaxinfer.progress import long_work


def time_batches(
    programs: LevelPrograms, batches: Sequence[LevelAndSize], repeats: int
) -> dict[LevelAndSize, np.ndarray]:
    """Time each batch; return its seconds, [repeats].

    Each runs once per round, and rounds are in different orders, as when serving: a program that has just run takes up
    to a tenth less, since its code and buffers are in caches.
    """
    rng, size = np.random.default_rng(0), programs.image_size
    images = rng.integers(0, 256, (programs.sizes[-1], size, size, 3), np.uint8)
    times = {batch: list[float]() for batch in batches}
    with long_work("timing batches", total=(1 + repeats) * len(times)) as work:
        for _ in range(1 + repeats):  # the first round links programs, and is not counted
            for level, count in rng.permutation(batches).tolist():
                times[level, count].append(programs.rehearse(level, images[:count]))
                work.advance()
    return {batch: np.array(seconds[1:]) for batch, seconds in times.items()}


def choose_schedules(
    programs: LevelPrograms, levels: Levels, task: Task, validation: Dataset
) -> dict[int, MergeSchedule]:
    """Choose the merging levels' schedules; where they are undecided, choose them by this task."""
    schedules = dict(levels.schedules)
    undecided = [level for level in levels.merge_levels if level not in schedules and levels.forced is None]
    with long_work("choosing where levels merge", total=len(undecided)) as work:
        for level in undecided:
            schedules[level] = _choose_schedule(programs, levels, level, task, validation)
            work.advance()
    return schedules


def _choose_schedule(
    programs: LevelPrograms, levels: Levels, level: int, task: Task, validation: Dataset
) -> MergeSchedule:
    """Choose the faster schedule, unless it is less accurate by more than a standard error."""
    results = {
        schedule: _evaluate(programs, task, levels.adaptation(level, schedule), validation)
        for schedule in MergeSchedule
    }
    (constant, slow), (decreasing, fast) = results[MergeSchedule.CONSTANT], results[MergeSchedule.DECREASING]
    if fast > slow:
        return MergeSchedule.CONSTANT
    compared = LevelAccuracy.from_correct(decreasing, constant, "")
    is_worse = compared.difference < -compared.difference_error
    return MergeSchedule.CONSTANT if is_worse else MergeSchedule.DECREASING


def schedules_of(tasks: Collection[Task], levels: Levels, weights: str) -> dict[int, MergeSchedule]:
    """The merging levels' schedules that most tasks were profiled with, without levels where none was.

    Tasks share batches, and so schedules.

    Args:
      weights: the format of the weights.
    """
    schedules = {}
    for level in levels.merge_levels:
        ran = {schedule: level_key(levels.adaptation(level, schedule), weights) for schedule in MergeSchedule}
        profiled = {schedule: sum(ran[schedule] in task.accuracy for task in tasks) for schedule in MergeSchedule}
        if any(profiled.values()):
            schedules[level] = max(profiled, key=profiled.__getitem__)
    return schedules


def profile_accuracy(
    programs: LevelPrograms, task: Task, validation: Dataset, weights: str
) -> dict[str, LevelAccuracy]:
    """Measure a task's accuracy at each of its levels, by `level_key`.

    Args:
      programs: the programs of the levels.
      task: a task that they need not serve.
      validation: images that it was not trained on.
      weights: the format of the weights.
    """
    levels = [level for level in programs.levels if level <= 0 or level in task.prompts]
    accuracies = {}
    with long_work("measuring accuracy", total=len(levels)) as work:
        plain, _ = _evaluate(programs, task, programs.adaptation(0), validation)
        for level in levels:
            adaptation = programs.adaptation(level)
            correct = _evaluate(programs, task, adaptation, validation)[0] if level else plain
            ran = level_key(adaptation, weights)
            accuracies[ran] = LevelAccuracy.from_correct(correct, plain, ran)
            work.advance()
    return accuracies


def level_key(adaptation: TokenAdaptation, weights: str) -> str:
    """A key for everything that accuracy depends on, except the task."""
    return f"{adaptation} in {weights}"


def _evaluate(
    programs: LevelPrograms, task: Task, adaptation: TokenAdaptation, validation: Dataset
) -> tuple[np.ndarray, float]:
    """Return which images are classified rightly, bool [N], and the seconds of the fastest batch."""
    logits_of, largest = programs.try_task(task, adaptation), programs.sizes[-1]
    logits_of(validation.images[:1])  # compiles
    logits, seconds = [], []
    for first in range(0, len(validation), largest):
        begun = time.perf_counter()
        logits.append(logits_of(validation.images[first : first + largest]))
        seconds.append(time.perf_counter() - begun)
    return np.concatenate(logits).argmax(-1) == validation.labels, min(seconds)

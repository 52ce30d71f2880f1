"""What is measured when a task is registered: accuracy, what batches take, and how levels best divide their merges."""

import time
from collections.abc import Collection, Sequence

import numpy as np

from jaxinfer.elastic.accuracy import LevelAccuracy
from jaxinfer.elastic.latency import LevelAndSize
from jaxinfer.elastic.levels import Levels
from jaxinfer.elastic.programs import LevelPrograms
from jaxinfer.elastic.tasks.datasets import Dataset
from jaxinfer.elastic.tasks.repository import Task
from jaxinfer.models.layers.token_adaptation import MergeSchedule, TokenAdaptation
from jaxinfer.serving.progress import Progress


def time_batches(
    programs: LevelPrograms, wanted: Sequence[LevelAndSize], repeats: int, progress: Progress
) -> dict[LevelAndSize, np.ndarray]:
    """The seconds of each batch, [repeats].

    Each runs once in a round, and rounds are in different orders, as when serving: a program that has just run takes up
    to a tenth less, since its code and buffers are in caches.
    """
    rng, size = np.random.default_rng(0), programs.image_size
    images = rng.integers(0, 256, (programs.sizes[-1], size, size, 3), np.uint8)
    found = {batch: list[float]() for batch in wanted}
    for done in range(1 + repeats):  # the first round links programs, and is not counted
        for level, count in rng.permutation(wanted).tolist():
            found[level, count].append(programs.rehearse(level, images[:count]))
        progress("latency", done, repeats)
    return {batch: np.array(seconds[1:]) for batch, seconds in found.items()}


def choose_schedules(
    programs: LevelPrograms, levels: Levels, task: Task, validation: Dataset, progress: Progress
) -> dict[int, MergeSchedule]:
    """How merging levels divide their merges; chosen by this task where that is not decided."""
    schedules = dict(levels.schedules)
    undecided = [level for level in levels.merge_levels if level not in schedules and levels.forced is None]
    for done, level in enumerate(undecided):
        schedules[level] = _choose_schedule(programs, levels, level, task, validation)
        progress("schedules", done + 1, len(undecided))
    return schedules


def _choose_schedule(
    programs: LevelPrograms, levels: Levels, level: int, task: Task, validation: Dataset
) -> MergeSchedule:
    """The faster way to divide merges over the layers, unless it is less accurate by more than a standard error."""
    found = {
        schedule: _evaluate(programs, task, levels.adaptation(level, schedule), validation)
        for schedule in MergeSchedule
    }
    (constant, slow), (decreasing, fast) = found[MergeSchedule.CONSTANT], found[MergeSchedule.DECREASING]
    if fast > slow:
        return MergeSchedule.CONSTANT
    compared = LevelAccuracy.of(decreasing, constant, "")
    is_worse = compared.difference < -compared.difference_error
    return MergeSchedule.CONSTANT if is_worse else MergeSchedule.DECREASING


def schedules_of(tasks: Collection[Task], levels: Levels, weights: str) -> dict[int, MergeSchedule]:
    """How merging levels divide their merges: as most tasks were profiled; without those at which none was.

    Tasks share batches, and so schedules. weights: the format of the weights.
    """
    found = {}
    for level in levels.merge_levels:
        ran = {schedule: what_runs(levels.adaptation(level, schedule), weights) for schedule in MergeSchedule}
        profiled = {schedule: sum(ran[schedule] in task.accuracy for task in tasks) for schedule in MergeSchedule}
        if any(profiled.values()):
            found[level] = max(profiled, key=profiled.__getitem__)
    return found


def profile_accuracy(
    programs: LevelPrograms, task: Task, validation: Dataset, weights: str, progress: Progress
) -> dict[str, LevelAccuracy]:
    """A task's accuracy at all levels that are compiled and that it has, by what ran.

    Args:
      programs: of the levels.
      task: need not be one that they serve.
      validation: images that it was not trained on.
      weights: the format of the weights.
      progress: see `Progress`.
    """
    levels = [level for level in programs.levels if level <= 0 or level in task.prompts]
    plain, _ = _evaluate(programs, task, programs.adaptation(0), validation)
    found = {}
    for done, level in enumerate(levels):
        adaptation = programs.adaptation(level)
        correct = _evaluate(programs, task, adaptation, validation)[0] if level else plain
        ran = what_runs(adaptation, weights)
        found[ran] = LevelAccuracy.of(correct, plain, ran)
        progress("accuracy", done + 1, len(levels))
    return found


def what_runs(adaptation: TokenAdaptation, weights: str) -> str:
    """All that accuracy depends on beside the task."""
    return f"{adaptation} in {weights}"


def _evaluate(
    programs: LevelPrograms, task: Task, adaptation: TokenAdaptation, validation: Dataset
) -> tuple[np.ndarray, float]:
    """Which images are classified rightly, bool [N], and the least seconds that a batch took."""
    logits_of, largest = programs.try_task(task, adaptation), programs.sizes[-1]
    logits_of(validation.images[:1])  # compiles
    found, seconds = [], []
    for first in range(0, len(validation), largest):
        begun = time.perf_counter()
        found.append(logits_of(validation.images[first : first + largest]))
        seconds.append(time.perf_counter() - begun)
    return np.concatenate(found).argmax(-1) == validation.labels, min(seconds)

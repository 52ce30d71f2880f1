"""What is measured when a task is registered: its accuracy at each level, and how levels best divide their merges."""

import time

import numpy as np

from jaxinfer.elastic.accuracy import LevelAccuracy
from jaxinfer.elastic.datasets import Dataset
from jaxinfer.elastic.levels import Levels
from jaxinfer.elastic.programs import LevelPrograms
from jaxinfer.elastic.progress import Progress
from jaxinfer.elastic.tasks import Task
from jaxinfer.models.token_adaptation import MergeSchedule, TokenAdaptation


def choose_schedule(
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


def profile_accuracy(
    programs: LevelPrograms, task: Task, validation: Dataset, weights: str, progress: Progress
) -> dict[int, LevelAccuracy]:
    """A task's accuracy at all levels that are compiled and that it has.

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
        found[level] = LevelAccuracy.of(correct, plain, what_runs(adaptation, weights))
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

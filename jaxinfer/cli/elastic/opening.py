"""Checks that need no weights: what can be refused is refused before anything long begins."""

from collections.abc import Sequence
from pathlib import Path

from jaxinfer.checkpoints import CheckpointError
from jaxinfer.elastic import ProfileError, Service, Task, TaskRepository
from jaxinfer.elastic.levels import require_vit
from jaxinfer.elastic.tasks.datasets import DATASETS
from jaxinfer.hub import resolve
from jaxinfer.models.config import PreprocessingConfig
from jaxinfer.models.files.description import Description


def images_of(model: Path) -> tuple[int, PreprocessingConfig]:
    """Return the height and width of a model's images, and how others become so.

    Raises CheckpointError, ElasticError for another model.
    """
    config = require_vit(model, Description.read(resolve(model)).config)
    return config.image_size, config.preprocessing


def read_tasks(model: Path, folder: Path | None, names: Sequence[str]) -> dict[str, Task]:
    """Read the tasks of these names, or all that can be read. Raises ValueError if there are none."""
    repository = TaskRepository.of_model(model, folder)
    if names:
        return {name: repository.read(name) for name in names}
    tasks = {}
    for name in repository.names():
        try:
            tasks[name] = repository.read(name)
        except CheckpointError:  # the service says so, and serves the others
            continue
    if not tasks:
        raise ValueError(f"{repository.folder}: no tasks; register one with `jaxinfer elastic register`.")
    return tasks


def levels_of(service: Service, task: str) -> list[int]:
    """Return the levels that a task has."""
    return [level for level in service.levels if level <= 0 or level in service.task(task).prompts]


def check_profiled(service: Service, model: Path, task: str) -> None:
    """Check that a task's accuracy was measured at all its levels. Raises ValueError, which says what to type."""
    for level in levels_of(service, task):
        try:
            service.accuracy(task, level)
        except ProfileError:
            raise ValueError(
                f"task {task!r} was not profiled at level {level} with this model and these options; run: "
                f"{how_to_profile(model, task)}"
            ) from None


def how_to_profile(model: Path, task: str) -> str:
    """Return the command that measures a task."""
    return f"jaxinfer elastic profile {model} --task {task} --data {task if task in DATASETS else 'DATA'}"

"""The tasks of a service: read from the repository, trained, profiled, and stored there."""

import contextlib
import dataclasses
import hashlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, TypedDict

from msgspec import Meta

from jaxinfer.elastic.accuracy import LevelAccuracy, expected_accuracies
from jaxinfer.elastic.catalogue import LevelCatalogue
from jaxinfer.elastic.errors import ElasticError, LevelError, ProfileError, UnknownTaskError
from jaxinfer.elastic.latency import REPEATS
from jaxinfer.elastic.profiling import choose_schedules, level_key, profile_accuracy, schedules_of
from jaxinfer.elastic.scheduling.profile import ServingProfile
from jaxinfer.elastic.tasks.datasets import Dataset, Division
from jaxinfer.elastic.tasks.images import check_images
from jaxinfer.elastic.tasks.repository import Task, TaskRepository
from jaxinfer.elastic.tasks.training import TrainingConfig
from jaxinfer.fields import Size, check
from jaxinfer.models.files.loading import LoadedModel
from jaxinfer.models.layers.token_adaptation import PromptMode
from jaxinfer.serving.heap import trim_heap
from jaxinfer.sizes import round_up

log = logging.getLogger(__name__)

_Prompts = Annotated[list[Size], Meta(description="a list of integers >= 1")]

CheckPlan = Callable[[Mapping[str, Task]], Callable[[], None]]
"""Checks that queries of these tasks can be planned, and returns a function that begins to plan for them."""


class RegistrationOptions(TypedDict, total=False):
    """Options of `Service.register_task`."""

    prompts: Sequence[int]
    """Numbers of prompts, each a level > 0; default: none."""
    division: Division | None
    """The division of the data set, which is kept with the task; default: a fifth is for validation."""
    validation: Dataset | None
    """Images to measure accuracy on, of classes of the same names; all of the data set is then for training. Default: a
    part of the data set."""
    training: TrainingConfig | None
    """The training options of prompts."""
    new_version: bool
    """Whether to replace a task of this name, which is an error otherwise."""


class TaskRegistrar:
    """The tasks of a service, and their accuracy.

    Args:
      model: the backbone.
      repository: the repository of tasks.
      catalogue: the levels, to which it adds those of the tasks' prompts.

    Attributes:
      repository: where the tasks are stored.
      refused: errors of the repository's tasks that are not served, since they are damaged or of another model.
    """

    def __init__(self, model: LoadedModel, repository: TaskRepository, catalogue: LevelCatalogue):
        self.repository, self._catalogue = repository, catalogue
        self._backbone, self._format = _digest(model), str(model.weights.quantized or model.weights.dtype)
        levels = catalogue.adaptations
        self._tasks: dict[str, Task] = {}
        self.refused: dict[str, Exception] = {}
        for name in repository.names():
            try:
                self._tasks[name] = _fitting(repository.read(name), self._backbone, levels.prompt_mode)
            except Exception as error:  # whatever is wrong with one task does not concern the others
                log.warning("Task %r is not served: %s", name, error)
                self.refused[name] = error
        tasks = self._tasks.values()
        self._registering = threading.Lock()  # held while a task is trained and profiled
        catalogue.add(schedules_of(tasks, levels, self._format), _prompts_of(*tasks))
        for task in tasks:
            catalogue.programs.put(task)

    @property
    def tasks(self) -> dict[str, Task]:
        """A copy of the tasks by name."""
        return dict(self._tasks)

    def task(self, name: str) -> Task:
        """A task by its name. Raises UnknownTaskError, or ElasticError for a refused one."""
        name = check("task", name, str)
        if (why := self.refused.get(name)) is not None:
            raise ElasticError(f"task {name!r} is not served: {why}") from why
        if name not in self._tasks:
            raise UnknownTaskError(f"no task {name!r}; registered: {', '.join(self._tasks) or 'none'}.")
        return self._tasks[name]

    def free(self) -> None:
        """Give all memory back, the catalogue's too, unless a task is being registered, whose end does."""
        if not self._registering.acquire(blocking=False):
            return
        try:
            self._catalogue.free()
            trim_heap()
        finally:
            self._registering.release()

    # Accuracy

    def check_has_level(self, task: Task, level: int) -> None:
        """Raise LevelError unless a task can run at a level."""
        self._catalogue.adaptation(level)
        if level > 0 and level not in task.prompts:
            known = ", ".join(map(str, task.prompts)) or "none"
            raise LevelError(f"task {task.name!r} was not trained with {level} prompts; trained numbers: {known}.")

    def accuracy(self, task: Task, level: int) -> LevelAccuracy:
        """A task's accuracy at a level. Raises ProfileError if it was not measured, or the level has changed since."""
        self.check_has_level(task, level)
        now = level_key(self._catalogue.adaptation(level), self._format)
        if now not in task.accuracy:
            profiled = "; ".join(task.accuracy) or "nothing"
            raise ProfileError(
                f"task {task.name!r} was not profiled at level {level} with its present settings, {now}: call "
                f"`profile` with its images. Profiled: {profiled}."
            )
        return task.accuracy[now]

    def shared_levels(self, tasks: Mapping[str, Task] | None = None) -> tuple[int, ...]:
        """The levels that these tasks share, or all tasks, ascending."""
        tasks, levels = self._tasks if tasks is None else tasks, self._catalogue.programs.levels
        return tuple(n for n in levels if n <= 0 or all(n in task.prompts for task in tasks.values()))

    def profile_of(
        self, tasks: Mapping[str, Task] | None = None, levels: Sequence[int] | None = None
    ) -> ServingProfile:
        """The accuracy and latency of these tasks, or all, at these levels, or those that the tasks share.

        Raises ProfileError for what was not measured, or has changed since.
        """
        tasks = self._tasks if tasks is None else tasks
        levels = self.shared_levels(tasks) if levels is None else self._catalogue.known(levels)
        latency, sizes = self._catalogue.latency, self._catalogue.programs.sizes
        if missing := latency.missing(levels, sizes):
            level, batch = missing[0]
            raise ProfileError(f"batches of {batch} at level {level} were not timed here: call `measure_latency`.")
        accuracy = {}
        for name, task in tasks.items():
            expected = expected_accuracies([self.accuracy(task, level) for level in levels])
            accuracy |= {(name, level): share for level, share in zip(levels, expected, strict=True)}
        return ServingProfile(
            levels=tuple(levels),
            sizes=sizes,
            seconds={(n, b): latency.seconds(n, b).p95 for n in levels for b in sizes},
            accuracy=accuracy,
        )

    def ready_profile(self, tasks: Mapping[str, Task] | None = None) -> ServingProfile:
        """Return what a live service plans with: levels that can run batches of all sizes.

        A size that is not compiled yet takes the seconds of the next one, which it runs in.
        """
        whole, programs = self.profile_of(tasks), self._catalogue.programs
        ready = {level: sizes for level in whole.levels if programs.sizes[-1] in (sizes := programs.ready(level))}
        padded = {(n, b): whole.seconds[n, round_up(b, sizes)] for n, sizes in ready.items() for b in whole.sizes}
        return dataclasses.replace(whole.at_levels(ready), seconds=padded)

    # New tasks and versions

    def register(
        self,
        name: str,
        dataset: Dataset,
        check_plan: CheckPlan,
        *,
        prompts: Sequence[int] = (),
        division: Division | None = None,
        validation: Dataset | None = None,
        training: TrainingConfig | None = None,
        new_version: bool = False,
    ) -> Task:
        """Train a task, profile it, store it, and serve it; an error leaves everything as it was."""
        with self._registration():
            version = self.repository.next_version(name, new_version=new_version)
            programs, levels = self._catalogue.programs, self._catalogue.adaptations
            check_images(dataset.images, levels.config.image_size)
            prompts = check("prompts", prompts, _Prompts, error=LevelError)
            programs.check_room(name, dataset.names)
            if validation is None:
                division = division or Division()
                dataset, validation, _ = division.parts(dataset)
            elif division is not None:
                raise ElasticError("register_task: give validation images, or a division of the data set, not both.")
            validation = self._checked(validation, dataset.names)
            options = training or TrainingConfig()
            heads, learnt = programs.trainer().train(dataset, prompts, levels.prompt_mode, options)
            task = Task(
                name=name,
                labels=dataset.names,
                backbone=self._backbone,
                prompt_mode=levels.prompt_mode,
                heads=heads,
                prompts=learnt,
                accuracy={},
                division=division,
                version=version,
            )
            return self._install(task, validation, check_plan)

    def profile(self, name: str, validation: Dataset, check_plan: CheckPlan) -> Task:
        """Measure a task's accuracy again, and keep it as a new version; an error leaves everything as it was."""
        with self._registration():
            task = self.task(name)
            validation = self._checked(validation, task.labels)
            version = self.repository.next_version(name, new_version=True)
            remeasure = not self._catalogue.is_serving
            return self._install(
                dataclasses.replace(task, version=version), validation, check_plan, remeasure=remeasure
            )

    @contextlib.contextmanager
    def _registration(self) -> Iterator[None]:
        """Hold the lock by which one task at a time is registered or profiled."""
        self._catalogue.origin.check()
        try:
            with self._registering:
                yield
        finally:
            if self._catalogue.is_ending:
                self.free()

    def _checked(self, validation: Dataset, labels: Sequence[str]) -> Dataset:
        """Check images for measuring accuracy; number their classes as the task's labels."""
        check_images(validation.images, self._catalogue.adaptations.config.image_size)
        return validation.with_names(labels)

    def _install(self, task: Task, validation: Dataset, check_plan: CheckPlan, *, remeasure: bool = False) -> Task:
        """Profile a task, keep it, and serve it; if that fails, the service stays as it is.

        Other tasks' profiles stay, and so do other profiles of this version's prompts and heads.

        Args:
          remeasure: whether to time batches that were timed before.
        """
        catalogue = self._catalogue
        with catalogue.unchanged_by_errors():
            programs = catalogue.programs
            schedules = choose_schedules(programs, catalogue.adaptations, task, validation)
            catalogue.add(schedules, _prompts_of(*self._tasks.values(), task))
            catalogue.compile_all(programs.levels)
            accuracies = profile_accuracy(programs, task, validation, self._format)
            task = dataclasses.replace(task, accuracy={**task.accuracy, **accuracies})
            catalogue.measure(programs.levels, remeasure=remeasure, repeats=REPEATS)
            self._serve(task, check_plan)
        return task

    def _serve(self, task: Task, check_plan: CheckPlan) -> None:
        """Keep a task and serve it at once. Raises ValueError if a policy at work cannot use its levels."""
        tasks = self._tasks | {task.name: task}
        lost = set(self.shared_levels()) - set(self.shared_levels(tasks))
        with self._catalogue.lock:
            begin = check_plan(tasks)
            self.repository.write(task)
            self._catalogue.programs.put(task)
            self._tasks = tasks
            self.refused.pop(task.name, None)
            begin()
        if lost and len(tasks) > 1:
            levels = ", ".join(map(str, sorted(lost)))
            log.warning("Queries run no more at the levels %s: task %r has no such prompts.", levels, task.name)


def _prompts_of(*tasks: Task) -> set[int]:
    """The numbers of prompts that tasks were trained with."""
    return {count for task in tasks for count in task.prompts}


def _fitting(task: Task, backbone: str, mode: PromptMode) -> Task:
    """Check that a task from the repository fits the service. Raises ElasticError."""
    if task.backbone != backbone:
        raise ElasticError(
            f"task {task.name!r} was trained with another model; open that model, or register the task again in "
            "another repository."
        )
    if task.prompts and task.prompt_mode != mode:
        raise ElasticError(
            f"the prompts of task {task.name!r} were trained with prompt_mode={task.prompt_mode.value!r}; open the "
            "service with this prompt_mode."
        )
    return task


def _digest(model: LoadedModel) -> str:
    """A digest of the weights on disk."""
    files = sorted((name, file.sha256) for name, file in model.manifest.files.items() if name.startswith("state/"))
    return hashlib.sha256(repr(files).encode()).hexdigest()[:16]

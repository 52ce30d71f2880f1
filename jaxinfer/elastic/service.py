"""`Service`: one vision transformer for many tasks, its tokens chosen for each batch (OTAS, section III)."""

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Annotated, Self, TypedDict, Unpack

import numpy as np
from msgspec import Meta

from jaxinfer.compiled import Costs, ExecutableStore, Origin
from jaxinfer.compiled.background import Step, compile_in_background
from jaxinfer.elastic.accuracy import LevelAccuracy, expected_accuracies
from jaxinfer.elastic.answers import Answer, Classification, QueryStatistics
from jaxinfer.elastic.decider import QueryDecider
from jaxinfer.elastic.errors import ElasticError, LevelError, ProfileError, UnknownTaskError
from jaxinfer.elastic.latency import REPEATS, LatencyProfile
from jaxinfer.elastic.levels import Level, Levels, default_merge_levels, require_vit
from jaxinfer.elastic.profiling import choose_schedules, level_key, profile_accuracy, schedules_of, time_batches
from jaxinfer.elastic.programs import LevelAndSize, LevelPrograms, image_bytes
from jaxinfer.elastic.runner import LevelRunner, best_labels
from jaxinfer.elastic.scheduling.policies import Elastic, Policy
from jaxinfer.elastic.scheduling.profile import ServingProfile
from jaxinfer.elastic.tasks.datasets import Dataset, Division
from jaxinfer.elastic.tasks.images import check_images
from jaxinfer.elastic.tasks.repository import Task, TaskRepository
from jaxinfer.elastic.tasks.training import Trainer, TrainingConfig
from jaxinfer.fields import AtLeast1, Size, check
from jaxinfer.hub import resolve
from jaxinfer.models.devices import device_name, devices_of
from jaxinfer.models.files.loading import LoadedModel, load_model
from jaxinfer.models.layers.token_adaptation import MergeSchedule, PromptMode, TokenAdaptation
from jaxinfer.progress import ProgressOption, current_progress, showing
from jaxinfer.serving.budget import Budget, Reservation, default_max_waiting, sizes_of
from jaxinfer.serving.errors import FailedError, closed_error
from jaxinfer.serving.heap import trim_heap
from jaxinfer.serving.lifecycle import Closeable, check_timeout
from jaxinfer.sizes import round_up
from jaxinfer.streaming.config import parse_bytes

log = logging.getLogger(__name__)

_TaskOrTasks = Annotated[str | list[str], Meta(description="the name of a task, or one for each image")]

_Levels = Annotated[list[Level], Meta(description="a list of levels, integers within 2**30")]
_Prompts = Annotated[list[Size], Meta(description="a list of integers >= 1")]
_Repeats = Annotated[
    int, Meta(ge=REPEATS, lt=2**30, description=f"an integer >= {REPEATS}, as fewer give no reliable latency")
]

PLAN_SECONDS = 0.01
"""Seconds that planning may take between batches before a simpler rule decides."""


def plan_in_time(profile: ServingProfile) -> Policy:
    """Make the default policy of services: it plans exactly if that takes no longer than `PLAN_SECONDS`."""
    return Elastic(profile, time_limit=PLAN_SECONDS)


class ServiceOptions(TypedDict, total=False):
    """Options of `Service`, which says what they mean."""

    merge_levels: Sequence[int] | None
    prompt_mode: PromptMode | str
    schedule: MergeSchedule | str | None
    max_batch: int
    max_tasks: int
    max_classes: int
    policy: Callable[[ServingProfile], Policy]
    max_waiting: int | None
    device_memory: int | str | None
    kernels: bool


class Service(Closeable):
    """One vision transformer that classifies images for any of its tasks, at any level.

    A level > 0 adds as many prompts in each layer, 0 is the plain model, a level < 0 merges as many tokens in each
    layer. A program is compiled when it is first needed: `classify` waits for those of its level and its numbers of
    images alone; the first query for two of one level, while the others are compiled in the background, and no query
    for any more. `start` and `compile_ahead` wait for all. Several threads may classify at a time.

    Args:
      model: a vision transformer.
      repository: the repository of tasks.
      merge_levels: the levels < 0; None: `default_merge_levels`.
      prompt_mode: how a layer's prompts continue in the next one.
      schedule: the division of merges over the layers; None: chosen by profiling for each level.
      max_batch: images that are classified at once.
      max_tasks: maximum number of tasks.
      max_classes: maximum number of classes of a task.
      policy: makes the policy that decides, from the profile, which queries run next and at which level; it follows
        changes of the profile.
      max_waiting: waiting queries beyond which more are refused. None: 10,000, or as many as have images of 512 MiB
        together.
      device_memory: memory for the model, its tasks and the two batches in flight: bytes, or such as "8GiB"; if
        `max_batch` does not fit, batches are smaller, which shows when their programs are compiled. None: any.
      kernels: whether operations may run as kernels; False: plain XLA.
      progress: whether work of seconds, such as compiling, shows a line on stderr: True, False, a function to call with
        (what, done, total), or None: as the caller has chosen, else yes unless `JAXINFER_PROGRESS=0`.

    Attributes:
      config: the model's config.
      latency: the latency of batches.
      refused: errors of the repository's tasks that are not served, since they are damaged or of another model.
    """

    def __init__(
        self,
        model: LoadedModel,
        repository: TaskRepository,
        *,
        merge_levels: Sequence[int] | None = None,
        prompt_mode: PromptMode | str = PromptMode.REPLACE,
        schedule: MergeSchedule | str | None = None,
        max_batch: int = 64,
        max_tasks: int = 8,
        max_classes: int = 100,
        policy: Callable[[ServingProfile], Policy] = plan_in_time,
        max_waiting: int | None = None,
        device_memory: int | str | None = None,
        kernels: bool = True,
        progress: ProgressOption = None,
    ):
        with showing(progress):
            self._progress = current_progress()
        config = require_vit(model.folder, model.config)
        waiting = default_max_waiting(image_bytes(config)) if max_waiting is None else max_waiting
        max_batch = check("Service.max_batch", max_batch, Size, error=ElasticError)
        max_tasks = check("Service.max_tasks", max_tasks, Size, error=ElasticError)
        max_classes = check("Service.max_classes", max_classes, Size, error=ElasticError)
        kernels = check("Service.kernels", kernels, bool, error=ElasticError)
        self._max_waiting: int = check("Service.max_waiting", waiting, AtLeast1, error=ElasticError)
        merged = default_merge_levels(config) if merge_levels is None else merge_levels
        merged = set(check("Service.merge_levels", merged, _Levels, error=LevelError))
        self.config, self._repository, self._origin = config, repository, Origin("This service")
        levels = Levels(
            config=config,
            merge_levels=tuple(sorted(merged)),
            prompt_mode=PromptMode(prompt_mode),
            forced=None if schedule is None else MergeSchedule(schedule),
            schedules={},
        )
        self._backbone, self._format = _digest(model), str(model.weights.quantized or model.weights.dtype)
        self._tasks: dict[str, Task] = {}
        self.refused: dict[str, Exception] = {}
        for name in repository.names():
            try:
                self._tasks |= {name: self._checked(repository.read(name), levels)}
            except Exception as error:  # whatever is wrong with one task does not concern the others
                log.warning("Task %r is not served: %s", name, error)
                self.refused[name] = error
        schedules = schedules_of(self._tasks.values(), levels, self._format)
        self._levels = dataclasses.replace(levels, schedules=schedules)
        trainer = Trainer(model)
        programs = LevelPrograms(
            model,
            max_batch=max_batch,
            max_tasks=max_tasks,
            max_classes=max_classes,
            kernels=kernels,
            store=ExecutableStore(),
        )
        self._held: tuple[LevelPrograms, Trainer] | None = programs, trainer  # everything that has the model's weights
        costs = Costs.open(
            device=device_name(devices_of(model.mesh)[0]),
            model={
                "config": str(model.description.config),
                "weights": str(model.weights),
                "options": f"{prompt_mode=!s}, {max_tasks=}, {max_classes=}" + ("" if kernels else f", {kernels=}"),
            },
        )
        self.latency = LatencyProfile(costs, _merged(programs))
        self._registering = threading.Lock()  # held while a task is trained and profiled
        self._serving = threading.Lock()  # held while the tasks, levels, programs that may run, or decider change
        self._policy = policy
        self._memory = None if device_memory is None else parse_bytes("device_memory", device_memory)
        self._decider: QueryDecider | None = None
        self._closed = False
        self._devices = next(iter(model.leaves.values())).devices()
        self._reservation = Reservation(f"Service {model.name}")
        self._add_levels(*self._tasks.values())
        for task in self._tasks.values():
            self._programs.put(task)

    @classmethod
    def from_checkpoint(
        cls,
        path: str | Path,
        *,
        repository: str | Path | None = None,
        dtype: str | None = None,
        quantize: str | None = None,
        progress: ProgressOption = None,
        **options: Unpack[ServiceOptions],
    ) -> Self:
        """Make a service from a model directory, with its registered tasks.

        Args:
          path: a model directory of a vision transformer, or what stands for one, as in `LLM`.
          repository: the folder of tasks; None: `tasks` in the folder `path`.
          dtype: see `load_model`.
          quantize: see `load_model`.
          progress: see `Service`.
          options: see `Service`.

        Raises CheckpointError for files that are damaged or of other models, ElasticError for options.
        """
        tasks = TaskRepository.of_model(path, repository)
        with showing(progress):
            return cls(load_model(resolve(path), dtype=dtype, quantize=quantize), tasks, **options)

    @property
    def _programs(self) -> LevelPrograms:
        return self._parts[0]

    @property
    def _trainer(self) -> Trainer:
        return self._parts[1]

    @property
    def _parts(self) -> tuple[LevelPrograms, Trainer]:
        self._origin.check()
        if self._held is None:
            raise closed_error("This service")
        return self._held

    @property
    def budgets(self) -> dict[str, Budget]:
        """The budget of each memory that the service uses, by name, with each owner's bytes."""
        return self._reservation.budgets

    @property
    def levels(self) -> tuple[int, ...]:
        """All levels, ascending, compiled or not."""
        return self._programs.levels

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """All padded batch sizes, ascending, compiled or not."""
        return self._programs.sizes

    @property
    def compiled(self) -> int:
        """The number of programs compiled, or read from disk, so far."""
        return self._programs.compiled

    @property
    def tasks(self) -> Mapping[str, Task]:
        """The tasks by name."""
        return dict(self._tasks)

    def adaptation(self, level: int) -> TokenAdaptation:
        """A level's token adaptation. Raises LevelError for an unknown level."""
        return self._programs.adaptation(check("level", level, Level, error=LevelError))

    def _known(self, levels: Sequence[int] | None) -> Sequence[int]:
        """The levels that a caller means, None for all. Raises LevelError for an unknown one."""
        if levels is None:
            return self.levels
        known: list[int] = check("levels", levels, _Levels, error=LevelError)
        for level in known:
            self.adaptation(level)
        return known

    def task(self, name: str) -> Task:
        """A task by its name. Raises UnknownTaskError, or ElasticError for a refused one."""
        name = check("task", name, str)
        if (why := self.refused.get(name)) is not None:
            raise ElasticError(f"task {name!r} is not served: {why}") from why
        if name not in self._tasks:
            raise UnknownTaskError(f"no task {name!r}; registered: {', '.join(self._tasks) or 'none'}.")
        return self._tasks[name]

    def classify(
        self, images: np.ndarray | Sequence[np.ndarray], task: str | Sequence[str], level: int = 0
    ) -> list[Classification]:
        """Classify images. Waits for the programs of this level and these numbers of images, if they are not compiled.

        Args:
          images: uint8 [B, size, size, 3], RGB, of the model's size; any number of them, or a single one.
          task: the task of all images, or one for each; they are computed together.
          level: one of `levels` that the tasks have.

        Raises InvalidImageError, UnknownTaskError or LevelError before anything runs or is compiled, BudgetError where
        a program needs more memory than there is, FailedError for logits that are not finite.
        """
        images = check_images(images, self.config.image_size)
        tasks, level = check("task", task, _TaskOrTasks), check("level", level, Level, error=LevelError)
        tasks = [tasks] * len(images) if isinstance(tasks, str) else tasks
        if len(tasks) != len(images):
            raise ElasticError(f"{len(images)} images need one task for all or one per image, got {len(tasks)}.")
        for name in dict.fromkeys(tasks):
            self._check_has_level(self.task(name), level)
        programs, answers = self._programs, []  # kept, as the service may be closed meanwhile
        with showing(self._progress):
            self._compile(programs, lambda: [(level, size) for size in _sizes_of(len(images), programs.sizes)])
        largest = programs.sizes[-1]
        for first in range(0, len(images), largest):
            part = slice(first, first + largest)
            answers += self._classify(programs, images[part], tasks[part], level)
        return answers

    def _classify(
        self, programs: LevelPrograms, images: np.ndarray, tasks: list[str], level: int
    ) -> list[Classification]:
        answers, sent = [], programs.device.clock()
        labelled = best_labels(programs.launch(level, tasks, images))
        programs.device.end(sent)
        for answered in labelled:
            if isinstance(answered, FailedError):
                raise answered
            answers.append(Classification(label=answered[0], probabilities=answered[1], level=level))
        return answers

    def _check_has_level(self, task: Task, level: int) -> None:
        self.adaptation(level)
        if level > 0 and level not in task.prompts:
            known = ", ".join(map(str, task.prompts)) or "none"
            raise LevelError(f"task {task.name!r} was not trained with {level} prompts; trained numbers: {known}.")

    def serving_profile(self, levels: Sequence[int] | None = None) -> ServingProfile:
        """The profile for controllers: accuracy and latency of all tasks.

        Args:
          levels: ascending; None: the levels that all tasks have.

        Raises ProfileError for what was not measured, or has changed since.
        """
        return self._serving_profile(self._tasks, levels)

    def _serving_profile(self, tasks: Mapping[str, Task], levels: Sequence[int] | None = None) -> ServingProfile:
        levels = self._shared_levels(tasks) if levels is None else self._known(levels)
        if missing := self.latency.missing(levels, self.batch_sizes):
            level, batch = missing[0]
            raise ProfileError(f"batches of {batch} at level {level} were not timed here: call `measure_latency`.")
        accuracy = {}
        for name, task in tasks.items():
            expected = expected_accuracies([self._accuracy(task, level) for level in levels])
            accuracy |= {(name, level): share for level, share in zip(levels, expected, strict=True)}
        return ServingProfile(
            levels=tuple(levels),
            sizes=self.batch_sizes,
            seconds={(n, b): self.latency.seconds(n, b).p95 for n in levels for b in self.batch_sizes},
            accuracy=accuracy,
        )

    def _ready_profile(self, tasks: Mapping[str, Task]) -> ServingProfile:
        """Return what a live service plans with: levels that can run batches of all sizes.

        A size that is not compiled yet takes the seconds of the next one, which it runs in.
        """
        whole, programs = self._serving_profile(tasks), self._programs
        ready = {level: sizes for level in whole.levels if programs.sizes[-1] in (sizes := programs.ready(level))}
        padded = {(n, b): whole.seconds[n, round_up(b, sizes)] for n, sizes in ready.items() for b in whole.sizes}
        return dataclasses.replace(_at_levels(whole, ready), seconds=padded)

    @property
    def shared_levels(self) -> tuple[int, ...]:
        """The levels that all tasks share, ascending; queries use these."""
        return tuple(self._shared_levels(self._tasks))

    def _shared_levels(self, tasks: Mapping[str, Task]) -> list[int]:
        return [n for n in self.levels if n <= 0 or all(n in task.prompts for task in tasks.values())]

    def make_query(self, image: np.ndarray, task: str, *, latency: float, utility: float = 1.0) -> "Future[Answer]":
        """Classify an image before a deadline; the level is chosen when it runs (OTAS's Make_Query).

        The first query waits until one level can answer, if `start` was not called, and other levels are compiled in
        the background: levels are chosen among those that are there.

        Args:
          image: uint8 [size, size, 3], RGB, of the model's size.
          task: the task whose classes it is sorted into.
          latency: seconds from now within which the answer has a value.
          utility: the value of a right answer in time, relative to other queries.

        Returns a future, which raises ShedError where the answer could not have been in time; cancelling it withdraws
        the query unless it runs. Its callbacks run in a thread of the service, one after the other: one that blocks
        delays other callbacks, but no answers. Raises InvalidImageError, UnknownTaskError, ProfileError,
        OverloadedError where too many wait, ValueError for a latency or utility that is negative or not finite.
        """
        pixels = check_images(image, self.config.image_size)
        if len(pixels) != 1:
            raise ElasticError(f"a query must be a single image, got {len(pixels)} images.")
        task = self.task(task).name
        return self._started().serve(task, pixels[0].copy(), latency=latency, utility=utility, owner=self)

    async def query(self, image: np.ndarray, task: str, *, latency: float, utility: float = 1.0) -> Answer:
        """Classify an image like `make_query`, in a coroutine. Cancelling it withdraws the query."""
        return await asyncio.wrap_future(self.make_query(image, task, latency=latency, utility=utility))

    def start(self) -> None:
        """Prepare to serve all levels: compile the missing programs and run each program once.

        Without it the first query comes sooner, and those that follow it have fewer levels for a while. Raises
        ProfileError for what was not measured, or has changed since, before it compiles; else as `compile_ahead`.
        """
        with showing(self._progress):
            levels = self.serving_profile().levels
            self._compile_all(levels)
            self._programs.warm_up(levels)
            self._started()
            self._replan()

    def compile_ahead(self, levels: Sequence[int] | None = None) -> None:
        """Compile the missing programs now instead of when they are needed.

        Args:
          levels: the levels to compile; None: all.

        Raises LevelError, BudgetError where they need more memory than there is, ElasticError for a `device_memory`
        that is too little for a batch of one, MappingsError.
        """
        levels = self._known(levels)
        with showing(self._progress):
            self._compile_all(levels)

    def close(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """Close the service, as `Closeable` says. A task that is being registered or profiled is kept first."""
        timeout = check_timeout(timeout)
        if self._origin.forked:
            return
        with self._serving:
            self._closed, decider = True, self._decider
        try:
            if decider is not None:
                decider.loop.close(drain=drain, timeout=timeout)
        finally:
            self._free()

    def _free(self) -> None:
        """Free memory, unless a task is being registered, whose end does."""
        if not self._registering.acquire(blocking=False):
            return
        try:
            with self._serving:
                if self._held is not None:
                    self._held[0].turns.stop()
                self._held = None
                self._reservation.release()
            trim_heap()
        finally:
            self._registering.release()

    @contextlib.contextmanager
    def _registration(self) -> Iterator[None]:
        """Hold the lock by which one task at a time is registered or profiled."""
        self._origin.check()
        try:
            with self._registering:
                yield
        finally:
            if self._closed:
                self._free()

    @property
    def is_running(self) -> bool:
        """Whether queries are accepted: false once the service is closed or its serving thread has died."""
        return not self._closed and (self._decider is None or self._decider.loop.is_running)

    @property
    def statistics(self) -> QueryStatistics:
        """Counters of queries so far."""
        return QueryStatistics() if self._decider is None else self._decider.statistics

    @property
    def waiting(self) -> int:
        """The number of queries without an answer."""
        return 0 if self._decider is None else self._decider.loop.num_tickets

    def _started(self) -> QueryDecider:
        """The decider, which starts with the first query, when one level is ready."""
        if self._decider is None:
            programs = self._programs
            self._compile_first(programs)
            with self._serving:
                if self._closed:
                    raise closed_error("This service")
                if self._decider is None:
                    policy = self._policy(self.serving_profile())
                    policy.use(self._ready_profile(self._tasks))
                    runner = LevelRunner(programs, self.latency, _weakly(self._replan))
                    self._decider = QueryDecider(runner, policy, max_waiting=self._max_waiting, device=programs.device)
                    self._decider.loop.stop_when_dropped(self)
                    held = weakref.ref(self)
                    compile_in_background(
                        programs.turns,
                        lambda tried: None if (alive := held()) is None else alive._next_step(tried),
                        lambda program: None if (alive := held()) is None else alive._take(program),
                    )
        return self._decider

    def _compile_first(self, programs: LevelPrograms) -> None:
        """Compile the fewest programs that can answer queries: two of one level, at which the policy can decide.

        They are of the smallest size, as a query that comes alone should not pay for a large batch, and the largest, as
        any number of queries fits into it, so that nothing waits for the sizes between. `device_memory` needs the
        largest of all levels, since it limits the sizes of all.
        """
        profile = self.serving_profile()
        levels = profile.levels if self._memory is not None else _fewest_levels(profile, self._policy)
        with showing(self._progress):
            self._compile(programs, lambda: [(n, b) for n in levels for b in (programs.sizes[-1], programs.sizes[0])])
            programs.warm_up(levels)

    def _next_step(self, tried: set[LevelAndSize]) -> tuple[LevelAndSize, Step] | None:
        """The next program to compile in the background: first the fastest level, for a service that is busy."""
        if self._closed:
            return None
        programs, levels = self._programs, self.shared_levels
        needed = [(n, b) for b in programs.sizes[:-1] for n in levels]
        for level, size in programs.missing([*((n, programs.sizes[-1]) for n in levels), *needed]):
            if (level, size) not in tried:
                failure = f"Batches of {size} at level {level} are not used"
                return (level, size), Step(programs.compiler(level, size), failure)
        return None

    def _take(self, program: LevelAndSize) -> None:
        """Plan with a program from now on. Raises BudgetError or ElasticError if its memory does not fit."""
        programs = self._programs
        self._admit(programs, [program])
        programs.warm_up([program[0]])
        self._replan()

    def _replan(self) -> None:
        """Give the decider the present latencies; it keeps its own if not all are measured."""
        with self._serving, contextlib.suppress(ProfileError):
            if self._decider is not None:
                self._decider.use(self._ready_profile(self._tasks))

    def _compile_all(self, levels: Sequence[int]) -> None:
        programs = self._programs
        self._compile(programs, lambda: [(level, size) for level in levels for size in programs.sizes])

    def _compile(self, programs: LevelPrograms, needed: Callable[[], Iterable[LevelAndSize]]) -> None:
        """Compile what is needed, which may be less when sizes turn out to be too large for `device_memory`."""
        while missing := programs.missing(needed()):
            programs.compile(missing)
            self._admit(programs, missing)

    def _admit(self, programs: LevelPrograms, compiled: Sequence[LevelAndSize]) -> None:
        """Let compiled programs run, if memory can be reserved for them. Raises BudgetError, ElasticError."""
        with self._serving:
            if self._held is None:
                raise closed_error("This service")
            if self._memory is not None:  # waiting queries are batched by the present sizes
                programs.fit(self._memory, compiled, may_shrink=self._decider is None)
            compiled = [(level, size) for level, size in compiled if size in programs.sizes]
            self._reserve(compiled)
            programs.admit(compiled)

    def accuracy(self, task: str, level: int) -> LevelAccuracy:
        """The accuracy measured by profiling.

        Raises ProfileError if there is none, or the level has changed since.
        """
        return self._accuracy(self.task(task), level)

    def _accuracy(self, task: Task, level: int) -> LevelAccuracy:
        self._check_has_level(task, level)
        now = level_key(self.adaptation(level), self._format)
        if now not in task.accuracy:
            profiled = "; ".join(task.accuracy) or "nothing"
            raise ProfileError(
                f"task {task.name!r} was not profiled at level {level} with its present settings, {now}: call "
                f"`profile` with its images. Profiled: {profiled}."
            )
        return task.accuracy[now]

    def register_task(
        self,
        name: str,
        dataset: Dataset,
        *,
        prompts: Sequence[int] = (),
        division: Division | None = None,
        validation: Dataset | None = None,
        training: TrainingConfig | None = None,
        new_version: bool = False,
        progress: ProgressOption = None,
    ) -> Task:
        """Train a head and prompts for a task, profile it, store it in the repository, and serve it.

        Args:
          name: the task's name.
          dataset: its images and labels.
          prompts: numbers of prompts, each a level > 0.
          division: the division of the data set, which is kept with the task; None: a fifth is for validation.
          validation: images to measure accuracy on, of classes of the same names; all of the data set is then for
            training. None: a part of the data set.
          training: the training options of prompts.
          new_version: whether to replace a task of this name, which is an error otherwise.
          progress: who is told how far it is, as in `Service`; None: as chosen there.

        Raises TaskExistsError, InvalidImageError, ElasticError for too many classes or tasks, LevelError, BudgetError
        where programs of new levels need more memory than there is; then nothing has changed.
        """
        with self._registration(), showing(self._progress if progress is None else progress):
            version = self._repository.next_version(name, new_version=new_version)
            check_images(dataset.images, self.config.image_size)
            prompts = check("prompts", prompts, _Prompts, error=LevelError)
            self._programs.check_room(name, dataset.names)
            if validation is None:
                division = division or Division()
                dataset, validation, _ = division.parts(dataset)
            elif division is not None:
                raise ElasticError("register_task: give validation images, or a division of the data set, not both.")
            validation = self._checked_validation(validation, dataset.names)
            heads, learnt = self._trainer.train(
                dataset, prompts, self._levels.prompt_mode, training or TrainingConfig()
            )
            task = Task(
                name=name,
                labels=dataset.names,
                backbone=self._backbone,
                prompt_mode=self._levels.prompt_mode,
                heads=heads,
                prompts=learnt,
                accuracy={},
                division=division,
                version=version,
            )
            return self._install(task, validation)

    def profile(self, name: str, validation: Dataset) -> Task:
        """Measure a task's accuracy at all levels again, and keep it as a new version.

        Latency is measured anew, too, unless queries are served meanwhile, which would count as slow batches.

        Args:
          name: the task's name.
          validation: images that it was not trained on, of classes of the same names.

        Raises UnknownTaskError, InvalidImageError.
        """
        with self._registration(), showing(self._progress):
            task = self.task(name)
            validation = self._checked_validation(validation, task.labels)
            version = self._repository.next_version(name, new_version=True)
            remeasure = self._decider is None
            return self._install(dataclasses.replace(task, version=version), validation, remeasure=remeasure)

    def measure_latency(
        self, levels: Sequence[int] | None = None, *, remeasure: bool = False, repeats: int = REPEATS
    ) -> dict[LevelAndSize, np.ndarray]:
        """Time batches of all sizes, except those on record unless `remeasure`.

        Args:
          levels: the levels to time; None: all.
          remeasure: whether to time batches on record again and replace their record.
          repeats: how often each batch is timed, at least `REPEATS`.

        Returns:
          The seconds of each batch that was timed, [repeats].
        """
        repeats = check("repeats", repeats, _Repeats, error=ElasticError)
        with showing(self._progress):
            return self._measure_latency(self._known(levels), remeasure, repeats)

    def _measure_latency(
        self, levels: Sequence[int], remeasure: bool, repeats: int = REPEATS
    ) -> dict[LevelAndSize, np.ndarray]:
        def batches() -> list[LevelAndSize]:
            sizes = self.batch_sizes
            return [(n, b) for n in levels for b in sizes] if remeasure else self.latency.missing(levels, sizes)

        programs = self._programs
        self._compile(programs, batches)
        if not (timed := batches()):
            return {}
        times = time_batches(programs, timed, repeats)
        for (level, count), seconds in times.items():
            self.latency.renew(level, count, seconds.tolist())
        self.latency.costs.save()
        self._replan()
        return times

    def _install(self, task: Task, validation: Dataset, *, remeasure: bool = False) -> Task:
        """Profile a task, keep it, and serve it; if that fails, the service stays as it is.

        Other tasks' profiles stay, and so do other profiles of this version's prompts and heads.

        Args:
          remeasure: whether to time batches that were timed before.
        """
        before = self._levels
        try:
            with self._programs.unchanged_by_errors():
                schedules = choose_schedules(self._programs, before, task, validation)
                self._levels = dataclasses.replace(before, schedules=schedules)
                self._add_levels(*self._tasks.values(), task)
                self._compile_all(self.levels)
                accuracies = profile_accuracy(self._programs, task, validation, self._format)
                task = dataclasses.replace(task, accuracy={**task.accuracy, **accuracies})
                self._measure_latency(self.levels, remeasure)
                self._serve(task)
        except BaseException:
            self._levels = before
            with self._serving:
                self._reserve()  # less, if there were new levels
            raise
        return task

    def _serve(self, task: Task) -> None:
        """Keep a task and serve it at once. Raises ValueError if a policy at work cannot use its levels."""
        tasks = self._tasks | {task.name: task}
        lost = set(self._shared_levels(self._tasks)) - set(self._shared_levels(tasks))
        with self._serving:
            profile = None if self._decider is None else self._ready_profile(tasks)
            if profile is not None:
                self._policy(profile)
                self._programs.warm_up(profile.levels)
            self._repository.write(task)
            self._programs.put(task)
            self._tasks = tasks
            self.refused.pop(task.name, None)
            if self._decider is not None and profile is not None:
                self._decider.use(profile)
        if lost and len(tasks) > 1:
            levels = ", ".join(map(str, sorted(lost)))
            log.warning("Queries run no more at the levels %s: task %r has no such prompts.", levels, task.name)

    def _checked_validation(self, validation: Dataset, labels: Sequence[str]) -> Dataset:
        """Check images for measuring accuracy; number their classes as the task's labels."""
        check_images(validation.images, self.config.image_size)
        return validation.with_names(labels)

    def _add_levels(self, *tasks: Task) -> None:
        """Have all levels of these tasks, and memory for their prompts. Raises BudgetError, ElasticError."""
        for level in sorted({0, *self._levels.merge_levels, *(count for task in tasks for count in task.prompts)}):
            self._programs.add(level, self._levels.adaptation(level))
        self._admit(self._programs, [])

    def _reserve(self, also: Sequence[LevelAndSize] = ()) -> None:
        """Reserve memory for the model, tasks, batches of programs that are ready, or `also` are, and waiting queries.

        Raises BudgetError.
        """
        device = self._programs.tenants(self.batch_sizes[-1], also)
        host = {"images that wait": self._max_waiting * image_bytes(self.config)}
        remedy = "lower max_batch, max_waiting, max_tasks or device_memory, or close another model"
        self._reservation.resize(sizes_of(self._devices, device, host=host), remedy=remedy)

    def _checked(self, task: Task, levels: Levels) -> Task:
        """Check that a task from the repository fits this service."""
        if task.backbone != self._backbone:
            raise ElasticError(
                f"task {task.name!r} was trained with another model; open that model, or register the task again in "
                "another repository."
            )
        if task.prompts and task.prompt_mode != levels.prompt_mode:
            raise ElasticError(
                f"the prompts of task {task.name!r} were trained with prompt_mode={task.prompt_mode.value!r}; open the "
                "service with this prompt_mode."
            )
        return task


def _sizes_of(count: int, sizes: Sequence[int]) -> set[int]:
    """The sizes of the batches that this many images are divided into."""
    return {round_up(min(count - first, sizes[-1]), sizes) for first in range(0, count, sizes[-1])}


def _at_levels(profile: ServingProfile, levels: Collection[int]) -> ServingProfile:
    """A profile of these levels alone."""
    accuracy = {(task, level): right for (task, level), right in profile.accuracy.items() if level in levels}
    return dataclasses.replace(profile, levels=tuple(n for n in profile.levels if n in levels), accuracy=accuracy)


def _fewest_levels(profile: ServingProfile, make: Callable[[ServingProfile], Policy]) -> tuple[int, ...]:
    """The fewest levels by which a policy can decide: level 0 for most, another one, or else all."""
    policy = make(profile)
    for level in sorted(profile.levels, key=abs):
        with contextlib.suppress(ValueError):
            policy.use(_at_levels(profile, [level]))
            return (level,)
    return profile.levels


def _digest(model: LoadedModel) -> str:
    """A digest of the weights on disk."""
    files = sorted((name, file.sha256) for name, file in model.manifest.files.items() if name.startswith("state/"))
    return hashlib.sha256(repr(files).encode()).hexdigest()[:16]


def _merged(programs: LevelPrograms) -> Callable[[int], int]:
    """A function from levels to the tokens they merge over all layers.

    It holds the programs weakly: they must not outlive their service.
    """
    held = weakref.ref(programs)

    def merged(level: int) -> int:
        if (alive := held()) is None:
            raise closed_error("This service")
        return sum(alive.adaptation(level).merges)

    return merged


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """A function that calls a method of an object, without keeping that alive, as long as it exists."""
    held = weakref.WeakMethod(method)

    def call() -> None:
        if (bound := held()) is not None:
            bound()

    return call

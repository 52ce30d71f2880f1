"""`Service`: one vision transformer for many tasks, its tokens chosen for each batch (OTAS, section III)."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Self, Unpack

import numpy as np
from msgspec import Meta

from jaxinfer.elastic.accuracy import LevelAccuracy
from jaxinfer.elastic.answers import Answer, Classification, QueryStatistics
from jaxinfer.elastic.catalogue import LevelCatalogue
from jaxinfer.elastic.decider import QueryTicket
from jaxinfer.elastic.errors import ElasticError, LevelError
from jaxinfer.elastic.latency import REPEATS
from jaxinfer.elastic.levels import Level, require_vit
from jaxinfer.elastic.options import ServiceConfig, ServiceOptions
from jaxinfer.elastic.planning import Planning
from jaxinfer.elastic.programs import LevelAndSize
from jaxinfer.elastic.registrar import RegistrationOptions, TaskRegistrar
from jaxinfer.elastic.scheduling.profile import ServingProfile
from jaxinfer.elastic.tasks.datasets import Dataset
from jaxinfer.elastic.tasks.images import check_images
from jaxinfer.elastic.tasks.repository import Task, TaskRepository
from jaxinfer.fields import NotNegative, check
from jaxinfer.hub import resolve
from jaxinfer.models.devices import AnyMesh
from jaxinfer.models.files.loading import LoadedModel, load_model
from jaxinfer.models.layers.token_adaptation import TokenAdaptation
from jaxinfer.progress import ProgressOption, current_progress, showing
from jaxinfer.serving.budget import Budget
from jaxinfer.serving.future import TicketFuture
from jaxinfer.serving.lifecycle import check_timeout
from jaxinfer.serving.loop import Loop
from jaxinfer.serving.served import Served
from jaxinfer.sharding import ShardingRules

_TaskOrTasks = Annotated[str | list[str], Meta(description="the name of a task, or one for each image")]
_Repeats = Annotated[
    int, Meta(ge=REPEATS, lt=2**30, description=f"an integer >= {REPEATS}, as fewer give no reliable latency")
]


class Service(Served):
    """One vision transformer that classifies images for any of its tasks, at any level.

    A level > 0 adds as many prompts in each layer, 0 is the plain model, a level < 0 merges as many tokens in each
    layer. A program is compiled when it is first needed: `classify` waits for those of its level and its numbers of
    images alone; the first query for two of one level, while the others are compiled in the background, and no query
    for any more. `start` and `compile_ahead` wait for all. Several threads may classify at a time.

    Args:
      model: a vision transformer.
      repository: the repository of tasks.
      progress: whether work of seconds, such as compiling, shows a line on stderr, as in `LLM`.
      options: those of `ServiceOptions`.

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
        progress: ProgressOption = None,
        **options: Unpack[ServiceOptions],
    ):
        with showing(progress):
            self._progress = current_progress()
        self.config = require_vit(model.folder, model.config)
        config = ServiceConfig.from_options(options, self.config)
        self._catalogue = LevelCatalogue(model, config, config.levels(self.config))
        self._registrar = TaskRegistrar(model, repository, self._catalogue)
        self.latency, self.refused = self._catalogue.latency, self._registrar.refused
        self._planning = Planning(self._catalogue, self._registrar, config, self._progress)

    @classmethod
    def from_checkpoint(
        cls,
        path: str | Path,
        *,
        repository: str | Path | None = None,
        mesh: AnyMesh = None,
        rules: ShardingRules | None = None,
        dtype: str | None = None,
        quantize: str | None = None,
        progress: ProgressOption = None,
        **options: Unpack[ServiceOptions],
    ) -> Self:
        """Make a service from a model directory, with its registered tasks.

        Args:
          path: a model directory of a vision transformer, or what stands for one, as in `LLM`.
          repository: the folder of tasks; None: `tasks` in the folder `path`.
          others: `mesh`, `rules`, `dtype` and `quantize` as in `load_model`, the rest as in the class.

        Raises CheckpointError for files that are damaged or of other models, ElasticError for options.
        """
        tasks = TaskRepository.of_model(path, repository)
        with showing(progress):
            model = load_model(resolve(path), mesh=mesh, rules=rules, dtype=dtype, quantize=quantize)
            return cls(model, tasks, **options)

    @property
    def budgets(self) -> dict[str, Budget]:
        """The budget of each memory that the service uses, by name, with each owner's bytes."""
        return self._catalogue.reservation.budgets

    @property
    def levels(self) -> tuple[int, ...]:
        """All levels, ascending, compiled or not."""
        return self._catalogue.programs.levels

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """All padded batch sizes, ascending, compiled or not."""
        return self._catalogue.programs.sizes

    @property
    def compiled(self) -> int:
        """The number of programs compiled, or read from disk, so far."""
        return self._catalogue.programs.compiled

    @property
    def tasks(self) -> Mapping[str, Task]:
        """The tasks by name."""
        return self._registrar.tasks

    @property
    def shared_levels(self) -> tuple[int, ...]:
        """The levels that all tasks share, ascending; queries use these."""
        return self._registrar.shared_levels()

    def adaptation(self, level: int) -> TokenAdaptation:
        """A level's token adaptation. Raises LevelError for an unknown level."""
        return self._catalogue.adaptation(level)

    def task(self, name: str) -> Task:
        """A task by its name. Raises UnknownTaskError, or ElasticError for a refused one."""
        return self._registrar.task(name)

    def accuracy(self, task: str, level: int) -> LevelAccuracy:
        """The accuracy measured by profiling. Raises ProfileError if there is none, or the level has changed since."""
        return self._registrar.accuracy(self.task(task), level)

    def serving_profile(self, levels: Sequence[int] | None = None) -> ServingProfile:
        """The profile for controllers: accuracy and latency of all tasks.

        Args:
          levels: ascending; None: the levels that all tasks have.

        Raises ProfileError for what was not measured, or has changed since.
        """
        return self._registrar.profile_of(levels=levels)

    def compile_ahead(self, levels: Sequence[int] | None = None) -> None:
        """Compile the missing programs of these levels (None: all) now instead of when they are needed.

        Raises LevelError, BudgetError where they need more memory than there is, ElasticError for a `device_memory`
        that is too little for a batch of one, MappingsError.
        """
        with showing(self._progress):
            self._catalogue.compile_all(self._catalogue.known(levels))

    def measure_latency(
        self, levels: Sequence[int] | None = None, *, remeasure: bool = False, repeats: int = REPEATS
    ) -> dict[LevelAndSize, np.ndarray]:
        """Time batches of all sizes, except those on record unless `remeasure`; return their seconds, [repeats].

        Args:
          levels: the levels to time; None: all.
          remeasure: whether to time batches on record again and replace their record.
          repeats: how often each batch is timed, at least `REPEATS`.
        """
        repeats = check("repeats", repeats, _Repeats, error=ElasticError)
        with showing(self._progress):
            levels = self._catalogue.known(levels)
            if times := self._catalogue.measure(levels, remeasure=remeasure, repeats=repeats):
                self._planning.update()
        return times

    def register_task(
        self, name: str, dataset: Dataset, *, progress: ProgressOption = None, **options: Unpack[RegistrationOptions]
    ) -> Task:
        """Train a head and prompts for a task, profile it, store it in the repository, and serve it.

        Args:
          name: the task's name.
          dataset: its images and labels.
          progress: who is told how far it is, as in `Service`; None: as chosen there.
          options: those of `RegistrationOptions`, such as `prompts`.

        Raises TaskExistsError, InvalidImageError, ElasticError for too many classes or tasks, LevelError, BudgetError
        where programs of new levels need more memory than there is; then nothing has changed.
        """
        with showing(self._progress if progress is None else progress):
            return self._registrar.register(name, dataset, self._planning.check, **options)

    def profile(self, name: str, validation: Dataset) -> Task:
        """Measure a task's accuracy at all levels again, and keep it as a new version.

        Latency is measured anew, too, unless queries are served meanwhile, which would count as slow batches.

        Args:
          name: the task's name.
          validation: images that it was not trained on, of classes of the same names.

        Raises UnknownTaskError, InvalidImageError.
        """
        with showing(self._progress):
            return self._registrar.profile(name, validation, self._planning.check)

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
            self._registrar.check_has_level(self.task(name), level)
        with showing(self._progress):
            return self._catalogue.classify(images, tasks, level)

    def submit(self, image: np.ndarray, task: str, *, deadline: float, utility: float = 1.0) -> TicketFuture[Answer]:
        """Classify an image before a deadline; the level is chosen when it runs (OTAS's Make_Query).

        Args:
          image: uint8 [size, size, 3], RGB, of the model's size.
          task: the task whose classes it is sorted into.
          deadline: seconds from now within which the answer has a value.
          utility: the value of a right answer in time, relative to other queries.

        Returns a future, which a coroutine can await. It raises ShedError where the answer could not have been in time;
        cancelling it withdraws the query unless it runs. Without `start`, the first query waits here until a level is
        ready. Raises InvalidImageError, UnknownTaskError, ProfileError, OverloadedError where too many wait, and
        ValueError for a deadline or utility that is negative or not finite.
        """
        deadline = check("deadline", deadline, NotNegative)
        pixels = check_images(image, self.config.image_size)
        if len(pixels) != 1:
            raise ElasticError(f"a query must be a single image, got {len(pixels)} images.")
        task, decider = self.task(task).name, self._planning.started(self)
        return decider.serve(task, pixels[0].copy(), latency=deadline, utility=utility, owner=self)

    def start(self) -> None:
        """Prepare to serve all levels: compile the missing programs and run each program once.

        Without it the first query comes sooner, and those that follow it have fewer levels for a while. Raises
        ProfileError for what was not measured, or has changed since, before it compiles; else as `compile_ahead`.
        """
        with showing(self._progress):
            self._planning.start_all(self)

    def stats(self) -> QueryStatistics:
        """Return a copy of the counters of queries so far."""
        return QueryStatistics() if self._serving_loop is None else self._serving_loop.stats()

    @property
    def is_running(self) -> bool:
        """Whether queries are accepted: false once the service is closed or its serving thread has died."""
        return not self._catalogue.is_ending and super().is_running

    def close(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """Close the service, as `Closeable` says. A task that is being registered or profiled is kept first."""
        timeout = check_timeout(timeout)
        if not self._catalogue.origin.forked:
            with self._catalogue.lock:
                self._catalogue.is_ending = True
            super().close(drain=drain, timeout=timeout)

    @property
    def _serving_loop(self) -> Loop[QueryTicket] | None:
        return None if (decider := self._planning.decider) is None else decider.loop

    def _free(self) -> None:
        self._registrar.free()

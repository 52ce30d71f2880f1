"""The program `classify`: a batch of images at a level, each for its own task; one executable per level and size."""

import contextlib
import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from rich.filesize import decimal

from jaxinfer.compiled import DeviceTime, ExecutableStore, Program, ProgramSpec
from jaxinfer.compiled.background import StoppedError, Turns
from jaxinfer.compiled.interruptible import run_all
from jaxinfer.compiled.spec import shapes_of
from jaxinfer.elastic.errors import ElasticError, LevelError
from jaxinfer.elastic.tasks.repository import Head, Task
from jaxinfer.elastic.tasks.training import Trainer
from jaxinfer.execution.forward import BatchSize, Forward, LaunchedBatch, batch_sharding, batch_sizes
from jaxinfer.models.config import ViTConfig
from jaxinfer.models.files.loading import LoadedModel
from jaxinfer.models.layers.token_adaptation import TokenAdaptation
from jaxinfer.models.weight_format import WeightFormat
from jaxinfer.progress import long_work, showing
from jaxinfer.serving.errors import closed_error
from jaxinfer.sharding import ShardingRules
from jaxinfer.sharding.collectives import use_rules

log = logging.getLogger(__name__)

PROGRAM = "classify"
"""The program's name in caches and in the record of costs."""

LevelAndSize = tuple[int, int]
"""A level, and the size that a batch is padded to."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LevelStatic:
    """Everything that a level's program depends on, except the shapes of its arguments."""

    config: ViTConfig
    weights: WeightFormat
    rules: ShardingRules
    adaptation: TokenAdaptation


class Classify(BatchSize):
    """A batch of images."""

    program = PROGRAM


def build(static: LevelStatic, sizes: Classify) -> Callable[..., jax.Array]:
    """Build the function of these sizes.

    (leaves, heads, prompts, tasks int32 [B], images uint8 [B, H, W, 3]) -> logits, float32 [B, classes]. Heads and
    prompts are those of all tasks, as `task_arrays` makes them.
    """

    def function(
        leaves: list[jax.Array], heads: Head, prompts: jax.Array | None, tasks: jax.Array, images: jax.Array
    ) -> jax.Array:
        from jaxinfer.models.abstract import merge_model  # imports Flax, which only tracing needs

        with use_rules(static.rules):
            model = merge_model(static.config, static.weights, leaves)
            image_prompts = None if prompts is None else prompts[tasks]
            features = model.features(images, static.adaptation, image_prompts).astype(jnp.float32)
        # Multiplying the heads of all tasks costs less than gathering each image's, and is the same for every batch.
        logits = jnp.einsum("bd,tcd->btc", features, heads.weight) + heads.bias
        return jnp.take_along_axis(logits, tasks[:, None, None], axis=1)[:, 0]

    return function


TaskArrays = tuple[Head, jax.Array | None]
"""Heads and prompts of all tasks on the device."""


def task_arrays(
    tasks: Iterable[Task],
    config: ViTConfig,
    prompts: int,
    *,
    max_tasks: int,
    max_classes: int,
    sharding: Sharding | None = None,
) -> TaskArrays:
    """Put all tasks' heads and prompts [max_tasks, layers, prompts, D] (None without any) on every device.

    They are zero where there is no task, or it has no such prompts; classes that do not exist are never chosen.
    """
    weight = np.zeros((max_tasks, max_classes, config.feature_width), np.float32)
    bias = np.full((max_tasks, max_classes), -np.inf, np.float32)
    all_prompts = np.zeros((max_tasks, config.layers, prompts, config.embed), np.float32) if prompts else None
    for place, task in enumerate(tasks):
        if (head := task.heads.get(prompts)) is None:
            continue
        weight[place, : len(head.bias)], bias[place, : len(head.bias)] = head.weight, head.bias
        if all_prompts is not None:
            all_prompts[place] = task.prompts[prompts]
    return jax.device_put((Head(weight, bias), all_prompts), sharding)


def image_bytes(config: ViTConfig) -> int:
    """The bytes of an image as it is sent to the device."""
    return config.image_size**2 * 3


class LevelPrograms:
    """The programs of all levels, and the tasks that they run.

    A program is compiled when it is asked for, and ready when its owner has admitted it, having reserved its memory.

    Args:
      model: the backbone.
      max_batch: images of the largest batch in each lane; smaller batches have powers of two as sizes.
      max_tasks: maximum number of tasks.
      max_classes: maximum number of classes of a task.
      kernels: whether operations may run as kernels.
      store: keeps executables between processes; None: nothing does.

    Attributes:
      sizes: the sizes that batches are padded to, ascending, compiled or not.
      device: times all batches, whoever sends them.
      turns: who compiles first.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        max_batch: int,
        max_tasks: int,
        max_classes: int,
        kernels: bool = True,
        store: ExecutableStore | None = None,
    ):
        assert isinstance(model.config, ViTConfig)
        self._config, self._weights, self._store, self._kernels = model.config, model.weights, store, kernels
        self._leaves = list(model.leaves.values())
        self._mesh, self._rules, self._lanes = model.mesh, model.rules, model.lanes
        self._most = {"max_tasks": max_tasks, "max_classes": max_classes}
        self.sizes = batch_sizes(max_batch, self._lanes)
        self._levels: dict[int, _Level] = {}
        self._served = _Served({}, {})
        self.device, self.turns = DeviceTime(), Turns()
        self._warm: set[Program] = set()

    @property
    def image_size(self) -> int:
        """The height and width of an image, in pixels."""
        return self._config.image_size

    @property
    def levels(self) -> tuple[int, ...]:
        """The levels, ascending, compiled or not."""
        return tuple(sorted(self._levels))

    @property
    def compiled(self) -> int:
        """The number of programs that are compiled, or were read from the store."""
        return sum(len(tuple(level.forward.cache)) for level in self._levels.values())

    def ready(self, level: int) -> tuple[int, ...]:
        """The sizes, ascending, at which a level can run."""
        return tuple(size for size in self.sizes if size in self._levels[level].ready)

    def padded(self, level: int, count: int) -> int:
        """The size that runs `count` images at a level. Raises LevelError if none of them is ready."""
        for size in self.ready(level):
            if size >= count:
                return size
        raise LevelError(f"level {level} is not compiled for {count} images.")

    def adaptation(self, level: int) -> TokenAdaptation:
        """A level's adaptation. Raises LevelError for an unknown level."""
        if level not in self._levels:
            raise LevelError(f"there is no level {level}; levels: {', '.join(map(str, self.levels))}.")
        return self._levels[level].adaptation

    def add(self, level: int, adaptation: TokenAdaptation) -> None:
        """Have a level, unless it is there with this adaptation. What was ready is, since it is compiled first."""
        before = self._levels.get(level)
        if before is not None and before.adaptation == adaptation:
            return
        made = _Level(adaptation, self._forward_of(adaptation), set(before.ready) if before else set())
        self._compile([(made.forward, size) for size in sorted(made.ready)])
        tasks, arrays = self._served
        if adaptation.prompts not in arrays:
            arrays = arrays | {adaptation.prompts: self._arrays_of(tasks.values(), adaptation.prompts)}
        self._served = _Served(tasks, arrays)
        self._levels = self._levels | {level: made}

    def missing(self, needed: Iterable[LevelAndSize]) -> list[LevelAndSize]:
        """Return those of these programs that are not ready."""
        return [(level, size) for level, size in dict.fromkeys(needed) if size not in self.ready(level)]

    def compile(self, needed: Iterable[LevelAndSize]) -> None:
        """Compile these programs, several at a time, before any in the background. Raises MappingsError, ClosedError.

        Ctrl-C ends the call at once.
        """
        self._compile([(self._levels[level].forward, size) for level, size in needed])

    def _compile(self, needed: Sequence[tuple[Forward[Classify], int]]) -> None:
        missing = [(forward, size) for forward, size in needed if not forward.is_compiled(size)]
        if not missing:
            return
        with self.turns.first(), long_work("compiling programs", total=len(missing)) as work:

            def compile_one(needed: tuple[Forward[Classify], int]) -> None:
                compile_size(*needed)
                work.advance()

            try:
                run_all(compile_one, missing, os.cpu_count() or 1)
            except StoppedError:
                raise closed_error("This service") from None

    def compiler(self, level: int, size: int) -> Callable[[], None]:
        """A function that compiles a program, and keeps none of the model's memory alive meanwhile."""
        return functools.partial(compile_size, self._levels[level].forward, size)

    def admit(self, programs: Iterable[LevelAndSize]) -> None:
        """Let these programs run, which are compiled."""
        for level, size in programs:
            self._levels[level].ready.add(size)

    @contextlib.contextmanager
    def unchanged_by_errors(self) -> Iterator[None]:
        """Restore levels and tasks if the body of the context fails."""
        before = self._levels, self._served
        try:
            yield
        except BaseException:
            self._levels, self._served = before
            raise

    def bytes_needed(self, batch: int, also: Collection[LevelAndSize] = ()) -> int:
        """The bytes of each device for the model, the tasks and two batches of this size together; see `tenants`."""
        return sum(self.tenants(batch, also).values())

    def tenants(self, batch: int, also: Collection[LevelAndSize] = ()) -> dict[str, int]:
        """Return these bytes of each device by use, at the level that takes most of those ready, or in `also`.

        Two batches, since one is sent while another runs.
        """
        ready = {(level, size) for level in self._levels for size in self.ready(level)} | set(also)
        workspaces = (self._levels[level].forward.workspace_bytes(size) for level, size in ready if size <= batch)
        return {
            "weights": sum(leaf.addressable_shards[0].data.nbytes for leaf in self._leaves),
            "prompts and heads": sum(leaf.nbytes for leaf in jax.tree.leaves(self._served.arrays)),
            "programs' workspace": 2 * max(workspaces, default=0),
            "images": 2 * batch // self._lanes * image_bytes(self._config),
        }

    def fit(self, device_memory: int, also: Collection[LevelAndSize] = (), *, may_shrink: bool = True) -> None:
        """Keep the batch sizes that fit the memory, as far as they are compiled.

        Raises ElasticError if none fits, or if sizes would go and may not.
        """
        fitting = tuple(size for size in self.sizes if self.bytes_needed(size, also) <= device_memory)
        if not fitting or (not may_shrink and fitting != self.sizes):
            size = self.sizes[-1] if fitting else self.sizes[0]
            raise ElasticError(
                f"device_memory={decimal(device_memory)} is too little for batches of {size}, which need "
                f"{decimal(self.bytes_needed(size, also))} at the levels {', '.join(map(str, self.levels))}: raise it, "
                "or open the service with fewer levels or a smaller max_batch."
            )
        if fitting != self.sizes:
            log.info("Batches of more than %d do not fit into %s.", fitting[-1], decimal(device_memory))
            self.sizes = fitting

    def check_room(self, name: str, labels: Sequence[str]) -> None:
        """Check that a task fits beside the others. Raises ElasticError."""
        if len(labels) > (most := self._most["max_classes"]):
            raise ElasticError(f"task {name!r} has {len(labels)} classes and max_classes={most}: raise it.")
        tasks = self._served.tasks
        if name not in tasks and len(tasks) == (most := self._most["max_tasks"]):
            raise ElasticError(f"task {name!r} is one more than max_tasks={most}: raise it.")

    def put(self, task: Task) -> None:
        """Serve a task's heads and prompts, in place of its previous version."""
        self.check_room(task.name, task.labels)
        tasks = self._served.tasks | {task.name: task}
        # Batches in flight keep their arrays; a task's place never changes.
        self._served = _Served(tasks, {n: self._arrays_of(tasks.values(), n) for n in self._served.arrays})

    def launch(self, level: int, tasks: Sequence[str], images: np.ndarray) -> "Launched":
        """Send a batch of at most the largest size, without waiting for it.

        Compiles nothing. Raises LevelError for a level that is not ready for as many images.
        """
        served = self._served
        places = {name: place for place, name in enumerate(served.tasks)}
        batch = self._launch(served, level, [places[task] for task in tasks], images)
        return Launched(batch, [served.tasks[task].labels for task in tasks])

    def rehearse(self, level: int, images: np.ndarray) -> float:
        """Run a batch whose answers are not needed, with any task or none; return its seconds."""
        sent = self.device.clock()
        self._launch(self._served, level, [0] * len(images), images).result()
        return self.device.end(sent).seconds

    def _launch(self, served: "_Served", level: int, places: Sequence[int], images: np.ndarray) -> LaunchedBatch:
        adaptation, sizes = self.adaptation(level), self.ready(level)
        self.padded(level, len(images))  # raises LevelError
        forward, arrays = self._levels[level].forward, served.arrays[adaptation.prompts]
        with forward.cache.forbid_compile():
            return forward.launch((self._leaves, *arrays), np.array(places, np.int32), images, sizes=sizes)

    def warm_up(self, levels: Iterable[int]) -> None:
        """Run each ready program of these levels once, if it has not run: the first call links the compiled code."""
        size = self._config.image_size
        cold = [
            (program, level, batch)
            for level in levels
            for batch in self.ready(level)
            if (program := self._levels[level].forward.program(batch)) not in self._warm
        ]
        with long_work("running programs once", total=len(cold)) as work:
            for program, level, batch in cold:
                self.rehearse(level, np.zeros((batch, size, size, 3), np.uint8))
                self._warm.add(program)
                work.advance()

    def trainer(self) -> Trainer:
        """A trainer of tasks on the same weights."""
        return Trainer(self._config, self._weights, self._leaves, self._mesh)

    def try_task(self, task: Task, adaptation: TokenAdaptation) -> Callable[[np.ndarray], np.ndarray]:
        """A function from images, at most the largest batch, to the logits of a task that need not be served."""
        forward = next((level.forward for level in self._levels.values() if level.adaptation == adaptation), None)
        forward = forward or self._forward_of(adaptation)
        arguments, sizes = (self._leaves, *self._arrays_of([task], adaptation.prompts)), self.sizes[-1:]

        def logits(images: np.ndarray) -> np.ndarray:
            sent = self.device.clock()
            logits = forward.launch(arguments, np.zeros(len(images), np.int32), images, sizes=sizes).result()
            self.device.end(sent)
            return logits

        return logits

    def _forward_of(self, adaptation: TokenAdaptation) -> Forward[Classify]:
        """The programs of an adaptation, none compiled yet."""
        config, size = self._config, self._config.image_size
        leaves, sharding = shapes_of(self._leaves), batch_sharding(self._mesh, self._rules)
        tasks = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), self._arrays_of([], adaptation.prompts)
        )

        def arguments(sizes: Classify) -> tuple[Any, ...]:
            places = jax.ShapeDtypeStruct((sizes.batch,), jnp.int32, sharding=sharding)
            images = jax.ShapeDtypeStruct((sizes.batch, size, size, 3), jnp.uint8, sharding=sharding)
            return leaves, *tasks, places, images

        spec: ProgramSpec[Classify, Iterable[int]] = ProgramSpec(
            sizes=Classify,
            build=build,
            static=LevelStatic(config=config, weights=self._weights, rules=self._rules, adaptation=adaptation),
            arguments=arguments,
            reachable=lambda sizes: (Classify(batch=size) for size in sizes),
            out_shardings=lambda sizes: sharding,
        )
        with showing(False):  # who compiles says so
            return Forward(
                spec,
                max_batch=self.sizes[-1] // self._lanes,
                mesh=self._mesh,
                lanes=self._lanes,
                kernels=self._kernels,
                store=self._store,
                turns=self.turns,
            )

    def _arrays_of(self, tasks: Iterable[Task], prompts: int) -> TaskArrays:
        whole = None if self._mesh is None else NamedSharding(self._mesh, PartitionSpec())
        return task_arrays(tasks, self._config, prompts, **self._most, sharding=whole)


class Launched(NamedTuple):
    """A batch on the device.

    Attributes:
      batch: its result is float32 [images, max_classes], -inf for classes that do not exist.
      labels: the class labels of each image's task when the batch was sent.
    """

    batch: LaunchedBatch
    labels: list[tuple[str, ...]]

    def rows(self) -> np.ndarray:
        """Wait for the batch; return its images' logits."""
        return self.batch.result()


class _Served(NamedTuple):
    """Tasks, and their arrays by number of prompts: replaced at once, so that no batch runs with part of a change."""

    tasks: dict[str, Task]
    arrays: dict[int, TaskArrays]


class _Level(NamedTuple):
    """A level: its programs, and the sizes of those that may run."""

    adaptation: TokenAdaptation
    forward: Forward[Classify]
    ready: set[int]


def compile_size(forward: Forward[Classify], size: int) -> None:
    """Compile the program of a batch size. Raises MappingsError, StoppedError."""
    forward.cache.compile_ahead([size], workers=1)

"""The levels that a service can run: their programs, the memory that these take, and how long batches take."""

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import numpy as np

from jaxinfer.compiled import Origin, executable_store
from jaxinfer.compiled.background import Step
from jaxinfer.elastic.answers import Classification
from jaxinfer.elastic.errors import LevelError
from jaxinfer.elastic.latency import LatencyProfile
from jaxinfer.elastic.levels import Level, Levels
from jaxinfer.elastic.options import LevelList, ServiceConfig
from jaxinfer.elastic.profiling import time_batches
from jaxinfer.elastic.programs import LevelAndSize, LevelPrograms, image_bytes
from jaxinfer.elastic.runner import best_labels
from jaxinfer.elastic.scheduling.policies import Policy
from jaxinfer.elastic.scheduling.profile import ServingProfile
from jaxinfer.execution.costs import open_costs
from jaxinfer.fields import check
from jaxinfer.models.devices import devices_of
from jaxinfer.models.files.loading import LoadedModel
from jaxinfer.models.layers.token_adaptation import MergeSchedule, TokenAdaptation
from jaxinfer.serving.budget import Reservation, sizes_of
from jaxinfer.serving.errors import FailedError, closed_error
from jaxinfer.sizes import round_up
from jaxinfer.streaming.config import parse_bytes


class LevelCatalogue:
    """The levels of a service, from their token adaptations to their programs.

    A program may run once it is compiled and memory is reserved for it.

    Args:
      model: the backbone.
      config: the service's options.
      levels: the token adaptations of levels, without those of tasks' prompts.

    Attributes:
      adaptations: the token adaptations of levels, by the schedules in use.
      latency: the latency of batches.
      reservation: the memory of the service.
      origin: the process in which it works.
      lock: held while the levels, the programs that may run, the tasks or the decider change.
      is_serving: whether queries are served, which are batched by the present sizes.
      is_ending: whether the service is being closed.
    """

    def __init__(self, model: LoadedModel, config: ServiceConfig, levels: Levels):
        self.adaptations, self.origin = levels, Origin("This service")
        programs = LevelPrograms(
            model,
            max_batch=config.max_batch,
            max_tasks=config.max_tasks,
            max_classes=config.max_classes,
            kernels=config.kernels,
            store=executable_store(),
        )
        options = f"prompt_mode={levels.prompt_mode}, max_tasks={config.max_tasks}, max_classes={config.max_classes}"
        costs = open_costs(
            devices_of(model.mesh)[0],
            mesh=model.mesh_text,
            kernels=config.kernels,
            config=model.description.config,
            weights=model.weights,
            options=options,
        )
        self.latency = LatencyProfile(costs, _merged(programs))
        self.lock = threading.Lock()
        self.is_serving = self.is_ending = False
        memory = config.device_memory
        self._memory = None if memory is None else parse_bytes("device_memory", memory)
        self._devices = next(iter(model.leaves.values())).devices()
        self._waiting_bytes = config.max_waiting * image_bytes(levels.config)
        self.reservation = Reservation(f"Service {model.name}")
        self._programs: LevelPrograms | None = programs

    @property
    def programs(self) -> LevelPrograms:
        """The programs of all levels. Raises ClosedError after the end, RuntimeError in a forked process."""
        self.origin.check()
        if self._programs is None:
            raise closed_error("This service")
        return self._programs

    def free(self) -> None:
        """Give all memory back; may be called again."""
        with self.lock:
            if self._programs is not None:
                self._programs.turns.stop()
            self._programs = None
            self.reservation.release()

    # Levels

    def adaptation(self, level: int) -> TokenAdaptation:
        """A level's token adaptation. Raises LevelError for an unknown level."""
        return self.programs.adaptation(check("level", level, Level, error=LevelError))

    def known(self, levels: Sequence[int] | None) -> Sequence[int]:
        """The levels that a caller means, None for all. Raises LevelError for an unknown one."""
        if levels is None:
            return self.programs.levels
        known: list[int] = check("levels", levels, LevelList, error=LevelError)
        for level in known:
            self.adaptation(level)
        return known

    def add(self, schedules: Mapping[int, MergeSchedule], prompts: Iterable[int]) -> None:
        """Have levels with these schedules and numbers of prompts, and memory for them.

        Programs that were ready stay ready. Raises BudgetError, ElasticError.
        """
        self.adaptations = dataclasses.replace(self.adaptations, schedules=schedules)
        for level in sorted({0, *self.adaptations.merge_levels, *prompts}):
            self.programs.add(level, self.adaptations.adaptation(level))
        self._admit(self.programs, [])

    @contextlib.contextmanager
    def unchanged_by_errors(self) -> Iterator[None]:
        """Restore levels, tasks and memory if the body of the context fails."""
        before = self.adaptations
        try:
            with self.programs.unchanged_by_errors():
                yield
        except BaseException:
            self.adaptations = before
            with self.lock:
                self._reserve(self.programs)  # less, if there were new levels
            raise

    # Programs

    def compile_all(self, levels: Sequence[int]) -> None:
        """Compile the missing programs of these levels. Raises BudgetError, ElasticError, MappingsError."""
        programs = self.programs
        self._compile(programs, lambda: [(level, size) for level in levels for size in programs.sizes])

    def compile_first(self, profile: ServingProfile, make: Callable[[ServingProfile], Policy]) -> None:
        """Compile the fewest programs that can answer queries: two of one level, at which the policy can decide.

        They are of the smallest size, as a query that comes alone should not pay for a large batch, and the largest, as
        any number of queries fits into it, so that nothing waits for the sizes between. `device_memory` needs the
        largest of all levels, since it limits the sizes of all.
        """
        programs = self.programs
        levels = profile.levels if self._memory is not None else _fewest_levels(profile, make)
        self._compile(programs, lambda: [(n, b) for n in levels for b in (programs.sizes[-1], programs.sizes[0])])
        programs.warm_up(levels)

    def next_step(self, levels: Sequence[int], tried: Collection[LevelAndSize]) -> tuple[LevelAndSize, Step] | None:
        """The next program to compile in the background: first the fastest level, for a service that is busy."""
        if self.is_ending:
            return None
        programs = self.programs
        needed = [(n, b) for b in programs.sizes[:-1] for n in levels]
        for level, size in programs.missing([*((n, programs.sizes[-1]) for n in levels), *needed]):
            if (level, size) not in tried:
                failure = f"Batches of {size} at level {level} are not used"
                return (level, size), Step(programs.compiler(level, size), failure)
        return None

    def take(self, program: LevelAndSize) -> None:
        """Let a program run that was compiled in the background. Raises BudgetError, ElasticError."""
        programs = self.programs
        self._admit(programs, [program])
        programs.warm_up([program[0]])

    def _compile(self, programs: LevelPrograms, needed: Callable[[], Iterable[LevelAndSize]]) -> None:
        """Compile what is needed, which may be less when sizes turn out to be too large for `device_memory`."""
        while missing := programs.missing(needed()):
            programs.compile(missing)
            self._admit(programs, missing)

    def _admit(self, programs: LevelPrograms, compiled: Sequence[LevelAndSize]) -> None:
        """Let compiled programs run, if memory can be reserved for them. Raises BudgetError, ElasticError."""
        with self.lock:
            if self._programs is None:
                raise closed_error("This service")
            if self._memory is not None:
                programs.fit(self._memory, compiled, may_shrink=not self.is_serving)
            compiled = [(level, size) for level, size in compiled if size in programs.sizes]
            self._reserve(programs, compiled)
            programs.admit(compiled)

    def _reserve(self, programs: LevelPrograms, also: Sequence[LevelAndSize] = ()) -> None:
        """Reserve memory for the model, tasks, batches of programs that are ready, or `also` are, and waiting queries.

        Raises BudgetError.
        """
        device = programs.tenants(programs.sizes[-1], also)
        host = {"images that wait": self._waiting_bytes}
        remedy = "lower max_batch, max_waiting, max_tasks or device_memory, or close another model"
        self.reservation.resize(sizes_of(self._devices, device, host=host), remedy=remedy)

    # Batches

    def classify(self, images: np.ndarray, tasks: Sequence[str], level: int) -> list[Classification]:
        """Classify images, uint8 [B, size, size, 3], each for its task, which has this level."""
        programs, answers = self.programs, list[Classification]()  # kept, as the service may be closed meanwhile
        self._compile(programs, lambda: [(level, size) for size in _sizes_of(len(images), programs.sizes)])
        largest = programs.sizes[-1]
        for first in range(0, len(images), largest):
            sent = programs.device.clock()
            part = slice(first, first + largest)
            labelled = best_labels(programs.launch(level, tasks[part], images[part]))
            programs.device.end(sent)
            for answered in labelled:
                if isinstance(answered, FailedError):
                    raise answered
                answers.append(Classification(label=answered[0], probabilities=answered[1], level=level))
        return answers

    def measure(self, levels: Sequence[int], *, remeasure: bool, repeats: int) -> dict[LevelAndSize, np.ndarray]:
        """Time batches of all sizes, except those on record unless `remeasure`; return their seconds, [repeats]."""
        programs = self.programs

        def batches() -> list[LevelAndSize]:
            sizes = programs.sizes
            return [(n, b) for n in levels for b in sizes] if remeasure else self.latency.missing(levels, sizes)

        self._compile(programs, batches)
        if not (timed := batches()):
            return {}
        times = time_batches(programs, timed, repeats)
        for (level, count), seconds in times.items():
            self.latency.renew(level, count, seconds.tolist())
        self.latency.costs.save()
        return times


def _sizes_of(count: int, sizes: Sequence[int]) -> set[int]:
    """The sizes of the batches that this many images are divided into."""
    return {round_up(min(count - first, sizes[-1]), sizes) for first in range(0, count, sizes[-1])}


def _fewest_levels(profile: ServingProfile, make: Callable[[ServingProfile], Policy]) -> tuple[int, ...]:
    """The fewest levels by which a policy can decide: level 0 for most, another one, or else all."""
    policy = make(profile)
    for level in sorted(profile.levels, key=abs):
        with contextlib.suppress(ValueError):
            policy.use(profile.at_levels([level]))
            return (level,)
    return profile.levels


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

"""The planning of a live service: a decider, whose profile follows the tasks, the programs and their latency."""

import contextlib
import functools
import weakref
from collections.abc import Callable, Mapping

from jaxinfer.compiled.background import compile_in_background
from jaxinfer.elastic.catalogue import LevelCatalogue
from jaxinfer.elastic.decider import QueryDecider
from jaxinfer.elastic.errors import ProfileError
from jaxinfer.elastic.options import ServiceConfig
from jaxinfer.elastic.programs import LevelAndSize
from jaxinfer.elastic.registrar import TaskRegistrar
from jaxinfer.elastic.runner import LevelRunner
from jaxinfer.elastic.tasks.repository import Task
from jaxinfer.progress import ProgressOption, showing
from jaxinfer.serving.errors import closed_error


class Planning:
    """The decider of a service's queries, and the profile that it plans with.

    Args:
      catalogue: the levels.
      registrar: the tasks.
      config: the service's options.
      progress: who is told how far compiling for the first query is.

    Attributes:
      decider: serves queries; None before the first one.
    """

    def __init__(
        self, catalogue: LevelCatalogue, registrar: TaskRegistrar, config: ServiceConfig, progress: ProgressOption
    ):
        self._catalogue, self._registrar, self._progress = catalogue, registrar, progress
        self._policy, self._max_waiting = config.policy, config.max_waiting
        self.decider: QueryDecider | None = None

    def started(self, owner: object) -> QueryDecider:
        """The decider, which starts with the first query, when one level is ready; it ends with its owner."""
        if self.decider is None:
            catalogue, programs = self._catalogue, self._catalogue.programs
            with showing(self._progress):
                catalogue.compile_first(self._registrar.profile_of(), self._policy)
            with catalogue.lock:
                if catalogue.is_ending:
                    raise closed_error("This service")
                if self.decider is None:
                    policy = self._policy(self._registrar.profile_of())
                    policy.use(self._registrar.ready_profile())
                    runner = LevelRunner(programs, catalogue.latency, _weakly(self.update))
                    catalogue.is_serving = True
                    self.decider = QueryDecider(runner, policy, max_waiting=self._max_waiting, device=programs.device)
                    self.decider.loop.stop_when_dropped(owner)
                    self._compile_others()
        return self.decider

    def start_all(self, owner: object) -> None:
        """Start when all levels are ready. Raises ProfileError for what was not measured, before it compiles."""
        levels = self._registrar.profile_of().levels
        self._catalogue.compile_all(levels)
        self._catalogue.programs.warm_up(levels)
        self.started(owner)
        self.update()

    def update(self) -> None:
        """Give the decider the present latencies; it keeps its own if not all are measured."""
        with self._catalogue.lock, contextlib.suppress(ProfileError):
            if self.decider is not None:
                self.decider.use(self._registrar.ready_profile())

    def check(self, tasks: Mapping[str, Task]) -> Callable[[], None]:
        """Check that the policy can decide for these tasks, once queries are served; return what makes it do so."""
        if self.decider is None:
            return lambda: None
        profile = self._registrar.ready_profile(tasks)
        self._policy(profile)
        self._catalogue.programs.warm_up(profile.levels)
        return functools.partial(self.decider.use, profile)

    def _compile_others(self) -> None:
        """Compile the other programs in the background, and plan with each from then on."""
        held = weakref.ref(self)
        compile_in_background(
            self._catalogue.programs.turns,
            lambda tried: (
                None if (x := held()) is None else x._catalogue.next_step(x._registrar.shared_levels(), tried)
            ),
            lambda program: None if (x := held()) is None else x._take(program),
        )

    def _take(self, program: LevelAndSize) -> None:
        """Plan with a program from now on. Raises BudgetError or ElasticError if its memory does not fit."""
        self._catalogue.take(program)
        self.update()


def _weakly(method: Callable[[], None]) -> Callable[[], None]:
    """A function that calls a method of an object, without keeping that alive, as long as it exists."""
    held = weakref.WeakMethod(method)

    def call() -> None:
        if (bound := held()) is not None:
            bound()

    return call

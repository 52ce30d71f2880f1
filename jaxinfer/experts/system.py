"""A system of experts, as users hold it."""

import logging
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, Self, overload

import numpy as np

from jaxinfer.experts.config import SystemConfig
from jaxinfer.experts.errors import InsufficientMemoryError, InvalidInputError, LoadError
from jaxinfer.experts.execution.decider import InputDecider, InputTicket
from jaxinfer.experts.execution.loader import OpenedExpert
from jaxinfer.experts.execution.observed import ObservedProfiles
from jaxinfer.experts.opened import OpenedSystem
from jaxinfer.experts.results import Judgement, Result
from jaxinfer.experts.scheduling.executor_state import ExpertStatistics
from jaxinfer.experts.scheduling.experts import ExpertGraph
from jaxinfer.experts.scheduling.profile import Profile
from jaxinfer.experts.scheduling.request import Action, Load
from jaxinfer.fields import NotNegative, check
from jaxinfer.models.vision.image_files import AnyImage, pixels_of
from jaxinfer.progress import ProgressOption, long_work, showing
from jaxinfer.serving.budget import Budget
from jaxinfer.serving.errors import OverloadedError
from jaxinfer.serving.future import TicketFuture
from jaxinfer.serving.heap import trim_heap
from jaxinfer.serving.loop import Loop
from jaxinfer.serving.served import Served

log = logging.getLogger(__name__)

IN_FLIGHT = 1024
"""Maximum number of inputs under way, and so in memory, of one `System.run`."""


class System(Served):
    """A system of expert models that share less memory than they need together (CoServe).

    Experts with the same shapes share their programs. Costs are measured once per architecture and device, and kept.

    >>> with System.from_config("board.toml") as system:  # doctest: +SKIP
    ...     for result in system.run([("resistor", image)]):
    ...         print(result.verdict)

    Args:
      config: the system's config; or the system opened already, which then belongs to this one.
      profiles: initial costs by architecture and device, instead of measured ones.
      progress: whether work of seconds shows a line on stderr, or who hears of it; as in `LLM`.

    Attributes:
      opened: the opened checkpoints, programs and reserved memory that it runs.
      profiles: the experts' costs, corrected by what loads and batches really take.
      scheduler: decides what is loaded and runs.
      initial_experts: the experts that were loaded at the start.

    Raises ConfigError for a config that cannot work. An expert whose checkpoint cannot be opened is no error:
    its requests fail with LoadError, others go on.
    """

    def __init__(
        self,
        config: SystemConfig | OpenedSystem,
        *,
        profiles: Mapping[tuple[str, str], Profile] | None = None,
        progress: ProgressOption = None,
    ):
        with showing(progress):
            self.opened = config if isinstance(config, OpenedSystem) else OpenedSystem(config)
            if profiles is None:
                profiles = self.opened.measure()
            else:
                self.opened.write_files()
            self.profiles = ObservedProfiles(profiles)
            self.scheduler = self.opened.make_scheduler(self.profiles)
            self._runner = self.opened.make_runner(self.scheduler)
            self.initial_experts = self._load_placed()
        self._decider = InputDecider(self.scheduler, self.profiles, self._runner)
        self.opened.lend(self._decider)
        self._decider.loop.stop_when_dropped(self)

    @classmethod
    def from_config(
        cls,
        path: str | os.PathLike[str],
        *,
        mode: str | None = None,
        profiles: Mapping[tuple[str, str], Profile] | None = None,
        progress: ProgressOption = None,
    ) -> Self:
        """Make the system that a TOML file describes; mode: as in `OpenedSystem`, the others as in the class."""
        return cls(SystemConfig.read(path, mode=mode), profiles=profiles, progress=progress)

    # -- for users --

    def submit(self, kind: str, value: Any, *, deadline: float | None = None) -> TicketFuture[Result]:
        """Submit an input and return its future at once, for a thread to ask or a coroutine to await.

        Args:
          kind: the name of one of the config's inputs.
          value: an image, uint8 [H, W, 3] (RGB), as from `load_image`; for an encoder a text or token ids.
          deadline: seconds within which the last expert must have begun.

        The future's callbacks run in a thread of the system, one after the other: one that blocks delays other
        callbacks, but no results.

        An error of the future that comes after some stages has their Result as its `output`.

        Raises RoutingError, InvalidInputError, OverloadedError, LoadError, ClosedError, DiedError.
        """
        try:
            kind, deadline = check("kind", kind, str), check("deadline", deadline, NotNegative | None)
        except ValueError as error:
            raise InvalidInputError(str(error)) from None
        first = self.graph.first(kind)
        return self._decider.serve(first, self.opened.find(first).kind.check(value), within=deadline, owner=self)

    def load_image(self, kind: str, image: AnyImage) -> np.ndarray:
        """Resize and crop an image of any size as the first expert of a kind of input needs it.

        Classifiers resize as their checkpoints say; detectors take the image inside a grey square, in whose pixels
        boxes are. An expert with `image_size` in its config resizes images of this size itself, and takes no others.

        Args:
          kind: the name of one of the config's inputs.
          image: a file, an image of Pillow, or uint8 [H, W, 3] (RGB).

        Raises RoutingError, InvalidInputError, LoadError, and MissingExtraError without Pillow.
        """
        expert = self.opened.find(self.graph.first(kind))
        try:
            return expert.kind.fit(pixels_of(image))
        except ValueError as error:
            raise InvalidInputError(str(error)) from error

    @overload
    def run(self, inputs: Iterable[tuple[str, Any]], *, return_errors: Literal[False] = False) -> Iterator[Result]: ...

    @overload
    def run(self, inputs: Iterable[tuple[str, Any]], *, return_errors: bool) -> Iterator[Result | Exception]: ...

    def run(
        self, inputs: Iterable[tuple[str, Any]], *, return_errors: bool = False
    ) -> Iterator[Result] | Iterator[Result | Exception]:
        """Yield the results of (kind, value) pairs, in order, each as soon as it is ready.

        Args:
          inputs: any number; taken while fewer than `IN_FLIGHT` are under way and the queue has room.
          return_errors: yield an input's error in place of its result and go on, instead of raising it and cancelling
            the inputs that follow.
        """
        under_way: deque[Future[Result]] = deque()

        def take() -> Result | Exception:
            try:
                outcome = under_way[0].result()
            except Exception as error:
                if not return_errors:
                    raise
                outcome = error
            under_way.popleft()
            return outcome

        try:
            for kind, value in inputs:
                while (future := self._try_submit(kind, value, alone=not under_way)) is None:
                    yield take()
                under_way.append(future)
                while under_way and (under_way[0].done() or len(under_way) >= IN_FLIGHT):
                    yield take()
            while under_way:
                yield take()
        finally:
            for future in under_way:
                future.cancel()

    def _try_submit(self, kind: str, value: Any, *, alone: bool) -> Future[Result] | None:
        """Submit an input, with errors in the future.

        Returns None if too many wait, unless the caller has none under way (`alone`).
        """
        try:
            return self.submit(kind, value)
        except Exception as error:
            if isinstance(error, OverloadedError) and not alone:
                return None
            failed: Future[Result] = Future()
            failed.set_exception(error)
            return failed

    def retry(self, expert: str) -> None:
        """Load a failed expert again at once, such as after its checkpoint was repaired."""
        self._decider.retry(self.graph.require(expert).name)

    def stats(self) -> ExpertStatistics:
        """Return the counters of inputs, loads by source and batches so far, and where time went."""
        return self._decider.loop.stats()

    def run_now(self, action: Action) -> Sequence[Judgement]:
        """Carry out a scheduler's action now: for a `Simulator(system.scheduler, act=system.run_now)`.

        Returns a batch's answers, to zeros as inputs.
        """
        return self._runner.run_now(action)

    @property
    def graph(self) -> ExpertGraph:
        """Which expert follows which, and each one's usage."""
        return self.opened.graph

    @property
    def experts(self) -> Mapping[str, OpenedExpert]:
        """The experts whose checkpoints opened."""
        return self.opened.experts

    @property
    def broken(self) -> Mapping[str, Exception]:
        """The errors of the experts that cannot be used."""
        return self.opened.broken

    @property
    def budgets(self) -> dict[str, Budget]:
        """The budget of each memory that the system uses, by name, with each owner's bytes."""
        return self.opened.budgets

    # -- parts --

    @property
    def _serving_loop(self) -> Loop[InputTicket]:
        return self._decider.loop

    def _free(self) -> None:
        self.opened.release()
        trim_heap()

    def _load_placed(self) -> set[str]:
        """Load the experts that are placed at the start; return those that could be loaded."""
        manager, loaded = self.scheduler.manager, set[str]()
        placed = [(pool, name) for pool, names in manager.place().items() for name in names]
        with long_work("loading experts", total=len(placed)) as work:
            for pool, name in placed:
                try:
                    self.run_now(Load(executor=0, pool=pool, expert=name, tier="disk"))
                    loaded.add(name)
                except InsufficientMemoryError as error:
                    log.warning("%s", error)
                    manager.remove_placed(pool, name)
                except LoadError as error:
                    self.opened.mark_broken(name, error)
                    manager.remove_placed(pool, name)
                work.advance()
        return loaded

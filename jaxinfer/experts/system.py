"""A system of experts, as users hold it."""

import asyncio
import logging
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, Self, overload

import numpy as np

from jaxinfer.experts.config import SystemConfig
from jaxinfer.experts.errors import InsufficientMemoryError, InvalidInputError, LoadError
from jaxinfer.experts.execution.decider import InputDecider
from jaxinfer.experts.execution.kinds import Judgement
from jaxinfer.experts.execution.observed import ObservedProfiles
from jaxinfer.experts.execution.runner import ExpertRunner
from jaxinfer.experts.opened import OpenedSystem
from jaxinfer.experts.results import Result
from jaxinfer.experts.scheduling.executor_state import ExpertStatistics
from jaxinfer.experts.scheduling.profile import Profile
from jaxinfer.experts.scheduling.request import Action, Load
from jaxinfer.fields import NotNegative, check
from jaxinfer.models.vision.image_files import AnyImage, pixels_of
from jaxinfer.progress import ProgressOption, long_work, showing
from jaxinfer.serving.errors import OverloadedError
from jaxinfer.serving.heap import trim_heap
from jaxinfer.serving.lifecycle import Closeable, check_timeout

log = logging.getLogger(__name__)

IN_FLIGHT = 1024
"""Maximum number of inputs under way, and so in memory, of one `System.run`."""


class System(OpenedSystem, Closeable):
    """A system of expert models that share less memory than they need together (CoServe).

    Experts with the same shapes share their programs. Costs are measured once per architecture and device, and kept.

    >>> with System.from_config("board.toml") as system:  # doctest: +SKIP
    ...     for result in system.run([("resistor", image)]):
    ...         print(result.verdict)

    Args:
      config: the system's config.
      profiles: initial costs by architecture and device, instead of measured ones.
      progress: whether work of seconds shows a line on stderr, or who hears of it; as in `LLM`.

    Raises ConfigError for a config that cannot work. An expert whose checkpoint cannot be opened is no error:
    its requests fail with LoadError, others go on.
    """

    def __init__(
        self,
        config: SystemConfig,
        *,
        profiles: Mapping[tuple[str, str], Profile] | None = None,
        progress: ProgressOption = None,
    ):
        super().__init__(config, progress=progress)
        with showing(progress):
            if profiles is None:
                profiles = self.measure()
            else:
                self._prepare()
            self.profiles = ObservedProfiles(profiles)
            self.scheduler = self.make_scheduler(self.profiles)
            self._compile(self.profiles, self.devices[: len(self.scheduler.executors)])
            self._start()
        self._runner = ExpertRunner(self.scheduler.executors, self.devices, self.experts, self._programs, self._weights)
        self._decider = InputDecider(self.scheduler, self.profiles, self._runner)
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

    def submit(self, kind: str, value: Any, *, deadline: float | None = None) -> Future[Result]:
        """Submit an input and return a future at once.

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
        return self._decider.serve(first, self._find(first).kind.check(value), within=deadline, owner=self)

    def load_image(self, kind: str, image: AnyImage) -> np.ndarray:
        """Resize and crop an image of any size as the first expert of a kind of input needs it.

        Classifiers resize as their checkpoints say; detectors take the image inside a grey square, in whose pixels
        boxes are. An expert with `image_size` in its config resizes images of this size itself, and takes no others.

        Args:
          kind: the name of one of the config's inputs.
          image: a file, an image of Pillow, or uint8 [H, W, 3] (RGB).

        Raises RoutingError, InvalidInputError, LoadError, and MissingExtraError without Pillow.
        """
        expert = self._find(self.graph.first(kind))
        try:
            return expert.kind.fit(pixels_of(image))
        except ValueError as error:
            raise InvalidInputError(str(error)) from error

    async def judge(self, kind: str, value: Any, *, deadline: float | None = None) -> Result:
        """Submit an input and wait for its result, in a coroutine; cancelling it cancels the request."""
        return await asyncio.wrap_future(self.submit(kind, value, deadline=deadline))

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

    def close(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """Close the system (see `Closeable`). Running requests may finish; new inputs are refused."""
        timeout = check_timeout(timeout)
        try:
            self._decider.loop.close(drain=drain, timeout=timeout)
        finally:
            self._reservation.release()
            trim_heap()

    def run_now(self, action: Action) -> Sequence[Judgement]:
        """Carry out a scheduler's action now: for a `Simulator(system.scheduler, act=system.run_now)`.

        Returns a batch's answers, to zeros as inputs.
        """
        return self._runner.run_now(action)

    @property
    def is_running(self) -> bool:
        """Whether inputs are accepted."""
        return self._decider.loop.is_running

    @property
    def statistics(self) -> ExpertStatistics:
        """Counters of inputs, loads by source and batches, and where time went."""
        return self.scheduler.statistics

    @property
    def initial_experts(self) -> set[str]:
        """The experts that were loaded at the start."""
        return self._initial_experts

    def _start(self) -> None:
        """Load the experts that are placed at the start."""
        devices = {x.pool.index: device for x, device in zip(self.scheduler.executors, self.devices, strict=False)}
        self._weights = self._loader([devices[pool.index] for pool in self.scheduler.manager.pools])
        placed = [(pool, name) for pool, names in self.scheduler.manager.place().items() for name in names]
        self._initial_experts: set[str] = set()
        with long_work("loading experts", total=len(placed)) as work:
            for pool, name in placed:
                try:
                    self._weights.prepare(Load(executor=0, pool=pool, expert=name, tier="disk"))()
                    self._initial_experts.add(name)
                except InsufficientMemoryError as error:
                    log.warning("%s", error)
                    self.scheduler.manager.remove_placed(pool, name)
                except LoadError as error:
                    self._mark_broken(name, error)
                    self.scheduler.manager.remove_placed(pool, name)
                work.advance()

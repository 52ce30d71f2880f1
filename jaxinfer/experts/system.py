"""A system of experts, as its users hold it."""

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Literal, overload

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
from jaxinfer.experts.scheduling.scheduler import Assignment, Scheduler
from jaxinfer.generation.fields import NotNegative, check
from jaxinfer.serving.errors import OverloadedError
from jaxinfer.serving.heap import trim_heap
from jaxinfer.serving.lifecycle import Closeable
from jaxinfer.serving.progress import Progress, log_progress

log = logging.getLogger(__name__)

IN_FLIGHT = 1024
"""Most inputs of one `System.run` on their way, which are in memory."""


class System(OpenedSystem, Closeable):
    """Experts that judge inputs together, in less memory than they have.

    Experts with the same shapes share their programs. What they cost is measured once for each architecture and
    device, and kept.

    >>> with System.from_config("board.toml") as system:  # doctest: +SKIP
    ...     for result in system.run([("resistor", image)]):
    ...         print(result.verdict)

    Args:
      config: what there is.
      profiles: what experts cost at first, by architecture and device, instead of measuring it.
      preadv: reads experts' files; benchmarks give one that is slower.
      on_assignment: told of every assignment of a request to an executor, with the times it was chosen by.
      scheduler: makes the scheduler; benchmarks give one that records, or that replays (`jaxinfer.evaluation`).
      progress: told of what takes a while.

    Raises ConfigError for a config that cannot work. An expert whose checkpoint cannot be opened is no error:
    its requests fail with LoadError, others go on.
    """

    def __init__(
        self,
        config: SystemConfig,
        *,
        profiles: Mapping[tuple[str, str], Profile] | None = None,
        preadv: Callable[[int, list[Any], int], int] = os.preadv,
        on_assignment: Callable[[Assignment], None] | None = None,
        scheduler: Callable[..., Scheduler] = Scheduler,
        progress: Progress = log_progress,
    ):
        super().__init__(config, preadv=preadv, progress=progress)
        self.profiles = ObservedProfiles(profiles if profiles is not None else self.measure())
        self.scheduler = self.make_scheduler(self.profiles, scheduler=scheduler, on_assignment=on_assignment)
        self._compile(self.profiles, self.devices[: len(self.scheduler.executors)])
        self._start()
        self._runner = ExpertRunner(self.scheduler.executors, self.devices, self.experts, self._programs, self._weights)
        self._decider = InputDecider(self.scheduler, self.profiles, self._runner)
        self._decider.loop.stop_when_dropped(self)

    # -- what users do --

    def submit(self, kind: str, value: Any, *, deadline: float | None = None) -> Future[Result]:
        """Have an input judged; returns at once.

        Args:
          kind: one of the config's inputs.
          value: an image, uint8 [H, W, 3] (RGB); for an encoder a text or token ids.
          deadline: seconds within which the last expert must have begun.
        Raises RoutingError, InvalidInputError, OverloadedError, LoadError, ClosedError, DiedError.
        """
        try:
            kind, deadline = check("kind", kind, str), check("deadline", deadline, NotNegative | None)
        except ValueError as error:
            raise InvalidInputError(str(error)) from None
        first = self.graph.first(kind)
        return self._decider.serve(first, self._find(first).kind.check(value), within=deadline, owner=self)

    async def judge(self, kind: str, value: Any, *, deadline: float | None = None) -> Result:
        """The same for coroutines: waits for the result; cancelling gives the request up."""
        return await asyncio.wrap_future(self.submit(kind, value, deadline=deadline))

    @overload
    def run(self, inputs: Iterable[tuple[str, Any]], *, return_errors: Literal[False] = False) -> Iterator[Result]: ...

    @overload
    def run(self, inputs: Iterable[tuple[str, Any]], *, return_errors: bool) -> Iterator[Result | Exception]: ...

    def run(
        self, inputs: Iterable[tuple[str, Any]], *, return_errors: bool = False
    ) -> Iterator[Result] | Iterator[Result | Exception]:
        """The results of (kind, value) pairs, in their order, each as soon as it is there.

        Args:
          inputs: any number; taken while fewer than `IN_FLIGHT` are on their way, and no more may wait than do.
          return_errors: give the error of an input in place of its result and go on, instead of raising it, which gives
            up those that follow.
        """
        under_way: deque[Future[Result]] = deque()

        def take() -> Result | Exception:
            try:
                found = under_way[0].result()
            except Exception as error:
                if not return_errors:
                    raise
                found = error
            under_way.popleft()
            return found

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
        """`submit`, its errors in the future; None if too many wait, unless none of the caller's does (`alone`)."""
        try:
            return self.submit(kind, value)
        except Exception as error:
            if isinstance(error, OverloadedError) and not alone:
                return None
            failed: Future[Result] = Future()
            failed.set_exception(error)
            return failed

    def retry(self, expert: str) -> None:
        """Have an expert that could not be loaded tried again at once, as after its checkpoint was repaired."""
        self._decider.retry(self.graph.require(expert).name)

    def close(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """As of `Closeable`. What has begun then may end; inputs that come while it waits are refused."""
        try:
            self._decider.loop.close(drain=drain, timeout=timeout)
        finally:
            self._reservation.release()
            trim_heap()

    def perform(self, action: Action) -> Sequence[Judgement]:
        """Do what the scheduler has decided here and now: for a `Simulator(system.scheduler, act=system.perform)`.

        Returns a batch's answers, to zeros as inputs.
        """
        return self._runner.perform(action)

    @property
    def is_running(self) -> bool:
        """Whether inputs are taken."""
        return self._decider.loop.is_running

    @property
    def statistics(self) -> ExpertStatistics:
        """What became of inputs, loads by where they came from, batches, and where time went."""
        return self.scheduler.statistics

    @property
    def initially(self) -> set[str]:
        """The experts that were loaded at the start."""
        return self._initially

    def _start(self) -> None:
        """Load the experts that are there at the start."""
        devices = {x.pool.index: device for x, device in zip(self.scheduler.executors, self.devices, strict=False)}
        self._weights = self._loader([devices[pool.index] for pool in self.scheduler.manager.pools])
        placed = [(pool, name) for pool, names in self.scheduler.manager.place().items() for name in names]
        self._initially: set[str] = set()
        for done, (pool, name) in enumerate(placed):
            self._progress("loading experts", done, len(placed))
            try:
                self._weights.prepare(Load(executor=0, pool=pool, expert=name, tier="disk"))()
                self._initially.add(name)
            except InsufficientMemoryError as error:
                log.warning("%s", error)
                self.scheduler.manager.remove_placed(pool, name)
            except LoadError as error:
                self._break(name, error)
                self.scheduler.manager.remove_placed(pool, name)

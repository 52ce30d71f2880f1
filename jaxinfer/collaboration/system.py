"""A system of experts, as its users hold it."""

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any, Self

import jax

from checkpoints import CheckpointError
from jaxinfer.collaboration.config import ExecutorOptions, ExpertConfig, SystemConfig
from jaxinfer.collaboration.errors import ConfigError, LoadError
from jaxinfer.collaboration.execution.architectures import Architecture, ArchitecturePrograms
from jaxinfer.collaboration.execution.executors import Executors, Result, Times
from jaxinfer.collaboration.execution.kinds import kind_of
from jaxinfer.collaboration.execution.loader import ExpertLoader, OpenedExpert, write_expert
from jaxinfer.collaboration.execution.profiler import Measured, measure
from jaxinfer.collaboration.scheduling.experts import ExpertGraph, ExpertInfo
from jaxinfer.collaboration.scheduling.profile import Profile, Profiles
from jaxinfer.collaboration.scheduling.request import Action, Load
from jaxinfer.collaboration.scheduling.scheduler import Decision, ExecutorConfig, Scheduler, Statistics
from jaxinfer.compiled import ExecutableStore
from jaxinfer.models.loading import open_model

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Told what is being done, how much of it is, and how much there is."""


def log_progress(what: str, done: int, total: int) -> None:
    """The default: to the log."""
    log.info("%s: %d of %d", what, done, total)


class System:
    """Experts that judge inputs together, in less memory than they have.

    Experts with the same shapes share their programs. What they cost is measured once for each architecture and
    device, and kept.

    >>> with System.from_config("board.toml") as system:  # doctest: +SKIP
    ...     for result in system.run([("resistor", image)]):
    ...         print(result.verdict)

    Args:
      config: what there is.
      profiles: what experts cost, by architecture and device, instead of measuring it.
      preadv: reads experts' files; benchmarks give one that is slower.
      on_decision: told of every assignment of a request to an executor, with the times it was chosen by.
      scheduler: makes the scheduler; benchmarks give one that records, or that replays (`scheduling/replay.py`).
      progress: told of what takes a while.

    Raises CollaborationError for a config that cannot work. An expert whose checkpoint cannot be opened is no error:
    its requests fail with LoadError, others go on.
    """

    def __init__(
        self,
        config: SystemConfig,
        *,
        profiles: Mapping[tuple[str, str], Profile] | None = None,
        preadv: Callable[[int, list[Any], int], int] = os.preadv,
        on_decision: Callable[[Decision], None] | None = None,
        scheduler: Callable[..., Scheduler] = Scheduler,
        progress: Progress = log_progress,
    ):
        self.config = config
        self._progress = progress
        self._configs = {expert.name: expert for expert in config.experts}
        self.broken: dict[str, Exception] = {}
        self.experts: dict[str, OpenedExpert] = {}
        self._open()
        self._prepare()
        self.graph = self._graph(config)
        self.devices = [_device(executor) for executor in config.executors]
        self._programs: dict[tuple[Architecture, Any], ArchitecturePrograms] = {}
        self._keep = max(expert.architecture.bytes for expert in self.experts.values())
        self._preadv = preadv
        self.profiles = profiles if profiles is not None else self.measure()
        self.scheduler = scheduler(
            self.graph,
            self.profiles,
            [_executor_config(x, device) for x, device in zip(config.executors, self.devices, strict=True)],
            config.policy,
            host_bytes=config.host_memory,
            max_queued=config.max_queued,
            on_decision=on_decision,
        )
        self._compile()
        self._loader = self._start()
        self._executors = Executors(self.scheduler, self.experts, self._programs, self._loader, self.devices)

    @classmethod
    def from_config(cls, path: str | os.PathLike[str], *, mode: str | None = None, **options: Any) -> Self:
        """The system that a TOML file describes.

        Args:
          mode: a policy by its name instead of the file's: "best", "paper", "samba" and others (`policy.POLICIES`).
          options: as of `System`.
        """
        return cls(SystemConfig.read(path, mode=mode), **options)

    # -- what users do --

    def submit(self, kind: str, value: Any, *, deadline: float | None = None) -> Future[Result]:
        """Have an input judged; returns at once.

        Args:
          kind: one of the config's inputs.
          value: an image, uint8 [H, W, 3] (RGB); for an encoder a text or token ids.
          deadline: seconds within which the last expert must have begun.
        Raises RoutingError, InvalidInputError, OverloadedError, LoadError, ShutdownError.
        """
        first = self.graph.first(kind)
        return self._executors.submit(first, self._like(first).kind.check(value), deadline=deadline)

    async def judge(self, kind: str, value: Any, *, deadline: float | None = None) -> Result:
        """The same for coroutines: waits for the result; cancelling gives the request up."""
        return await asyncio.wrap_future(self.submit(kind, value, deadline=deadline))

    def run(self, inputs: Iterable[tuple[str, Any]]) -> Iterator[Result]:
        """The results of (kind, value) pairs, in their order. All are submitted before the first result is given."""
        futures = [self.submit(kind, value) for kind, value in inputs]
        try:
            for future in futures:
                yield future.result()
        finally:
            for future in futures:
                future.cancel()

    def close(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """End. `drain` waits for what was submitted; otherwise what has not begun fails with ShutdownError."""
        self._executors.close(drain=drain, timeout=timeout)
        self._loader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(drain=kind is None)

    def perform(self, action: Action) -> None:
        """Do what the scheduler has decided here and now: for a `Simulator(system.scheduler, act=system.perform)`."""
        self._executors.perform(action)

    @property
    def statistics(self) -> Statistics:
        """What the scheduler has done: loads by where they came from, batches, failures."""
        return self.scheduler.statistics

    @property
    def times(self) -> Times:
        """Where time went."""
        return self._executors.times

    @property
    def initially(self) -> set[str]:
        """The experts that were loaded at the start."""
        return {name for names in self._placed.values() for name in names}

    @property
    def compiled(self) -> int:
        """How many programs there are: not more for more experts."""
        return sum(len(list(programs.cache)) for programs in self._programs.values())

    def measure(self, *, anew: bool = False) -> Profiles:
        """What experts cost, from the record; what is not on it is measured (`anew`: all)."""
        return {key: found.profile for key, found in self.measured(anew=anew).items()}

    def measured(self, *, anew: bool = False) -> dict[tuple[str, str], Measured]:
        """The same with how well a line fits the latencies, and the memory of batches."""
        beside, one = Counter(self.devices), self.config.policy.one_executor
        devices = {device.platform: device for device in self.devices}
        architectures = {expert.architecture for expert in self.experts.values()}
        wanted = [(architecture, device) for architecture in architectures for device in devices.values()]
        found = {}
        for done, (architecture, device) in enumerate(sorted(wanted, key=lambda key: (key[0].name, str(key[1])))):
            self._progress("measuring architectures", done, len(wanted))
            loader = ExpertLoader(self._find, [device], keep=self._keep, preadv=self._preadv)
            experts = iter([name for name, expert in self.experts.items() if expert.architecture == architecture])
            key = architecture.name, device.platform
            while key not in found:
                try:
                    found[key] = measure(
                        self._of(architecture, device),
                        loader,
                        0,
                        next(experts),
                        max_batch=self.config.max_batch,
                        beside=1 if one else beside[device],
                        anew=anew,
                    )
                except LoadError as error:
                    log.warning("%s", error)
                except StopIteration:
                    raise LoadError(f"no expert of architecture {architecture.name} can be loaded.") from None
            loader.close()
        return found

    # -- how it is built --

    def _open(self) -> None:
        for done, name in enumerate(self._configs):
            self._progress("opening experts", done, len(self._configs))
            try:
                self.experts[name] = self._open_expert(name)
            except (CheckpointError, OSError) as error:
                self._break(name, error)
        if not self.experts:
            raise LoadError(f"no expert can be opened; the first: {next(iter(self.broken.values()))}")

    def _open_expert(self, name: str) -> OpenedExpert:
        expert = self._configs[name]
        opened = open_model(expert.checkpoint, dtype=self.config.dtype)
        return OpenedExpert(
            name=name, opened=opened, kind=kind_of(opened, size=expert.image_size, tokens=expert.tokens)
        )

    def _break(self, name: str, error: Exception) -> None:
        self.broken[name] = error
        log.warning("expert %s cannot be used: %s", name, error)

    def _like(self, name: str) -> OpenedExpert:
        """The expert; if it cannot be opened, one that it is taken to be like."""
        return self.experts.get(name) or next(iter(self.experts.values()))

    def _find(self, name: str) -> OpenedExpert:
        """The expert; one that could not be opened before is tried again. Raises LoadError."""
        if name not in self.experts:
            try:
                expert = self._open_expert(name)
            except (CheckpointError, OSError) as error:
                raise LoadError(str(error)) from error
            if expert.architecture != self._like(name).architecture:
                raise LoadError(f"its architecture is {expert.architecture.name}, which was not known at the start.")
            self.experts[name] = expert
        return self.experts[name]

    def _prepare(self) -> None:
        """Write the files of experts that have none yet."""
        for done, expert in enumerate(list(self.experts.values())):
            self._progress("preparing experts", done, len(self.experts))
            try:
                write_expert(expert.opened)
            except CheckpointError as error:
                self._break(expert.name, error)

    def _graph(self, config: SystemConfig) -> ExpertGraph:
        graph = ExpertGraph((self._info(expert) for expert in config.experts), config.inputs, config.rules)
        usage = {expert.name: expert.usage for expert in config.experts if expert.usage is not None}
        for rule in config.rules:
            first, following = (self.experts.get(name) for name in (rule.expert, rule.next))
            if first and following and first.kind.shape != following.kind.shape:
                raise ConfigError(
                    f"expert {rule.expert!r} takes inputs of {list(first.kind.shape)} and {rule.next!r}, which follows "
                    f"it, of {list(following.kind.shape)}; give both the same image_size."
                )
        return graph.with_usage(usage)

    def _info(self, expert: ExpertConfig) -> ExpertInfo:
        """An expert as the scheduler knows it."""
        architecture = self._like(expert.name).architecture
        return ExpertInfo(
            name=expert.name,
            architecture=architecture.name,
            bytes=architecture.bytes,
            pinned=expert.pinned and expert.name not in self.broken,
        )

    def _of(self, architecture: Architecture, device: Any) -> ArchitecturePrograms:
        if (architecture, device) not in self._programs:
            alone = self.config.policy.one_executor or self.devices.count(device) == 1
            self._programs[architecture, device] = ArchitecturePrograms(
                architecture, device, single_threaded=not alone, store=ExecutableStore()
            )
        return self._programs[architecture, device]

    def _compile(self) -> None:
        used = {
            (self.experts[name].architecture, device)
            for name in self.experts
            for device in self.devices[: len(self.scheduler.executors)]
        }
        for done, (architecture, device) in enumerate(sorted(used, key=lambda key: (key[0].name, str(key[1])))):
            self._progress("compiling architectures", done, len(used))
            profile = self.profiles.get((architecture.name, device.platform))
            if profile is not None:
                self._of(architecture, device).compile_ahead(profile.max_batch)

    def _start(self) -> ExpertLoader:
        """Load the experts that are there at the start."""
        devices = {executor.pool.index: device for executor, device in self._pairs()}
        loader = ExpertLoader(
            self._find, [devices[pool.index] for pool in self.scheduler.pools], keep=self._keep, preadv=self._preadv
        )
        self._placed = self.scheduler.place()
        total = sum(map(len, self._placed.values()))
        for done, (pool, name) in enumerate((pool, name) for pool, names in self._placed.items() for name in names):
            self._progress("loading experts", done, total)
            try:
                loader.prepare(Load(executor=0, pool=pool, expert=name, tier="disk"))()
            except LoadError as error:
                self._break(name, error)
                self.scheduler.remove_placed(pool, name)
        return loader

    def _pairs(self) -> list[tuple[Any, Any]]:
        return list(zip(self.scheduler.executors, self.devices, strict=False))


def _device(executor: ExecutorOptions) -> Any:
    """The device of an executor. Raises ConfigError if it is not here."""
    if executor.device is None:
        return jax.local_devices()[0]
    platform, _, index = executor.device.partition(":")
    try:
        found = jax.local_devices(backend=platform)
        return found[int(index or 0)]
    except (RuntimeError, ValueError, IndexError) as error:
        here = ", ".join(f"{device.platform}:{device.id}" for device in jax.local_devices())
        raise ConfigError(
            f"executor {executor.name!r}: there is no device {executor.device!r}; here: {here}."
        ) from error


def _executor_config(executor: ExecutorOptions, device: Any) -> ExecutorConfig:
    return ExecutorConfig(
        name=executor.name,
        processor=device.platform,
        device=f"{device.platform}:{device.id}",
        expert_bytes=executor.expert_memory,
        activation_bytes=executor.activation_memory,
    )

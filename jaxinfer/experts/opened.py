"""A system of experts before it runs: checkpoints opened, memory reserved, costs measured, programs compiled."""

import itertools
import logging
import math
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import jax

from jaxinfer.checkpoints import CheckpointError
from jaxinfer.checkpoints.stores import Staging
from jaxinfer.compiled import executable_store
from jaxinfer.experts.config import ExecutorOptions, ExpertConfig, SystemConfig
from jaxinfer.experts.errors import ConfigError, LoadError
from jaxinfer.experts.execution.architectures import Architecture, ArchitecturePrograms
from jaxinfer.experts.execution.decider import InputDecider
from jaxinfer.experts.execution.kinds import NOTHING, ExpertKind, kind_of
from jaxinfer.experts.execution.lender import EXPERTS, HOST_CACHE, ExpertLender
from jaxinfer.experts.execution.loader import ExpertLoader, OpenedExpert, file_bytes, write_expert
from jaxinfer.experts.execution.place import Place
from jaxinfer.experts.execution.profiler import Measured, measure
from jaxinfer.experts.execution.runner import ExpertRunner
from jaxinfer.experts.scheduling.executor_state import ExecutorConfig
from jaxinfer.experts.scheduling.expert_manager import ExpertManager
from jaxinfer.experts.scheduling.experts import ExpertInfo, Rule
from jaxinfer.experts.scheduling.policy import Policy
from jaxinfer.experts.scheduling.profile import Profile, Profiles
from jaxinfer.experts.scheduling.scheduler import Scheduler
from jaxinfer.hub import HubName, resolve
from jaxinfer.models.files.loading import open_model
from jaxinfer.progress import ProgressOption, current_progress, long_work, showing
from jaxinfer.serving.budget import (
    Budget,
    BudgetError,
    Reservation,
    default_max_waiting,
    host_budget,
    sizes_of,
)
from jaxinfer.serving.heap import map_large_arrays

log = logging.getLogger(__name__)

SMALLEST_MAPPED = 128 << 10
"""Array size in bytes from which memory goes back to the system when an expert leaves.

Most arrays of a convolutional model are small.
"""


class OpenedSystem:
    """The experts of a config, opened and checked; nothing is loaded and no thread runs.

    It is the device side of a system. `System` runs it; tools plan and simulate with it.

    Args:
      config: the system's config.
      progress: whether work of seconds shows a line on stderr, or who hears of it; as in `LLM`.
      preadv: reads the experts' files, as `os.preadv` does; its `repr` names the disk in the record of costs.
      scheduler_type: makes schedulers from the arguments of `Scheduler`.

    Attributes:
      config: the config given.
      experts: the experts whose checkpoints opened.
      broken: the errors of the others.
      graph: which expert follows which, and each one's usage.
      places: each executor's device, or its mesh.
      host_bytes: the host cache's bytes for each device of the mesh, as schedulers count experts.
      max_waiting: waiting requests beyond which inputs are refused.

    Raises ConfigError for a config that cannot work. An expert whose checkpoint cannot be opened is no error,
    as long as there is another one.
    """

    def __init__(
        self,
        config: SystemConfig,
        *,
        progress: ProgressOption = None,
        preadv: Callable[[int, list[Any], int], int] = os.preadv,
        scheduler_type: Callable[..., Scheduler] = Scheduler,
    ):
        self.config, self._preadv, self._scheduler_type = config, preadv, scheduler_type
        self._configs = {expert.name: expert for expert in config.experts}
        self.broken: dict[str, Exception] = {}
        self.experts: dict[str, OpenedExpert] = {}
        self._programs: dict[tuple[Architecture, Place], ArchitecturePrograms] = {}
        config.graph()  # routes that cannot be are refused before anything is opened
        self.places = _places(config)
        self.host_bytes = config.host_memory // len(self.places[0].devices)  # all devices' parts of a copy are there
        map_large_arrays(SMALLEST_MAPPED)
        with showing(progress):
            self._progress = current_progress()  # also for work that begins later
            self._open()
        self.graph = config.graph(self._info)
        all_experts = sum(expert.bytes for expert in self.graph.experts.values())
        kinds = [self._template_of(each.expert).kind for each in config.inputs]
        largest = max(math.prod(kind.shape) * kind.dtype.itemsize for kind in kinds)
        self.max_waiting = config.max_waiting or default_max_waiting(largest)
        batches = sum(place.lanes * config.max_batch for place in self.places)
        in_memory = self.max_waiting + batches  # those in batches do not wait
        self._reservation = _reserve(config, self.places, all_experts, in_memory * largest)
        self.check_memory()

    @classmethod
    def from_config(
        cls, path: str | os.PathLike[str], *, mode: str | None = None, progress: ProgressOption = None
    ) -> Self:
        """Make the system that a TOML file describes.

        Args:
          mode: a policy that replaces the file's: "best", "paper", "samba" and others (`policy.POLICIES`).
          progress: as in the class.
        """
        return cls(SystemConfig.read(path, mode=mode), progress=progress)

    def make_scheduler(self, profiles: Profiles, *, policy: Policy | None = None, may_refuse: bool = True) -> Scheduler:
        """Make a scheduler of the system, without requests and with its experts not placed yet.

        Args:
          policy: replaces the config's.
          may_refuse: whether it refuses requests beyond `max_waiting`.
        """
        return self._scheduler_type(
            self.graph,
            profiles,
            self._executors(),
            policy or self.config.policy,
            host_bytes=self.host_bytes,
            max_waiting=self.max_waiting if may_refuse else None,
        )

    def make_runner(self, scheduler: Scheduler) -> ExpertRunner:
        """Compile the programs of a scheduler's executors, and make the runner that carries out its actions."""
        places = {x.pool.index: place for x, place in zip(scheduler.executors, self.places, strict=False)}
        with showing(self._progress):
            self._compile(scheduler.profiles, self.places[: len(scheduler.executors)])
        loader = self._loader([places[pool.index] for pool in scheduler.manager.pools])
        return ExpertRunner(scheduler.executors, self.places, self.experts, self._programs, loader)

    def check_memory(self, policy: Policy | None = None) -> None:
        """Check that every expert has room somewhere, whatever batches take: before costs are measured.

        Args:
          policy: replaces the config's.

        Raises ConfigError.
        """
        costs = Profile(k=1.0, b=0.0, max_batch=1, load={"disk": 0.0})
        keys = itertools.product(self.graph.experts.values(), self.places)
        profiles = {(expert.architecture, place.processor): costs for expert, place in keys}
        policy = policy or self.config.policy
        ExpertManager(self.graph, profiles, self._executors(), policy, host_bytes=self.host_bytes)

    @property
    def budgets(self) -> dict[str, Budget]:
        """The budget of each memory that the system uses, by name, with each owner's bytes."""
        return self._reservation.budgets

    @property
    def compiled(self) -> int:
        """The number of programs, which does not grow with the number of experts."""
        return sum(len(list(programs.forward.cache)) for programs in self._programs.values())

    def measure(self, *, remeasure: bool = False) -> Profiles:
        """Read the experts' costs from the record, and measure the missing ones (`remeasure`: all)."""
        return {key: measured.profile for key, measured in self.measured(remeasure=remeasure).items()}

    def measured(self, *, remeasure: bool = False) -> dict[tuple[str, str], Measured]:
        """The costs with how well a line fits the latencies, and the memory of batches."""
        measured: dict[tuple[str, str], Measured] = {}
        self.measure_into(measured, remeasure=remeasure)
        return measured

    def measure_into(self, measured: dict[tuple[str, str], Measured], *, remeasure: bool = False) -> None:
        """Do what `measured` does, into a dictionary that has what is measured so far after Ctrl-C."""
        places = {place.processor: place for place in self.places}
        architectures = {expert.architecture for expert in self.experts.values()}
        pairs = [(architecture, place) for architecture in architectures for place in places.values()]
        pairs.sort(key=lambda key: (key[0].name, key[1].name))
        with showing(self._progress):
            self.write_files()
            with long_work("measuring architectures", total=len(pairs)) as work:
                for architecture, place in pairs:
                    measured[architecture.name, place.processor] = self._measure(
                        architecture, place, remeasure=remeasure
                    )
                    work.advance()

    def write_files(self) -> None:
        """Write the layer files of the experts that have none yet. Experts whose files are damaged become `broken`."""
        with showing(self._progress), long_work("writing files of experts", total=len(self.experts)) as work:
            for expert in list(self.experts.values()):
                try:
                    write_expert(expert.opened)
                except CheckpointError as error:
                    self.mark_broken(expert.name, error)
                work.advance()

    def find(self, name: str) -> OpenedExpert:
        """Find the expert, opening it again if that failed before. Raises LoadError."""
        if name not in self.experts:
            try:
                expert = self._open_expert(name)
            except (CheckpointError, ConfigError, OSError) as error:
                raise LoadError(str(error)) from error
            if expert.architecture not in {other.architecture for other in self.experts.values()}:
                raise LoadError(
                    f"its architecture is {expert.architecture.name}, which no expert had that was there at the start; "
                    "start the system again."
                )
            differs = expert.architecture != self._template_of(name).architecture
            self.experts[name] = expert
            self.broken.pop(name, None)
            if differs:
                self.graph.experts[name] = self._info(self._configs[name])
        return self.experts[name]

    def mark_broken(self, name: str, error: Exception) -> None:
        """Note that an expert cannot be used, and why."""
        self.broken[name] = error
        log.warning("expert %s cannot be used: %s", name, error)

    def lend(self, decider: InputDecider) -> None:
        """Lend the memory of experts that a decider does not need, from now on."""
        pools = {x.pool.index: place for x, place in zip(decider.scheduler.executors, self.places, strict=False)}
        places = [pools[pool.index] for pool in decider.scheduler.manager.pools]
        decider.lend(ExpertLender(decider.scheduler, decider.loader, decider.loop, self._reservation, places))

    def release(self) -> None:
        """Give the reserved memory back."""
        self._reservation.release()

    # -- parts --

    def _measure(self, architecture: Architecture, place: Place, *, remeasure: bool) -> Measured:
        """Measure by the first expert that can be loaded."""
        loader, sharers = self._loader([place]), self.places.count(place)
        try:
            for name in [name for name, expert in self.experts.items() if expert.architecture == architecture]:
                try:
                    return measure(
                        self._programs_for(architecture, place),
                        loader,
                        0,
                        name,
                        max_batch=self.config.max_batch,
                        sharers=1 if self.config.policy.one_executor else sharers,
                        remeasure=remeasure,
                    )
                except LoadError as error:
                    log.warning("%s", error)
        finally:
            loader.close()
        raise LoadError(f"no expert of architecture {architecture.name} can be loaded.")

    def _executors(self) -> list[ExecutorConfig]:
        return [_executor_config(x, place) for x, place in zip(self.config.executors, self.places, strict=True)]

    def _open(self) -> None:
        with long_work("opening experts", total=len(self._configs)) as work:
            for name in self._configs:
                try:
                    self.experts[name] = self._open_expert(name)
                except (CheckpointError, OSError) as error:
                    self.mark_broken(name, error)
                work.advance()
        if not self.experts:
            raise LoadError(f"no expert can be opened; the first: {next(iter(self.broken.values()))}")

    def _open_expert(self, name: str) -> OpenedExpert:
        expert = self._configs[name]
        checkpoint = expert.checkpoint
        folder = resolve(str(checkpoint)) if isinstance(checkpoint, HubName) else checkpoint
        try:
            opened = open_model(folder, mesh=self.places[0].mesh, dtype=self.config.dtype)
        except CheckpointError:
            raise
        except ValueError as error:  # such as a mesh that it does not divide over
            raise ConfigError(f"expert {name!r}: {error}") from error
        kind = kind_of(opened, size=expert.image_size, tokens=expert.tokens)
        _check_verdicts(name, kind, self.config.rules)
        self._check_inputs(name, kind)
        return OpenedExpert(name=name, opened=opened, kind=kind)

    def _check_inputs(self, name: str, kind: ExpertKind) -> None:
        """Check that the experts before and after this one take the same inputs. Raises ConfigError."""
        for rule in self.config.rules:
            if name in (rule.expert, rule.next):
                other = self.experts.get(rule.next if name == rule.expert else rule.expert)
                if other is not None and other.kind.takes != kind.takes:
                    raise ConfigError(
                        f"rule {rule.expert!r}: expert {other.name!r} takes {other.kind.takes}, and {name!r} "
                        f"{kind.takes}; an input goes on as it is: give both the same image_size, or tokenizer."
                    )

    def _template_of(self, name: str) -> OpenedExpert:
        """The expert; if it cannot be opened, the one it is assumed to be like: the named one, or the first."""
        named = self._configs[name].like or name
        return self.experts.get(name) or self.experts.get(named) or next(iter(self.experts.values()))

    def _find_to_load(self, name: str) -> OpenedExpert:
        """Find the expert for a load, which has room only for the assumed architecture. Raises LoadError."""
        assumed, expert = self.graph.experts[name], self.find(name)
        if self.graph.experts[name].architecture != assumed.architecture:
            raise LoadError(
                f"it was not there at the start, was taken to be a {assumed.architecture}, and is a "
                f"{expert.architecture.name}, which is known from now on; `like` in the config says so beforehand."
            )
        return expert

    def _info(self, expert: ExpertConfig) -> ExpertInfo:
        """An expert's description for the scheduler."""
        template = self._template_of(expert.name)
        return ExpertInfo(
            name=expert.name,
            architecture=template.architecture.name,
            bytes=template.opened.bytes_per_device(),
            pinned=expert.pinned and expert.name not in self.broken,
        )

    def _programs_for(self, architecture: Architecture, place: Place) -> ArchitecturePrograms:
        if (architecture, place) not in self._programs:
            alone = self.config.policy.one_executor or self.places.count(place) == 1
            self._programs[architecture, place] = ArchitecturePrograms(
                architecture,
                place,
                single_threaded=not alone,
                kernels=self.config.kernels,
                store=executable_store(),
            )
        return self._programs[architecture, place]

    def _compile(self, profiles: Profiles, places: list[Place]) -> None:
        architectures = {expert.architecture for expert in self.experts.values()}
        used = [(architecture, place) for architecture in architectures for place in set(places)]
        with long_work("compiling architectures", total=len(used)) as work:
            for architecture, place in sorted(used, key=lambda key: (key[0].name, key[1].name)):
                profile = profiles.get((architecture.name, place.processor))
                if profile is not None:
                    self._programs_for(architecture, place).compile_ahead(profile.max_batch)
                work.advance()

    def _loader(self, places: list[Place]) -> ExpertLoader:
        """A loader with a pool at each of these places; it keeps one buffer, as large as the largest expert."""
        keep = max(file_bytes(opened) for opened in {x.architecture: x.opened for x in self.experts.values()}.values())
        method = weakref.WeakMethod(self._find_to_load)  # weak: a dropped system gives its memory back at once

        def find(name: str) -> OpenedExpert:
            if (find_to_load := method()) is None:
                raise LoadError("its system is gone.")
            return find_to_load(name)

        return ExpertLoader(find, places, staging=Staging(keep=keep), preadv=self._preadv)


def _reserve(
    config: SystemConfig,
    places: Sequence[Place],
    all_experts: int,
    inputs: int,
) -> Reservation:
    """Reserve all that could be used of the memory given, on all devices and on the host.

    Args:
      all_experts: bytes of all experts together on each device, which no pool exceeds.
      inputs: bytes of the inputs that may be in memory.

    Raises ConfigError where a device or the host has less memory.
    """
    reservation, sizes = Reservation(f"System {config.name}"), Counter[tuple[Budget, str]]()
    for executor, place in zip(config.executors, places, strict=True):
        experts = min(executor.expert_memory, all_experts)
        sizes += sizes_of(place.devices, {EXPERTS: experts, "activations": executor.activation_memory or 0})
    if config.policy.host_cache:
        copies = len(places[0].devices)
        sizes[host_budget(), HOST_CACHE] = min(config.host_memory, all_experts * copies)
    sizes[host_budget(), "inputs that wait"] = inputs
    remedy = (
        "give executors and the host cache less (expert_memory, activation_memory, host_memory), or lower max_waiting"
    )
    try:
        reservation.resize(sizes, unused=True, remedy=remedy)
    except BudgetError as error:
        raise ConfigError(str(error)) from error
    return reservation


def _check_verdicts(name: str, kind: ExpertKind, rules: Iterable[Rule]) -> None:
    """Check that experts can give the verdicts of their rules, or the next one never runs. Raises ConfigError."""
    for rule in rules:
        if rule.expert == name and rule.verdict not in kind.verdicts:
            known = ", ".join(map(repr, kind.verdicts[:8])) + (", ..." if len(kind.verdicts) > 8 else "")
            remedy = ""
            if all(verdict.isdecimal() for verdict in kind.verdicts if verdict != NOTHING):
                remedy = " To name its classes, put labels.txt next to its weights and convert them again."
            raise ConfigError(
                f"rule {rule.expert!r}: it never answers {rule.verdict!r}; its verdicts: {known}.{remedy}"
            )


def _places(config: SystemConfig) -> list[Place]:
    """The place of each executor. Raises ConfigError for devices that do not exist here."""
    if config.mesh is None:
        return [_place(executor) for executor in config.executors]
    try:
        return [Place.on_mesh(config.mesh.build())] * len(config.executors)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _place(executor: ExecutorOptions) -> Place:
    """The device of an executor. Raises ConfigError if it does not exist here."""
    if executor.device is None:
        return Place((jax.local_devices()[0],))
    platform, _, index = executor.device.partition(":")
    try:
        return Place((dict(enumerate(jax.local_devices(backend=platform)))[int(index or 0)],))
    except (RuntimeError, ValueError, KeyError) as error:
        here = ", ".join(f"{device.platform}:{device.id}" for device in jax.local_devices())
        raise ConfigError(
            f"executor {executor.name!r}: there is no device {executor.device!r}; here: {here}."
        ) from error


def _executor_config(executor: ExecutorOptions, place: Place) -> ExecutorConfig:
    return ExecutorConfig(
        name=executor.name,
        processor=place.processor,
        device=place.name,
        expert_bytes=executor.expert_memory,
        activation_bytes=executor.activation_memory,
    )

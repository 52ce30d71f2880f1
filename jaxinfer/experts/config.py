"""The file that describes a system: experts, rules, executors and memory."""

import dataclasses
import os
import pathlib
from collections.abc import Callable
from typing import Annotated, Any, Self

import msgspec
from msgspec import Meta

from jaxinfer.experts.errors import ConfigError
from jaxinfer.experts.scheduling.experts import ExpertGraph, ExpertInfo, InputKind, Rule
from jaxinfer.experts.scheduling.policy import Policy, policy_of
from jaxinfer.fields import AtLeast1, Bytes, NotNegative, Size, check_fields
from jaxinfer.hub import HubName, model_in_file
from jaxinfer.sharding import MeshConfig
from jaxinfer.streaming.config import parse_bytes
from jaxinfer.toml_files import check_table, reading_toml


class _Strict(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    pass


class _Expert(_Strict):
    checkpoint: str
    pinned: bool = False
    usage: float | None = None
    image_size: tuple[int, int] | None = None
    tokens: int | None = None
    like: str | None = None


class _Input(_Strict):
    kind: str
    expert: str
    share: float | None = None


class _Rule(_Strict):
    expert: str
    verdict: str
    next: str
    probability: float | None = None


class _Executor(_Strict):
    expert_memory: str | int
    name: str | None = None
    device: str | None = None
    activation_memory: str | int | None = None
    count: int = 1


class _File(_Strict):
    experts: dict[str, _Expert]
    inputs: list[_Input]
    executors: list[_Executor]
    rules: list[_Rule] = []
    mode: str = "best"
    policy: dict[str, Any] = {}
    host_memory: str | int = 0
    max_batch: int = 8
    max_waiting: int | None = None
    dtype: str | None = None
    kernels: bool = True
    mesh: dict[str, Any] | None = None


_TABLES: dict[str, type[_Strict]] = {"experts": _Expert, "inputs": _Input, "rules": _Rule, "executors": _Executor}
"""The tables of a file, each of many."""


_HeightAndWidth = Annotated[tuple[Size, Size], Meta(description="height and width, integers >= 1")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertConfig:
    """The config of an expert.

    Attributes:
      checkpoint: the expert's model directory, or a repository of the hub.
      pinned: whether it stays once it is loaded.
      usage: share of all inputs that reach it; None: derived from the inputs and rules.
      image_size: height and width of its images; None: the model's.
      tokens: maximum tokens of a text, for an encoder; None: its context.
      like: an expert of the same architecture to assume while the checkpoint is missing; None: the first one.
    """

    name: str
    checkpoint: pathlib.Path | HubName
    pinned: bool = False
    usage: NotNegative | None = None
    image_size: _HeightAndWidth | None = None
    tokens: Size | None = None
    like: str | None = None

    def __post_init__(self) -> None:
        numbers = ("usage", "image_size", "tokens")
        check_fields(self, "name", "pinned", *numbers, "like", where=f"experts.{self.name}", error=ConfigError)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExecutorOptions:
    """The config of an executor.

    Attributes:
      device: such as "gpu:0"; None: the system's mesh, or the first device.
      expert_memory: bytes for experts, of each device.
      activation_memory: bytes of each device for a batch's activations, on top of the experts; None: limited by
        `max_batch` alone.
    """

    name: str
    device: str | None = None
    expert_memory: AtLeast1
    activation_memory: AtLeast1 | None = None

    def __post_init__(self) -> None:
        check_fields(self, where=f"executors.{self.name}", error=ConfigError)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SystemConfig:
    """The config of a whole system.

    Attributes:
      name: the memory's owner in errors and tables: the file's name.
      experts: the experts.
      inputs: the kinds of input, and where each goes first.
      rules: which expert follows which verdict.
      executors: the executors that run them.
      mesh: how experts and batches are divided over devices, all of which every executor uses; None: executors have a
        device each.
      policy: the scheduler's policy.
      host_memory: bytes of the host cache, where the policy uses one.
      max_batch: inputs of the largest batch in each lane of the mesh.
      max_waiting: waiting requests beyond which inputs are refused; None: 10,000, or as many as have inputs of 512 MiB
        together.
      dtype: the experts' matrices' dtype; None: as stored, but float32 on a CPU.
      kernels: whether operations may run as kernels; False: plain XLA.
    """

    name: str = "of experts"
    experts: tuple[ExpertConfig, ...]
    inputs: tuple[InputKind, ...]
    rules: tuple[Rule, ...] = ()
    executors: tuple[ExecutorOptions, ...]
    mesh: MeshConfig | None = None
    policy: Policy = dataclasses.field(default_factory=lambda: policy_of("best"))
    host_memory: Bytes = 0
    max_batch: Size = 8
    max_waiting: AtLeast1 | None = None
    dtype: str | None = None
    kernels: bool = True

    def __post_init__(self) -> None:
        names = ("name", "host_memory", "max_batch", "max_waiting", "dtype", "kernels")
        check_fields(self, *names, error=ConfigError)
        for name in ("experts", "inputs", "executors"):
            if not getattr(self, name):
                raise ConfigError(f"{name}: there are none; a system needs at least one.")
        for what in ("experts", "executors"):
            names = [each.name for each in getattr(self, what)]
            if len(set(names)) < len(names):
                raise ConfigError(f"{what}: two have the name {max(names, key=names.count)!r}; names must be unique.")
        if not isinstance(self.mesh, MeshConfig | None):
            raise ConfigError(f"mesh must be a MeshConfig, such as MeshConfig(data=2), or None; got {self.mesh!r}.")
        for executor in self.executors:
            if self.mesh is not None and executor.device is not None:
                raise ConfigError(
                    f"executors.{executor.name}.device={executor.device!r}: with a mesh every executor uses all of its "
                    "devices; remove device, or the mesh."
                )
        for expert in self.experts:
            if expert.like is not None and expert.like not in {other.name for other in self.experts}:
                raise ConfigError(f"experts.{expert.name}.like: there is no expert {expert.like!r}.")

    @classmethod
    def read(cls, path: str | os.PathLike[str], *, mode: str | None = None) -> Self:
        """Read a TOML file; checkpoints are relative to its folder, or repositories of the hub, as hf://ORG/NAME.

        Args:
          mode: a policy that replaces the file's.

        Raises ConfigError, naming the file.
        """
        path = pathlib.Path(path)
        with reading_toml(path, "a system", ConfigError) as content:
            _check_fields(content)
            file = msgspec.convert(content, _File)
            config = cls(
                name=path.stem,
                experts=tuple(_expert(name, expert, path.parent) for name, expert in file.experts.items()),
                inputs=tuple(InputKind(name=x.kind, expert=x.expert, share=x.share) for x in file.inputs),
                rules=tuple(Rule(**msgspec.structs.asdict(rule)) for rule in file.rules),
                executors=tuple(
                    x for place, executor in enumerate(file.executors) for x in _executors(place, executor)
                ),
                mesh=None if file.mesh is None else MeshConfig.from_mapping(file.mesh, source="[mesh]"),
                policy=policy_of(mode or file.mode, **file.policy),
                host_memory=parse_bytes("host_memory", file.host_memory),
                max_batch=file.max_batch,
                max_waiting=file.max_waiting,
                dtype=file.dtype,
                kernels=file.kernels,
            )
            config.graph()
        return config

    def graph(self, info: Callable[[ExpertConfig], ExpertInfo] | None = None) -> ExpertGraph:
        """Return which expert follows which, and each one's usage.

        Args:
          info: describes an expert for the scheduler; None: routes alone count, and all experts are alike.

        Raises ConfigError or RoutingError for routes that lead nowhere, or in a circle.
        """
        info = info or (lambda expert: ExpertInfo(name=expert.name, architecture="any", bytes=1))
        usage = {expert.name: expert.usage for expert in self.experts if expert.usage is not None}
        return ExpertGraph(map(info, self.experts), self.inputs, self.rules, usage=usage)


def _check_fields(content: Any) -> None:
    """Check the names of all fields. Raises ConfigError that names the known ones."""
    check_table("the file", content, _File.__struct_fields__, ConfigError)
    for name, kind in _TABLES.items():
        tables = content.get(name)
        named = enumerate(tables) if isinstance(tables, list) else tables.items() if isinstance(tables, dict) else ()
        for key, table in named:
            check_table(f"{name}.{key}", table, kind.__struct_fields__, ConfigError)


def _expert(name: str, given: _Expert, folder: pathlib.Path) -> ExpertConfig:
    fields = msgspec.structs.asdict(given)
    checkpoint = model_in_file(f"experts.{name}.checkpoint", fields.pop("checkpoint"), folder)
    return ExpertConfig(name=name, checkpoint=checkpoint, **fields)


def _executors(place: int, given: _Executor) -> list[ExecutorOptions]:
    """A table's executors, `count` of them."""
    if given.count < 1:
        raise ConfigError(f"executors: count must be at least 1, got {given.count}.")
    name, activation = given.name or f"executor-{place}", given.activation_memory
    return [
        ExecutorOptions(
            name=name if given.count == 1 else f"{name}-{number}",
            device=given.device,
            expert_memory=parse_bytes("expert_memory", given.expert_memory),
            activation_memory=None if activation is None else parse_bytes("activation_memory", activation),
        )
        for number in range(given.count)
    ]

"""The file that describes a system: experts, rules, executors, memory."""

import dataclasses
import math
import os
import pathlib
from typing import Any, Self

import msgspec

from jaxinfer.experts.errors import ConfigError
from jaxinfer.experts.scheduling.experts import InputKind, Rule
from jaxinfer.experts.scheduling.policy import Policy, policy_of
from jaxinfer.streaming.config import parse_bytes


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
    max_queued: int | None = None
    dtype: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertConfig:
    """An expert.

    Attributes:
      checkpoint: its model directory.
      pinned: never evicted once it is loaded.
      usage: how many of all inputs come to it; None: as inputs and rules say.
      image_size: height and width of its images; None: as its model takes them.
      tokens: of an encoder, most tokens of a text; None: its context.
      like: an expert with the same architecture, which counts while the checkpoint is not there; None: the first one.
    """

    name: str
    checkpoint: pathlib.Path
    pinned: bool = False
    usage: float | None = None
    image_size: tuple[int, int] | None = None
    tokens: int | None = None
    like: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExecutorOptions:
    """An executor.

    Attributes:
      device: such as "gpu:0"; None: the first device.
      expert_memory: bytes for experts.
      activation_memory: bytes that a batch may take beside them; None: no limit but `max_batch`.
    """

    name: str
    device: str | None = None
    expert_memory: int
    activation_memory: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SystemConfig:
    """All of a system.

    Attributes:
      name: what has its memory, in errors and tables: that of the file.
      experts, inputs, rules: what there is, and where inputs go.
      executors: what runs them.
      policy: which rules the scheduler follows.
      host_memory: bytes of the host cache, if the policy has one.
      max_batch: no batch is larger.
      max_queued: inputs beyond so many requests that wait are refused; None: no limit.
      dtype: of the experts' matrices; None: as stored, except that a CPU computes in float32.
    """

    name: str = "of experts"
    experts: tuple[ExpertConfig, ...]
    inputs: tuple[InputKind, ...]
    rules: tuple[Rule, ...] = ()
    executors: tuple[ExecutorOptions, ...]
    policy: Policy = dataclasses.field(default_factory=lambda: policy_of("best"))
    host_memory: int = 0
    max_batch: int = 8
    max_queued: int | None = None
    dtype: str | None = None

    def __post_init__(self) -> None:
        for name in ("experts", "inputs", "executors"):
            if not getattr(self, name):
                raise ConfigError(f"{name}: there are none; a system needs at least one.")
        for what in ("experts", "executors"):
            names = [each.name for each in getattr(self, what)]
            if len(set(names)) < len(names):
                raise ConfigError(f"{what}: two have the name {max(names, key=names.count)!r}; names must be unique.")
        for expert in self.experts:
            if expert.like is not None and expert.like not in {other.name for other in self.experts}:
                raise ConfigError(f"experts.{expert.name}.like: there is no expert {expert.like!r}.")
        if self.max_batch < 1:
            raise ConfigError(f"max_batch must be at least 1, got {self.max_batch}.")
        if self.max_queued is not None and self.max_queued < 1:
            raise ConfigError(f"max_queued must be at least 1, got {self.max_queued}.")
        if self.host_memory < 0:
            raise ConfigError(f"host_memory must be at least 0 bytes, got {self.host_memory}.")

    @classmethod
    def read(cls, path: str | os.PathLike[str], *, mode: str | None = None) -> Self:
        """Read a TOML file; checkpoints are relative to its folder. Raises ConfigError, naming the file.

        mode: instead of the file's.
        """
        path = pathlib.Path(path)
        try:
            found = msgspec.toml.decode(path.read_bytes(), type=_File)
            return cls(
                name=path.stem,
                experts=tuple(_expert(name, expert, path.parent) for name, expert in found.experts.items()),
                inputs=tuple(InputKind(name=x.kind, expert=x.expert, share=x.share) for x in found.inputs),
                rules=tuple(Rule(**msgspec.structs.asdict(rule)) for rule in found.rules),
                executors=tuple(
                    x for place, executor in enumerate(found.executors) for x in _executors(place, executor)
                ),
                policy=policy_of(mode or found.mode, **found.policy),
                host_memory=parse_bytes("host_memory", found.host_memory),
                max_batch=found.max_batch,
                max_queued=found.max_queued,
                dtype=found.dtype,
            )
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; name a TOML file that describes a system.") from error
        except (msgspec.MsgspecError, UnicodeDecodeError, ValueError, TypeError) as error:
            raise ConfigError(f"{path}: {error}") from error


def _expert(name: str, given: _Expert, folder: pathlib.Path) -> ExpertConfig:
    if given.image_size is not None and min(given.image_size) < 1:
        raise ConfigError(f"experts.{name}.image_size must be at least 1, got {list(given.image_size)}.")
    if given.tokens is not None and given.tokens < 1:
        raise ConfigError(f"experts.{name}.tokens must be at least 1, got {given.tokens}.")
    if given.usage is not None and not (math.isfinite(given.usage) and given.usage >= 0):
        raise ConfigError(f"experts.{name}.usage must be at least 0, got {given.usage}.")
    fields = msgspec.structs.asdict(given)
    return ExpertConfig(name=name, checkpoint=folder / fields.pop("checkpoint"), **fields)


def _executors(place: int, given: _Executor) -> list[ExecutorOptions]:
    """Those of one table, `count` times."""
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

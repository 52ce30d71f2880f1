"""Architectures: experts of the same shapes share programs, compiled once with the weights as arguments."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxinfer.compiled import Cost, Costs, ExecutableStore, ProgramSpec
from jaxinfer.disk_cache import keys
from jaxinfer.execution.forward import BatchSize, Forward
from jaxinfer.experts.execution.kinds import Classifier, Detector, ExpertKind, TextEncoder
from jaxinfer.models.config import EncoderConfig, ModelConfig, ResNetConfig, ViTConfig, YoloConfig
from jaxinfer.models.devices import device_name
from jaxinfer.models.files.description import kind_of
from jaxinfer.models.leaves import canonical_leaves
from jaxinfer.models.weight_format import WeightFormat
from jaxinfer.sharding import ShardingRules
from jaxinfer.sharding.collectives import use_rules
from jaxinfer.sizes import powers

PROGRAM = "judge"
"""The program's name in caches and in the record of costs."""


@dataclasses.dataclass(frozen=True)
class Architecture:
    """The part of a model that experts with the same programs share.

    Attributes:
      config: the model's config without labels.
      weights: the format of their leaves.
      shape: an input's.
      dtype: an input's.
    """

    config: ModelConfig
    weights: WeightFormat
    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def from_kind(cls, kind: ExpertKind, weights: WeightFormat) -> "Architecture":
        """An expert's architecture."""
        return cls(kind.config, weights, kind.shape, kind.dtype.name)

    @property
    def name(self) -> str:
        """A short name, different for different architectures."""
        size = "x".join(map(str, self.shape[:2]))
        return f"{kind_of(self.config)}-{size}-{keys.digest({'architecture': keys.describe(self)})[:6]}"

    @property
    def bytes(self) -> int:
        """The bytes of the weights."""
        return sum(leaf.bytes for leaf in canonical_leaves(self.config, self.weights).values())


class Judge(BatchSize):
    """A batch of inputs."""

    program = PROGRAM


def build(static: Architecture, sizes: Judge) -> Callable[..., Any]:
    """Build the function of a batch: leaves, inputs [B, ...] -> the outputs of the kind's `run`."""
    kinds = {ResNetConfig: Classifier, ViTConfig: Classifier, YoloConfig: Detector, EncoderConfig: TextEncoder}
    run = kinds[type(static.config)].run

    def function(leaves: list[jax.Array], inputs: jax.Array) -> Any:
        from jaxinfer.models.abstract import merge_model  # imports Flax, which only tracing needs

        with use_rules(ShardingRules()):
            return run(merge_model(static.config, static.weights, leaves), inputs)

    return function


class ArchitecturePrograms:
    """The executables of an architecture on a device, one per batch size, for all its experts.

    Args:
      architecture: the architecture.
      device: the device they run on.
      single_threaded: whether programs on a CPU keep to one thread, because others run at the same time.
      kernels: whether operations may run as kernels.
      store: keeps executables between processes; None: nothing does.

    Attributes:
      forward: the executables.
      kernels: as given.
    """

    def __init__(
        self,
        architecture: Architecture,
        device: Any,
        *,
        single_threaded: bool,
        kernels: bool = True,
        store: ExecutableStore | None = None,
    ):
        self.architecture, self.device = architecture, device
        self.sharding = SingleDeviceSharding(device)
        self._options: dict[str, str | bool | int] = (
            {"xla_cpu_multi_thread_eigen": False} if single_threaded and device.platform == "cpu" else {}
        )
        self.kernels = kernels
        self.forward = Forward(self._spec(), max_batch=1, kernels=kernels, store=store)

    def _spec(self) -> ProgramSpec[Judge, Iterable[int]]:
        shapes = canonical_leaves(self.architecture.config, self.architecture.weights).values()
        leaves = [jax.ShapeDtypeStruct(x.shape, np.dtype(x.dtype), sharding=self.sharding) for x in shapes]

        def arguments(sizes: Judge) -> tuple[Any, ...]:
            shape, dtype = (sizes.batch, *self.architecture.shape), np.dtype(self.architecture.dtype)
            return leaves, jax.ShapeDtypeStruct(shape, dtype)

        return ProgramSpec(
            sizes=Judge,
            build=build,
            static=self.architecture,
            arguments=arguments,
            reachable=lambda sizes: (Judge(batch=size) for size in sizes),
            compiler_options=lambda sizes: self._options,
        )

    def compile_ahead(self, max_batch: int) -> None:
        """Compile for batches up to this size."""
        self.forward.sizes = powers(2, 1, max_batch)
        self.forward.cache.compile_ahead(self.forward.sizes)

    def run(self, leaves: Sequence[jax.Array], inputs: Sequence[np.ndarray]) -> Any:
        """Run a batch of at most the largest size, and wait for it, as `Forward.run` does."""
        return self.forward.run((list(leaves),), inputs)


def open_costs(architecture: Architecture, device: Any, *, sharers: int, disk: str, kernels: bool = True) -> Costs:
    """Open the record of an architecture's costs on a device, which is kept on disk.

    Args:
      sharers: number of executors that share the device and slow one another.
      disk: the disk that the experts are on.
      kernels: whether operations may run as kernels.
    """
    key = {"architecture": str(architecture), "executors": str(sharers), "disk": disk}
    if not kernels:
        key["kernels"] = "False"
    return Costs.open(device=device_name(device), model=key)


def cost_of(costs: Costs, batch: int) -> Cost | None:
    """The cost of batches of this size."""
    return costs.for_sizes(PROGRAM, batch=batch)

"""Architectures: experts of the same shapes share programs, compiled once with the weights as arguments."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jaxinfer.compiled import Cost, Costs, ExecutableStore, ProgramSpec
from jaxinfer.disk_cache import keys
from jaxinfer.execution.costs import open_costs
from jaxinfer.execution.forward import BatchSize, Forward, batch_sharding, batch_sizes
from jaxinfer.experts.execution.kinds import Classifier, Detector, ExpertKind, TextEncoder
from jaxinfer.experts.execution.place import RULES, Place
from jaxinfer.models.config import EncoderConfig, ModelConfig, ResNetConfig, ViTConfig, YoloConfig, kind_of
from jaxinfer.models.leaves import canonical_leaves
from jaxinfer.models.weight_format import WeightFormat
from jaxinfer.sharding import axes_text
from jaxinfer.sharding.collectives import use_rules

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


class Judge(BatchSize):
    """A batch of inputs."""

    program = PROGRAM


def build(static: Architecture, sizes: Judge) -> Callable[..., Any]:
    """Build the function of a batch: leaves, inputs [B, ...] -> the outputs of the kind's `run`."""
    kinds = {ResNetConfig: Classifier, ViTConfig: Classifier, YoloConfig: Detector, EncoderConfig: TextEncoder}
    run = kinds[type(static.config)].run

    def function(leaves: list[jax.Array], inputs: jax.Array) -> Any:
        from jaxinfer.models.abstract import merge_model  # imports Flax, which only tracing needs

        with use_rules(RULES):
            return run(merge_model(static.config, static.weights, leaves), inputs)

    return function


class ArchitecturePrograms:
    """The executables of an architecture at a place, one per batch size, for all its experts.

    Args:
      architecture: the architecture.
      place: the devices they run on.
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
        place: Place,
        *,
        single_threaded: bool,
        kernels: bool = True,
        store: ExecutableStore | None = None,
    ):
        self.architecture, self.place = architecture, place
        self._options: dict[str, str | bool | int] = (
            {"xla_cpu_multi_thread_eigen": False} if single_threaded and place.platform == "cpu" else {}
        )
        self.kernels = kernels
        self.forward = Forward(
            self._spec(), max_batch=1, mesh=place.mesh, lanes=place.lanes, kernels=kernels, store=store
        )

    def _spec(self) -> ProgramSpec[Judge, Iterable[int]]:
        shapes = canonical_leaves(self.architecture.config, self.architecture.weights).values()
        leaves = [jax.ShapeDtypeStruct(x.shape, np.dtype(x.dtype), sharding=self.place.sharding(x)) for x in shapes]
        divided = batch_sharding(self.place.mesh, RULES)

        def arguments(sizes: Judge) -> tuple[Any, ...]:
            shape, dtype = (sizes.batch, *self.architecture.shape), np.dtype(self.architecture.dtype)
            return leaves, jax.ShapeDtypeStruct(shape, dtype, sharding=divided)

        return ProgramSpec(
            sizes=Judge,
            build=build,
            static=self.architecture,
            arguments=arguments,
            reachable=lambda sizes: (Judge(batch=size) for size in sizes),
            out_shardings=lambda sizes: divided,
            compiler_options=lambda sizes: self._options,
        )

    def compile_ahead(self, max_batch: int) -> None:
        """Compile for batches up to this size, whole ones in each lane."""
        self.forward.sizes = batch_sizes(-(-max_batch // self.place.lanes), self.place.lanes)
        self.forward.cache.compile_ahead(self.forward.sizes)

    def run(self, leaves: Sequence[jax.Array], inputs: Sequence[np.ndarray]) -> Any:
        """Run a batch of at most the largest size, and wait for it, as `Forward.run` does."""
        return self.forward.run((list(leaves),), inputs)


def architecture_costs(
    architecture: Architecture, place: Place, *, sharers: int, disk: str, kernels: bool = True
) -> Costs:
    """Open the record of an architecture's costs at a place.

    Args:
      architecture: the architecture.
      place: the place.
      sharers: number of executors that share the place and slow one another.
      disk: the disk that the experts are on.
      kernels: whether operations may run as kernels.
    """
    mesh = "" if place.mesh is None else axes_text(place.mesh)
    device = place.devices[0]
    return open_costs(device, mesh=mesh, kernels=kernels, architecture=architecture, executors=sharers, disk=disk)


def cost_of(costs: Costs, batch: int) -> Cost | None:
    """The cost of batches of this size."""
    return costs.for_sizes(PROGRAM, batch=batch)

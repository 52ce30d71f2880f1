"""The memory that a model takes on each device."""

import dataclasses

from rich.table import Table

from jaxinfer.generation.engine.config import SNAPSHOTS_PER_SEQUENCE
from jaxinfer.generation.execution.memory import device_tenants
from jaxinfer.models import WeightFormat
from jaxinfer.models.devices import bytes_per_device
from jaxinfer.models.files.description import Description
from jaxinfer.models.fitting import fit
from jaxinfer.models.leaves import cache_leaves, canonical_leaves, state_leaves
from jaxinfer.models.stages import Stages, stages_on
from jaxinfer.serving.budget import Budget, Reservation
from jaxinfer.sharding import MeshConfig, ShardingRules


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """The memory of a model on each device of a mesh.

    Attributes:
      weights: bytes of weights.
      cache: bytes of the KV cache.
      token: bytes of one token in it, on all devices; 0 without a cache.
      states: bytes of recurrent states.
      what: the dtype or quantisation, and the batch, in words.
      stages: the stages of its pipeline; None: it has none.
    """

    weights: int
    cache: int
    token: float
    states: int
    what: str
    stages: Stages | None

    def table(self, owner: str) -> Table:
        """Make the table of a device on which the model is alone."""
        budget, reservation = Budget(f"each device, {self.what}", None), Reservation(owner)
        tenants = device_tenants(weights=self.weights, cache=self.cache, states=self.states)
        reservation.resize({(budget, tenant): size for tenant, size in tenants.items()})
        return budget.table()


def memory_of(
    description: Description,
    weights: WeightFormat,
    layout: MeshConfig,
    rules: ShardingRules,
    *,
    max_batch: int,
    context: int,
    window: int,
) -> DeviceMemory:
    """Compute the memory of a model with a batch of this many tokens per request in each lane of a mesh.

    window: speculative tokens of a pass, which recurrent states have room for.

    Raises ValueError if the model cannot be divided over the mesh.
    """
    mesh = layout.abstract()
    fitted = fit(description.config, weights, mesh, rules, stored=description.quantization).config
    stages = stages_on(fitted, mesh, rules)
    leaves = canonical_leaves(fitted, weights)
    if stages is not None:
        fitted, leaves = stages.config, {name: there.leaf for name, there in stages.leaves(weights).items()}
    cached = cache_leaves(fitted, weights, layout.data * max_batch, context)
    cache = bytes_per_device(cached, mesh, rules)
    rows = max_batch * (1 + SNAPSHOTS_PER_SEQUENCE) + 1
    states = bytes_per_device(state_leaves(fitted, weights, layout.data * rows, window=window), mesh, rules)
    batch = f", batch {max_batch} of {context} tokens" if cache else ""
    token = cache * (layout.size // layout.data) / (max_batch * context) if cache else 0
    what = f"{weights.quantized or weights.dtype}{batch}"
    return DeviceMemory(bytes_per_device(leaves, mesh, rules), cache, token, states, what, stages)

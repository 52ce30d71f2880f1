"""How many pages the cache has, and what else lives in the device's memory."""

import dataclasses
import math

import jax

from jaxinfer.generation import signatures
from jaxinfer.generation.config import EngineConfig
from jaxinfer.models import DecoderConfig
from jaxinfer.models.loading import LoadedModel, available_bytes

FRACTION = 0.9
"""Of the memory that is free beside the weights, what cache and workspace may take."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes of one device.

    Attributes:
      weights: what the loaded model takes. available: what was free beside it.
      workspace: what the largest program needs while it runs; None where so much was free that it was not asked.
      page_bytes: one page of keys and values, all layers. num_pages: pages of the cache.
    """

    weights: int
    available: int
    workspace: int | None
    page_bytes: int
    num_pages: int

    @property
    def cache(self) -> int:
        """Bytes of the cache."""
        return self.num_pages * self.page_bytes


def page_bytes(model: LoadedModel, config: EngineConfig) -> int:
    """Bytes of one page on each device, all layers, scales included."""
    assert isinstance(model.config, DecoderConfig)
    state = signatures.device_state(model.config, model.weights, config, pages=1, processors=0)
    names = ("pages", "page", "kv_heads", "head_dim")

    def size(x: jax.ShapeDtypeStruct) -> int:
        axes = names if len(x.shape) == 4 else ("pages", "kv_heads")
        return math.prod(model.sharding(*axes, shape=x.shape).shard_shape(x.shape)) * x.dtype.itemsize

    return sum(size(x) for x in jax.tree.leaves(state.caches))


def plan_memory(model: LoadedModel, config: EngineConfig, *, cache_bytes: int | None = None) -> MemoryPlan:
    """Divide the memory beside the weights.

    Without `cache_bytes` a CPU, which shares its memory with others, gets the pages of `config.slots` full sequences,
    a GPU all that fit; both at most what `FRACTION` leaves beside the workspace.

    Raises ValueError if not even one page fits.
    """
    weights = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(model.state)
    )
    available, size = available_bytes(model.mesh), page_bytes(model, config)
    pages = config.slots * -(-config.context // config.page_size)
    budget = int(available * FRACTION) if cache_bytes is None else cache_bytes
    workspace = None
    if budget < size:
        raise ValueError(
            f"The KV cache may take {budget} bytes, but one page of {config.page_size} tokens takes {size}: "
            "raise cache_bytes, or lower page_size."
        )
    return MemoryPlan(
        weights=weights,
        available=available,
        workspace=workspace,
        page_bytes=size,
        num_pages=min(pages, budget // size),
    )

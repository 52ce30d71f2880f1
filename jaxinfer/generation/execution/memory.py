"""How many pages the cache has, and what else lives in the device's memory."""

import dataclasses
import math
from collections.abc import Collection, Iterable
from typing import Any

import jax
from rich.filesize import decimal

from jaxinfer.compiled import ExecutableStore, ProgramCache, ProgramSpec
from jaxinfer.generation.engine.buckets import Buckets
from jaxinfer.generation.engine.config import EngineConfig
from jaxinfer.generation.execution.layout import DeviceLayout
from jaxinfer.generation.execution.platforms import buckets_of, shares_memory
from jaxinfer.generation.execution.programs import chain, decode, prefill
from jaxinfer.models.devices import available_bytes, devices_of
from jaxinfer.models.loading import LoadedModel, OpenedModel
from jaxinfer.serving.budget import Budget
from jaxinfer.streaming.config import LayerRange
from jaxinfer.streaming.model import StreamedModel

FRACTION = 0.9
"""Of the memory that is free beside the weights, what cache and workspace may take."""
AMPLE = 8
"""Where this many times the cache are free, the compiler is not asked how much the programs need beside it."""

COARSE_BITS = 6
"""Leading binary digits of a number of pages that the plan keeps, where it has the choice."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes of one device, as planned before anything runs.

    Attributes:
      weights: what the loaded model takes, adapters included.
      available: what was free beside the model.
      workspace: what the largest program needs while it runs; None where there was enough not to ask.
      page_bytes: one page of keys and values, all layers.
      num_pages: pages of the cache.
      budget: who has what of the device: all of the above are its tenants.
      max_chunks: chunks that go through a streamed layer together, so that their activations fit; None: all of a step.
    """

    weights: int
    available: int
    workspace: int | None
    page_bytes: int
    num_pages: int
    budget: Budget
    max_chunks: int | None = None

    @property
    def cache(self) -> int:
        """Bytes of the cache."""
        return self.num_pages * self.page_bytes

    def __str__(self) -> str:
        pages = f"{self.num_pages} pages of {decimal(self.page_bytes)}"
        workspace = "" if self.workspace is None else f", workspace {decimal(self.workspace)}"
        free = decimal(self.available)
        return f"weights {decimal(self.weights)}, cache {decimal(self.cache)} ({pages}){workspace}, of {free} free"


def plan_memory(
    model: LoadedModel, config: EngineConfig, *, cache_bytes: int | None = None, device_memory: int | None = None
) -> MemoryPlan:
    """Divide the memory beside the weights between the cache and the programs' workspace.

    A CPU, which shares its memory with others, gets the pages of `config.max_batch` full sequences, a GPU all that fit.
    Where that is not little of what is free, the largest programs are compiled to learn their workspace.

    Args:
      cache_bytes: bytes of the cache; None: as many as there is room for.
      device_memory: bytes that the model may take of each device, weights included; None: all that are free.
    Raises ValueError if not even one page fits, MemoryError if `cache_bytes` and the workspace do not fit together.
    """
    weights, shared = _weight_bytes(model), shares_memory(model.platform)
    available = available_bytes(model.mesh)
    if device_memory is not None:
        available = min(available, device_memory - weights)
    buffers = model.placement.buffer_bytes if isinstance(model, StreamedModel) else 0
    available -= buffers
    buckets = buckets_of(config, model.platform)
    layout = DeviceLayout.of(model, config, num_pages=config.max_batch)  # its shapes hardly depend on pages
    adapters, size = part_bytes(layout.adapters), part_bytes(layout.state.caches) // layout.num_pages
    full = config.max_batch * config.pages_per_sequence
    max_chunks = None
    if cache_bytes is None and is_ample(model, device_memory, available, full * size + adapters):
        workspace = None
    elif isinstance(model, StreamedModel):
        max_chunks, workspace = _largest_slice(
            layout, model.ranges, buckets, int(available * FRACTION) - adapters - size
        )
    else:
        workspace = workspace_bytes(layout, buckets)
    room = int(available * FRACTION) - adapters - (workspace or 0)
    wanted = room if cache_bytes is None else cache_bytes
    check_page(wanted, size, config)
    if wanted > room:
        raise MemoryError(
            f"cache_bytes={cache_bytes} does not fit: of {available} bytes that are free beside the weights, programs "
            f"need {workspace} and adapters {adapters}; the cache may have {max(room, 0)}."
        )
    pages = min(wanted // size, full) if shared else wanted // size
    if cache_bytes is None and pages != full:
        pages = _coarse(pages)
    budget = Budget(_memory_name(model), weights + buffers + available)
    reserve_model(
        budget, weights=weights, buffers=buffers, adapters=adapters, cache=pages * size, workspace=workspace or 0
    )
    return MemoryPlan(
        weights=weights + adapters,
        available=available,
        workspace=workspace,
        page_bytes=size,
        num_pages=pages,
        budget=budget,
        max_chunks=max_chunks,
    )


def reserve_model(
    budget: Budget, *, weights: int, buffers: int = 0, adapters: int = 0, cache: int = 0, workspace: int = 0
) -> None:
    """Reserve what a model takes of a device, in bytes; all of it is pinned. Raises BudgetError if it does not fit.

    Args:
      budget: the device's.
      weights: that are there all the time.
      buffers: for layers that come while others compute.
      adapters: LoRA adapters.
      cache: keys and values.
      workspace: what the largest program needs while it runs.
    """
    tenants = {"weights": weights, "layers on their way": buffers, "adapters": adapters, "KV pages": cache}
    budget.reserve_all(tenants | {"programs' workspace": workspace})


def _memory_name(model: OpenedModel) -> str:
    first, *others = devices_of(model.mesh)
    return f"each of {1 + len(others)} devices" if others else f"{first.platform}:{first.id}"


def is_ample(model: OpenedModel, device_memory: int | None, available: int, cache: int) -> bool:
    """Whether so much is free beside the weights that the compiler need not be asked what the programs take.

    device_memory: what the user allows, which is exact.
    """
    return shares_memory(model.platform) and device_memory is None and AMPLE * cache <= available


def check_page(budget: int, size: int, config: EngineConfig) -> None:
    """Raise ValueError unless a page of this size fits into what the cache may take."""
    if budget < size:
        raise ValueError(
            f"The KV cache may take {max(budget, 0)} bytes, but one page of {config.page_size} tokens takes {size}: "
            "raise cache_bytes or device_memory, lower page_size, or free memory."
        )


def needed_bytes(weights: int, others: int) -> int:
    """How much of a device must be free, or allowed, for weights and all else: cache, adapters, workspace."""
    return weights + math.ceil(others / FRACTION) + 1


def _coarse(pages: int) -> int:
    """At most 3% fewer pages, of few numbers: free memory varies between starts, and each number is another program."""
    step = 1 << max(0, pages.bit_length() - COARSE_BITS)
    return pages // step * step


def _weight_bytes(model: LoadedModel) -> int:
    """Of the weights that are on each device all the time."""
    if not isinstance(model, StreamedModel):
        return part_bytes(model.leaves)
    return part_bytes(model.leaves) + model.placement.tiers.count("device") * model.placement.layer_bytes


def _largest_slice(
    layout: DeviceLayout, ranges: Collection[LayerRange], buckets: Buckets, room: int
) -> tuple[int, int]:
    """How many chunks a streamed layer takes at once, so that they need at most half the room; and what they need."""
    found = ((chunks, slice_workspace(layout, ranges, buckets, chunks)) for chunks in reversed(buckets.chunks))
    return next(one for one in found if one[1] <= room // 2 or one[0] == buckets.chunks[0])


def slice_workspace(layout: DeviceLayout, ranges: Collection[LayerRange], buckets: Buckets, chunks: int) -> int:
    """What the programs of these ranges of layers need for so many chunks at once."""
    largest = dataclasses.replace(buckets.largest, chunks=(chunks,))
    return workspace_bytes(layout, largest, chain.decoder_specs(layout, ranges))


def workspace_bytes(
    layout: DeviceLayout, buckets: Buckets, specs: Iterable[ProgramSpec[Any, Buckets]] | None = None
) -> int:
    """What the largest programs need while they run, on each device; compiles them. specs: other ones than usually."""
    specs = specs or [prefill.spec(layout), decode.spec(layout)]
    programs = ProgramCache(specs, mesh=layout.mesh, kernels=layout.engine.kernels, store=ExecutableStore())
    programs.compile_ahead(buckets.largest)
    return max(program.memory.workspace_bytes for program in programs)


def part_bytes(tree: Any) -> int:
    """Bytes of each device's part of arrays or shapes; shapes without a sharding are on one device."""

    def shape(x: Any) -> tuple[int, ...]:
        return x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)

    return sum(math.prod(shape(x)) * x.dtype.itemsize for x in jax.tree.leaves(tree))

"""How many pages the cache has, and what else a model takes of the devices' memory and the host's."""

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any

import jax
from jax.sharding import Mesh
from rich.filesize import decimal

from jaxinfer.compiled import Costs, ExecutableStore, ProgramCache, ProgramSpec
from jaxinfer.generation.engine.buckets import Buckets
from jaxinfer.generation.engine.config import EngineConfig, SharedConfig
from jaxinfer.generation.execution.layout import DeviceLayout
from jaxinfer.generation.execution.platforms import buckets_of, shares_memory
from jaxinfer.generation.execution.programs import chain, decode, prefill
from jaxinfer.models.devices import available_bytes, devices_of
from jaxinfer.models.files.loading import LoadedModel, OpenedModel
from jaxinfer.models.leaves import layer_of
from jaxinfer.serving.budget import Budget, Offer, Offers, Sizes, budget_of, host_budget
from jaxinfer.streaming.config import LayerRange, Placement
from jaxinfer.streaming.model import StreamedModel

FRACTION = 0.9
"""Of the memory that is free beside the weights, what cache and workspace may take."""
AMPLE = 8
"""Where this many times the cache are free, the compiler is not asked how much the programs need beside it."""

LAYERS = "layers"
"""The tenant of a streamed model's layers that stay on the devices or in the host's memory."""

COARSE_BITS = 6
"""Leading binary digits of a number of pages that the plan keeps, where it has the choice."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes of one device, as planned before anything runs.

    Attributes:
      weights: what the loaded model takes, adapters included.
      available: what was free beside the model, and nobody had reserved.
      workspace: what the largest program needs while it runs; None where there was enough not to ask.
      page_bytes: one page of keys and values, all layers.
      num_pages: pages of the cache.
      tenants: all that is to be reserved of the device, by what it is for.
      max_chunks: chunks that go through a streamed layer together, so that their activations fit; None: all of a step.
    """

    weights: int
    available: int
    workspace: int | None
    page_bytes: int
    num_pages: int
    tenants: dict[str, int]
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
    placement, shared = placement_of(model), shares_memory(model.platform)
    tenants = weight_tenants(model, placement)
    weights, available = sum(tenants.values()), free_bytes(model, config)
    if device_memory is not None:
        available = min(available, device_memory - weights)
    available -= buffer_bytes(placement)
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
    check_page(wanted, size, config, who_has(model.mesh))
    if wanted > room:
        raise MemoryError(
            f"cache_bytes={cache_bytes} does not fit: of {available} bytes that are free beside the weights, programs "
            f"need {workspace} and adapters {adapters}; the cache may have {max(room, 0)}.\n{who_has(model.mesh)}"
        )
    pages = min(wanted // size, full) if shared else wanted // size
    if cache_bytes is None and pages != full:
        pages = _coarse(pages)
    tenants |= device_tenants(
        buffers=buffer_bytes(placement), adapters=adapters, cache=pages * size, workspace=workspace or 0
    )
    return MemoryPlan(
        weights=weights + adapters,
        available=available,
        workspace=workspace,
        page_bytes=size,
        num_pages=pages,
        tenants=tenants,
        max_chunks=max_chunks,
    )


def free_bytes(opened: OpenedModel, config: SharedConfig) -> int:
    """Bytes of each device that are free, and that nobody has reserved, nor will for adapters in the host's memory."""
    devices = devices_of(opened.mesh)
    sharing = Counter(map(budget_of, devices))
    unreserved = (free // count for budget, count in sharing.items() if (free := budget.free) is not None)
    beside = read_adapter_bytes(config) // len(devices) if shares_memory(opened.platform) else 0
    return min([available_bytes(opened.mesh), *unreserved]) - beside


def read_adapter_bytes(config: SharedConfig) -> int:
    """What adapters that were read may take of the host's memory."""
    return config.adapter_bytes if isinstance(config, EngineConfig) and config.max_adapters else 0


def who_has(mesh: Mesh | None) -> str:
    """What is reserved of the devices' memory, a line each, for an error."""
    return "\n".join(map(str, dict.fromkeys(map(budget_of, devices_of(mesh)))))


def placement_of(model: LoadedModel) -> Placement | None:
    """Where its layers are; None if all are on the devices."""
    return model.placement if isinstance(model, StreamedModel) else None


def buffer_bytes(placement: Placement | None) -> int:
    """What layers on their way take of each device."""
    return 0 if placement is None else placement.buffer_bytes


def device_tenants(
    *, weights: int = 0, layers: int = 0, buffers: int = 0, adapters: int = 0, cache: int = 0, workspace: int = 0
) -> dict[str, int]:
    """What a model reserves of a device, in bytes by tenant; those that need nothing are left out.

    Args:
      weights: that are there all the time; of a streamed model those beside its layers.
      layers: of a streamed model, those that stay.
      buffers: for layers that come while others compute.
      adapters: LoRA adapters.
      cache: keys and values.
      workspace: what the largest program needs while it runs.
    """
    tenants = {
        "weights": weights,
        LAYERS: layers,
        "layers on their way": buffers,
        "adapters": adapters,
        "KV pages": cache,
        "programs' workspace": workspace,
    }
    return {tenant: size for tenant, size in tenants.items() if size}


def weight_tenants(opened: OpenedModel, placement: Placement | None) -> dict[str, int]:
    """The part of `device_tenants` that is known before a weight is read. placement: None: all layers are there."""
    if placement is None:
        return device_tenants(weights=opened.bytes_per_device())
    rest = opened.bytes_per_device(lambda name: layer_of(name) is None)
    return device_tenants(weights=rest, layers=placement.tiers.count("device") * placement.layer_bytes)


def host_tenants(opened: OpenedModel, placement: Placement | None) -> dict[str, int]:
    """What a model's layers take of the host's memory beside what CPU devices have of it, in bytes by tenant."""
    tenants = dict[str, int]()
    if placement is not None:
        everywhere = placement.layer_bytes * len(devices_of(opened.mesh))
        tenants[LAYERS] = placement.tiers.count("host") * everywhere
        if not shares_memory(opened.platform):
            tenants["layers on their way"] = placement.staged * everywhere
    return tenants


def layer_offers(opened: OpenedModel, placement: Placement | None, sizes: Sizes, costs: Costs) -> Offers:
    """Layers that stay could be read from disk as the others are, where the record says how long that takes."""
    if placement is None or "disk" not in placement.tiers:
        return {}

    def offer(budget: Budget, size: int) -> Offer:
        if (seconds := costs.mean("fetch_disk")) is None:
            return Offer(0, 0.0)
        parts = len(devices_of(opened.mesh)) if budget is host_budget() else 1
        return Offer(size, seconds * size / (placement.layer_bytes * parts))

    return {
        (budget, tenant): functools.partial(offer, budget, size)
        for (budget, tenant), size in sizes.items()
        if tenant == LAYERS
    }


def is_ample(model: OpenedModel, device_memory: int | None, available: int, cache: int) -> bool:
    """Whether so much is free beside the weights that the compiler need not be asked what the programs take.

    device_memory: what the user allows, which is exact.
    """
    return shares_memory(model.platform) and device_memory is None and AMPLE * cache <= available


def check_page(budget: int, size: int, config: EngineConfig, who_has: str) -> None:
    """Raise ValueError unless a page of this size fits into what the cache may take. who_has: the other memory."""
    if budget < size:
        raise ValueError(
            f"The KV cache may take {max(budget, 0)} bytes, but one page of {config.page_size} tokens takes {size}: "
            f"raise cache_bytes or device_memory, lower page_size, or free memory.\n{who_has}"
        )


def needed_bytes(weights: int, others: int) -> int:
    """How much of a device must be free, or allowed, for weights and all else: cache, adapters, workspace."""
    return weights + math.ceil(others / FRACTION) + 1


def _coarse(pages: int) -> int:
    """At most 3% fewer pages, of few numbers: free memory varies between starts, and each number is another program."""
    step = 1 << max(0, pages.bit_length() - COARSE_BITS)
    return pages // step * step


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

"""How many pages the cache has, and the other memory of devices and host that a model takes."""

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple, Self

import jax
from jax.sharding import Mesh
from rich.filesize import decimal

from jaxinfer.checkpoints.host_memory import ARRAY_ALIGNMENT, aligned
from jaxinfer.compiled import ProgramCache, ProgramSpec, executable_store
from jaxinfer.generation.engine.buckets import Buckets
from jaxinfer.generation.engine.config import EngineConfig, SharedConfig
from jaxinfer.generation.engine.page_tier import MAX_WRITES, bytes_of_page
from jaxinfer.generation.engine.state_pages import pages_of_state
from jaxinfer.generation.execution.layout import DeviceLayout
from jaxinfer.generation.execution.plan import MOVES
from jaxinfer.generation.execution.platforms import buckets_of, shares_memory
from jaxinfer.generation.execution.programs import pass_programs, whole_programs
from jaxinfer.models import RecurrentState
from jaxinfer.models.devices import available_bytes, devices_of
from jaxinfer.models.files.loading import LoadedModel, OpenedModel
from jaxinfer.models.leaves import layer_of
from jaxinfer.serving.budget import BudgetError, budget_of, host_budget
from jaxinfer.streaming.config import LayerRange, MemoryConfig, Placement, exact_bytes
from jaxinfer.streaming.experts import IN_FLIGHT
from jaxinfer.streaming.model import layer_ranges

FRACTION = 0.9
"""Share of the free memory beside the weights that cache and workspace may take."""
AMPLE = 8
"""With this many times the cache free, the compiler is not asked how much the programs need beside it."""

LAYERS = "layers"
"""The tenant of a streamed model's layers that stay on the devices or in the host's memory."""

EXPERTS = "experts"
"""The tenant of a streamed model's experts."""

MOVING = "KV pages on their way"
"""The tenant of pages between the cache and the host."""

ON_HOST = "KV pages of the host"
"""The tenant of pages in the host's memory."""

SLICES = 3
"""With `kv_offload`, slices of a layer's pages on a device at a time: one computes, one comes, one goes."""

COARSE_BITS = 6
"""Leading binary digits of a number of pages that the plan keeps, if it has the choice."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes of one device, as planned before anything runs.

    Attributes:
      weights: bytes of the loaded model, adapters included.
      available: bytes that were free beside the model, and unreserved.
      workspace: bytes that the largest program needs while it runs; None if there was enough not to ask.
      page_bytes: one page of keys and values, all layers.
      num_pages: pages of the cache.
      host_pages: pages that the host's memory keeps of those that the cache forgets.
      slice_pages: pages of one layer that are on the device at a time, if the cache is in the host's memory; else 0.
      host_tenants: bytes to reserve of the host for them, by purpose.
      tenants: bytes to reserve of the device, by purpose.
      max_chunks: chunks that go through a streamed layer together, so that their activations fit; None: all of a step.
    """

    weights: int
    available: int
    workspace: int | None
    page_bytes: int
    num_pages: int
    tenants: dict[str, int]
    host_pages: int = 0
    slice_pages: int = 0
    host_tenants: dict[str, int] = dataclasses.field(default_factory=dict)
    max_chunks: int | None = None

    @property
    def cache(self) -> int:
        """Bytes of the cache."""
        return self.num_pages * self.page_bytes

    def __str__(self) -> str:
        pages = f"{self.num_pages} pages of {decimal(self.page_bytes)}"
        if self.slice_pages:
            pages += f" on the host, {self.slice_pages} of a layer at a time on the device"
        workspace = "" if self.workspace is None else f", workspace {decimal(self.workspace)}"
        free = decimal(self.available)
        return f"weights {decimal(self.weights)}, cache {decimal(self.cache)} ({pages}){workspace}, of {free} free"


def plan_memory(
    model: LoadedModel,
    config: EngineConfig,
    *,
    limits: MemoryConfig | None = None,
    placement: Placement | None = None,
    cache_bytes: int | None = None,
    asleep: bool = False,
) -> MemoryPlan:
    """Divide the memory beside the weights between the cache and the programs' workspace.

    A CPU, which shares its memory with others, gets the pages of `config.max_batch` full sequences, a GPU all that fit.
    Unless that is a small part of the free memory, the largest programs are compiled to learn their workspace.

    Args:
      limits: what the model may take of each device, and what keeps the pages that the cache forgets; None: all that is
        free, and nothing does.
      placement: the place of each layer; None: all are on the devices.
      cache_bytes: bytes of the cache; None: as many as there is room for.
      asleep: whether the weights are not on the devices yet, whose memory others will have left when they come.

    Raises ValueError if not even one page fits, MemoryError if `cache_bytes` and the workspace do not fit together.
    """
    shared, tenants = shares_memory(model.platform), weight_tenants(model, placement)
    weights, limits = sum(tenants.values()), limits or MemoryConfig()
    layout = DeviceLayout.from_model(model, config, num_pages=config.max_batch)  # its shapes hardly depend on pages
    adapters, cache = part_bytes(layout.adapters), CacheSizes.from_layout(layout, config, limits)
    states = state_bytes(layout)
    host_pages, on_host = _pages_on_host(layout, config, limits, cache)
    tiers, buffers = on_host and not cache.offloaded, buffer_bytes(placement)
    moving = 2 * (MOVES[-1] * cache.page + _row_bytes(layout)) if tiers and not shared else 0
    available = capacity_bytes(model, config) - weights if asleep else free_bytes(model, config)
    available -= sum(on_host.values()) // len(devices_of(model.mesh)) if shared else 0
    if limits.device_memory is not None:
        available = min(available, limits.device_memory - weights)
    available -= buffers + moving + states
    buckets = buckets_of(config, model.platform, streamed=placement is not None)
    max_chunks = None
    if cache_bytes is None and is_ample(model, limits.device_memory, available, cache.full * cache.page + adapters):
        workspace = None
    elif placement is not None:
        room = int(available * FRACTION) - adapters - cache.least * cache.page
        max_chunks, workspace = _largest_slice(layout, layer_ranges(model, placement), buckets, room)
    else:
        workspace = workspace_bytes(layout, buckets)
    room = int(available * FRACTION) - adapters - (workspace or 0)
    cache_limit = room if cache_bytes is None else cache_bytes
    cache.check(cache_limit, config, memory_report(model.mesh))
    if cache_limit > room:
        raise MemoryError(
            f"cache_bytes={cache_bytes} does not fit: of {decimal(available)} that are free beside the weights, "
            f"programs need {decimal(workspace or 0)} and adapters {decimal(adapters)}; the cache may have "
            f"{exact_bytes(max(room, 0))}.{memory_report(model.mesh)}"
        )
    pages = cache.pages_in(cache_limit, bounded=shared, exact=cache_bytes is not None)
    caches = {"cache": pages * cache.page, "states": states, "moving": moving}
    tenants |= device_tenants(buffers=buffers, adapters=adapters, workspace=workspace or 0, **caches)
    return MemoryPlan(
        weights=weights + adapters,
        available=available,
        workspace=workspace,
        page_bytes=(part_bytes(layout.caches) - states) // layout.num_pages,
        num_pages=cache.offloaded or pages,
        host_pages=host_pages,
        slice_pages=pages if cache.offloaded else 0,
        host_tenants=on_host,
        tenants=tenants,
        max_chunks=max_chunks,
    )


class CacheSizes(NamedTuple):
    """The sizes of a KV cache, before its pages are known.

    Attributes:
      page: bytes of each device for a page that is there: of all layers; with `kv_offload` of one, in `SLICES`.
      least: the fewest pages that must be there; with `kv_offload` those of a sequence, since attention takes all.
      full: the pages of `config.max_batch` full sequences.
      offloaded: pages of the cache that the host's memory has room for, with `kv_offload`; 0: it is on the devices.
    """

    page: int
    least: int
    full: int
    offloaded: int

    @classmethod
    def from_layout(cls, layout: DeviceLayout, config: EngineConfig, limits: MemoryConfig) -> Self:
        """The sizes for an engine, from its layout with any number of pages."""
        size = (part_bytes(layout.caches) - state_bytes(layout)) // layout.num_pages
        each = config.pages_per_sequence
        full = config.max_batch * each
        if limits.kv_offload is None:
            return cls(size, 1, full, 0)
        offloaded = limits.kv_offload // bytes_of_page(layout.host_page)
        return cls(SLICES * size // layout.config.layers, each, max(each, min(full, offloaded)), offloaded)

    def pages_in(self, budget: int, *, bounded: bool, exact: bool) -> int:
        """The pages that are there in a budget of bytes.

        Args:
          bounded: whether more than `full` are of no use, though they have room.
          exact: whether the user has chosen the budget.
        """
        pages = budget // self.page
        if bounded or self.offloaded:
            pages = min(pages, self.full)
        return pages if exact or pages == self.full else max(_coarse(pages), self.least)

    def check(self, budget: int, config: EngineConfig, report: str) -> None:
        """Raise ValueError unless the least fits into the cache's budget. report: other uses of the memory."""
        if budget < self.least * self.page:
            least, lower = f"one page of {config.page_size} tokens takes", "page_size"
            if self.offloaded:
                least, lower = f"a layer's pages of {config.context} tokens take, in {SLICES} slices,", "context"
            raise ValueError(
                f"The KV cache may take {decimal(max(budget, 0))}, but {least} {exact_bytes(self.least * self.page)}: "
                f"raise cache_bytes or device_memory, lower {lower}, or free memory.{report}"
            )


def _pages_on_host(
    layout: DeviceLayout, config: EngineConfig, limits: MemoryConfig, cache: CacheSizes
) -> tuple[int, dict[str, int]]:
    """Return how many pages the host keeps of those that the cache forgets, and the bytes of its memory, by tenant.

    Raises ValueError, BudgetError.
    """
    host_kv, offload, size = limits.host_kv, limits.kv_offload, bytes_of_page(layout.host_page)
    of_state = pages_of_state(layout.host_page, layout.host_states)
    given = {"host_kv": host_kv, "disk_kv": limits.disk_kv}
    tiers = {name: value for name, value in given.items() if value is not None}
    if tiers and not config.prefix_caching:
        name, value = next(iter(tiers.items()))
        raise ValueError(
            f"{name}={value} keeps pages of the prefix cache, and prefix_caching=False: leave one of them out."
        )
    rooms = [room for room in (host_budget().free, host_budget().available) if room is not None]
    for name, limit in (("host_kv", host_kv), ("kv_offload", offload), ("disk_kv_limit", limits.disk_kv_limit)):
        if name != "disk_kv_limit" and limit is not None and rooms and limit > min(rooms):
            raise BudgetError(
                f"{name}={limit}: {exact_bytes(max(min(rooms), 0))} of the host's memory are free: lower it, or close "
                f"another model.{host_budget().report}"
            )
        if limit is not None and limit < (least := (1 + of_state) * size):
            what = f"one page of {config.page_size} tokens" + (" and a recurrent state" if of_state else "")
            raise ValueError(
                f"{name}={limit} has no room for {what}, which {'take' if of_state else 'takes'} {exact_bytes(least)}: "
                "raise it, lower page_size, or leave it out."
            )
    if offload is not None:
        shared = shares_memory(layout.platform)
        moving = {} if shared else {MOVING: (SLICES - 1) * cache.full * size // layout.config.layers}
        return 0, {ON_HOST: offload, **moving}
    if not tiers:
        return 0, {}
    read, written = config.pages_per_sequence + of_state, MAX_WRITES * max(MOVES[-1], of_state)
    moving = {MOVING: (2 * read + written * len(tiers)) * size}
    if host_kv is None:
        return 0, moving
    return host_kv // aligned(size, ARRAY_ALIGNMENT) or 1, {ON_HOST: host_kv, **moving}


def free_bytes(opened: OpenedModel, config: SharedConfig) -> int:
    """The bytes of each device that are free, unreserved, and not needed for adapters in the host's memory."""
    devices = devices_of(opened.mesh)
    sharing = Counter(map(budget_of, devices))
    unreserved = (free // count for budget, count in sharing.items() if (free := budget.free) is not None)
    return min([available_bytes(opened.mesh), *unreserved]) - _adapters_beside(opened, config)


def capacity_bytes(opened: OpenedModel, config: SharedConfig) -> int:
    """The bytes of each device that a model may have which is there alone, adapters in the host's memory aside."""
    devices = devices_of(opened.mesh)
    sharing = Counter(map(budget_of, devices))
    known = [budget.capacity // count for budget, count in sharing.items() if budget.capacity is not None]
    return min(known, default=available_bytes(opened.mesh)) - _adapters_beside(opened, config)


def _adapters_beside(opened: OpenedModel, config: SharedConfig) -> int:
    """The bytes of each device for adapters that were read, where devices share the host's memory."""
    return read_adapter_bytes(config) // len(devices_of(opened.mesh)) if shares_memory(opened.platform) else 0


def read_adapter_bytes(config: SharedConfig) -> int:
    """The limit of host memory for adapters, in bytes."""
    return config.adapter_bytes if isinstance(config, EngineConfig) and config.max_adapters else 0


def memory_report(mesh: Mesh | None) -> str:
    """List who has reserved how much of the devices' memory, for the end of an error: each line after a line break."""
    return "".join(budget.report for budget in dict.fromkeys(map(budget_of, devices_of(mesh))))


def buffer_bytes(placement: Placement | None) -> int:
    """The bytes of each device for layers on their way."""
    return 0 if placement is None else placement.buffer_bytes


def device_tenants(
    *,
    weights: int = 0,
    layers: int = 0,
    experts: int = 0,
    buffers: int = 0,
    adapters: int = 0,
    cache: int = 0,
    states: int = 0,
    moving: int = 0,
    workspace: int = 0,
) -> dict[str, int]:
    """A model's reservations of a device, in bytes by tenant; those of 0 bytes are left out.

    Args:
      weights: weights that are there all the time; for a streamed model those beside its layers.
      layers: layers of a streamed model that stay.
      experts: experts of a streamed model, those that come and go.
      buffers: space for layers that come while others compute.
      adapters: LoRA adapters.
      cache: keys and values.
      states: recurrent states, of all slots and snapshots.
      moving: pages of the cache on their way to the host or from it.
      workspace: bytes that the largest program needs while it runs.
    """
    tenants = {
        "weights": weights,
        LAYERS: layers,
        EXPERTS: experts,
        "layers on their way": buffers,
        "adapters": adapters,
        "KV pages": cache,
        "recurrent states": states,
        MOVING: moving,
        "programs' workspace": workspace,
    }
    return {tenant: size for tenant, size in tenants.items() if size}


def weight_tenants(opened: OpenedModel, placement: Placement | None) -> dict[str, int]:
    """The part of `device_tenants` known before a weight is read. placement: None: all layers are there."""
    if placement is None:
        return device_tenants(weights=opened.bytes_per_device())
    rest = opened.bytes_per_device(lambda name: layer_of(name) is None)
    experts = 0 if placement.experts is None else placement.experts.device_bytes
    return device_tenants(weights=rest, layers=placement.tiers.count("device") * placement.layer_bytes, experts=experts)


def host_tenants(opened: OpenedModel, placement: Placement | None) -> dict[str, int]:
    """The bytes of the host's memory for a model's layers, by tenant, beside that of CPU devices."""
    tenants = dict[str, int]()
    if placement is not None:
        everywhere = placement.layer_bytes * len(devices_of(opened.mesh))
        tenants[LAYERS] = placement.tiers.count("host") * everywhere
        if not shares_memory(opened.platform):
            tenants["layers on their way"] = placement.staged * everywhere
        if placement.experts is not None:
            tenants[EXPERTS] = placement.experts.host_bytes
            if placement.experts.tier == "disk" and not shares_memory(opened.platform):
                tenants["experts on their way"] = IN_FLIGHT * placement.experts.bytes
    return tenants


def is_ample(model: OpenedModel, device_memory: int | None, available: int, cache: int) -> bool:
    """Return whether so much is free beside the weights that the programs' workspace need not be known.

    device_memory: the user's limit, which is exact.
    """
    return shares_memory(model.platform) and device_memory is None and AMPLE * cache <= available


def needed_bytes(weights: int, others: int) -> int:
    """Return how much of a device must be free, or allowed, for weights and all else: cache, adapters, workspace."""
    return weights + math.ceil(others / FRACTION) + 1


def _coarse(pages: int) -> int:
    """Round down by at most 3% to one of few numbers: free memory varies, and each number is another program."""
    step = 1 << max(0, pages.bit_length() - COARSE_BITS)
    return pages // step * step


def _largest_slice(
    layout: DeviceLayout, ranges: Collection[LayerRange], buckets: Buckets, room: int
) -> tuple[int, int]:
    """Return how many chunks a streamed layer takes at once, to need at most half the room; and their workspace."""
    slices = ((chunks, slice_workspace(layout, ranges, buckets, chunks)) for chunks in reversed(buckets.chunks))
    return next((chunks, size) for chunks, size in slices if size <= room // 2 or chunks == buckets.chunks[0])


def slice_workspace(layout: DeviceLayout, ranges: Collection[LayerRange], buckets: Buckets, chunks: int) -> int:
    """Compute the workspace of programs over these ranges of layers, for this many chunks at once."""
    largest = dataclasses.replace(buckets.largest, chunks=(chunks,))
    return workspace_bytes(layout, largest, pass_programs(layout, ranges))


def workspace_bytes(
    layout: DeviceLayout, buckets: Buckets, specs: Iterable[ProgramSpec[Any, Buckets]] | None = None
) -> int:
    """Compile the largest programs and return their workspace, on each device. specs: None: of whole passes."""
    specs = specs or whole_programs(layout)
    programs = ProgramCache(specs, mesh=layout.mesh, kernels=layout.engine.kernels, store=executable_store())
    programs.compile_ahead(buckets.largest)
    return max(program.memory.workspace_bytes for program in programs)


def state_bytes(layout: DeviceLayout) -> int:
    """The bytes of each device for the recurrent states of all slots and snapshots."""
    return part_bytes([cache for cache in layout.caches if isinstance(cache, RecurrentState)])


def _row_bytes(layout: DeviceLayout) -> int:
    """The bytes of each device for one of these states."""
    return state_bytes(layout) // (layout.engine.max_batch + 1 + layout.num_snapshots)


def part_bytes(tree: Any) -> int:
    """The bytes of each device's part of arrays or shapes; shapes without a sharding are on one device."""

    def shape(x: Any) -> tuple[int, ...]:
        return x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)

    return sum(math.prod(shape(x)) * x.dtype.itemsize for x in jax.tree.leaves(tree))

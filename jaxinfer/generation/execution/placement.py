"""The placement of layers: on the devices, in the host's memory, or on disk."""

import dataclasses
import functools
import logging
import math
import os
from collections.abc import Callable

from rich.filesize import decimal

from jaxinfer.checkpoints.host_memory import aligned
from jaxinfer.checkpoints.reading import GROUP_BYTES
from jaxinfer.compiled import Costs
from jaxinfer.generation.engine.config import EngineConfig, SharedConfig
from jaxinfer.generation.execution.layout import DeviceLayout
from jaxinfer.generation.execution.memory import (
    FRACTION,
    CacheSizes,
    free_bytes,
    is_ample,
    memory_report,
    needed_bytes,
    part_bytes,
    slice_workspace,
    state_bytes,
    workspace_bytes,
)
from jaxinfer.generation.execution.platforms import buckets_of, shares_memory
from jaxinfer.models import DecoderConfig
from jaxinfer.models.devices import devices_of, host_available_bytes
from jaxinfer.models.files.loading import OpenedModel
from jaxinfer.models.leaves import layer_of
from jaxinfer.serving.budget import host_budget
from jaxinfer.streaming.config import (
    ExpertPlacement,
    LayerRange,
    MemoryConfig,
    Placement,
    PrefetchDepth,
    Tier,
    exact_bytes,
    spread,
)
from jaxinfer.streaming.layer_folders import experts_of

_log = logging.getLogger("jaxinfer.streaming")

DEPTH = 1
"""Prefetch depth while nothing is known of fetches: with equal layers, more would hide no more."""
MAX_DEPTH = 4
PINNED_LIMIT, PINNED_GIB = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", 64
"""XLA's environment variable that limits how much of the host's memory it pins for GPUs, and its default."""


class DeviceBytes:
    """A model's bytes on each device, known before a weight is read.

    Args:
      config: the engine's sizes.
      memory: the user's limits.

    Attributes:
      limit: bytes that it may take.
      rest: bytes of embeddings, head and norms.
      layer: bytes of the largest layer, without experts.
      largest: the index of that layer; layers of a kind are equally large.
      expert: bytes of the largest expert, as it is read from disk; 0 without experts.
      experts: the number of experts of all layers.
      least_experts: how many must be there at a time: twice those of a token.
      adapters: bytes of LoRA adapters and recurrent states.
      cache_sizes: the sizes of the cache; None for an encoder, which has none.
    """

    def __init__(self, opened: OpenedModel, config: SharedConfig, memory: MemoryConfig):
        self._opened, self._memory = opened, memory
        available = free_bytes(opened, config)
        self.limit = min(available, memory.device_memory or available)
        kinds = sorted(set(opened.transformer.layer_kinds))
        experts = {name for name, leaf in opened.shapes.items() if leaf.parts}
        layers = {
            kind: opened.bytes_per_device(lambda name, kind=kind: layer_of(name) == kind and name not in experts)
            for kind in kinds
        }
        self.largest = max(layers, key=layers.__getitem__)
        self.layer = layers[self.largest]
        self.expert, self.experts, self.least_experts = _expert_sizes(opened)
        self.rest, self.adapters, self.cache_sizes = opened.bytes_per_device(_is_rest), 0, None
        if self._has_cache:
            assert isinstance(config, EngineConfig)
            self._config = config
            self.adapters = part_bytes(self._streamed_layout.adapters) + state_bytes(self._streamed_layout)
            self.cache_sizes = CacheSizes.from_layout(self._streamed_layout, config, memory)

    @property
    def least_cache(self) -> int:
        """The least bytes of the cache; 0 for an encoder."""
        return 0 if self.cache_sizes is None else self.cache_sizes.least * self.cache_sizes.page

    @property
    def cache(self) -> int:
        """The bytes of the cache for `EngineConfig.max_batch` full sequences; 0 for an encoder."""
        return 0 if self.cache_sizes is None else self.cache_sizes.full * self.cache_sizes.page

    @property
    def whole(self) -> int:
        """Bytes of all weights."""
        return self._opened.bytes_per_device()

    def of_whole(self, cache: int) -> int:
        """The bytes of the whole model with a cache, in programs of all layers; includes the room to load it."""
        loading = self.whole + min(self._opened.manifest.bytes, GROUP_BYTES)
        return max(loading, self._with(self.whole, cache, lambda: self._workspace))

    def of_streamed(self, layers: int, cache: int, experts: int | None = None) -> int:
        """The bytes with this many layers there at a time and a cache, with the fewest chunks at once.

        experts: how many are there at a time; None: as few as possible.
        """
        weights = self.streamed_weights(layers, experts)
        return self._with(weights, cache, lambda: self._streamed_workspace)

    def streamed_weights(self, layers: int, experts: int | None = None) -> int:
        """The bytes of weights with this many layers and experts there at a time, as in `of_streamed`."""
        experts = self.least_experts if experts is None else experts
        return self.rest + layers * self.layer + experts * self.expert

    def at_a_time(self, layers: int) -> str:
        """Say which layers and experts are there at a time, for errors."""
        experts = f", {self.least_experts} experts of {decimal(self.expert)}" if self.experts else ""
        return f"{layers} layers such as layer {self.largest} of {decimal(self.layer)}{experts}"

    @property
    def _has_cache(self) -> bool:
        return isinstance(self._opened.config, DecoderConfig)

    def _with(self, weights: int, cache: int, workspace: Callable[[], int]) -> int:
        if not self._has_cache:
            return math.ceil(weights / FRACTION)
        others = self.adapters + cache
        if not is_ample(self._opened, self._memory.device_memory, self.limit - weights, others):
            others += workspace()
        return needed_bytes(weights, others)

    @functools.cached_property
    def _workspace(self) -> int:
        layout = DeviceLayout.from_model(self._opened, self._config, num_pages=self._config.max_batch)
        return workspace_bytes(layout, buckets_of(self._config, self._opened.platform))

    @functools.cached_property
    def _streamed_workspace(self) -> int:
        buckets = buckets_of(self._config, self._opened.platform, streamed=True)
        kinds = sorted(set(self._opened.transformer.layer_kinds))
        alone = [LayerRange(kind, 1, kind, streamed=True) for kind in kinds]
        return slice_workspace(self._streamed_layout, alone, buckets, buckets.chunks[0])

    @functools.cached_property
    def _streamed_layout(self) -> DeviceLayout:
        config = dataclasses.replace(self._config, max_decode_passes=1)
        return DeviceLayout.from_model(self._opened, config, num_pages=config.max_batch, only=_is_rest)


def _expert_sizes(opened: OpenedModel) -> tuple[int, int, int]:
    """The bytes of the largest expert in its file, the number of experts, and of those needed at a time."""
    if not (keys := experts_of(opened.config)):
        return 0, 0, 0
    assert isinstance(opened.config, DecoderConfig)
    first = {layer: opened.layer_shapes(layer, 0) for layer in opened.config.moe_layers}
    largest = max(sum(aligned(x.size * x.dtype.itemsize) for x in shapes) for shapes in first.values())
    routers = [moe.router for layer in first if (moe := opened.config.layer(layer).mlp.moe)]
    return largest, len(keys), max(min(2 * router.experts_per_token, router.experts) for router in routers)


def _is_rest(name: str) -> bool:
    """Return whether a leaf belongs to no layer."""
    return layer_of(name) is None


def plan_placement(
    opened: OpenedModel,
    config: SharedConfig,
    memory: MemoryConfig,
    *,
    cache_bytes: int | None = None,
    costs: Costs | None = None,
) -> Placement | None:
    """Plan where a model's layers are to be; None: all on the devices, in programs of the whole model.

    "host" and "disk" keep as many layers on the devices as `device_memory` has room for beside embeddings, head,
    layers on their way, the programs' workspace, and the cache of `config.max_batch` full sequences; without
    `device_memory` none, so that nothing is taken from the cache. Likewise "disk" keeps layers in as much of the host's
    memory as `host_memory` says. "auto" uses the free memory, and takes the first of device, host and disk that the
    model fits.

    The layers of a mixture of experts are placed so without their experts, which come one by one; without
    `device_memory` all layers are on the devices that the free memory has room for. Experts stay in what is left beside
    the full cache, without `device_memory` in half of it.

    Args:
      cache_bytes: bytes of the cache; None: as there is room, at least one page.
      costs: the times of earlier fetches, which decide how far ahead layers are brought.

    Raises MemoryError if not even the layers on their way and the least cache fit, naming the least that does, or if
    "host" does not fit; ValueError for a cache of less than a page, and for what is not streamed: to lanes nothing, to
    several devices no mixture of experts. Nothing is read or written until then.
    """
    if memory.weights == "device" and memory.device_memory is None:
        return None
    _check_lanes(opened, memory)
    needs = DeviceBytes(opened, config, memory)
    if cache_bytes is not None:
        assert isinstance(config, EngineConfig), "an encoder has no cache"
        assert needs.cache_sizes is not None
        needs.cache_sizes.check(cache_bytes, config, memory_report(opened.mesh))
    least, full = (needs.least_cache, needs.cache) if cache_bytes is None else (cache_bytes, cache_bytes)
    if memory.weights == "device":
        _check_whole(opened, needs, least)
        return None
    if memory.weights == "auto" and _fits_whole(needs, full):
        return None
    _check_devices(opened, memory)
    depth = _fitting_depth(opened, memory, needs, least, _depth(memory, costs))
    return _streamed(opened, memory, needs, full, depth)


def _fits_whole(needs: DeviceBytes, cache: int) -> bool:
    """Check whether all layers fit the devices beside the cache."""
    if needs.whole >= needs.limit:  # what programs need takes compiling to know
        return False
    if (whole := needs.of_whole(cache)) > needs.limit:
        return False
    _log.info("auto: all layers stay on the devices, %s of %s with the cache", decimal(whole), decimal(needs.limit))
    return True


def _fitting_depth(opened: OpenedModel, memory: MemoryConfig, needs: DeviceBytes, cache: int, depth: int) -> int:
    """Find how many layers ahead can be brought to the devices: `depth`, or what fits unless the user has chosen it.

    cache: the least bytes of the cache. Raises MemoryError if not even the fewest layers fit beside it.
    """
    chosen = memory.prefetch is not None
    least, remedy = depth if chosen else DEPTH, "lower prefetch, or use quantize='int4' or a mesh"
    at_a_time = f"{decimal(needs.rest)} beside the layers, {needs.at_a_time(least + 1)}"
    weights = needs.streamed_weights(least + 1)
    _check_weights(opened, needs, f"streaming needs ({at_a_time})", weights, remedy=f"{remedy} with more devices")
    while not chosen and depth > DEPTH and needs.of_streamed(depth + 1, cache) > needs.limit:
        depth -= 1
    if (needed := needs.of_streamed(depth + 1, cache)) > needs.limit:
        raise MemoryError(
            f"{opened.folder}: streaming needs {decimal(needed)} on each device ({decimal(needs.rest)} beside the "
            f"layers, {needs.at_a_time(depth + 1)}, {decimal(cache)} of cache, and what programs take), and "
            f"{decimal(needs.limit)} may be used: raise device_memory to at least {exact_bytes(needed)}, {remedy} "
            f"with more devices.{memory_report(opened.mesh)}"
        )
    return depth


def _streamed(opened: OpenedModel, memory: MemoryConfig, needs: DeviceBytes, cache: int, depth: int) -> Placement:
    """Place the layers of a streamed model: on the devices those that fit beside the cache and `depth` layers ahead."""
    limit, count, resident = needs.limit, opened.transformer.layers, 0
    if memory.device_memory is not None or memory.weights == "auto" or needs.experts:
        while resident < count and needs.of_streamed(resident + depth + 2, cache) <= limit:
            resident += 1
    experts = _place_experts(opened, memory, needs, resident + depth + 1, cache) if needs.experts else None
    on_host = _on_host(opened, memory, count - resident, needs.layer, 0 if experts is None else experts.host_bytes)
    counts: dict[Tier, int] = {"device": resident, "host": on_host}
    limits = "free" if memory.device_memory is None else "device_memory"
    reason = (
        f"{memory.weights}: the model takes {decimal(needs.whole)} of each device, {decimal(limit)} may be used "
        f"({limits})"
    )
    return Placement(
        tiers=spread(count, counts),
        depth=PrefetchDepth(device=depth, host=depth if shares_memory(opened.platform) else depth + 1),
        layer_bytes=needs.layer,
        reason=reason,
        experts=experts,
        kv_offload=memory.kv_offload is not None,
    )


def _check_lanes(opened: OpenedModel, memory: MemoryConfig) -> None:
    """Raise ValueError for a mesh with lanes or stages unless all weights are to be on the devices."""
    if memory.weights != "device" and opened.stages is not None:
        raise ValueError(
            f"weights={memory.weights!r} is not for a mesh with stages, and this one has "
            f"pipeline={opened.stages.count}: use weights='device', or pipeline = 1."
        )
    if memory.weights != "device" and opened.lanes > 1:
        raise ValueError(
            f"weights={memory.weights!r} is not for a mesh with lanes, and this one has data={opened.lanes}: leave "
            "it 'device', or use data = 1."
        )


def _check_devices(opened: OpenedModel, memory: MemoryConfig) -> None:
    """Raise ValueError for a mixture of experts on several devices, since it would be streamed."""
    if (count := len(devices_of(opened.mesh))) > 1 and experts_of(opened.config):
        raise ValueError(
            f"{opened.folder}: streaming the experts of a mixture to {count} devices is not implemented, and "
            f"weights={memory.weights!r} would: use one device, or weights='device'."
        )


def _place_experts(
    opened: OpenedModel, memory: MemoryConfig, needs: DeviceBytes, layers: int, cache: int
) -> ExpertPlacement:
    """Place the experts beside so many layers and the cache.

    Raises MemoryError if they are to be in the host's memory and do not fit.
    """
    tier: Tier = "disk"
    everywhere = needs.experts * needs.expert
    if memory.weights in ("host", "auto"):
        budget, remedy = _host_room(opened, memory)
        if everywhere <= budget:
            tier = "host"
        elif memory.weights == "host":
            raise MemoryError(
                f"{opened.folder}: {needs.experts} experts take {decimal(everywhere)} of the host's memory, and "
                f"{decimal(budget)} may be used: {remedy}, or use weights='disk'.{host_budget().report}"
            )
    if tier == "host" and shares_memory(opened.platform):
        return ExpertPlacement(tier=tier, count=needs.experts, slots=0, bytes=needs.expert)
    free = needs.limit - needs.of_streamed(layers, cache)
    if memory.device_memory is None:
        free //= 2
    slots = min(needs.experts, needs.least_experts + max(free, 0) // needs.expert)
    return ExpertPlacement(tier=tier, count=needs.experts, slots=slots, bytes=needs.expert)


def _check_whole(opened: OpenedModel, needs: DeviceBytes, cache: int) -> None:
    """Raise MemoryError unless all layers fit the devices within `device_memory`."""
    _check_weights(opened, needs, "all layers on the devices take", needs.whole, remedy=f"or {opened.remedy}")
    if (needed := needs.of_whole(cache)) > needs.limit:
        raise MemoryError(
            f"{opened.folder}: all layers on the devices take {decimal(needed)}, with {decimal(cache)} of cache, "
            f"and {decimal(needs.limit)} may be used: raise device_memory to at least {exact_bytes(needed)}, or "
            f"{opened.remedy}.{memory_report(opened.mesh)}"
        )


def _check_weights(opened: OpenedModel, needs: DeviceBytes, what: str, weights: int, *, remedy: str) -> None:
    """Raise MemoryError for weights that do not fit by themselves: what programs need takes compiling to know."""
    if weights > needs.limit:
        raise MemoryError(
            f"{opened.folder}: {what} {decimal(weights)} on each device without cache and programs, and "
            f"{decimal(needs.limit)} may be used: raise device_memory above {exact_bytes(weights)}, {remedy}."
            f"{memory_report(opened.mesh)}"
        )


def _on_host(opened: OpenedModel, memory: MemoryConfig, layers: int, layer_bytes: int, expert_bytes: int) -> int:
    """Return how many of the layers that are not on the devices are in the host's memory."""
    if memory.weights == "disk" and memory.host_memory is None:
        return 0
    each, (budget, remedy) = layer_bytes * len(devices_of(opened.mesh)), _host_room(opened, memory)
    budget = max(0, budget - expert_bytes)
    count = min(layers, budget // each)
    if memory.weights == "host" and count < layers:
        raise MemoryError(
            f"{opened.folder}: {layers} layers take {decimal(layers * each)} of the host's memory, and "
            f"{decimal(budget)} may be used: {remedy}, or use weights='disk'.{host_budget().report}"
        )
    return count


def _host_room(opened: OpenedModel, memory: MemoryConfig) -> tuple[int, str]:
    """The room for layers in the host's memory, beside that for loading them; and how to get more."""
    free, unreserved = host_available_bytes(), host_budget().free
    free = free if unreserved is None else min(free, unreserved)
    if shares_memory(opened.platform):  # what the devices may take is the host's memory too
        free -= min(free, memory.device_memory or (free if memory.weights == "auto" else 0))
    rooms = [(max(0, int(free * FRACTION) - min(opened.manifest.bytes, GROUP_BYTES)), "free memory of the host")]
    if memory.host_memory is not None:
        rooms.append((memory.host_memory, "raise host_memory"))
    if opened.platform == "gpu":
        pinned = int(os.environ.get(PINNED_LIMIT) or PINNED_GIB)
        rooms.append((pinned << 30, f"raise the environment variable {PINNED_LIMIT}={pinned} before starting Python"))
    return min(rooms)


def _depth(memory: MemoryConfig, costs: Costs | None) -> int:
    """Compute the prefetch depth whose compute time covers a p95 fetch; 1 if fetching is the bottleneck anyway."""
    if memory.prefetch is not None:
        return memory.prefetch
    fetches = [cost for tier in ("disk", "host") if costs and (cost := costs.for_sizes(f"fetch_{tier}"))]
    layer = costs.for_sizes("layer") if costs else None
    if layer is None or not fetches or (slowest := max(fetches, key=lambda cost: cost.mean)).mean >= layer.mean:
        return DEPTH
    return min(MAX_DEPTH, max(DEPTH, math.ceil(slowest.p95 / layer.mean)))

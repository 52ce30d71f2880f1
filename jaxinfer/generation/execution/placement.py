"""Which layers stay on the devices, which in the host's memory, and which on disk."""

import dataclasses
import logging
import math
from typing import Self

from rich.filesize import decimal

from jaxinfer.compiled import Costs
from jaxinfer.generation.engine.config import EngineConfig
from jaxinfer.generation.execution.layout import DeviceLayout
from jaxinfer.generation.execution.memory import FRACTION, part_bytes
from jaxinfer.generation.execution.platforms import shares_memory
from jaxinfer.models import DecoderConfig
from jaxinfer.models.devices import available_bytes, devices_of, host_available_bytes
from jaxinfer.models.leaves import layer_of
from jaxinfer.models.loading import OpenedModel
from jaxinfer.streaming.config import MemoryConfig, Placement, PrefetchDepth, Tier, spread

_log = logging.getLogger("jaxinfer.streaming")

DEPTH = 1
"""How many layers are brought ahead while nothing is known of fetches: of like layers, more would hide no more."""
MAX_DEPTH = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceBytes:
    """What a model takes of each device.

    Attributes:
      rest: embeddings, head, norms and adapters.
      layer: the largest layer. largest: which it is; layers of a kind are equally large.
      page: one page of the cache; 0 for an encoder, which has none.
      cache: the cache of `EngineConfig.max_batch` full sequences.
    """

    rest: int
    layer: int
    largest: int
    page: int
    cache: int

    @classmethod
    def of(cls, opened: OpenedModel, config: EngineConfig) -> Self:
        """Of a model under an engine of these sizes."""
        kinds = sorted(set(opened.transformer.layer_kinds))
        layers = {kind: opened.bytes_per_device(lambda name, kind=kind: layer_of(name) == kind) for kind in kinds}
        rest, page = opened.bytes_per_device(lambda name: layer_of(name) is None), 0
        if isinstance(opened.config, DecoderConfig):
            layout = DeviceLayout(
                opened.config,
                opened.weights,
                config,
                num_pages=1,
                platform=opened.platform,
                mesh=opened.mesh,
                rules=opened.rules,
                fitting=opened.fitting,
                family=opened.description.family,
            )
            rest, page = rest + part_bytes(layout.adapters), part_bytes(layout.state.caches)
        largest = max(layers, key=layers.__getitem__)
        cache = page * config.max_batch * config.pages_per_sequence
        return cls(rest=rest, layer=layers[largest], largest=largest, page=page, cache=cache)


def plan_placement(
    opened: OpenedModel,
    config: EngineConfig,
    memory: MemoryConfig,
    *,
    cache_bytes: int | None = None,
    costs: Costs | None = None,
) -> Placement | None:
    """Where the layers of a model are to be; None: all on the devices, in programs of the whole model.

    "host" and "disk" keep as many layers on the devices as `device_memory` has room for beside embeddings, head,
    layers on their way, and the cache of `config.max_batch` full sequences; without it none, so that nothing is taken
    from the cache. Likewise "disk" keeps layers in as much of the host's memory as `host_memory` says. "auto" uses what
    is free, and takes the first of device, host and disk that the model fits.

    Args:
      costs: what earlier fetches took, which says how far ahead layers are brought.
    Raises MemoryError if not even the layers on their way and one page of the cache fit, or "host" does not.
    """
    if memory.weights == "device":
        return None
    needs, count = DeviceBytes.of(opened, config), opened.transformer.layers
    rest, layer_bytes, least = needs.rest, needs.layer, needs.page
    available = available_bytes(opened.mesh)
    free = int(min(available, memory.device_memory or available) * FRACTION)
    cache = needs.cache if cache_bytes is None else cache_bytes
    if memory.weights == "auto" and (whole := rest + count * layer_bytes + cache) <= free:
        _log.info("auto: all layers stay on the devices, %s of %s with the cache", decimal(whole), decimal(free))
        return None
    depth = _depth(memory, costs)
    depth = depth if memory.prefetch is not None else _most(depth, free - rest - least, layer_bytes)
    needed = rest + (depth + 1) * layer_bytes + least
    if needed > free:
        raise MemoryError(
            f"{opened.folder}: streaming needs {decimal(needed)} on each device ({decimal(rest)} beside the layers, "
            f"{depth + 1} layers such as layer {needs.largest} of {decimal(layer_bytes)}, {decimal(least)} of cache), "
            f"and {decimal(free)} may be used: raise device_memory, lower prefetch, or use quantize='int4' or a mesh "
            "with more devices."
        )
    room = max(0, free - rest - (depth + 1) * layer_bytes - cache)
    resident = 0
    if memory.device_memory is not None or memory.weights == "auto":
        resident = min(count, room // layer_bytes)
    on_host = _on_host(opened, memory, count - resident, layer_bytes)
    counts: dict[Tier, int] = {"device": resident, "host": on_host}
    limits = "free" if memory.device_memory is None else "device_memory"
    reason = (
        f"{memory.weights}: the model takes {decimal(rest + count * layer_bytes)} of each device, "
        f"{decimal(free)} may be used ({limits})"
    )
    return Placement(
        tiers=spread(count, counts),
        depth=PrefetchDepth(device=depth, host=depth if shares_memory(opened.platform) else depth + 1),
        layer_bytes=layer_bytes,
        reason=reason,
    )


def _on_host(opened: OpenedModel, memory: MemoryConfig, layers: int, layer_bytes: int) -> int:
    """How many of the layers that are not on the devices are in the host's memory."""
    each = layer_bytes * len(devices_of(opened.mesh))
    budget = memory.host_memory
    if budget is None and memory.weights == "disk":
        return 0
    if budget is None:
        free = host_available_bytes()
        if shares_memory(opened.platform):  # what the devices may take is the host's too
            free -= min(free, memory.device_memory or (free if memory.weights == "auto" else 0))
        budget = free if memory.weights == "host" else int(free * FRACTION)
    count = min(layers, budget // each)
    if memory.weights == "host" and count < layers:
        raise MemoryError(
            f"{opened.folder}: {layers} layers take {decimal(layers * each)} of the host's memory, and "
            f"{decimal(budget)} may be used: raise host_memory, or use weights='disk'."
        )
    return count


def _depth(memory: MemoryConfig, costs: Costs | None) -> int:
    """How many layers ahead: while so many compute, even a slow fetch ends, if fetches are not what takes longest."""
    if memory.prefetch is not None:
        return memory.prefetch
    fetches = [cost for tier in ("disk", "host") if costs and (cost := costs.of(f"fetch_{tier}"))]
    layer = costs.of("layer") if costs else None
    if layer is None or not fetches or (slowest := max(fetches, key=lambda cost: cost.mean)).mean >= layer.mean:
        return DEPTH
    return min(MAX_DEPTH, max(DEPTH, math.ceil(slowest.p95 / layer.mean)))


def _most(depth: int, room: int, layer_bytes: int) -> int:
    """The depth, or less where memory is short, but 1 at least."""
    return max(DEPTH, min(depth, room // layer_bytes - 1))

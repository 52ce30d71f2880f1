"""`gather_pages`: pages are copied from the cache, for all layers, before others take their place."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.compiled import ProgramSpec, Sizes
from jaxinfer.generation.engine.batch import PageBlock
from jaxinfer.generation.engine.buckets import Buckets
from jaxinfer.generation.execution.layout import DeviceLayout, integers
from jaxinfer.generation.execution.state import DeviceState, pages_by_shape
from jaxinfer.models import Cache, KVPages


@dataclasses.dataclass(frozen=True, kw_only=True)
class GatherPages(Sizes):
    """The number of pages, padded."""

    program = "gather_pages"
    count: int


def gather_pages(caches: list[Cache], pages: jax.Array) -> PageBlock:
    """Return these pages of all layers. pages: int32 [N]; what padding copies has no meaning."""

    groups = [list(group.values()) for group in pages_by_shape(caches)]

    def both(*fields: str) -> tuple[jax.Array, ...]:
        def gather(layers: list[KVPages]) -> jax.Array:
            parts = [getattr(layer, field).at[pages].get(mode="clip") for layer in layers for field in fields]
            together = jnp.stack(parts, axis=1)  # [N, 2L, ...]: XLA copies each page once
            return together.reshape(len(pages), len(layers), 2, *together.shape[2:])

        return tuple(map(gather, groups))

    return PageBlock(both("k", "v"), () if groups[0][0].k_scale is None else both("k_scale", "v_scale"))


def build(static: None, sizes: GatherPages) -> Callable[..., Any]:
    """Build the function of these sizes."""

    def gather(state: DeviceState, pages: jax.Array) -> PageBlock:
        return gather_pages(state.caches, pages)

    return gather


def spec(layout: DeviceLayout) -> ProgramSpec[GatherPages, Buckets]:
    """The spec for an engine. Nothing is donated: the pages are read before the step writes to them."""
    return ProgramSpec(
        sizes=GatherPages,
        build=build,
        arguments=lambda sizes: (layout.state, *layout.inputs(integers(sizes.count))),
        reachable=lambda buckets: (GatherPages(count=count) for count in buckets.moves),
        out_shardings=lambda sizes: layout.block_shardings(sizes.count),
    )

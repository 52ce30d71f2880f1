"""`scatter_pages`: pages come back to the cache, which `gather_pages` has copied from it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxinfer.compiled import ProgramSpec, Sizes
from jaxinfer.generation.engine.batch import PageBlock
from jaxinfer.generation.engine.buckets import Buckets
from jaxinfer.generation.execution.layout import DeviceLayout, integers
from jaxinfer.generation.execution.state import DeviceState
from jaxinfer.models import KVPages


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScatterPages(Sizes):
    """The number of pages, padded."""

    program = "scatter_pages"
    count: int


def scatter_pages(state: DeviceState, pages: jax.Array, block: PageBlock) -> DeviceState:
    """Put a block into pages of all layers. pages: int32 [N]; one out of range is dropped."""

    def put(old: jax.Array | None, new: jax.Array | None, layer: int, index: int) -> jax.Array | None:
        return None if old is None or new is None else old.at[pages].set(new[:, layer, index], mode="drop")

    caches = [
        KVPages(
            put(old.k, block.kv, layer, 0),  # type: ignore[arg-type]
            put(old.v, block.kv, layer, 1),  # type: ignore[arg-type]
            put(old.k_scale, block.scale, layer, 0),
            put(old.v_scale, block.scale, layer, 1),
        )
        for layer, old in enumerate(state.caches)
    ]
    return DeviceState(caches, state.slots)


def build(static: None, sizes: ScatterPages) -> Callable[..., Any]:
    """Build the function of these sizes."""
    return scatter_pages


def spec(layout: DeviceLayout) -> ProgramSpec[ScatterPages, Buckets]:
    """The spec for an engine."""
    return ProgramSpec(
        sizes=ScatterPages,
        build=build,
        arguments=lambda sizes: (
            layout.state,
            *layout.inputs(integers(sizes.count)),
            layout.block(sizes.count),
        ),
        reachable=lambda buckets: (ScatterPages(count=count) for count in buckets.moves),
        donate=(0,),
        out_shardings=lambda sizes: layout.state_shardings,
    )

"""`scatter_pages`: pages come back to the cache, which `gather_pages` has copied from it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxinfer.compiled import ProgramSpec, Sizes
from jaxinfer.generation.engine.batch import PageBlock
from jaxinfer.generation.engine.buckets import Buckets
from jaxinfer.generation.execution.layout import DeviceLayout, integers
from jaxinfer.generation.execution.state import DeviceState, pages_by_shape
from jaxinfer.models import KVPages


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScatterPages(Sizes):
    """The number of pages, padded."""

    program = "scatter_pages"
    count: int


def scatter_pages(state: DeviceState, pages: jax.Array, block: PageBlock) -> DeviceState:
    """Put a block into pages of all layers. pages: int32 [N]; one out of range is dropped."""

    caches = list(state.caches)
    for group, layers in enumerate(pages_by_shape(caches)):
        parts = [x[group] for x in block if x]  # keys and values, and perhaps their scales, [N, L, 2, ...]
        for at, (layer, known) in enumerate(layers.items()):
            new = [x[:, at, which] for x in parts for which in (0, 1)]  # in the order of `KVPages`
            old = [x for x in known if x is not None]
            caches[layer] = KVPages(*(x.at[pages].set(y, mode="drop") for x, y in zip(old, new, strict=True)))
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

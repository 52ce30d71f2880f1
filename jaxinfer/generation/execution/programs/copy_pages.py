"""`copy_pages`: a request that shares a part of a page gets a copy of it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxinfer.compiled import ProgramSpec, Sizes
from jaxinfer.generation.engine.buckets import Buckets
from jaxinfer.generation.execution.layout import DeviceLayout, integers
from jaxinfer.generation.execution.state import DeviceState, pages_by_shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopyPages(Sizes):
    """The number of pages, padded."""

    program = "copy_pages"
    count: int


def copy_pages(state: DeviceState, source: jax.Array, target: jax.Array) -> DeviceState:
    """Copy pages, all read before any is written. source, target: int32 [R]; a target out of range is dropped."""
    caches = list(state.caches)
    for group in pages_by_shape(caches):
        for layer, pages in group.items():
            caches[layer] = jax.tree.map(lambda x: x.at[target].set(x[source], mode="drop"), pages)
    return DeviceState(caches, state.slots)


def build(static: None, sizes: CopyPages) -> Callable[..., Any]:
    """Build the function of these sizes."""
    return copy_pages


def spec(layout: DeviceLayout) -> ProgramSpec[CopyPages, Buckets]:
    """The spec for an engine. Models with recurrent states share full pages only."""
    copies = layout.engine.prefix_caching and not layout.num_snapshots
    return ProgramSpec(
        sizes=CopyPages,
        build=build,
        arguments=lambda sizes: (layout.state, *layout.inputs(integers(sizes.count), integers(sizes.count))),
        reachable=lambda buckets: (CopyPages(count=count) for count in (buckets.admissions if copies else ())),
        donate=(0,),
        out_shardings=lambda sizes: layout.state_shardings,
    )

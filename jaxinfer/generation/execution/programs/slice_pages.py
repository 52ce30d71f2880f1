"""`put_pages`, `take_pages`: pages of one layer come to the devices, and those that it wrote go back to the host."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from jaxinfer.compiled import ProgramSpec, Sizes
from jaxinfer.generation.engine.buckets import Buckets
from jaxinfer.generation.execution.layout import DeviceLayout, integers
from jaxinfer.models import KVPages
from jaxinfer.sizes import powers

SMALLEST_SLICE = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class PutPages(Sizes):
    """The number of pages, padded."""

    program = "put_pages"
    count: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class TakePages(Sizes):
    """The number of pages, padded."""

    program = "take_pages"
    count: int


def slice_sizes(slice_pages: int) -> tuple[int, ...]:
    """The numbers of pages that programs bring to a layer of so many, or back; ascending."""
    return powers(4, min(SMALLEST_SLICE, slice_pages), slice_pages)


def put_pages(cache: KVPages, pages: KVPages) -> KVPages:
    """Replace the first pages of a layer's cache."""
    return jax.tree.map(lambda old, new: lax.dynamic_update_slice_in_dim(old, new, 0, 0), cache, pages)


def take_pages(cache: KVPages, pages: jax.Array) -> KVPages:
    """Return these pages of a layer's cache. pages: int32 [N]."""
    return jax.tree.map(lambda x: x.at[pages].get(mode="clip"), cache)


def build_put(static: None, sizes: PutPages) -> Callable[..., Any]:
    """Build the function of these sizes."""
    return put_pages


def build_take(static: None, sizes: TakePages) -> Callable[..., Any]:
    """Build the function of these sizes."""
    return take_pages


def specs(layout: DeviceLayout) -> list[ProgramSpec[Any, Buckets]]:
    """The specs for an engine whose cache is in the host's memory."""

    counts = slice_sizes(layout.slice_pages)
    return [
        ProgramSpec(
            sizes=PutPages,
            build=build_put,
            arguments=lambda sizes: (layout.caches[0], layout.layer_pages(0, sizes.count)),
            reachable=lambda buckets: (PutPages(count=count) for count in counts),
            donate=(0,),
            out_shardings=lambda sizes: layout.shardings_of(layout.caches[0]),
        ),
        ProgramSpec(
            sizes=TakePages,
            build=build_take,
            arguments=lambda sizes: (layout.caches[0], *layout.inputs(integers(sizes.count))),
            reachable=lambda buckets: (TakePages(count=count) for count in counts),
            out_shardings=lambda sizes: layout.shardings_of(layout.layer_pages(0, sizes.count)),
        ),
    ]

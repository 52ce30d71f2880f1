"""`place_adapter`: a LoRA adapter comes to the device."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxinfer.compiled import ProgramSpec, Sizes
from jaxinfer.generation.engine.buckets import Buckets
from jaxinfer.generation.execution.layout import DeviceLayout, integers
from jaxinfer.models import LayerAdapters, LowRankStack


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlaceAdapter(Sizes):
    """No sizes: adapters have one shape."""

    program = "place_adapter"


def place_adapter(adapters: list[LayerAdapters], index: jax.Array, adapter: list[LayerAdapters]) -> list[LayerAdapters]:
    """Set one of the adapters. index: int32 [], from 0; adapter: a: [R, K], b: [N, R] of every linear."""

    def fill(stack: LowRankStack, new: LowRankStack) -> LowRankStack:
        a, b = new.a.astype(stack.a.dtype), new.b.astype(stack.b.dtype)
        return LowRankStack(stack.a.at[index].set(a), stack.b.at[:, index].set(b))

    return jax.tree.map(fill, adapters, adapter, is_leaf=lambda x: isinstance(x, LowRankStack))


def build(static: None, sizes: PlaceAdapter) -> Callable[..., Any]:
    """Build the function of these sizes."""
    return place_adapter


def spec(layout: DeviceLayout) -> ProgramSpec[PlaceAdapter, Buckets]:
    """The spec for an engine. Nothing is donated: if a step fails here, the present adapters stay."""
    return ProgramSpec(
        sizes=PlaceAdapter,
        build=build,
        arguments=lambda sizes: (layout.adapters, *layout.inputs(integers()), layout.one_adapter()),
        reachable=lambda buckets: () if layout.adapters is None else (PlaceAdapter(),),
        out_shardings=lambda sizes: (
            None if layout.mesh is None else jax.tree.map(lambda x: x.sharding, layout.adapters)
        ),
    )

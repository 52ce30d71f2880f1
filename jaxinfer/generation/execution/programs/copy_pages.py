"""`copy_pages`: a request that shares a part of a page gets a copy of it."""

import jax

from jaxinfer.compiled import ProgramSpec
from jaxinfer.generation.engine.buckets import Buckets
from jaxinfer.generation.execution.layout import DeviceLayout, integers
from jaxinfer.generation.execution.state import DeviceState


def copy_pages(state: DeviceState, source: jax.Array, target: jax.Array) -> DeviceState:
    """Copy pages, all read before any is written. source, target: int32 [R]; a target out of range is dropped."""
    caches = jax.tree.map(lambda x: x.at[target].set(x[source], mode="drop"), state.caches)
    return DeviceState(caches, state.slots)


def spec(layout: DeviceLayout) -> ProgramSpec[Buckets]:
    """Sizes: `count` pages."""
    return ProgramSpec(
        name="copy_pages",
        function=lambda sizes: copy_pages,
        arguments=lambda sizes: (layout.state, *layout.inputs(integers(sizes["count"]), integers(sizes["count"]))),
        reachable=lambda buckets: (
            {"count": count} for count in (buckets.admissions if layout.engine.prefix_caching else ())
        ),
        donate=(0,),
        out_shardings=layout.state_shardings,
    )

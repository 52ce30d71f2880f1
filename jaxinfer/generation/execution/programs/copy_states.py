"""`copy_states`: recurrent states are copied from slots to snapshots, or back."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.compiled import ProgramSpec, Sizes
from jaxinfer.generation.engine.buckets import Buckets
from jaxinfer.generation.execution.layout import DeviceLayout, integers
from jaxinfer.generation.execution.state import DeviceState
from jaxinfer.models import RecurrentState


@dataclasses.dataclass(frozen=True, kw_only=True)
class CopyStates(Sizes):
    """No sizes: only the states that are copied take time."""

    program = "copy_states"


def copy_states(state: DeviceState, source: jax.Array, target: jax.Array) -> DeviceState:
    """Copy the states of some rows to others, one after the other. source, target: int32 [R], negative for padding."""
    places = [place for place, cache in enumerate(state.caches) if isinstance(cache, RecurrentState)]

    def copy(at: jax.Array, arrays: list[RecurrentState]) -> list[RecurrentState]:
        def move(x: jax.Array) -> jax.Array:
            row = lax.dynamic_index_in_dim(x, source[at], keepdims=True)
            return lax.dynamic_update_slice_in_dim(x, row, target[at], axis=0)

        return jax.tree.map(move, arrays)

    copied = lax.fori_loop(0, jnp.sum(target >= 0), copy, [state.caches[place] for place in places])
    caches = list(state.caches)
    for place, cache in zip(places, copied, strict=True):
        caches[place] = cache
    return DeviceState(caches, state.slots)


def build(static: None, sizes: CopyStates) -> Callable[..., Any]:
    """Build the function."""
    return copy_states


def spec(layout: DeviceLayout) -> ProgramSpec[CopyStates, Buckets]:
    """The spec for an engine; each slot is copied at most once."""
    count = integers(layout.engine.max_batch)
    return ProgramSpec(
        sizes=CopyStates,
        build=build,
        arguments=lambda sizes: (layout.state, *layout.inputs(count, count)),
        reachable=lambda buckets: (CopyStates(),) if layout.num_snapshots else (),
        donate=(0,),
        out_shardings=lambda sizes: layout.state_shardings,
    )

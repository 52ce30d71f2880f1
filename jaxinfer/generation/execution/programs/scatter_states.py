"""`scatter_states`: a snapshot of recurrent states comes back, which `gather_states` has copied."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxinfer.compiled import ProgramSpec, Sizes
from jaxinfer.generation.engine.batch import StateBlock
from jaxinfer.generation.engine.buckets import Buckets
from jaxinfer.generation.execution.layout import DeviceLayout, integers
from jaxinfer.generation.execution.state import DeviceState
from jaxinfer.models import RecurrentState


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScatterStates(Sizes):
    """No sizes: a row of states comes back."""

    program = "scatter_states"


def scatter_states(state: DeviceState, row: jax.Array, block: StateBlock) -> DeviceState:
    """Put a block into a row of the states of all layers. row: int32 [1]; one out of range is dropped."""
    places = [place for place, cache in enumerate(state.caches) if isinstance(cache, RecurrentState)]
    known, tree = jax.tree.flatten([state.caches[place] for place in places])
    written = [x.at[row].set(y, mode="drop") for x, y in zip(known, block.arrays, strict=True)]
    caches = list(state.caches)
    for place, cache in zip(places, jax.tree.unflatten(tree, written), strict=True):
        caches[place] = cache
    return DeviceState(caches, state.slots)


def build(static: None, sizes: ScatterStates) -> Callable[..., Any]:
    """Build the function."""
    return scatter_states


def spec(layout: DeviceLayout) -> ProgramSpec[ScatterStates, Buckets]:
    """The spec for an engine."""
    return ProgramSpec(
        sizes=ScatterStates,
        build=build,
        arguments=lambda sizes: (layout.state, *layout.inputs(integers(1)), layout.states()),
        reachable=lambda buckets: (ScatterStates(),) if layout.num_snapshots and buckets.moves else (),
        donate=(0,),
        out_shardings=lambda sizes: layout.state_shardings,
    )

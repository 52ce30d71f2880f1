"""`gather_states`: a snapshot of recurrent states is copied for the host, before another takes its place."""

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
class GatherStates(Sizes):
    """No sizes: a row of states is copied."""

    program = "gather_states"


def gather_states(state: DeviceState, row: jax.Array) -> StateBlock:
    """Copy a row of the states of all layers. row: int32 [1]."""
    states = [cache for cache in state.caches if isinstance(cache, RecurrentState)]
    return StateBlock(tuple(x[row] for x in jax.tree.leaves(states)))


def build(static: None, sizes: GatherStates) -> Callable[..., Any]:
    """Build the function."""
    return gather_states


def spec(layout: DeviceLayout) -> ProgramSpec[GatherStates, Buckets]:
    """The spec for an engine. Nothing is donated: the states are read before the step writes to them."""
    return ProgramSpec(
        sizes=GatherStates,
        build=build,
        arguments=lambda sizes: (layout.state, *layout.inputs(integers(1))),
        reachable=lambda buckets: (GatherStates(),) if layout.num_snapshots and buckets.moves else (),
        out_shardings=lambda sizes: layout.shardings_of(layout.states()),
    )

"""`admit`: requests get their slots."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from jaxinfer.compiled import ProgramSpec, Sizes
from jaxinfer.generation.engine.buckets import Buckets
from jaxinfer.generation.execution.layout import DeviceLayout, integers
from jaxinfer.generation.execution.state import DeviceState, Slots


@dataclasses.dataclass(frozen=True, kw_only=True)
class Admit(Sizes):
    """The number of requests, padded."""

    program = "admit"
    count: int


def admit(state: DeviceState, slot: jax.Array, requests: Slots) -> DeviceState:
    """Put requests into slots. slot: int32 [R], out of range in padding rows; requests: Slots of R rows."""
    slots = jax.tree.map(lambda old, new: old.at[slot].set(new, mode="drop"), state.slots, requests)
    return DeviceState(state.caches, slots)


def build(static: None, sizes: Admit) -> Callable[..., Any]:
    """Build the function of these sizes."""
    return admit


def spec(layout: DeviceLayout) -> ProgramSpec[Admit, Buckets]:
    """The spec for an engine."""
    return ProgramSpec(
        sizes=Admit,
        build=build,
        arguments=lambda sizes: (
            layout.state,
            *layout.inputs(integers(sizes.count), layout.slots(sizes.count)),
        ),
        reachable=lambda buckets: (Admit(count=count) for count in buckets.admissions),
        donate=(0,),
        out_shardings=lambda sizes: layout.state_shardings,
    )

"""The programs of the device, one a file: a pure function, and its `ProgramSpec` for an engine.

A decoder's programs take and return the whole device state (donated, so it is updated in place). A request's options
are in the state from its admission on, so a step is told only its slots and pages. The host may therefore send the next
step before it has seen the tokens of the last.

Dimensions: B rows of the batch, M chunks of prompts, T tokens a chunk, P pages a row, C tokens of context, S slots.
"""

from collections.abc import Collection
from typing import Any

from jaxinfer.compiled import ProgramSpec
from jaxinfer.generation.engine.buckets import Buckets
from jaxinfer.generation.execution.layout import DeviceLayout
from jaxinfer.generation.execution.programs import (
    admit,
    chain,
    copy_pages,
    copy_states,
    decode,
    experts,
    gather_pages,
    gather_states,
    place_adapter,
    prefill,
    ring,
    scatter_pages,
    scatter_states,
    slice_pages,
)
from jaxinfer.streaming.config import LayerRange


def decoder_programs(layout: DeviceLayout) -> list[ProgramSpec[Any, Buckets]]:
    """All programs of a decoder."""
    return [*state_programs(layout), *whole_programs(layout)]


def whole_programs(layout: DeviceLayout) -> list[ProgramSpec[Any, Buckets]]:
    """The programs that run passes through a decoder whose layers are all on the devices."""
    return [prefill.spec(layout), decode.spec(layout)] if layout.stages is None else [ring.spec(layout)]


def chain_programs(layout: DeviceLayout, ranges: Collection[LayerRange]) -> list[ProgramSpec[Any, Buckets]]:
    """All programs of a decoder whose layers are streamed, and run in these ranges."""
    return [*state_programs(layout), *pass_programs(layout, ranges)]


def pass_programs(layout: DeviceLayout, ranges: Collection[LayerRange]) -> list[ProgramSpec[Any, Buckets]]:
    """The programs of a pass through layers that run in these ranges."""
    return [*chain.decoder_specs(layout, ranges), *experts.expert_specs(layout, ranges)]


def state_programs(layout: DeviceLayout) -> list[ProgramSpec[Any, Buckets]]:
    """The programs that change a decoder's state between passes, or copy pages from it."""
    if layout.slice_pages:  # the host copies pages, where they are
        return [*(file.spec(layout) for file in (admit, place_adapter)), *slice_pages.specs(layout)]
    files = admit, copy_pages, copy_states, gather_pages, gather_states, scatter_pages, scatter_states, place_adapter
    return [file.spec(layout) for file in files]

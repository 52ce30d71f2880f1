"""`DecoderState`: what a decoder keeps on its devices beside weights, and how it changes between passes."""

from collections.abc import Hashable
from typing import Any

import jax
import numpy as np

from jaxinfer.generation.engine.batch import PageBlock, StateBlock
from jaxinfer.generation.engine.buckets import Buckets
from jaxinfer.generation.execution.base import DevicePrograms
from jaxinfer.generation.execution.commands import Command
from jaxinfer.generation.execution.layer_caches import OffloadedCaches
from jaxinfer.generation.execution.layout import DeviceLayout
from jaxinfer.generation.execution.packing import ALL_TOKENS
from jaxinfer.generation.execution.programs import place_adapter, zeros
from jaxinfer.generation.execution.programs.copy_pages import CopyPages
from jaxinfer.generation.execution.programs.gather_pages import GatherPages
from jaxinfer.generation.execution.programs.gather_states import GatherStates
from jaxinfer.generation.execution.spares import STATES
from jaxinfer.generation.execution.state import DeviceState
from jaxinfer.models import LayerAdapters


class DecoderState:
    """Holds a decoder's KV cache, slots and adapters.

    Args:
      layout: their shapes.
      programs: those of `programs.state_programs`, among others.

    Attributes:
      layout: the shapes of everything.
      arrays: cache and slots; None before `restart`, and after `free`.
      offloaded: the cache in the host's memory; None: it is in `arrays`.
      adapters: the LoRA adapters on the devices; None: there is no room for any.
    """

    def __init__(self, layout: DeviceLayout, programs: DevicePrograms[Buckets]):
        self.layout, self._programs = layout, programs
        self._empty = programs.compile(zeros.spec(layout.state), zeros.Zeros())
        self._no_adapters = None
        if layout.adapters is not None:
            self._no_adapters = programs.compile(zeros.spec(layout.adapters), zeros.Zeros())
        self.offloaded = OffloadedCaches(layout, programs) if layout.slice_pages else None
        self.arrays: DeviceState = None  # type: ignore[assignment]  # nothing runs while it is free
        self.adapters: list[LayerAdapters] | None = None
        self._all_tokens: dict[int, jax.Array] = {}  # bitmasks of rows that may choose anything

    def restart(self) -> None:
        """Make cache and slots empty; adapters stay."""
        for array in jax.tree.leaves(self.arrays):
            array.delete()  # first: there is no room for two
        self.arrays = self._empty()
        if self.offloaded is not None:
            self.offloaded.restart()
        self._place_adapters()

    def free(self) -> None:
        """Give the memory back, for the next state of the same shapes."""
        if self.arrays is not None:
            STATES.give(self._shapes, self.arrays)
        self.arrays, self.adapters = None, None  # type: ignore[assignment]
        self._all_tokens.clear()

    def take(self) -> None:
        """Have memory again if it is free: that of another state of the same shapes, if there is one."""
        if self.arrays is None:
            self.arrays = STATES.take(self._shapes) or self._empty()
        self._place_adapters()

    @property
    def _shapes(self) -> Hashable:
        shapes, tree = jax.tree.flatten(self.layout.state)
        return tree, *((x.shape, x.dtype, x.sharding) for x in shapes)

    def _place_adapters(self) -> None:
        if self.adapters is None and self._no_adapters is not None:
            self.adapters = self._no_adapters()

    def change(self, command: Command) -> PageBlock | StateBlock | None:
        """Send a command to the devices that changes the state; returns the content of one that copies some from it."""
        if isinstance(command.sizes, CopyPages) and self.offloaded is not None:
            self.offloaded.copy(*command.inputs)
            return None
        program = self._programs.cache.get(command.sizes)
        if isinstance(command.sizes, GatherPages | GatherStates):
            return program(self.arrays, *command.inputs)
        if isinstance(command.sizes, place_adapter.PlaceAdapter):  # steps in flight keep the arrays they were given
            self.adapters = program(self.adapters, *command.inputs)
        else:
            self.arrays = program(self.arrays, *command.inputs)
        return None

    def bitmask(self, packed: np.ndarray | None, rows: int) -> Any:
        """The tokens that rows, so many of a lane, may choose. None: any, which the devices keep."""
        if packed is not None:
            return packed
        if rows not in self._all_tokens:
            shape = self.layout.stack_lanes(self.layout.bitmask(rows))
            self._all_tokens[rows] = jax.device_put(np.full(shape.shape, ALL_TOKENS), shape.sharding)
        return self._all_tokens[rows]

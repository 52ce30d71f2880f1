"""Runs a decoder's batches: owns its KV cache and everything else that stays on the device."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jaxinfer.compiled import Clock, Program, ProgramSpec, Sizes
from jaxinfer.generation.engine.batch import Batch, Chunk, DecodeRow, StepOutput
from jaxinfer.generation.engine.buckets import Buckets, round_up
from jaxinfer.generation.engine.config import EngineConfig
from jaxinfer.generation.engine.protocols import InFlightStep
from jaxinfer.generation.engine.request import Sequence
from jaxinfer.generation.engine.speculation import PassCosts
from jaxinfer.generation.execution.base import BaseExecutor
from jaxinfer.generation.execution.layout import DeviceLayout
from jaxinfer.generation.execution.memory import who_has
from jaxinfer.generation.execution.packing import ALL_TOKENS, Packer
from jaxinfer.generation.execution.programs import decoder_programs, zeros
from jaxinfer.generation.execution.programs.admit import Admit
from jaxinfer.generation.execution.programs.copy_pages import CopyPages
from jaxinfer.generation.execution.programs.decode import Decode
from jaxinfer.generation.execution.programs.place_adapter import PlaceAdapter
from jaxinfer.generation.execution.programs.prefill import Chunks, Prefill
from jaxinfer.generation.execution.results import only_asked, read_decode, read_prefill
from jaxinfer.generation.execution.state import DeviceState, Rows
from jaxinfer.generation.sampling.sampler import LogitsProcessor
from jaxinfer.models import LayerAdapters
from jaxinfer.models.devices import available_bytes
from jaxinfer.models.files.loading import LoadedModel
from jaxinfer.pallas_kernels.choices import Call


class DecoderExecutor(BaseExecutor[Buckets]):
    """The device side of an engine on a decoder; the whole model in every program.

    Args:
      model: weights and config.
      config: the engine's sizes.
      buckets: the sizes that programs are compiled for.
      num_pages: the size of the cache.
      logits_processors: functions by name.
      clock: the engine's clock.
      costs: the times of passes, in the record to which every step is added.
    """

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig,
        buckets: Buckets,
        *,
        num_pages: int,
        logits_processors: Mapping[str, LogitsProcessor],
        clock: Clock,
        costs: PassCosts,
    ):
        self._layout = DeviceLayout.from_model(
            model, config, num_pages=num_pages, processors=tuple(logits_processors.values())
        )
        super().__init__(model, config, self._specs(self._layout), clock, costs.all)
        self._pass_costs = costs
        self._packer = Packer(self._layout, buckets, logits_processors)
        self._empty_state = self._zeros(self._layout.state)
        self._state: DeviceState = self._empty_state()
        self._restarting = False  # whether `restart` has begun and not ended
        self._adapters: list[LayerAdapters] | None = None
        if config.max_adapters:
            self._adapters = self._zeros(self._layout.adapters)()
        self._all_tokens: dict[int, jax.Array] = {}  # bitmasks of rows that may choose anything

    def _specs(self, layout: DeviceLayout) -> list[ProgramSpec[Any, Buckets]]:
        """Return the specs of all programs."""
        return decoder_programs(layout)

    def _zeros(self, shapes: Any) -> Program:
        """Compile the program that makes arrays of these shapes."""
        return zeros.spec(shapes).compile(zeros.Zeros(), mesh=self._layout.mesh, store=self.store)

    def restart(self) -> None:
        """Begin with an empty state, after a step that failed may have destroyed it.

        If this is interrupted, the next `launch` does it.
        """
        self._restarting = True
        self._give_up()
        super().restart()
        for array in jax.tree.leaves(self._state):
            array.delete()  # first: there is no room for two
        self._state = self._empty_state()
        self._restarting = False

    def _give_up(self) -> None:
        """Abandon work in progress besides the state."""

    def compile_ahead(self, sequences: Iterable[Sequence] | None = None) -> int:
        """Compile every program that these sequences, or any (None), can need; returns how many were missing.

        Raises MemoryError if the largest leaves no room to run it.
        """
        buckets = self._packer.buckets
        if sequences is not None:
            buckets = buckets.reachable(list(sequences), self._layout.engine, num_pages=self._layout.num_pages)
        missing = self.programs.compile_ahead(buckets)
        if missing and (workspace := self.workspace_bytes) > (free := available_bytes(self._layout.mesh)):
            raise MemoryError(
                f"The programs need {workspace} bytes to run in, and {free} are free beside weights and cache: "
                f"lower cache_bytes, max_batch or token_budget.\n{who_has(self._layout.mesh)}"
            )
        return missing

    def calls(self) -> list[Call]:
        """Trace every program, and return the operations that have several implementations here."""
        return self.programs.calls(self._packer.buckets)

    def launch(self, batch: Batch) -> InFlightStep:
        """Send a batch to the device, without waiting for it."""
        if self._restarting:
            self.restart()
        for index, adapter in batch.adapter_uploads:  # steps in flight keep the arrays they were given
            place, layers = self.programs.get(PlaceAdapter()), self._layout.adapter_layers(adapter)
            self._adapters = place(self._adapters, np.int32(index - 1), layers)
        if batch.copies:
            source, target = self._packer.copies(batch.copies)
            self._update(CopyPages(count=len(source)), source, target)
        if batch.admissions:
            slot, requests = self._packer.admissions(batch.admissions)
            self._update(Admit(count=len(slot)), slot, requests)
        launched = self._clock()
        program, output = self._run(batch)
        for array in jax.tree.leaves(output):
            array.copy_to_host_async()
        return InFlightStep(batch, program, output, launched)

    def _run(self, batch: Batch) -> tuple[Program, Any]:
        """Send a batch's passes to the device; returns the program that ran, and the pending results asked for."""
        program, inputs = self._prefill(batch) if batch.chunks else self._decode(batch)
        self._state, output = program(self._layout.leaves, self._adapters, self._state, *inputs)
        return program, only_asked(batch, output)

    def _update(self, sizes: Sizes, *inputs: Any) -> None:
        """Update the state by the program of these sizes."""
        self._state = self.programs.get(sizes)(self._state, *inputs)

    def _prefill(self, batch: Batch) -> tuple[Program, tuple[Any, ...]]:
        buckets = self._packer.buckets
        count, size = round_up(len(batch.chunks), buckets.chunks), round_up(len(batch.rows), buckets.prefill_rows)
        width = self._packer.page_table_width(batch)
        program = self.programs.get(Prefill(chunks=count, batch=size, pages=width))
        return program, self._inputs(batch, count, size, width)

    def _inputs(self, batch: Batch, count: int, size: int, width: int) -> tuple[Chunks | None, Rows, Any]:
        """Pack a batch's chunks (None for none), rows and bitmask, padded to `count` chunks and `size` rows."""
        parts = [*batch.chunks, *[None] * (count - len(batch.chunks)), *batch.rows]
        chunks = self._packer.chunks(batch.chunks, count, width) if count else None
        return chunks, self._packer.rows(batch.rows, size, width), self._bitmask(parts, count + size)

    def _decode(self, batch: Batch) -> tuple[Program, tuple[Any, ...]]:
        width, speculative = self._packer.page_table_width(batch), batch.num_speculative_tokens
        size = round_up(len(batch.rows), self._packer.buckets.decode_rows)
        rows, limits = self._packer.rows(batch.rows, size, width), self._packer.speculation_limits(batch.rows, size)
        program = self.programs.get(Decode(batch=size, speculative=speculative, pages=width))
        return program, (rows, self._bitmask(list(batch.rows), size), np.int32(batch.passes), limits)

    def _bitmask(self, parts: list[Chunk | DecodeRow | None], count: int) -> Any:
        """Return the tokens that each row may choose; kept on the device while all may choose any."""
        bitmask = self._packer.bitmask(parts, count)
        if bitmask is None:
            if count not in self._all_tokens:
                shape = self._layout.place(self._layout.bitmask(count))
                self._all_tokens[count] = jax.device_put(np.full(shape.shape, ALL_TOKENS), shape.sharding)
            return self._all_tokens[count]
        return bitmask

    def collect(self, step: InFlightStep) -> StepOutput:
        """Wait for a step; returns its results."""
        batch, program = step.batch, step.program
        output = jax.device_get(step.output)
        seconds = self._seconds(step)
        if isinstance(program.sizes, Prefill):
            self.costs.record(program.name, program.bucket, seconds)
            return StepOutput(outputs=read_prefill(batch, output, padded_chunks=program.sizes.chunks))
        plain, speculative = map(int, output.passes)
        self._pass_costs.record(program.bucket, seconds, plain=plain, speculative=speculative)
        return StepOutput(outputs=read_decode(batch, output))

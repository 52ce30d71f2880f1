"""Runs a decoder's batches: packs them into commands, sends these to the devices, and reads the results."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from rich.filesize import decimal

from jaxinfer.compiled import Bucket, Clock
from jaxinfer.compiled.spec import shapes_of
from jaxinfer.generation.engine.batch import Batch, PageBlock, SequenceOutput, StateBlock, StepOutput
from jaxinfer.generation.engine.buckets import Buckets
from jaxinfer.generation.engine.protocols import InFlightStep
from jaxinfer.generation.engine.request import Sequence as TokenSequence
from jaxinfer.generation.engine.restoring import WRITE_PAGE
from jaxinfer.generation.engine.speculation import PassCosts
from jaxinfer.generation.execution.base import BaseExecutor, DevicePrograms, Passes, send_to_host
from jaxinfer.generation.execution.commands import Command
from jaxinfer.generation.execution.decoder_state import DecoderState
from jaxinfer.generation.execution.memory import memory_report
from jaxinfer.generation.execution.packing import Packer
from jaxinfer.generation.execution.programs.passes import Pass
from jaxinfer.generation.execution.programs.prefill import PrefillOutput
from jaxinfer.generation.execution.programs.verification import DecodeOutput
from jaxinfer.generation.execution.results import only_asked, read_decode, read_prefill, split_lanes
from jaxinfer.models.devices import available_bytes
from jaxinfer.pallas_kernels.choices import Call


@dataclasses.dataclass
class PassResult:
    """The pending results of a pass.

    Attributes:
      name: the name of such a pass in the record of costs.
      bucket: the sizes of its program.
      sizes: its own.
      output: its results, on the devices.
      stages: of the pipeline that it went through, of which the last has the results.
      micro_batches: those of it that were not empty.
      steady_share: the share of its time that its passes take in a pipeline that neither fills nor drains.
      blocks: pages and states for the host that the step has copied before; its first pass has them.
    """

    name: str
    bucket: Bucket
    sizes: Pass
    output: PrefillOutput | DecodeOutput
    stages: int = 1
    micro_batches: int = 1
    steady_share: float = 1.0
    blocks: tuple[PageBlock | StateBlock, ...] = ()

    def read(self, lane: Batch, output: PrefillOutput | DecodeOutput) -> list[SequenceOutput]:
        """Read the results of one lane, on the host, for each of `Batch.parts`."""
        places = self.sizes.places(len(lane.rows), self.micro_batches)
        if isinstance(output, DecodeOutput):
            return read_decode(lane, output, places)
        return read_prefill(lane, output, [self.sizes.chunks + place for place in places])


class DecoderPasses(Passes, Protocol):
    """Sends a decoder's passes to its devices."""

    def split(self, batch: Batch) -> list[Batch]:
        """Divide a batch into parts, of which each is one command, in order."""
        ...

    def run(self, commands: list[Command], state: DecoderState) -> list[PassResult]:
        """Send the passes of a step, one for each command; they change the state."""
        ...


class DecoderExecutor(BaseExecutor[Buckets]):
    """The device side of an engine on a decoder: a state, a packing, and passes.

    Args:
      state: what is on the devices beside weights.
      packer: makes commands of batches.
      passes: sends passes to the devices.
      programs: all programs.
      clock: the engine's clock.
      costs: the times of passes, in the record to which every step is added.

    Attributes:
      state: what is on the devices beside weights.
      passes: sends passes to the devices.
    """

    def __init__(
        self,
        *,
        state: DecoderState,
        packer: Packer,
        passes: DecoderPasses,
        programs: DevicePrograms[Buckets],
        clock: Clock,
        costs: PassCosts,
    ):
        super().__init__(programs, passes, state.layout.engine, clock, costs.all)
        self.state, self.passes = state, passes
        self._packer, self._pass_costs = packer, costs
        self._restarting = False  # whether `restart` has begun and not ended
        self._on_host = state.layout.platform == "cpu"  # results, which JAX would copy or look up at some cost

    @property
    def chunk_seconds(self) -> float | None:
        """The fewest seconds of a chunk, as in `Executor`."""
        return self._pass_costs.chunk_seconds()

    def restart(self) -> None:
        """Begin with an empty state, after a step that failed may have destroyed it.

        If this is interrupted, the next `run` does it.
        """
        self._restarting = True
        super().restart()
        self.state.restart()
        self._restarting = False

    def sleep(self) -> None:
        """Free the weights, as in `Executor`."""
        self.state.layout.leaves = shapes_of(self.state.layout.leaves)

    def free_state(self) -> None:
        """Free the state, as in `Executor`."""
        self.state.free()

    def wake_up(self, leaves: list[jax.Array]) -> None:
        """Take weights, and make an empty state if it was freed, as in `Executor`."""
        self.state.layout.leaves = [*leaves]
        self.state.take()

    def compile_ahead(self, sequences: Iterable[TokenSequence] | None = None) -> int:
        """Compile every program that these sequences, or any (None), can need; returns how many were missing.

        Raises MemoryError if the largest leaves no room to run it.
        """
        buckets, layout = self._packer.buckets, self.state.layout
        if sequences is not None:
            buckets = buckets.reachable(list(sequences), layout.engine, num_pages=layout.num_pages, lanes=layout.lanes)
        missing = self.programs.compile_ahead(buckets)
        if missing and (workspace := self.report().workspace_bytes) > (free := available_bytes(layout.mesh)):
            raise MemoryError(
                f"The programs need {decimal(workspace)} to run in, and {decimal(free)} are free beside weights and "
                f"cache: lower cache_bytes, max_batch or token_budget.{memory_report(layout.mesh)}"
            )
        return missing

    def compile_in_background(self) -> None:
        """Compile every program that any sequence can need, as in `Executor`."""
        self.programs.compile_in_background(self._packer.buckets)

    def calls(self) -> list[Call]:
        """Trace every program, and return the operations that have several implementations here."""
        return self.programs.calls(self._packer.buckets)

    def launch(self, batch: Batch) -> InFlightStep:
        """Send a batch to the device, without waiting for it."""
        parts = self.passes.split(batch)
        commands = self.commands(batch, parts)
        launched = self._clock()
        results = self.run(commands)
        for part, result in zip(parts, results, strict=True):
            result.output = only_asked(part, result.output)
        if not self._on_host:
            send_to_host([(result.output, result.blocks) for result in results])
        return InFlightStep(batch, (parts, results), launched)

    def commands(self, batch: Batch, parts: Iterable[Batch]) -> list[Command]:
        """Return what a batch has the devices do, in order; touches neither them nor the state.

        parts: those that the passes split the batch into.
        """
        return [*self._packer.changes(batch), *map(self._packer.pass_through, parts)]

    def run(self, commands: Sequence[Command]) -> list[PassResult]:
        """Send the commands of a step to the devices."""
        if self._restarting:
            self.restart()
        passes, blocks = [], []
        for command in commands:
            if isinstance(command.sizes, Pass):
                passes.append(command)
            elif (block := self.state.change(command)) is not None:
                blocks.append(block)
        results = self.passes.run(passes, self.state)
        results[0].blocks = tuple(blocks)
        return results

    def read_pages(self, batch: Batch) -> list[list[PageBlock | StateBlock]]:
        """Bring what a batch stores to the host while nothing runs, as in `Executor`."""
        blocks = [self.state.change(command) for command in self._packer.changes(batch)]
        return self._blocks_of_lanes([block for block in blocks if block is not None])

    def collect(self, step: InFlightStep) -> StepOutput:
        """Wait for a step; returns its results."""
        parts, results = _parts_of(step)
        late = self._is_late([result.output for result in results])
        self.passes.finish()
        on_host = self._read([result.output for result in results])
        lanes = self.state.layout.lanes
        outputs = [split_lanes(output, lanes, result.stages) for result, output in zip(results, on_host, strict=True)]
        seconds = self._seconds(step)
        batch = step.batch
        if (batch.restored or batch.restored_states) and (restored := batch.num_restored_pages):
            self._record_restored(results[0], seconds, restored, late=late)
        else:
            self._record(results[0], outputs[0], seconds, at_most=late)
        chunks: list[SequenceOutput] = []
        rows: list[SequenceOutput] = []
        for part, result, by_lane in zip(parts, results, outputs, strict=True):
            for lane, output in zip(part.lanes, by_lane, strict=True):
                read = result.read(lane, output)
                chunks += read[: len(lane.chunks)]
                rows += read[len(lane.chunks) :]
        return StepOutput(outputs=chunks + rows, stored=self._blocks_of_lanes(results[0].blocks) if batch.keeps else [])

    def _record_restored(self, first: PassResult, seconds: float, pages: int, *, late: bool) -> None:
        """Record how much longer a step took than others of its sizes, since pages came back to the cache before."""
        usual = self.costs.mean(first.name, **dict(first.bucket)) if isinstance(first.output, PrefillOutput) else None
        if usual is not None and not late:
            self.costs.record(WRITE_PAGE, (), max(seconds - usual, 0.0), passes=pages)

    def _blocks_of_lanes(self, blocks: Sequence[PageBlock | StateBlock]) -> list[list[PageBlock | StateBlock]]:
        """Wait for pages and states for the host; returns those of each lane."""
        stages, lanes = self.state.layout.num_stages, self.state.layout.lanes
        on_host = jax.tree.map(lambda x: x.reshape(stages, lanes, -1, *x.shape[1:]), self._read(blocks))
        return [jax.tree.map(lambda x, lane=lane: x[:, lane], on_host) for lane in range(lanes)]

    def _read(self, outputs: Sequence[PrefillOutput | DecodeOutput | PageBlock | StateBlock]) -> Any:
        """Wait for results; returns them as arrays of the host."""
        return jax.tree.map(np.asarray, outputs) if self._on_host else jax.device_get(outputs)

    def wait(self, step: InFlightStep) -> None:
        """Wait for a step whose results nobody wants."""
        _, results = _parts_of(step)
        jax.block_until_ready([result.output for result in results])

    def _record(
        self,
        first: PassResult,
        lanes: Sequence[PrefillOutput] | Sequence[DecodeOutput],
        seconds: float,
        *,
        at_most: bool,
    ) -> None:
        """Record how long a step took, or took at most. lanes: the results of its first pass."""
        passes = [output.passes.tolist() for output in lanes if isinstance(output, DecodeOutput)]
        if passes:
            # The lane whose rows went on longest was there in all passes.
            plain, speculative = max(passes, key=sum)
            steady = seconds * first.steady_share
            self._pass_costs.record(first.bucket, steady, plain=plain, speculative=speculative, at_most=at_most)
        else:
            self.costs.record(first.name, first.bucket, seconds, at_most=at_most)


def _parts_of(step: InFlightStep) -> tuple[list[Batch], list[PassResult]]:
    """The parts of a step's batch, and their pending results."""
    return step.output

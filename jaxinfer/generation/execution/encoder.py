"""Runs an encoder's batches: packs them into commands, sends these to the devices, and reads the vectors."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Protocol, cast

import jax
import numpy as np

from jaxinfer.compiled import Bucket, Clock, Costs
from jaxinfer.execution.forward import check_halves, halves
from jaxinfer.generation.engine.batch import Batch, SequenceOutput, StepOutput
from jaxinfer.generation.engine.buckets import EncoderBuckets
from jaxinfer.generation.engine.config import EncoderEngineConfig
from jaxinfer.generation.engine.protocols import InFlightStep
from jaxinfer.generation.engine.request import Sequence as TokenSequence
from jaxinfer.generation.execution.base import BaseExecutor, DevicePrograms, Passes
from jaxinfer.generation.execution.commands import Command
from jaxinfer.generation.execution.packing import pack_prompts

ShapeBuckets = Iterable[tuple[int, int]]
"""The (rows, tokens) of an encoder's batches."""


@dataclasses.dataclass
class Vectors:
    """The pending results of a batch.

    Attributes:
      name: the name of such a batch in the record of costs.
      bucket: its sizes.
      vectors: float32 [B, D], on the devices.
    """

    name: str
    bucket: Bucket
    vectors: jax.Array


class EncoderPasses(Passes, Protocol):
    """Sends an encoder's batches to its devices.

    Attributes:
      leaves: the weights that are on the devices all the time.
    """

    leaves: list[jax.Array]

    def run(self, command: Command) -> Vectors:
        """Send a batch."""
        ...


class EncoderExecutor(BaseExecutor[ShapeBuckets]):
    """The device side of an engine on an encoder: a packing, and passes; it has no state.

    Args:
      config: the engine's sizes.
      buckets: the sizes that programs are compiled for.
      passes: sends batches to the devices.
      programs: all programs.
      clock: the engine's clock.
      costs: the record of times, to which every step is added.

    Attributes:
      passes: sends batches to the devices.
    """

    def __init__(
        self,
        *,
        config: EncoderEngineConfig,
        buckets: EncoderBuckets,
        passes: EncoderPasses,
        programs: DevicePrograms[ShapeBuckets],
        clock: Clock,
        costs: Costs,
    ):
        super().__init__(programs, passes, config, clock, costs)
        self.passes, self._buckets = passes, buckets

    @property
    def chunk_seconds(self) -> float | None:
        """None: no prompt goes through it in chunks."""
        return None

    def sleep(self) -> None:
        """Free the weights, as in `Executor`."""
        self.passes.leaves = []

    def free_state(self) -> None:
        """Do nothing: there is no state."""

    def wake_up(self, leaves: list[jax.Array]) -> None:
        """Take weights, as in `Executor`."""
        self.passes.leaves = list(leaves)

    def compile_ahead(self, sequences: Iterable[TokenSequence] | None = None) -> int:
        """Compile what these sequences, or any (None), need together; returns how many programs were missing."""
        return self.programs.compile_ahead(
            self._buckets.shapes if sequences is None else self._buckets.reachable(sequences)
        )

    def compile_in_background(self) -> None:
        """Compile every program that any sequence can need, as in `Executor`."""
        self.programs.compile_in_background(self._buckets.shapes)

    def launch(self, batch: Batch) -> InFlightStep:
        """Send a batch to the device, without waiting for it."""
        commands = self.commands(batch)
        launched, result = self._clock(), None
        try:
            result = self.run(commands)
            result.vectors.copy_to_host_async()
        except Exception as error:
            check_halves(error, len(batch.chunks))
        return InFlightStep(batch, result, launched)

    def commands(self, batch: Batch) -> list[Command]:
        """Return what a batch has the devices do."""
        return [pack_prompts(batch, self._buckets)]

    def run(self, commands: Sequence[Command]) -> Vectors:
        """Send the command of a step to the devices."""
        (command,) = commands
        return self.passes.run(command)

    def collect(self, step: InFlightStep) -> StepOutput:
        """Wait for a batch; its vectors are pooled already, so only their directions count.

        If the devices have too little memory, the batch runs in halves.
        """
        count, result = len(step.batch.chunks), cast(Vectors | None, step.output)
        if result is not None:
            late = self._is_late(result.vectors)
            try:
                vectors = self._read(result, count)
            except Exception as error:
                check_halves(error, count)
            else:
                self.costs.record(result.name, result.bucket, self._seconds(step), at_most=late)
                return StepOutput(outputs=[SequenceOutput(embedding=vector) for vector in vectors])
        outputs: list[SequenceOutput] = []
        for part in halves(count):
            half = dataclasses.replace(step.batch, chunks=step.batch.chunks[part])
            vectors = self._read(self.run(self.commands(half)), len(half.chunks))
            outputs += [SequenceOutput(embedding=vector) for vector in vectors]
        return StepOutput(outputs=outputs)

    def _read(self, result: Vectors, count: int) -> np.ndarray:
        """Wait for a batch; return its vectors on the host, without those of padding."""
        self.passes.finish()
        return np.asarray(result.vectors)[:count]

    def wait(self, step: InFlightStep) -> None:
        """Wait for a batch whose vectors nobody wants."""
        if step.output is not None:
            jax.block_until_ready(step.output.vectors)

"""Passes of models whose layers are all on the devices: one program for each."""

import jax

from jaxinfer.generation.engine.batch import Batch
from jaxinfer.generation.engine.buckets import Buckets
from jaxinfer.generation.execution.base import DevicePrograms, WholePasses
from jaxinfer.generation.execution.commands import Command
from jaxinfer.generation.execution.decoder import PassResult
from jaxinfer.generation.execution.decoder_state import DecoderState
from jaxinfer.generation.execution.encoder import ShapeBuckets, Vectors
from jaxinfer.generation.execution.packing import PassInputs
from jaxinfer.generation.execution.programs.decode import Decode
from jaxinfer.generation.execution.programs.embed import Embed
from jaxinfer.generation.execution.programs.passes import Pass
from jaxinfer.generation.execution.programs.prefill import Prefill
from jaxinfer.models.files.loading import LoadedModel


class WholeDecoderPasses(WholePasses):
    """Sends a decoder's passes to its devices, those of a step as one program.

    Args:
      programs: the programs `prefill` and `decode`, among others.
    """

    def __init__(self, programs: DevicePrograms[Buckets]):
        self._programs = programs

    def split(self, batch: Batch) -> list[Batch]:
        """Return the batch: it is one command."""
        return [batch]

    def run(self, commands: list[Command], state: DecoderState) -> list[PassResult]:
        """Send the passes of a step."""
        (command,) = commands
        sizes, inputs = command.sizes, command.inputs
        assert isinstance(sizes, Pass)
        assert isinstance(inputs, PassInputs)
        bitmask = state.bitmask(inputs.bitmask, sizes.chunks + sizes.batch)
        if sizes.chunks:
            program_sizes = Prefill(chunks=sizes.chunks, batch=sizes.batch, pages=sizes.pages)
            given = inputs.chunks, inputs.rows, bitmask
        else:
            program_sizes = Decode(batch=sizes.batch, speculative=sizes.speculative, pages=sizes.pages)
            given = inputs.rows, bitmask, inputs.passes, inputs.speculation_limits
        program = self._programs.cache.get(program_sizes)
        state.arrays, output = program(state.layout.leaves, state.adapters, state.arrays, *given)
        return [PassResult(program.name, program.bucket, sizes, output)]


class WholeEncoderPasses(WholePasses):
    """Sends an encoder's batches to its devices, each as one program.

    Args:
      model: weights and config.
      programs: the program `embed`.

    Attributes:
      leaves: the weights.
    """

    def __init__(self, model: LoadedModel, programs: DevicePrograms[ShapeBuckets]):
        self.leaves, self._programs = list(model.leaves.values()), programs

    def run(self, command: Command) -> Vectors:
        """Send a batch."""
        program = self._programs.cache.get(Embed(**dict(command.sizes.bucket)))
        vectors: jax.Array = program(self.leaves, *command.inputs)
        return Vectors(program.name, program.bucket, vectors)

"""Runs an encoder's batches: one program for each number of rows and of tokens, and no state."""

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from jaxinfer.compiled import Clock, Costs, Program, ProgramSpec
from jaxinfer.generation.engine.batch import Batch, SequenceOutput, StepOutput
from jaxinfer.generation.engine.buckets import EncoderBuckets, round_up
from jaxinfer.generation.engine.config import EncoderEngineConfig
from jaxinfer.generation.engine.protocols import InFlightStep
from jaxinfer.generation.engine.request import Sequence
from jaxinfer.generation.execution.base import BaseExecutor
from jaxinfer.generation.execution.programs import embed
from jaxinfer.models.files.loading import LoadedModel


class EncoderExecutor(BaseExecutor[Iterable[tuple[int, int]]]):
    """The device side of an engine on an encoder; arguments as in `DecoderExecutor`."""

    _recorded_as = "embed"  # the name of a batch in the costs

    def __init__(
        self, model: LoadedModel, config: EncoderEngineConfig, buckets: EncoderBuckets, *, clock: Clock, costs: Costs
    ):
        super().__init__(model, config, self._specs(model, config), clock, costs)
        self._leaves, self._buckets = list(model.leaves.values()), buckets

    def _specs(
        self, model: LoadedModel, config: EncoderEngineConfig
    ) -> list[ProgramSpec[Any, Iterable[tuple[int, int]]]]:
        """Return the specs of all programs."""
        return [embed.spec(model, config.level)]

    def compile_ahead(self, sequences: Iterable[Sequence] | None = None) -> int:
        """Compile what these sequences, or any (None), need together; returns how many programs were missing."""
        return self.programs.compile_ahead(
            self._buckets.shapes if sequences is None else self._buckets.reachable(sequences)
        )

    def launch(self, batch: Batch) -> InFlightStep:
        """Send a batch to the device, without waiting for it."""
        sequences = batch.sequences
        rows, width = round_up(len(sequences), self._buckets.rows), self._buckets.length(sequences[0])
        tokens, positions = np.zeros((rows, width), np.int32), np.full((rows, width), -1, np.int32)
        for row, sequence in enumerate(sequences):
            length = sequence.num_prompt_tokens
            tokens[row, :length], positions[row, :length] = sequence.token_ids, np.arange(length)
        launched = self._clock()
        program, vectors = self._run(tokens, positions)
        vectors.copy_to_host_async()
        return InFlightStep(batch, program, vectors, launched)

    def _run(self, tokens: np.ndarray, positions: np.ndarray) -> tuple[Program, jax.Array]:
        """Send a padded batch to the device; returns the program that ran, and its pending vectors."""
        program = self.programs.get(embed.Embed(batch=tokens.shape[0], tokens=tokens.shape[1]))
        return program, program(self._leaves, tokens, positions)

    def collect(self, step: InFlightStep) -> StepOutput:
        """Wait for a batch; its vectors are pooled already, so only their directions count."""
        vectors = np.asarray(step.output)[: len(step.batch.chunks)]  # the last rows are padding
        self.costs.record(self._recorded_as, step.program.bucket, self._seconds(step))
        return StepOutput(outputs=[SequenceOutput(embedding=vector) for vector in vectors])

"""Passes of models whose layers are in stages of a pipeline: one program for all passes of a step."""

import jax
import numpy as np

from jaxinfer.generation.engine.batch import Batch
from jaxinfer.generation.engine.buckets import Buckets
from jaxinfer.generation.engine.stats import ExecutorReport, PipelineStats
from jaxinfer.generation.execution.base import DevicePrograms, WholePasses
from jaxinfer.generation.execution.commands import Command
from jaxinfer.generation.execution.decoder import PassResult
from jaxinfer.generation.execution.decoder_state import DecoderState
from jaxinfer.generation.execution.packing import PassInputs
from jaxinfer.generation.execution.programs.ring import DecodeInputs, PrefillInputs, Ring
from jaxinfer.sharding.schedules import ring_ticks


class RingDecoderPasses(WholePasses):
    """Sends a decoder's steps round the stages of a pipeline.

    Args:
      programs: the program `ring`, among others.
      stages: the number of stages.
      lanes: the number of lanes.
    """

    def __init__(self, programs: DevicePrograms[Buckets], stages: int, lanes: int):
        self._stats = PipelineStats()
        self._programs, self._stages, self._lanes = programs, stages, lanes
        self._jobs: jax.Array | None = None

    def report(self) -> ExecutorReport:
        """Return the work of the stages so far."""
        return ExecutorReport(pipeline=self._stats)

    def split(self, batch: Batch) -> list[Batch]:
        """Return the batch: it is one command."""
        return [batch]

    def run(self, commands: list[Command], state: DecoderState) -> list[PassResult]:
        """Send the passes of a step."""
        (command,) = commands
        sizes, inputs = command.sizes, command.inputs
        assert isinstance(sizes, Ring)
        assert isinstance(inputs, PassInputs)
        bitmask, schedule = state.bitmask(inputs.bitmask, sizes.chunks + sizes.batch), inputs.schedule
        assert schedule is not None
        if inputs.chunks is not None:
            given = PrefillInputs(inputs.chunks, inputs.rows, bitmask, schedule)
        else:
            given = DecodeInputs(inputs.rows, bitmask, schedule, inputs.speculation_limits)  # type: ignore[arg-type]
        program = self._programs.cache.get(sizes)
        leaves, adapters = state.layout.leaves, state.adapters
        state.arrays, output, self._jobs = program(leaves, adapters, state.arrays, given)
        ticks = ring_ticks(self._stages, schedule.micro_batches, schedule.passes, schedule.stride)
        busy = self._stages * schedule.micro_batches * schedule.passes
        self._stats += PipelineStats(slots=int(self._stages * ticks), idle_slots=int(self._stages * ticks - busy))
        return [
            PassResult(
                program.name,
                program.bucket,
                sizes,
                output,
                stages=self._stages,
                micro_batches=int(schedule.micro_batches),
                steady_share=float(schedule.passes * schedule.stride / ticks),
            )
        ]

    def recorded(self) -> np.ndarray:
        """Return what the stages worked on in the last step: int [ticks, stages, 3], micro-batch, pass, if anything.

        Ticks that there was room for, but that no schedule needed, are left out. Raises ValueError before any step.
        """
        if self._jobs is None:
            raise ValueError("No step was run yet.")
        jobs = np.asarray(self._jobs).reshape(self._stages, self._lanes, -1, 3)[:, 0].swapaxes(0, 1)
        return jobs[: np.flatnonzero(jobs[..., 2].any(axis=1))[-1] + 1]

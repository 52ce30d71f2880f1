"""Runs batches layer by layer, with weights that are not on the devices all the time (DeepSpeed Inference, VI).

One fetch of a layer serves all sequences of a step. The host drives the pass, and so is busy until its last layer is
sent: no step is in flight while the next one is scheduled.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

from jaxinfer.compiled import Costs, Program, ProgramSpec
from jaxinfer.generation.engine.batch import Batch, StepOutput
from jaxinfer.generation.engine.buckets import Buckets, EncoderBuckets, round_up
from jaxinfer.generation.engine.config import EngineConfig
from jaxinfer.generation.engine.protocols import Clock, InFlightStep
from jaxinfer.generation.execution.decoder import DecoderExecutor
from jaxinfer.generation.execution.encoder import EncoderExecutor
from jaxinfer.generation.execution.layout import DeviceLayout
from jaxinfer.generation.execution.programs import chain, chain_programs
from jaxinfer.generation.execution.programs.prefill import PrefillOutput
from jaxinfer.generation.execution.results import read_prefill
from jaxinfer.generation.sampling.sampler import LogitsProcessor
from jaxinfer.models import TokenRows
from jaxinfer.models.loading import LoadedModel
from jaxinfer.streaming.model import StreamedModel
from jaxinfer.streaming.prefetch import PrefetchDepth, Prefetcher


class ChainExecutor(DecoderExecutor):
    """The device side of an engine on a decoder whose layers are streamed; arguments as of `DecoderExecutor`.

    Attributes:
      prefetcher: brings the layers.
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
        costs: Costs,
    ):
        super().__init__(
            model,
            config,
            buckets,
            num_pages=num_pages,
            logits_processors=logits_processors,
            clock=clock,
            costs=costs,
        )
        self.depth, self._kinds = 0, model.config.layer_kinds
        self.prefetcher = _prefetcher(model, costs)

    @staticmethod
    def _specs(layout: DeviceLayout) -> list[ProgramSpec[Buckets]]:
        return chain_programs(layout)

    def restart(self) -> None:
        """Begin with an empty state, and with the first layer."""
        self.prefetcher.restart()
        super().restart()

    def _run(self, batch: Batch) -> tuple[Program, PrefillOutput]:
        buckets = self._packer.buckets
        count = round_up(len(batch.chunks), buckets.chunks) if batch.chunks else 0
        size = round_up(len(batch.rows), buckets.prefill_rows if count else buckets.decode_rows)
        sizes = {"chunks": count, "batch": size, "pages": self._packer.page_table_width(batch)}
        chunks, rows, bitmask = self._inputs(batch, sizes)
        x, groups = self.programs.get("enter", **sizes)(self._layout.leaves, self._state.slots, chunks, rows)
        for layer, kind in enumerate(self._kinds):
            program = self.programs.get("layer", kind=kind, **sizes)
            leaves = self.prefetcher.get(layer)
            adapters = None if self._adapters is None else self._adapters[layer]
            x, self._state.caches[layer] = program(leaves, adapters, self._state.caches[layer], x, groups)
            self.prefetcher.computing(x)
        program = self.programs.get("leave", **sizes)
        slots, output = program(self._layout.leaves, self._state.slots, x, groups, chunks, rows, bitmask)
        self._state = self._state._replace(slots=slots)
        return program, output

    def collect(self, step: InFlightStep) -> StepOutput:
        """Wait for a step."""
        output = jax.device_get(step.output)
        self.costs.record("pass", step.program.bucket, self._seconds(step))
        return StepOutput(outputs=read_prefill(step.batch, output, padded_chunks=dict(step.program.bucket)["chunks"]))


class EncoderChainExecutor(EncoderExecutor):
    """The device side of an engine on an encoder whose layers are streamed; arguments as of `DecoderExecutor`.

    Attributes:
      prefetcher: brings the layers.
    """

    def __init__(
        self, model: LoadedModel, config: EngineConfig, buckets: EncoderBuckets, *, clock: Clock, costs: Costs
    ):
        super().__init__(model, config, buckets, clock=clock, costs=costs)
        self.depth, self._kinds = 0, model.config.layer_kinds
        self.prefetcher = _prefetcher(model, costs)

    @staticmethod
    def _specs(model: LoadedModel) -> list[ProgramSpec[Iterable[tuple[int, int]]]]:
        return chain.encoder_specs(model)

    def restart(self) -> None:
        """Begin with the first layer."""
        self.prefetcher.restart()
        super().restart()

    def _run(self, tokens: np.ndarray, positions: np.ndarray) -> tuple[Program, jax.Array]:
        sizes = {"batch": tokens.shape[0], "tokens": tokens.shape[1]}
        x: Any = self.programs.get("enter", **sizes)(self._leaves, tokens, positions)
        for layer, kind in enumerate(self._kinds):
            program = self.programs.get("layer", kind=kind, **sizes)
            x, _ = program(self.prefetcher.get(layer), None, None, x, (TokenRows(tokens, positions),))  # type: ignore[arg-type]
            self.prefetcher.computing(x)
        program = self.programs.get("leave", **sizes)
        return program, program(self._leaves, x, positions)


def _prefetcher(model: LoadedModel, costs: Costs) -> Prefetcher:
    assert isinstance(model, StreamedModel)
    placement = model.placement
    depth = PrefetchDepth(device=placement.device_depth, host=placement.host_depth)
    return Prefetcher(model.store, placement.streamed, depth, costs)

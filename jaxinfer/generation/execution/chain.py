"""Runs batches layer by layer, with weights that are not on the devices all the time (DeepSpeed Inference, VI).

One fetch of a layer serves all sequences of a step. The host drives the pass, so it is busy until the last layer is
sent: no step is in flight while the next one is scheduled.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from jaxinfer.checkpoints.stores import LayerStore
from jaxinfer.compiled import Clock, Costs, Program, ProgramSpec
from jaxinfer.generation.engine.batch import Batch, SequenceOutput, StepOutput
from jaxinfer.generation.engine.buckets import Buckets, EncoderBuckets, round_up
from jaxinfer.generation.engine.config import EncoderEngineConfig, EngineConfig
from jaxinfer.generation.engine.protocols import InFlightStep
from jaxinfer.generation.engine.speculation import PassCosts
from jaxinfer.generation.execution.decoder import DecoderExecutor
from jaxinfer.generation.execution.encoder import EncoderExecutor
from jaxinfer.generation.execution.layout import DeviceLayout
from jaxinfer.generation.execution.programs import chain, chain_programs
from jaxinfer.generation.execution.programs.chain import (
    EncoderEnter,
    EncoderLayer,
    EncoderLeave,
    Enter,
    Layer,
    Leave,
    Pass,
    Propose,
    runs_experts,
)
from jaxinfer.generation.execution.programs.experts import Join, Route, RunExperts, mlp_kind
from jaxinfer.generation.execution.programs.prefill import Chunks, PrefillOutput
from jaxinfer.generation.execution.programs.verification import DecodeOutput, Speculation
from jaxinfer.generation.execution.results import only_asked, read_decode, read_prefill
from jaxinfer.generation.execution.state import Rows
from jaxinfer.models import TokenRows
from jaxinfer.models.files.loading import LoadedModel
from jaxinfer.streaming.config import LayerRange
from jaxinfer.streaming.experts import GROUP, ExpertCache
from jaxinfer.streaming.layer_folders import experts_of
from jaxinfer.streaming.model import StreamedModel
from jaxinfer.streaming.prefetch import Prefetcher


@dataclasses.dataclass
class _Slice:
    """A part of a batch on its way through the layers.

    Attributes:
      batch: the part of the batch.
      sizes: the sizes of its programs.
      inputs: its chunks, rows, bitmask and speculative tokens.
      groups: its tokens.
      x: [N, D], the output of the last layer that ran.
    """

    batch: Batch
    sizes: Pass
    inputs: tuple[Chunks | None, Rows, Any, Speculation | None]
    groups: tuple[TokenRows, ...]
    x: jax.Array


class _Layers:
    """The layers in the order of a pass, with their weights; streamed ones as they arrive.

    Attributes:
      ranges: the layers that one program runs at a time.
      prefetcher: brings the streamed layers.
      experts: brings the experts; None: the model has none.
    """

    def __init__(self, model: LoadedModel, costs: Costs):
        assert isinstance(model, StreamedModel)
        self.ranges = model.ranges
        self.prefetcher = Prefetcher(model.store, model.placement.streamed, model.placement.depth, costs)
        self.experts = None if model.experts is None else _experts(model, model.experts, self.prefetcher, costs)
        self._resident = {
            layers.first: [
                x
                for layer in range(layers.first, layers.first + layers.count)
                for x in model.store.start(layer).arrays()
            ]
            for layers in self.ranges
            if not layers.streamed
        }

    def __iter__(self) -> Iterator[tuple[LayerRange, list[jax.Array]]]:
        for layers in self.ranges:
            first = layers.first
            yield layers, self.prefetcher.get(first) if layers.streamed else self._resident[first]

    def restart(self) -> None:
        """Free everything that comes and goes."""
        self.prefetcher.restart()
        if self.experts is not None:
            self.experts.restart()

    def close(self) -> None:
        """Have the thread that waits for a layer or an expert, or will, get a CheckpointError; from any thread."""
        self.prefetcher.close()
        if self.experts is not None:
            self.experts.close()


def _experts(model: StreamedModel, store: LayerStore, prefetcher: Prefetcher, costs: Costs) -> ExpertCache:
    keys, layers = experts_of(model.config), model.transformer.layers
    places = {key: layers + place for place, key in enumerate(keys)}
    assert model.placement.experts is not None
    slots = model.placement.experts.slots or len(keys)
    return ExpertCache(store, places, slots, statistics=prefetcher.statistics, costs=costs)


class ChainExecutor(DecoderExecutor):
    """The device side of an engine on a decoder whose layers are streamed; arguments as in `DecoderExecutor`.

    Attributes:
      prefetcher: brings the layers.
      experts: brings the experts; None: the model has none.
    """

    def __init__(self, model: LoadedModel, config: EngineConfig, buckets: Buckets, *, costs: PassCosts, **others: Any):
        self._layers = _Layers(model, costs.all)
        super().__init__(model, config, buckets, costs=costs, **others)
        self.depth = 0
        self.prefetcher, self.experts = self._layers.prefetcher, self._layers.experts

    def _specs(self, layout: DeviceLayout) -> list[ProgramSpec[Any, Buckets]]:
        return chain_programs(layout, self._layers.ranges)

    def _give_up(self) -> None:
        self._layers.restart()

    def interrupt(self) -> None:
        """End a step that waits for a layer."""
        self._layers.close()

    def _run(self, batch: Batch) -> tuple[Program, list[PrefillOutput | DecodeOutput]]:
        slices = [self._enter(part) for part in self._slices(batch)]
        caches = self._state.caches
        for layers, leaves in self._layers:
            at, adapters = layers.layers, None if self._adapters is None else self._adapters[layers.layers]
            if runs_experts(self._layout.config, layers):
                done = [self._mix(part, layers, leaves) for part in slices]
                self.prefetcher.computing(done)
                continue
            for part in slices:
                program = self.programs.get(Layer.of_kind(part.sizes, layers.kind, layers.count))
                part.x, caches[at] = self._in_turn(program(leaves, adapters, caches[at], part.x, part.groups))
            self.prefetcher.computing(
                caches[layers.first].k, layers.count
            )  # waits for the cache: x is donated to the next layer
        outputs = [self._leave(part) for part in slices]
        return self.programs.get(Leave.for_pass(slices[0].sizes)), outputs

    def _mix(self, part: "_Slice", layers: LayerRange, leaves: list[jax.Array]) -> jax.Array:
        """Run a layer with experts; returns what is there when its weights are no longer used."""
        experts, caches, at = self.experts, self._state.caches, layers.layers
        assert experts is not None
        kind = mlp_kind(self._layout.config, layers.kind)
        route = self.programs.get(Route.of_kind(part.sizes, layers.kind))
        run, join = (self.programs.get(program.of_kind(part.sizes, kind)) for program in (RunExperts, Join))
        adapters = None if self._adapters is None else self._adapters[at]
        results = self._in_turn(route(leaves, adapters, caches[at], part.x, part.groups))
        part.x, caches[at], h, routing, y = results
        first, size = jax.device_get((routing.offsets, routing.sizes))
        for group in experts.groups(layers.first, np.flatnonzero(size).tolist()):
            rows = size[[expert for expert, _ in group]]
            group += [group[0]] * (GROUP - len(group))  # these have no rows
            rows, numbers = np.pad(rows, (0, GROUP - len(rows))), [expert for expert, _ in group]
            y = self._in_turn(run([x for _, x in group], h, routing.tokens, y, first[numbers], rows))
            experts.computing(y)
        part.x, done = self._in_turn(join(leaves, part.x, h, routing, y))
        experts.computing(done)
        return done

    def _sizes(self, batch: Batch) -> Pass:
        """Return the sizes of the programs of a plain pass over a batch."""
        buckets = self._packer.buckets
        count = round_up(len(batch.chunks), buckets.chunks) if batch.chunks else 0
        size = round_up(len(batch.rows), buckets.prefill_rows if count else buckets.decode_rows)
        return Pass(chunks=count, batch=size, speculative=0, pages=self._packer.page_table_width(batch))

    def _slices(self, batch: Batch) -> list[Batch]:
        """Split a batch into parts whose activations fit, which each layer runs in turn; the first has the rows."""
        most = self._packer.buckets.chunks[-1]
        rest = [
            dataclasses.replace(batch, chunks=batch.chunks[start : start + most], rows=())
            for start in range(most, len(batch.chunks), most)
        ]
        return [dataclasses.replace(batch, chunks=batch.chunks[:most]), *rest]

    def _enter(self, batch: Batch) -> "_Slice":
        """Embed a batch's tokens."""
        sizes = self._sizes(batch)
        chunks, rows, bitmask = self._inputs(batch, sizes.chunks, sizes.batch, sizes.pages)
        guess = self._propose(batch, rows) if batch.num_speculative_tokens else None
        if guess is not None:
            sizes = dataclasses.replace(sizes, speculative=batch.num_speculative_tokens)
        program = self.programs.get(Enter.for_pass(sizes))
        x, groups = self._in_turn(program(self._layout.leaves, self._state.slots, chunks, rows, guess))
        return _Slice(batch, sizes, (chunks, rows, bitmask, guess), groups, x)

    def _propose(self, batch: Batch, rows: Rows) -> Speculation | None:
        """Propose speculative tokens for the rows; None if there are none, since a plain pass computes less."""
        size = len(rows.slot)
        program = self.programs.get(Propose(batch=size, speculative=batch.num_speculative_tokens))
        limits = self._packer.speculation_limits(batch.rows, size)
        guess: Speculation = program(self._state.slots, rows.slot, limits)
        return guess if np.any(np.asarray(guess.num_tokens)) else None

    def _leave(self, part: "_Slice") -> PrefillOutput | DecodeOutput:
        """Choose the next tokens, and put them into their slots."""
        program = self.programs.get(Leave.for_pass(part.sizes))
        results = program(self._layout.leaves, self._state.slots, part.x, part.groups, *part.inputs)
        slots, output = self._in_turn(results)
        self._state = self._state._replace(slots=slots)
        return only_asked(part.batch, output)

    def collect(self, step: InFlightStep) -> StepOutput:
        """Wait for a step; returns its results."""
        self.prefetcher.finish()
        outputs, bucket = jax.device_get(step.output), step.program.bucket
        seconds = self._seconds(step)
        if isinstance(outputs[0], DecodeOutput):
            plain, speculative = map(int, outputs[0].passes)
            self._pass_costs.record(bucket, seconds, plain=plain, speculative=speculative)
            return StepOutput(outputs=read_decode(step.batch, outputs[0]))
        self.costs.record("pass", bucket, seconds)
        chunks: list[SequenceOutput] = []
        rows: list[SequenceOutput] = []
        for part, output in zip(self._slices(step.batch), outputs, strict=True):
            results = read_prefill(part, output, padded_chunks=self._sizes(part).chunks)
            chunks += results[: len(part.chunks)]
            rows += results[len(part.chunks) :]
        return StepOutput(outputs=chunks + rows)


class EncoderChainExecutor(EncoderExecutor):
    """The device side of an engine on an encoder whose layers are streamed; arguments as in `DecoderExecutor`.

    Attributes:
      prefetcher: brings the layers.
    """

    _recorded_as = "pass"

    def __init__(
        self, model: LoadedModel, config: EncoderEngineConfig, buckets: EncoderBuckets, *, clock: Clock, costs: Costs
    ):
        self._layers = _Layers(model, costs)
        super().__init__(model, config, buckets, clock=clock, costs=costs)
        self.depth = 0
        self.prefetcher = self._layers.prefetcher

    def _specs(
        self, model: LoadedModel, config: EncoderEngineConfig
    ) -> list[ProgramSpec[Any, Iterable[tuple[int, int]]]]:
        assert isinstance(model, StreamedModel)
        return chain.encoder_specs(model)

    def restart(self) -> None:
        """Begin with the first layer."""
        self._layers.restart()
        super().restart()

    def interrupt(self) -> None:
        """End a step that waits for a layer."""
        self._layers.close()

    def _run(self, tokens: np.ndarray, positions: np.ndarray) -> tuple[Program, jax.Array]:
        rows, length = tokens.shape
        enter = self.programs.get(EncoderEnter(batch=rows, tokens=length))
        x: Any = self._in_turn(enter(self._leaves, tokens, positions))
        groups = (TokenRows(tokens, positions),)  # type: ignore[arg-type]  # numpy until sent
        for layers, leaves in self._layers:
            sizes = EncoderLayer(batch=rows, tokens=length, kind=layers.kind, layers=layers.count)
            program = self.programs.get(sizes)
            x = self._in_turn(program(leaves, x, groups))
            self.prefetcher.computing(x, layers.count)
        program = self.programs.get(EncoderLeave(batch=rows, tokens=length))
        return program, program(self._leaves, x, positions)

    def collect(self, step: InFlightStep) -> StepOutput:
        """Wait for a batch; returns its results."""
        self.prefetcher.finish()
        return super().collect(step)

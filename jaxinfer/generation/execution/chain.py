"""Passes layer by layer, with weights that are not on the devices all the time (DeepSpeed Inference, VI).

One fetch of a layer serves all sequences of a step. The host drives the pass, so it is busy until the last layer is
sent: no step is in flight while the next one is scheduled.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from jaxinfer.compiled import Costs
from jaxinfer.generation.engine.batch import Batch
from jaxinfer.generation.engine.buckets import Buckets
from jaxinfer.generation.engine.stats import ExecutorReport
from jaxinfer.generation.execution.base import DevicePrograms
from jaxinfer.generation.execution.commands import Command
from jaxinfer.generation.execution.decoder import PassResult
from jaxinfer.generation.execution.decoder_state import DecoderState
from jaxinfer.generation.execution.encoder import ShapeBuckets, Vectors
from jaxinfer.generation.execution.layer_caches import LayerCaches, ResidentCaches
from jaxinfer.generation.execution.layout import DeviceLayout
from jaxinfer.generation.execution.packing import PassInputs
from jaxinfer.generation.execution.plan import Way
from jaxinfer.generation.execution.programs.chain import (
    EncoderEnter,
    EncoderLayer,
    EncoderLeave,
    Enter,
    Layer,
    Leave,
    Propose,
    runs_experts,
)
from jaxinfer.generation.execution.programs.experts import Join, Route, RunExperts, mlp_kind
from jaxinfer.generation.execution.programs.passes import Pass
from jaxinfer.generation.execution.programs.prefill import Chunks
from jaxinfer.generation.execution.programs.verification import Speculation
from jaxinfer.generation.execution.slices import SlicePages, split, split_by_pages
from jaxinfer.generation.execution.state import Rows
from jaxinfer.models import TokenRows
from jaxinfer.streaming.config import LayerRange, Placement
from jaxinfer.streaming.experts import GROUP, ExpertCache
from jaxinfer.streaming.layer_folders import experts_of
from jaxinfer.streaming.model import StreamedModel, layer_ranges
from jaxinfer.streaming.prefetch import Prefetcher


@dataclasses.dataclass
class _Slice:
    """A part of a batch on its way through the layers.

    Attributes:
      sizes: the sizes of its programs.
      inputs: its chunks, rows, bitmask and speculative tokens.
      groups: its tokens.
      pages: its pages of the cache; None: all pages are on the devices.
      x: [N, D], the output of the last layer that ran.
    """

    sizes: Pass
    inputs: tuple[Chunks | None, Rows, Any, Speculation | None]
    groups: tuple[TokenRows, ...]
    pages: SlicePages | None
    x: jax.Array


class LayerStream:
    """The layers in the order of a pass, with their weights; streamed ones as they arrive.

    Args:
      model: the weights.
      placement: where they are, and how far ahead they are fetched.
      costs: the record of fetch times.

    Attributes:
      ranges: the layers that one program runs at a time.
      prefetcher: brings the streamed layers.
      experts: brings the experts; None: the model has none.
    """

    def __init__(self, model: StreamedModel, placement: Placement, costs: Costs):
        self.ranges = layer_ranges(model, placement)
        self.prefetcher = Prefetcher(model.store, placement.streamed, placement.depth, costs)
        self.experts = None
        if model.experts is not None:
            assert placement.experts is not None
            keys = experts_of(model.config)
            places = {key: model.transformer.layers + place for place, key in enumerate(keys)}
            slots, statistics = placement.experts.slots or len(keys), self.prefetcher.statistics
            self.experts = ExpertCache(model.experts, places, slots, statistics=statistics, costs=costs)
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


class ChainPasses:
    """The base of passes layer by layer.

    Args:
      layers: the layers.

    Attributes:
      layers: the layers.
    """

    overlap = False

    def __init__(self, layers: LayerStream):
        self.layers = layers

    def report(self) -> ExecutorReport:
        """Return the measurements of bringing layers to the devices."""
        return ExecutorReport(streaming=self.layers.prefetcher.statistics)

    def finish(self) -> None:
        """Wait for the layers that were sent."""
        self.layers.prefetcher.finish()

    def restart(self) -> None:
        """Begin with the first layer."""
        self.layers.restart()

    def interrupt(self) -> None:
        """End a pass that waits for a layer."""
        self.layers.close()


class ChainDecoderPasses(ChainPasses):
    """Sends a decoder's passes to its devices.

    Args:
      layers: the layers.
      programs: those of `chain_programs`.
      buckets: the sizes that programs are compiled for.
      layout: the shapes on the devices.
    """

    def __init__(self, layers: LayerStream, programs: DevicePrograms[Buckets], buckets: Buckets, layout: DeviceLayout):
        super().__init__(layers)
        self._programs, self._buckets = programs, buckets
        self._slice_pages, self._page_size = layout.slice_pages, layout.engine.page_size

    def split(self, batch: Batch) -> list[Batch]:
        """Divide a batch into slices whose activations and pages fit, which each layer runs in turn."""
        most, pages = self._buckets.chunks[-1], self._slice_pages
        if not pages:
            return split(batch, chunks=most)
        return split_by_pages(batch, chunks=most, pages=pages, page_size=self._page_size)

    def run(self, commands: list[Command], state: DecoderState) -> list[PassResult]:
        """Send the slices of a pass."""
        slices = [self._enter(command, state) for command in commands]
        caches: LayerCaches = state.offloaded or ResidentCaches(state.arrays.caches, state.layout.cache_places)
        for layers, leaves in self.layers:
            if runs_experts(state.layout.config, layers):
                done = [self._run_experts(part, layers, leaves, state, caches) for part in slices]
            else:
                done = [self._run_layers(part, layers, leaves, state, caches) for part in slices][-1]
            self.layers.prefetcher.computing(done, layers.count)
        results = [self._leave(part, state) for part in slices]
        self.layers.prefetcher.statistics.kv_bytes += caches.finish()
        return results

    def _run_layers(
        self, part: _Slice, layers: LayerRange, leaves: list[jax.Array], state: DecoderState, caches: LayerCaches
    ) -> Any:
        """Run layers; returns what is there when they have run, with the slices before this one."""
        adapters = None if state.adapters is None else state.adapters[layers.layers]
        sizes, given = Layer.of_kind(part.sizes, layers.kind, layers.count), caches.take(layers, part.pages)
        number = np.int32(layers.first) if state.layout.config.layer_inputs else None
        part.x, written = self._programs.run(sizes, leaves, adapters, given, part.x, part.groups, number)
        return caches.give(layers, part.pages, written)  # not x, which is donated to the next layer

    def _run_experts(
        self, part: _Slice, layers: LayerRange, leaves: list[jax.Array], state: DecoderState, caches: LayerCaches
    ) -> Any:
        """Run a layer with experts; returns what is there when its weights are no longer used."""
        experts = self.layers.experts
        assert experts is not None
        kind, run = mlp_kind(state.layout.config, layers.kind), self._programs.run
        adapters = None if state.adapters is None else state.adapters[layers.layers]
        sizes, given = Route.of_kind(part.sizes, layers.kind), caches.take(layers, part.pages)
        part.x, written, h, routing, y = run(sizes, leaves, adapters, given, part.x, part.groups)
        caches.give(layers, part.pages, written)
        first, size = jax.device_get((routing.offsets, routing.sizes))
        for group in experts.groups(layers.first, np.flatnonzero(size).tolist()):
            rows = size[[expert for expert, _ in group]]
            group += [group[0]] * (GROUP - len(group))  # these have no rows
            rows, numbers = np.pad(rows, (0, GROUP - len(rows))), [expert for expert, _ in group]
            sizes = RunExperts.of_kind(part.sizes, kind)
            y = run(sizes, [x for _, x in group], h, routing.tokens, y, first[numbers], rows)
            experts.computing(y)
        part.x, done = run(Join.of_kind(part.sizes, kind), leaves, part.x, routing, y)
        experts.computing(done)
        return done

    def _enter(self, command: Command, state: DecoderState) -> _Slice:
        """Embed a slice's tokens."""
        sizes, inputs = command.sizes, command.inputs
        assert isinstance(sizes, Pass)
        assert isinstance(inputs, PassInputs)
        guess = self._propose(sizes, inputs, state) if sizes.speculative else None
        if guess is None:
            sizes = dataclasses.replace(sizes, speculative=0)
        chunks, rows, bitmask = inputs.chunks, inputs.rows, state.bitmask(inputs.bitmask, sizes.chunks + sizes.batch)
        leaves, slots = state.layout.leaves, state.arrays.slots
        x, groups = self._programs.run(Enter.for_pass(sizes), leaves, slots, chunks, rows, guess)
        return _Slice(sizes, (chunks, rows, bitmask, guess), groups, inputs.pages, x)

    def _propose(self, sizes: Pass, inputs: PassInputs, state: DecoderState) -> Speculation | None:
        """Propose speculative tokens for the rows; None if there are none, since a plain pass computes less."""
        program = self._programs.cache.get(Propose(batch=sizes.batch, speculative=sizes.speculative))
        guess: Speculation = program(state.arrays.slots, inputs.rows.slot, inputs.speculation_limits)
        return guess if np.any(np.asarray(guess.num_tokens)) else None

    def _leave(self, part: _Slice, state: DecoderState) -> PassResult:
        """Choose the next tokens, and put them into their slots."""
        leaves, slots = state.layout.leaves, state.arrays.slots
        sizes = Leave.for_pass(part.sizes)
        slots, output = self._programs.run(sizes, leaves, slots, part.x, part.groups, *part.inputs)
        state.arrays = state.arrays._replace(slots=slots)
        return PassResult(Way.CHAIN.value, sizes.bucket, sizes, output)


class ChainEncoderPasses(ChainPasses):
    """Sends an encoder's batches to its devices.

    Args:
      model: the weights outside layers.
      layers: the layers.
      programs: those of `chain.encoder_specs`.
    """

    def __init__(self, model: StreamedModel, layers: LayerStream, programs: DevicePrograms[ShapeBuckets]):
        super().__init__(layers)
        self.leaves, self._programs = list(model.leaves.values()), programs

    def run(self, command: Command) -> Vectors:
        """Send a batch."""
        (tokens, positions), sizes = command.inputs, dict(command.sizes.bucket)
        x: Any = self._programs.run(EncoderEnter(**sizes), self.leaves, tokens, positions)
        groups = (TokenRows(tokens, positions),)
        for layers, leaves in self.layers:
            layer = EncoderLayer(**sizes, kind=layers.kind, layers=layers.count)
            x = self._programs.run(layer, leaves, x, groups)
            self.layers.prefetcher.computing(x, layers.count)
        program = self._programs.cache.get(EncoderLeave(**sizes))
        return Vectors(Way.CHAIN.value, program.bucket, program(self.leaves, x, positions))

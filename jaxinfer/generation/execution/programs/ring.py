"""`ring`: passes of several micro-batches through the stages of a pipeline (DeepSpeed Inference, section IV-C1).

All devices run this one program, a loop over ticks. The last stage hands the tokens that it chose to the first, where
they wait until their micro-batch enters again. `sharding.schedules.ring_job` says what a stage works on, so that a
schedule is a number: the stride. `pipeline.py` has what a decode step and a prefill step share.

The history of tokens is changed by the last stage alone while the program runs, and equal on all stages when it ends.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.compiled import ProgramSpec
from jaxinfer.generation.engine.buckets import Buckets, chunks_per_micro_batch
from jaxinfer.generation.execution.layout import DecoderStatic, DeviceLayout, integers
from jaxinfer.generation.execution.programs.decode import MIN_ACCEPTED
from jaxinfer.generation.execution.programs.passes import Pass
from jaxinfer.generation.execution.programs.pipeline import (
    AXIS,
    Pipeline,
    PipelineStage,
    RingSchedule,
    Tick,
    joined,
    share_last,
)
from jaxinfer.generation.execution.programs.prefill import (
    Chunks,
    PrefillOutput,
    append_next,
    groups_of,
    next_tokens,
    parts,
)
from jaxinfer.generation.execution.programs.verification import (
    DecodeOutput,
    DecodeRows,
    PassState,
    Speculation,
    accept,
    choose_tokens,
    finish_step,
    speculate,
    tokens_of,
)
from jaxinfer.generation.execution.state import DeviceState, Progress, Rows, Slots, progress_of
from jaxinfer.generation.sampling.logprobs import Logprobs, no_logprobs
from jaxinfer.generation.sampling.sampler import LogitsProcessors
from jaxinfer.models import Cache, LayerAdapters, TokenRows
from jaxinfer.models.layers.forward_context import ForwardContext
from jaxinfer.sharding.collectives import axis_index, to_next

if TYPE_CHECKING:
    from jaxinfer.models import Decoder


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ring(Pass):
    """The sizes of a pass, in all of its micro-batches, and their number."""

    program = "ring"
    micro_batches: int

    def places(self, rows: int, micro_batches: int = 1) -> list[int]:
        """Return where rows are that are shared out evenly among the micro-batches that are not empty."""
        size = self.batch // self.micro_batches
        return [row % micro_batches * size + row // micro_batches for row in range(rows)]


class DecodeInputs(NamedTuple):
    """The inputs of a decode step.

    Attributes:
      rows: those of all micro-batches, one after the other.
      bitmask: uint32 [B, V / 32], the tokens that may be chosen.
      schedule: of the step.
      speculation_limits: int32 [B], the most speculative tokens of each row in a pass.
    """

    rows: Rows
    bitmask: jax.Array
    schedule: RingSchedule
    speculation_limits: jax.Array


class _DecodePart(NamedTuple):
    """The rows of a micro-batch; or of all, with one more dimension in front.

    Attributes:
      rows: their inputs.
      limit: int32 [B / M], as in `DecodeInputs`.
    """

    rows: DecodeRows
    limit: jax.Array


class _Results(NamedTuple):
    """The results of a decode step so far, which the last stage has.

    Attributes:
      position, proposed, accepted: int32 [M, B / M], progress and speculative tokens of the rows.
      logprobs: [M, B / M, K].
    """

    position: jax.Array
    proposed: jax.Array
    accepted: jax.Array
    logprobs: Logprobs


class _Decoding(NamedTuple):
    """The state that a tick of decoding changes.

    Attributes:
      x: [N, D], activations from the stage before.
      tokens: int32 [2, B / M, 1 + W], ids and positions of the micro-batch that they are of, from the same.
      waiting: int32 [M, 2, B / M, 1 + W], those of each micro-batch that is to enter the first stage.
      caches: of the stage's layers.
      slots: those of the last stage are ahead of the others'.
      results: of the last stage.
    """

    x: jax.Array
    tokens: jax.Array
    waiting: jax.Array
    caches: list[Cache]
    slots: Slots
    results: _Results


@dataclasses.dataclass(frozen=True)
class _DecodeStep:
    """A decode step: what all of its ticks share.

    Attributes:
      ring: its pipeline.
      rows: those of all micro-batches, one after the other.
      parts: the same by micro-batch, [M, B / M].
      speculative: W, the most speculative tokens of any row; with any, all passes have that many.
      max_tokens: K, the most tokens that a row can get.
      processors: the logits processors.
    """

    ring: Pipeline
    rows: DecodeRows
    parts: _DecodePart
    speculative: int
    max_tokens: int
    processors: LogitsProcessors

    def begin(self, state: DeviceState, limit: jax.Array) -> _Decoding:
        """The state before the first tick: all micro-batches wait to enter the first stage.

        limit: int32 [B], as in `DecodeInputs`.
        """
        position = progress_of(state.slots, self.rows.rows.slot).position
        tokens = self._next_tokens(self.rows, state.slots.history, position, limit)
        waiting = jnp.swapaxes(tokens.reshape(2, self.ring.micro_batches, -1, 1 + self.speculative), 0, 1)
        first, position = Tick.of_first().part(self.parts.rows), self.ring.split(position)
        group = TokenRows(waiting[0, 0], waiting[0, 1], first.rows.page_table, first.adapter, first.rows.slot)
        return _Decoding(
            self.ring.stage.embedded((group,)),
            jnp.zeros_like(waiting[0]),
            waiting,
            state.caches,
            state.slots,
            _Results(
                position=position,
                proposed=jnp.zeros_like(position),
                accepted=jnp.zeros_like(position),
                logprobs=no_logprobs((*position.shape, self.max_tokens)),
            ),
        )

    def run_tick(self, tick: Tick, carry: _Decoding) -> _Decoding:
        """Run the stage's layers over a micro-batch and hand it on; the last stage hands its next tokens to the first.

        tick: what the stage works on. Its tokens have come from the stage before; on the first they have waited.
        """
        stage, part = self.ring.stage, tick.part(self.parts)
        waiting = carry.waiting.at[self.ring.returned(tick)].set(carry.tokens, mode="drop")
        tokens = jnp.where(stage.is_first, tick.part(waiting), carry.tokens)
        ids, positions = tokens[0], jnp.where(tick.active, tokens[1], -1)
        group = TokenRows(ids, positions, part.rows.rows.page_table, part.rows.adapter, part.rows.rows.slot)
        x = stage.enter(carry.x, (group,))
        x, caches = stage.run(x, (group,), carry.caches, speculates=self.speculative > 0)
        position = jnp.where(tick.is_end, tokens[1, :, 0], -1)
        history, results, new = self._end_pass(tick, part, carry, position, group, x)
        return _Decoding(
            to_next(x, AXIS),
            to_next(jnp.where(tick.is_end, new, tokens), AXIS),
            waiting,
            caches,
            carry.slots._replace(history=history),
            results,
        )

    def _end_pass(
        self, tick: Tick, part: _DecodePart, carry: _Decoding, position: jax.Array, group: TokenRows, x: jax.Array
    ) -> tuple[jax.Array, _Results, jax.Array]:
        """Choose the next tokens of a micro-batch on the last stage.

        Args:
          tick: of the micro-batch.
          part: its rows.
          carry: the state before the tick.
          position: int32 [B / M], as in `Progress`; elsewhere than on the last stage all have ended.
          group: the tokens of its pass.
          x: [N, D], the output of the stage's layers.

        Returns the history, the results, and the tokens of the next pass: int32 [2, B / M, 1 + W].
        """
        model, rows = self.ring.stage.model, part.rows
        before = PassState(carry.slots.history, Progress(position), tick.part(carry.results.logprobs))
        guess = Speculation(group.ids[:, 1:], jnp.sum(group.positions[:, 1:] >= 0, axis=1))

        def choose() -> tuple[jax.Array, Logprobs]:
            hidden = model.leave(x, ForwardContext((group,), {}))[0]
            return choose_tokens(model, rows, before, hidden, guess.tokens, self.processors)

        chosen, logprobs = tick.at_end(choose, lambda: (jnp.zeros_like(group.ids), before.logprobs))
        after, accepted = accept(rows, before, guess, chosen, logprobs)
        proposed = tick.part(carry.results.proposed) + guess.num_tokens
        accepted += tick.part(carry.results.accepted)
        limit = jnp.where(accepted * MIN_ACCEPTED >= proposed, part.limit, 0)
        new = self._next_tokens(rows, after.history, after.progress.position, limit)
        results = tick.put(carry.results, _Results(after.progress.position, proposed, accepted, logprobs))
        return after.history, results, new

    def _next_tokens(self, rows: DecodeRows, history: jax.Array, position: jax.Array, limit: jax.Array) -> jax.Array:
        """Compute the tokens of the next pass of some rows, ids and positions: int32 [2, B, 1 + W].

        Args:
          position: int32 [B], as in `Progress`.
          limit: int32 [B], the most speculative tokens of each row.
        """
        guess = Speculation.none(len(position))
        if self.speculative:
            guess = speculate(history, rows.rows.slot, Progress(position), rows.options, limit, self.speculative)
        group = tokens_of(history, rows.rows, position, rows.adapter, guess)
        positions = group.positions.at[:, 0].set(position)  # of rows that have ended it says their length
        return jnp.stack([group.ids, positions])

    def finish(self, carry: _Decoding) -> tuple[DeviceState, DecodeOutput]:
        """The device's state and the results after the last tick."""
        results, passes, width = carry.results, self.ring.schedule.passes, self.max_tokens
        passed = PassState(carry.slots.history, Progress(joined(results.position)), joined(results.logprobs))
        plain = passes * int(not self.speculative)
        counts = jnp.stack([plain, passes - plain])
        proposed, accepted = joined(results.proposed), joined(results.accepted)
        slots, output = finish_step(carry.slots, self.rows, passed, proposed, accepted, counts, width=width)
        return DeviceState(carry.caches, share_last(slots, self.rows.rows.slot, self.rows.start, width)), output


def decode_ring(
    model: "Decoder",
    adapters: list[LayerAdapters] | None,
    state: DeviceState,
    inputs: DecodeInputs,
    *,
    static: DecoderStatic,
    sizes: Ring,
) -> tuple[DeviceState, DecodeOutput, jax.Array]:
    """Run passes over a token of every row, and speculative ones.

    Returns the state, the results (of the last stage), and what each stage has worked on, as `Pipeline.run` does.
    """
    max_passes, ring = static.engine.max_decode_passes, _pipeline(model, adapters, static, sizes, inputs.schedule)
    rows = DecodeRows.from_slots(state.slots, inputs.rows, inputs.bitmask)
    step = _DecodeStep(
        ring=ring,
        rows=rows,
        parts=ring.split(_DecodePart(rows, inputs.speculation_limits)),
        speculative=sizes.speculative,
        max_tokens=max_passes * (1 + sizes.speculative),
        processors=static.processors,
    )
    carry = step.begin(state, inputs.speculation_limits)
    carry, jobs = ring.run(step.run_tick, carry, passes=inputs.schedule.passes, max_passes=max_passes)
    return *step.finish(carry), jobs


class PrefillInputs(NamedTuple):
    """The inputs of a prefill step, as of `prefill`, for all micro-batches; each has as many chunks and rows."""

    chunks: Chunks
    rows: Rows
    bitmask: jax.Array
    schedule: RingSchedule


class _Prefilling(NamedTuple):
    """The state that a tick of a prefill step changes.

    Attributes:
      x, caches, slots: as in `_Decoding`.
      output: of the last stage, by micro-batch.
    """

    x: jax.Array
    caches: list[Cache]
    slots: Slots
    output: PrefillOutput


@dataclasses.dataclass(frozen=True)
class _PrefillStep:
    """A prefill step: what all of its ticks share.

    Attributes:
      ring: its pipeline.
      parts: chunks and rows by micro-batch.
      bitmask: uint32 [M, N, V / 32], the tokens that these N of each micro-batch may choose.
      nowhere: the slot of padding.
      chunk_size: tokens of a chunk.
      processors: the logits processors.
    """

    ring: Pipeline
    parts: tuple[Chunks, Rows]
    bitmask: jax.Array
    nowhere: int
    chunk_size: int
    processors: LogitsProcessors

    def begin(self, state: DeviceState) -> _Prefilling:
        """The state before the first tick."""
        first = Tick.of_first()
        groups = groups_of(state.slots, *self._part(first), chunk_size=self.chunk_size)
        x = self.ring.stage.embedded(groups)
        shapes = jax.eval_shape(lambda: self._choose(first, state.slots, groups, x))
        output = jax.tree.map(lambda x: jnp.zeros((self.ring.micro_batches, *x.shape), x.dtype), shapes)
        return _Prefilling(x, state.caches, state.slots, output)

    def run_tick(self, tick: Tick, carry: _Prefilling) -> _Prefilling:
        """Run the stage's layers over a micro-batch; the last stage chooses the tokens that come next."""
        stage, part = self.ring.stage, self._part(tick)
        groups = groups_of(carry.slots, *part, chunk_size=self.chunk_size)
        x, caches = stage.run(stage.enter(carry.x, groups), groups, carry.caches)
        new = tick.at_end(
            lambda: self._choose(tick, carry.slots, groups, x),
            lambda: tick.part(carry.output),
        )
        new = new._replace(produced=new.produced & tick.is_end)
        slots = append_next(carry.slots, *part, new)
        return _Prefilling(to_next(x, AXIS), caches, slots, tick.put(carry.output, new))

    def _part(self, tick: Tick) -> tuple[Chunks, Rows]:
        """The chunks and rows of a micro-batch; without one they are padding."""
        chunks, rows = tick.part(self.parts)
        num_tokens = jnp.where(tick.active, chunks.num_tokens, 0)
        chunks = chunks._replace(num_tokens=num_tokens, chooses=chunks.chooses & tick.is_end)
        return chunks, rows._replace(slot=jnp.where(tick.active, rows.slot, self.nowhere))

    def _choose(self, tick: Tick, slots: Slots, groups: tuple[TokenRows, ...], x: jax.Array) -> PrefillOutput:
        """Choose a micro-batch's next tokens from the output of the last stage, x [N, D]."""
        model, (chunks, rows) = self.ring.stage.model, self._part(tick)
        hidden, bitmask = model.leave(x, ForwardContext(groups, {})), tick.part(self.bitmask)
        return next_tokens(model, slots, hidden, chunks, rows, bitmask, processors=self.processors)

    def finish(self, carry: _Prefilling) -> PrefillOutput:
        """The results after the last tick: of the chunks of all micro-batches, then of their rows."""
        each, output = self.parts[0].slot.shape[1], carry.output

        def chunks_first(x: jax.Array) -> jax.Array:
            return jnp.concatenate([joined(x[:, :each]), joined(x[:, each:])])

        return PrefillOutput(
            *(jax.tree.map(chunks_first, x) for x in output[:3]),
            prompt_logprobs=joined(output.prompt_logprobs),
            pooled=joined(output.pooled),
        )


def prefill_ring(
    model: "Decoder",
    adapters: list[LayerAdapters] | None,
    state: DeviceState,
    inputs: PrefillInputs,
    *,
    static: DecoderStatic,
    sizes: Ring,
) -> tuple[DeviceState, PrefillOutput, jax.Array]:
    """Run one pass over chunks of prompts and a token of each decoding row; returns what `decode_ring` does."""
    ring, chunks, rows = _pipeline(model, adapters, static, sizes, inputs.schedule), inputs.chunks, inputs.rows
    count = chunks.slot.size
    step = _PrefillStep(
        ring=ring,
        parts=ring.split((chunks, rows)),
        bitmask=jnp.concatenate([ring.split(inputs.bitmask[:count]), ring.split(inputs.bitmask[count:])], axis=1),
        nowhere=len(state.slots.length) - 1,
        chunk_size=static.engine.chunk_size,
        processors=static.processors,
    )
    carry, jobs = ring.run(step.run_tick, step.begin(state), passes=1, max_passes=1)
    slot = jnp.concatenate([chunks.slot, rows.slot])
    lengths = progress_of(state.slots, rows.slot).length
    slots = share_last(carry.slots, slot, jnp.concatenate([chunks.start + chunks.num_tokens, lengths]), 1)
    return DeviceState(carry.caches, slots), step.finish(carry), jobs


def _pipeline(
    model: "Decoder",
    adapters: list[LayerAdapters] | None,
    static: DecoderStatic,
    sizes: Ring,
    schedule: RingSchedule,
) -> Pipeline:
    """Make the pipeline of a step."""
    assert static.stages is not None
    return Pipeline(PipelineStage(model, adapters, axis_index(AXIS), static.stages), schedule, sizes.micro_batches)


def build(static: DecoderStatic, sizes: Ring) -> Callable[..., Any]:
    """Build the function of these sizes."""
    step = prefill_ring if sizes.chunks else decode_ring
    return static.with_model(functools.partial(step, static=static, sizes=sizes))


def reachable(layout: DeviceLayout, buckets: Buckets) -> Iterable[Ring]:
    """Yield the sizes of all steps."""
    stages, most = layout.num_stages, layout.engine.num_speculative_tokens
    for pages in buckets.page_tables:
        for chunks in buckets.chunks:
            for rows in buckets.prefill_rows:
                yield prefill_sizes(stages, chunks=chunks, rows_of_each=rows, pages=pages)
        for rows in buckets.decode_rows:
            for micro_batches in (1, stages) if rows > 1 else (1,):
                for speculative in sorted({0, most}):
                    yield decode_sizes(micro_batches, rows, speculative, pages)


def prefill_sizes(stages: int, *, chunks: int, rows_of_each: int, pages: int) -> Ring:
    """The sizes of a prefill step of so many chunks, whose micro-batches have so many decoding rows each."""
    each = chunks_per_micro_batch(chunks, stages)
    micro_batches = -(-chunks // each)
    batch = micro_batches * rows_of_each
    return Ring(chunks=micro_batches * each, batch=batch, speculative=0, pages=pages, micro_batches=micro_batches)


def decode_sizes(micro_batches: int, rows: int, speculative: int, pages: int) -> Ring:
    """Return the sizes of a decode step of so many rows, shared out among micro-batches."""
    batch = micro_batches * -(-rows // micro_batches)
    return Ring(chunks=0, batch=batch, speculative=speculative, pages=pages, micro_batches=micro_batches)


def spec(layout: DeviceLayout) -> ProgramSpec[Ring, Buckets]:
    """The spec for an engine."""

    def arguments(sizes: Ring) -> tuple[Any, ...]:
        chunks, rows = parts(layout, chunks=sizes.chunks, batch=sizes.batch, pages=sizes.pages)
        bitmask: Any = layout.bitmask(sizes.chunks + sizes.batch)
        schedule = RingSchedule(integers(), integers(), integers())
        if sizes.chunks:
            inputs = PrefillInputs(chunks, rows, bitmask, schedule)
        else:
            inputs = DecodeInputs(rows, bitmask, schedule, integers(sizes.batch))
        return (layout.leaves, layout.adapters, layout.state, *layout.inputs(inputs))

    return ProgramSpec(
        sizes=Ring,
        build=build,
        static=layout.static,
        arguments=arguments,
        reachable=functools.partial(reachable, layout),
        donate=(2,),
        out_shardings=lambda sizes: (layout.state_shardings, layout.output_sharding, layout.output_sharding),
        compiler_options=lambda sizes: layout.compiler_options(
            tokens=sizes.tokens(layout.engine.chunk_size) // sizes.micro_batches
        ),
    )

"""`ring`: passes of several micro-batches through the stages of a pipeline (DeepSpeed Inference, section IV-C1).

All devices run this one program. At each tick a stage runs its layers over one micro-batch and hands the activations to
the next stage; the last one hands the tokens that it chose to the first, where they wait until their micro-batch enters
again. `sharding.schedules.ring_job` says what a stage works on, so that a schedule is a number: the stride.

The history of tokens is changed by the last stage alone while the program runs, and equal on all stages when it ends.

Dimensions beside those of `programs`: M micro-batches, of which each has B / M rows.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.compiled import ProgramSpec
from jaxinfer.generation.engine.buckets import Buckets, chunks_per_micro_batch
from jaxinfer.generation.execution.layout import DecoderStatic, DeviceLayout, integers
from jaxinfer.generation.execution.programs.chain import run_layers
from jaxinfer.generation.execution.programs.decode import MIN_ACCEPTED
from jaxinfer.generation.execution.programs.passes import Pass
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
from jaxinfer.models import KVPages, LayerAdapters, TokenRows
from jaxinfer.models.layers.forward_context import ForwardContext
from jaxinfer.models.stages import Stages
from jaxinfer.sharding.collectives import axis_index, from_last, to_next
from jaxinfer.sharding.schedules import drained_stride, ring_job, ring_ticks

if TYPE_CHECKING:
    from jaxinfer.models import Decoder

AXIS = "stages"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ring(Pass):
    """The sizes of a pass, in all of its micro-batches, and their number."""

    program = "ring"
    micro_batches: int

    def places(self, rows: int, micro_batches: int = 1) -> list[int]:
        """Return where rows are that are shared out evenly among the micro-batches that are not empty."""
        size = self.batch // self.micro_batches
        return [row % micro_batches * size + row // micro_batches for row in range(rows)]


class RingSchedule(NamedTuple):
    """The schedule of a step.

    Attributes:
      micro_batches: int32 [], those that are not empty, the first ones.
      passes: int32 [], of each of them.
      stride: int32 [], the ticks between two passes of a micro-batch.
    """

    micro_batches: jax.Array
    passes: jax.Array
    stride: jax.Array


class _Stage(NamedTuple):
    """The stage of this device.

    Attributes:
      model: its layers by position, and all that is there once.
      adapters: of its layers.
      number: int32 [], from 0.
      stages: the layers of all stages.
    """

    model: "Decoder"
    adapters: list[LayerAdapters] | None
    number: jax.Array
    stages: Stages

    @property
    def is_first(self) -> jax.Array:
        return self.number == 0

    @property
    def is_last(self) -> jax.Array:
        return self.number == self.stages.count - 1

    def enter(self, x: jax.Array, groups: tuple[TokenRows, ...]) -> jax.Array:
        """Compute the embeddings of tokens on the first stage, on the others x, which came from the stage before."""
        with jax.named_scope("first_stage"):
            return lax.cond(self.is_first, lambda: self.model.enter(groups)[0], lambda: x)

    def run(
        self, x: jax.Array, groups: tuple[TokenRows, ...], caches: list[KVPages]
    ) -> tuple[jax.Array, list[KVPages]]:
        """Run the layers that this stage has, [N, D] -> [N, D], and return their caches with what they wrote."""
        new_caches: list[KVPages] = []
        for position, cache in enumerate(caches):
            adapters = None if self.adapters is None else self.adapters[position : position + 1]

            def layer(x, cache, position=position, adapters=adapters):
                layers = range(position, position + 1)
                x, caches = run_layers(self.model, adapters, [cache], x, groups, layers=layers)
                assert caches is not None
                return x, caches[0]

            there = self.stages.there(position)
            if all(there):
                x, cache = layer(x, cache)
            else:
                with jax.named_scope("some_stages"):
                    x, cache = lax.cond(jnp.array(there)[self.number], layer, lambda x, cache: (x, cache), x, cache)
            new_caches.append(cache)
        return x, new_caches

    def embedded(self, groups: tuple[TokenRows, ...]) -> jax.Array:
        """Return zeros in the shape of activations."""
        shape = jax.eval_shape(lambda: self.model.enter(groups)[0])
        return jnp.zeros(shape.shape, shape.dtype)


class _Tick(NamedTuple):
    """The work of a stage at a tick.

    Attributes:
      at: int32 [], its micro-batch.
      active: bool [], whether there is any.
      is_end: bool [], whether this is the last stage, and there is.
    """

    at: jax.Array
    active: jax.Array
    is_end: jax.Array


def _work(stage: _Stage, tick: jax.Array, schedule: RingSchedule, most: int) -> tuple[_Tick, jax.Array]:
    """The work of a stage at a tick, and its record: int32 [3], micro-batch, pass, and whether there is any."""
    at, number, active = ring_job(tick, stage.number, **schedule._asdict())
    record = jnp.stack([at, number, active.astype(jnp.int32)])
    return _Tick(jnp.minimum(at, most - 1), active, active & stage.is_last), record


def _at_end[T](tick: _Tick, chosen: Callable[[], T], otherwise: Callable[[], T]) -> T:
    """Return what the last stage makes of its micro-batch, if it has one; elsewhere the other."""
    with jax.named_scope("last_stage"):
        return lax.cond(tick.is_end, chosen, otherwise)


def _split[T](tree: T, micro_batches: int) -> T:
    """Divide the first dimension of arrays by micro-batch: [M * N, ...] -> [M, N, ...]; scalars are for all."""
    return jax.tree.map(lambda x: x.reshape(micro_batches, -1, *x.shape[1:]) if x.ndim else x, tree)


def _at[T](tree: T, index: jax.Array) -> T:
    """Take a micro-batch's part of arrays."""
    return jax.tree.map(lambda x: x[index] if x.ndim else x, tree)


def _put[T](tree: T, tick: _Tick, new: T) -> T:
    """Put what the last stage has of a micro-batch into arrays."""
    return jax.tree.map(lambda x, y: x.at[jnp.where(tick.is_end, tick.at, len(x))].set(y, mode="drop"), tree, new)


def _joined[T](tree: T) -> T:
    """Join the parts of micro-batches again: [M, N, ...] -> [M * N, ...]."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)


def _make_equal(slots: Slots, slot: jax.Array, start: jax.Array, width: int) -> Slots:
    """Have all stages know what the last one knows of some slots: `width` tokens from `start` [R] on, and the length.

    slot: int32 [R].
    """
    index = start[:, None] + jnp.arange(width)
    tokens = slots.history.at[slot[:, None], index].get(mode="fill", fill_value=0)
    known = from_last(jnp.concatenate([tokens, slots.length[slot][:, None]], axis=1), AXIS)
    history = slots.history.at[slot[:, None], index].set(known[:, :-1], mode="drop")
    return slots._replace(history=history, length=slots.length.at[slot].set(known[:, -1]))


class _Decoding(NamedTuple):
    """The state that a tick of decoding changes.

    Attributes:
      x: [N, D], activations from the stage before.
      tokens: int32 [2, B / M, 1 + W], ids and positions of the micro-batch that they are of, from the same.
      waiting: int32 [M, 2, B / M, 1 + W], those of each micro-batch that is to enter the first stage.
      caches: of the stage's layers.
      slots: those of the last stage are ahead of the others'.
      position, proposed, accepted: int32 [M, B / M], of the last stage: progress and speculative tokens of the rows.
      logprobs: [M, B / M, K], of the same.
      jobs: int32 [ticks, 3], what the stage has worked on.
    """

    x: jax.Array
    tokens: jax.Array
    waiting: jax.Array
    caches: list[KVPages]
    slots: Slots
    position: jax.Array
    proposed: jax.Array
    accepted: jax.Array
    logprobs: Logprobs
    jobs: jax.Array


def decode_ring(
    model: "Decoder",
    adapters: list[LayerAdapters] | None,
    state: DeviceState,
    rows: Rows,
    bitmask: jax.Array,
    schedule: RingSchedule,
    speculation_limit: jax.Array,
    *,
    stages: Stages,
    micro_batches: int,
    max_passes: int,
    num_speculative_tokens: int,
    processors: LogitsProcessors,
) -> tuple[DeviceState, DecodeOutput, jax.Array]:
    """Run passes over a token of every row, and speculative ones.

    Args:
      bitmask: uint32 [B, V / 32], the tokens that may be chosen.
      speculation_limit: int32 [B], the most speculative tokens of each row in a pass.
      num_speculative_tokens: W, the most of any row; with any, all passes have that many.

    Returns the state, the results (of the last stage), and what each stage has worked on: int32 [ticks, 3].
    """
    stage = _Stage(model, adapters, axis_index(AXIS), stages)
    count, width = num_speculative_tokens, max_passes * (1 + num_speculative_tokens)
    step = DecodeRows.from_slots(state.slots, rows, bitmask)
    by_micro_batch, limits = _split(step, micro_batches), _split(speculation_limit, micro_batches)

    def tick(number: jax.Array, carry: _Decoding) -> _Decoding:
        tick, job = _work(stage, number, schedule, micro_batches)
        step, limit = _at(by_micro_batch, tick.at), limits[tick.at]
        returned, _, has_returned = ring_job(number - 1, stages.count - 1, **schedule._asdict())
        place = jnp.where(stage.is_first & has_returned, returned, micro_batches)
        waiting = carry.waiting.at[place].set(carry.tokens, mode="drop")
        tokens = jnp.where(stage.is_first, waiting[tick.at], carry.tokens)
        ids, positions = tokens[0], jnp.where(tick.active, tokens[1], -1)
        groups = (TokenRows(ids, positions, step.rows.page_table, step.adapter),)
        x, caches = stage.run(stage.enter(carry.x, groups), groups, carry.caches)
        position = jnp.where(tick.is_end, tokens[1, :, 0], -1)
        before = PassState(carry.slots.history, Progress(position), _at(carry.logprobs, tick.at))
        guess = Speculation(ids[:, 1:], jnp.sum(positions[:, 1:] >= 0, axis=1))
        chosen, logprobs = _at_end(
            tick,
            lambda: choose_tokens(
                model, step, before, model.leave(x, ForwardContext(groups, {}))[0], guess.tokens, processors
            ),
            lambda: (jnp.zeros_like(ids), before.logprobs),
        )
        after, accepted = accept(step, before, guess, chosen, logprobs)
        proposed = carry.proposed[tick.at] + guess.num_tokens
        accepted += carry.accepted[tick.at]
        allowed = jnp.where(accepted * MIN_ACCEPTED >= proposed, limit, 0)
        new = _next_tokens(step, after.history, after.progress.position, allowed, count)
        results = (carry.position, carry.proposed, carry.accepted, carry.logprobs)
        results = _put(results, tick, (after.progress.position, proposed, accepted, logprobs))
        return _Decoding(
            to_next(x, AXIS),
            to_next(jnp.where(tick.is_end, new, tokens), AXIS),
            waiting,
            caches,
            carry.slots._replace(history=after.history),
            *results,
            carry.jobs.at[number].set(job),
        )

    position = progress_of(state.slots, rows.slot).position
    tokens = _next_tokens(step, state.slots.history, position, speculation_limit, count)
    waiting = jnp.swapaxes(tokens.reshape(2, micro_batches, -1, 1 + count), 0, 1)
    first = _at(by_micro_batch, jnp.zeros((), jnp.int32))
    position = _split(position, micro_batches)
    carry = _Decoding(
        stage.embedded((TokenRows(waiting[0, 0], waiting[0, 1], first.rows.page_table, first.adapter),)),
        jnp.zeros_like(waiting[0]),
        waiting,
        state.caches,
        state.slots,
        position,
        jnp.zeros_like(position),
        jnp.zeros_like(position),
        no_logprobs((*position.shape, width)),
        _no_jobs(stages, micro_batches, max_passes),
    )
    ticks = ring_ticks(stages.count, schedule.micro_batches, schedule.passes, schedule.stride)
    carry = lax.fori_loop(0, ticks, tick, carry)
    passed = PassState(carry.slots.history, Progress(_joined(carry.position)), _joined(carry.logprobs))
    plain = schedule.passes * int(not count)
    counts = jnp.stack([plain, schedule.passes - plain])
    proposed, accepted = _joined(carry.proposed), _joined(carry.accepted)
    slots, output = finish_step(carry.slots, step, passed, proposed, accepted, counts, width=width)
    slots = _make_equal(slots, rows.slot, step.start, width)
    return DeviceState(carry.caches, slots), output, carry.jobs


def _next_tokens(step: DecodeRows, history: jax.Array, position: jax.Array, limit: jax.Array, width: int) -> jax.Array:
    """Compute the tokens of the rows' next pass, ids and positions: int32 [2, B, 1 + W].

    Args:
      position: int32 [B], as in `Progress`. limit: int32 [B], the most speculative tokens of each row.
      width: W, those of any row.
    """
    guess = Speculation.none(len(position))
    if width:
        guess = speculate(history, step.rows.slot, Progress(position), step.options, limit, width)
    group = tokens_of(history, step.rows, position, step.adapter, guess)
    positions = group.positions.at[:, 0].set(position)  # of rows that have ended it says their length
    return jnp.stack([group.ids, positions])


def _no_jobs(stages: Stages, micro_batches: int, passes: int) -> jax.Array:
    """Make an empty record of a step's jobs, with room for the ticks of any schedule."""
    ticks = ring_ticks(stages.count, micro_batches, passes, drained_stride(stages.count, micro_batches))
    return jnp.zeros((ticks, 3), jnp.int32)


class _Prefilling(NamedTuple):
    """The state that a tick of a prefill step changes.

    Attributes:
      x, caches, slots, jobs: as in `_Decoding`.
      output: of the last stage, by micro-batch.
    """

    x: jax.Array
    caches: list[KVPages]
    slots: Slots
    output: PrefillOutput
    jobs: jax.Array


def prefill_ring(
    model: "Decoder",
    adapters: list[LayerAdapters] | None,
    state: DeviceState,
    chunks: Chunks,
    rows: Rows,
    bitmask: jax.Array,
    schedule: RingSchedule,
    *,
    stages: Stages,
    micro_batches: int,
    chunk_size: int,
    processors: LogitsProcessors,
) -> tuple[DeviceState, PrefillOutput, jax.Array]:
    """Run one pass over chunks of prompts, of which each micro-batch has as many, and a token of each decoding row.

    Arguments as of `prefill`; returns what `decode_ring` does.
    """
    stage = _Stage(model, adapters, axis_index(AXIS), stages)
    nowhere = len(state.slots.length) - 1
    by_micro_batch = _split((chunks, rows), micro_batches)
    some = chunks.slot.size // micro_batches
    masks = jnp.concatenate(
        [_split(bitmask[: chunks.slot.size], micro_batches), _split(bitmask[chunks.slot.size :], micro_batches)], axis=1
    )

    def inputs(tick: _Tick) -> tuple[Chunks, Rows]:
        """The chunks and rows of a micro-batch; without one they are padding."""
        chunks, rows = _at(by_micro_batch, tick.at)
        num_tokens = jnp.where(tick.active, chunks.num_tokens, 0)
        chunks = chunks._replace(num_tokens=num_tokens, chooses=chunks.chooses & tick.is_end)
        return chunks, rows._replace(slot=jnp.where(tick.active, rows.slot, nowhere))

    def ended(slots: Slots, x: jax.Array, groups: tuple[TokenRows, ...], tick: _Tick) -> PrefillOutput:
        chunks, rows = inputs(tick)
        hidden = model.leave(x, ForwardContext(groups, {}))
        return next_tokens(model, slots, hidden, chunks, rows, masks[tick.at], processors=processors)

    def tick(number: jax.Array, carry: _Prefilling) -> _Prefilling:
        tick, job = _work(stage, number, schedule, micro_batches)
        chunks, rows = inputs(tick)
        groups = groups_of(carry.slots, chunks, rows, chunk_size=chunk_size)
        x, caches = stage.run(stage.enter(carry.x, groups), groups, carry.caches)
        new = _at_end(tick, lambda: ended(carry.slots, x, groups, tick), lambda: _at(carry.output, tick.at))
        new = new._replace(produced=new.produced & tick.is_end)
        slots = append_next(carry.slots, chunks, rows, new)
        jobs = carry.jobs.at[number].set(job)
        return _Prefilling(to_next(x, AXIS), caches, slots, _put(carry.output, tick, new), jobs)

    start = _Tick(jnp.zeros((), jnp.int32), jnp.array(True), jnp.array(True))
    groups = groups_of(state.slots, *inputs(start), chunk_size=chunk_size)
    x = stage.embedded(groups)
    shapes = jax.eval_shape(lambda: ended(state.slots, x, groups, start))
    output = jax.tree.map(lambda x: jnp.zeros((micro_batches, *x.shape), x.dtype), shapes)
    carry = _Prefilling(x, state.caches, state.slots, output, _no_jobs(stages, micro_batches, 1))
    ticks = ring_ticks(stages.count, schedule.micro_batches, 1, schedule.stride)
    carry = lax.fori_loop(0, ticks, tick, carry)

    def chunks_first(x: jax.Array) -> jax.Array:
        return jnp.concatenate([_joined(x[:, :some]), _joined(x[:, some:])])

    output = PrefillOutput(
        *(jax.tree.map(chunks_first, x) for x in carry.output[:3]),
        prompt_logprobs=_joined(carry.output.prompt_logprobs),
        pooled=_joined(carry.output.pooled),
    )
    slot = jnp.concatenate([chunks.slot, rows.slot])
    lengths = progress_of(state.slots, rows.slot).length
    slots = _make_equal(carry.slots, slot, jnp.concatenate([chunks.start + chunks.num_tokens, lengths]), 1)
    return DeviceState(carry.caches, slots), output, carry.jobs


def build(static: DecoderStatic, sizes: Ring) -> Callable[..., Any]:
    """Build the function of these sizes."""
    assert static.stages is not None
    shared = {"stages": static.stages, "micro_batches": sizes.micro_batches, "processors": static.processors}
    if sizes.chunks:
        return static.with_model(functools.partial(prefill_ring, chunk_size=static.engine.chunk_size, **shared))
    passes, speculative = static.engine.max_decode_passes, sizes.speculative
    return static.with_model(
        functools.partial(decode_ring, max_passes=passes, num_speculative_tokens=speculative, **shared)
    )


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
        schedule = RingSchedule(integers(), integers(), integers())
        shared = layout.bitmask(sizes.chunks + sizes.batch), schedule
        inputs = (chunks, rows, *shared) if sizes.chunks else (rows, *shared, integers(sizes.batch))
        return (layout.leaves, layout.adapters, layout.state, *layout.inputs(*inputs))

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

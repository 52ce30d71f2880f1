"""`prefill`: one pass over chunks of prompts, beside a token of each decoding row (chunked prefill)."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.compiled import ProgramSpec, Sizes
from jaxinfer.generation.engine.buckets import Buckets
from jaxinfer.generation.execution.layout import DecoderStatic, DeviceLayout, flags, integers
from jaxinfer.generation.execution.programs.expert_load import ExpertCounts, count_experts
from jaxinfer.generation.execution.programs.verification import Speculation, tokens_of
from jaxinfer.generation.execution.state import (
    DeviceState,
    Rows,
    Slots,
    append,
    options_of,
    progress,
    progress_of,
    with_progress,
)
from jaxinfer.generation.sampling.arrays import SamplingArrays
from jaxinfer.generation.sampling.logprobs import Logprobs, logprobs_if_asked, logprobs_of, no_logprobs
from jaxinfer.generation.sampling.sampler import LogitsProcessors, asks_more_than_greedy, sample
from jaxinfer.generation.sampling.vocabulary import greedy
from jaxinfer.models import LayerAdapters, TokenRows
from jaxinfer.models.config import Pooling

if TYPE_CHECKING:
    from jaxinfer.models import Decoder

PROMPT_LOGPROB_POSITIONS = 64
"""Most prompt positions whose logits exist at once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prefill(Sizes):
    """`chunks`, `batch` decoding rows beside them, and `pages` of a page table."""

    program = "prefill"
    chunks: int
    batch: int
    pages: int


class Chunks(NamedTuple):
    """Chunks of prompts; several may be of one request.

    Attributes:
      slot: int32 [M].
      start: int32 [M], the position of the first token.
      num_tokens: int32 [M], how many of its tokens are real.
      chooses: bool [M], whether a token is chosen after it: it ends the known tokens of its request.
      pooling: bool [M], whether the request wants its hidden vectors pooled.
      page_table: int32 [M, P].
    """

    slot: jax.Array
    start: jax.Array
    num_tokens: jax.Array
    chooses: jax.Array
    pooling: jax.Array
    page_table: jax.Array


class PrefillOutput(NamedTuple):
    """Results of `prefill`, for the M chunks and then the B rows.

    Attributes:
      tokens: int32 [M + B].
      produced: bool [M + B], whether the token counts.
      logprobs: [M + B].
      prompt_logprobs: [M, T], of the token after each token of a chunk.
      pooled: float32 [M, D], a chunk's hidden vectors pooled (a mean is a sum yet), for requests that want them.
      experts: of M + B rows, the experts of their tokens; None unless the engine counts them.
    """

    tokens: jax.Array
    produced: jax.Array
    logprobs: Logprobs
    prompt_logprobs: Logprobs
    pooled: jax.Array
    experts: ExpertCounts | None = None


def prefill(
    model: "Decoder",
    adapters: list[LayerAdapters] | None,
    state: DeviceState,
    chunks: Chunks,
    rows: Rows,
    bitmask: jax.Array,
    *,
    chunk_size: int,
    processors: LogitsProcessors,
    counts_experts: bool,
) -> tuple[DeviceState, PrefillOutput]:
    """Run one pass of the model over chunks of prompts and one token of each decoding row.

    Args:
      bitmask: uint32 [M + B, V / 32], the tokens that may be chosen; see `sampler.allowed`.
      chunk_size: T, tokens a chunk.
      counts_experts: whether the output has `experts`.
    """
    groups, routings = groups_of(state.slots, chunks, rows, chunk_size=chunk_size), []
    hidden, caches = model.forward(groups, state.caches, adapters, routings)
    assert caches is not None
    slots, output = add_tokens(model, state.slots, hidden, chunks, rows, bitmask, processors=processors)
    if counts_experts:
        output = output._replace(experts=count_experts(routings, groups))
    return DeviceState(caches, slots), output


def groups_of(
    slots: Slots, chunks: Chunks | None, rows: Rows, guess: Speculation | None = None, *, chunk_size: int
) -> tuple[TokenRows, ...]:
    """The tokens of a pass: those of the chunks (None: none), then the rows'; empty groups are left out.

    guess: the speculative tokens of the rows; None: none.
    """
    groups = []
    if chunks is not None:
        positions = _positions(chunks, chunk_size)
        ids = slots.history[chunks.slot[:, None], jnp.maximum(positions, 0)]
        groups.append(TokenRows(ids, positions, chunks.page_table, slots.adapter[chunks.slot], chunks.slot))
    if rows.slot.size:
        position = progress_of(slots, rows.slot).position
        guess = Speculation.none(rows.slot.size) if guess is None else guess
        groups.append(tokens_of(slots.history, rows, position, slots.adapter[rows.slot], guess))
    return tuple(groups)


def _positions(chunks: Chunks, chunk_size: int) -> jax.Array:
    """The positions of the chunks' tokens: int32 [M, T], negative for padding."""
    index = jnp.arange(chunk_size)
    return jnp.where(index < chunks.num_tokens[:, None], chunks.start[:, None] + index, -1)


def add_tokens(
    model: "Decoder",
    slots: Slots,
    hidden: list[jax.Array],
    chunks: Chunks,
    rows: Rows,
    bitmask: jax.Array,
    *,
    processors: LogitsProcessors,
) -> tuple[Slots, PrefillOutput]:
    """End a pass: choose the tokens that come next, and put them into their slots; `hidden` as for `next_tokens`."""
    output = next_tokens(model, slots, hidden, chunks, rows, bitmask, processors=processors)
    return append_next(slots, chunks, rows, output), output


def next_tokens(
    model: "Decoder",
    slots: Slots,
    hidden: list[jax.Array],
    chunks: Chunks,
    rows: Rows,
    bitmask: jax.Array,
    *,
    processors: LogitsProcessors,
) -> PrefillOutput:
    """Choose the tokens that come next, from the hidden vectors of each group of `groups_of`."""
    last = jnp.maximum(chunks.num_tokens - 1, 0)[:, None, None]
    ends = [jnp.take_along_axis(hidden[0], last, axis=1)[:, 0], *(group[:, 0] for group in hidden[1:])]
    slot, length, produced = _ends(slots, chunks, rows)
    options = options_of(slots, slot)
    logits = model.logits(jnp.concatenate(ends))  # [M + B, V]
    tokens, logprobs = _choose(logits, slots.history, slot, length, options, bitmask, processors, vocab=model.cfg.vocab)
    prompt_logprobs = _prompt_logprobs(model, hidden[0], slots.history, chunks, options)
    pooled = _pooled(hidden[0], chunks, model.cfg.pooling)
    return PrefillOutput(tokens, produced, logprobs, prompt_logprobs, pooled)


def append_next(slots: Slots, chunks: Chunks, rows: Rows, output: PrefillOutput) -> Slots:
    """Put the tokens that were chosen, where they count, into their slots."""
    slot, length, _ = _ends(slots, chunks, rows)
    before, count = progress(length, output.produced), output.produced.astype(jnp.int32)
    history, after = append(slots.history, slot, before, output.tokens[:, None], count, options_of(slots, slot))
    return with_progress(slots._replace(history=history), slot, after, output.produced)


def _ends(slots: Slots, chunks: Chunks, rows: Rows) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The slot of each chunk and row, its known tokens after the pass, and whether a token comes next."""
    decoding = progress_of(slots, rows.slot)
    slot = jnp.concatenate([chunks.slot, rows.slot])
    length = jnp.concatenate([chunks.start + chunks.num_tokens, decoding.length])
    return slot, length, jnp.concatenate([chunks.chooses, decoding.active])


def _pooled(hidden: jax.Array, chunks: Chunks, pooling: Pooling) -> jax.Array:
    """Pool the chunks' hidden vectors [M, T, W], where a request wants it: float32 [M, W]. A mean is a sum yet."""
    real = (_positions(chunks, hidden.shape[1]) >= 0)[..., None]

    def pool() -> jax.Array:
        match pooling:
            case Pooling.MEAN:
                return jnp.sum(jnp.where(real, hidden.astype(jnp.float32), 0.0), axis=1)
            case Pooling.MAX:
                return jnp.max(jnp.where(real, hidden.astype(jnp.float32), jnp.finfo(jnp.float32).min), axis=1)
            case Pooling.CLS:
                return hidden[:, 0].astype(jnp.float32)
            case Pooling.LAST:
                last = jnp.maximum(chunks.num_tokens - 1, 0)[:, None, None]
                return jnp.take_along_axis(hidden, last, axis=1)[:, 0].astype(jnp.float32)

    nothing = jnp.zeros((len(hidden), hidden.shape[2]), jnp.float32)
    return lax.cond(jnp.any(chunks.pooling), pool, lambda: nothing)


def _choose(
    logits: jax.Array,
    history: jax.Array,
    slot: jax.Array,
    length: jax.Array,
    options: SamplingArrays,
    bitmask: jax.Array,
    processors: LogitsProcessors,
    *,
    vocab: int,
) -> tuple[jax.Array, Logprobs]:
    """Choose the next token of each row, and its log probabilities; arguments as in `sample`."""
    none = no_logprobs(slot.shape)

    def by_options() -> tuple[jax.Array, Logprobs]:
        tokens = sample(logits, history, slot, length, options, bitmask, processors, vocab=vocab)
        return tokens, logprobs_if_asked(options.logprobs, logits, tokens)

    with jax.named_scope("sample"):
        best = greedy(logits)
        return lax.cond(asks_more_than_greedy(options, length), by_options, lambda: (best, none))


def _prompt_logprobs(
    model: "Decoder", hidden: jax.Array, history: jax.Array, chunks: Chunks, options: SamplingArrays
) -> Logprobs:
    """The log probabilities of the token after each token of a chunk, [M, T], if a request asks for some.

    They are computed for some positions at a time: the logits of all would be large.
    """
    batch, tokens = hidden.shape[:2]
    size = math.gcd(PROMPT_LOGPROB_POSITIONS, tokens)
    following = history[chunks.slot[:, None], _positions(chunks, tokens) + 1]

    def some_positions(args):
        return logprobs_of(model.logits(args[0]), args[1])

    def split(x):
        return jnp.moveaxis(x.reshape(batch, tokens // size, size, *x.shape[2:]), 1, 0)

    def every() -> Logprobs:
        parts = lax.map(some_positions, (split(hidden), split(following)))
        return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(batch, tokens, *x.shape[3:]), parts)

    asked = options.prompt_logprobs[: len(chunks.slot)]
    return lax.cond(jnp.any(asked), every, lambda: no_logprobs((batch, tokens)))


def build(static: DecoderStatic, sizes: Prefill) -> Callable[..., Any]:
    """Build the function of these sizes."""
    body = functools.partial(
        prefill,
        chunk_size=static.engine.chunk_size,
        processors=static.processors,
        counts_experts=static.engine.expert_load,
    )
    return static.with_model(body)


def parts(layout: DeviceLayout, *, chunks: int, batch: int, pages: int) -> tuple[Chunks, Rows]:
    """The shapes of chunks and rows."""
    vector, flag = integers(chunks), flags(chunks)
    return Chunks(vector, vector, vector, flag, flag, integers(chunks, pages)), layout.rows(batch, pages)


def spec(layout: DeviceLayout) -> ProgramSpec[Prefill, Buckets]:
    """The spec for an engine."""
    chunk_size = layout.engine.chunk_size

    def arguments(sizes: Prefill) -> tuple[Any, ...]:
        inputs = parts(layout, chunks=sizes.chunks, batch=sizes.batch, pages=sizes.pages)
        bitmask = layout.bitmask(sizes.chunks + sizes.batch)
        return (layout.leaves, layout.adapters, layout.state, *layout.inputs(*inputs, bitmask))

    return ProgramSpec(
        sizes=Prefill,
        build=build,
        static=layout.static,
        arguments=arguments,
        reachable=lambda buckets: (
            Prefill(chunks=chunks, batch=batch, pages=pages)
            for pages in buckets.page_tables
            for chunks in buckets.chunks
            for batch in buckets.prefill_rows
        ),
        donate=(2,),
        out_shardings=lambda sizes: None if layout.mesh is None else (layout.state_shardings, layout.output_sharding),
        compiler_options=lambda sizes: layout.compiler_options(tokens=sizes.batch + sizes.chunks * chunk_size),
    )

"""`prefill`: one pass over chunks of prompts, beside a token of each decoding row (chunked prefill)."""

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
from jaxinfer.generation.execution.state import (
    DeviceState,
    Rows,
    append,
    last_tokens,
    options_of,
    progress,
    progress_of,
    with_progress,
)
from jaxinfer.generation.sampling.arrays import SamplingArrays
from jaxinfer.generation.sampling.logprobs import Logprobs, logprobs_of, no_logprobs, record_logprobs
from jaxinfer.generation.sampling.sampler import LogitsProcessors, asks_more_than_greedy, sample
from jaxinfer.generation.sampling.vocabulary import greedy
from jaxinfer.models import LayerAdapters, TokenRows

if TYPE_CHECKING:
    from jaxinfer.models import Decoder

PROMPT_LOGPROB_POSITIONS = 64
"""How many prompt positions' logits exist at once, at most."""


class Chunks(NamedTuple):
    """Chunks of prompts; several may be of one request.

    Attributes:
      slot: int32 [M].
      start: int32 [M], the position of the first token.
      num_tokens: int32 [M], how many of its tokens are real.
      chooses: bool [M], whether a token is chosen after it: it ends what is known of its request.
      pooling: bool [M], whether the request wants the sum of its hidden vectors.
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
      prompt_logprobs: [M, T], of the token after each one of a chunk.
      pooled: float32 [M, D], sums of a chunk's hidden vectors, in chunks whose request wants them.
    """

    tokens: jax.Array
    produced: jax.Array
    logprobs: Logprobs
    prompt_logprobs: Logprobs
    pooled: jax.Array


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
) -> tuple[DeviceState, PrefillOutput]:
    """One pass of the model over chunks of prompts and one token of each decoding row.

    Args:
      bitmask: uint32 [M + B, V / 32], the tokens that may be chosen; see `sampler.allowed`.
      chunk_size: T, tokens a chunk.
    """
    slots = state.slots
    index = jnp.arange(chunk_size)
    positions = jnp.where(index < chunks.num_tokens[:, None], chunks.start[:, None] + index, -1)
    ids = slots.history[chunks.slot[:, None], jnp.maximum(positions, 0)]
    groups = [TokenRows(ids, positions, chunks.page_table, slots.adapter[chunks.slot])]
    decoding = progress_of(slots, rows.slot)
    if rows.slot.size:
        groups.append(last_tokens(slots.history, rows, decoding.position, slots.adapter[rows.slot]))
    hidden, caches = model.forward(tuple(groups), state.caches, adapters)
    assert caches is not None
    last = jnp.take_along_axis(hidden[0], jnp.maximum(chunks.num_tokens - 1, 0)[:, None, None], axis=1)
    ends = jnp.concatenate([last[:, 0], *(group[:, 0] for group in hidden[1:])])  # [M + B, D]
    slot = jnp.concatenate([chunks.slot, rows.slot])
    length = jnp.concatenate([chunks.start + chunks.num_tokens, decoding.length])
    produced = jnp.concatenate([chunks.chooses, decoding.active])
    options = options_of(slots, slot)
    tokens, logprobs = _choose(
        model.logits(ends), slots.history, slot, length, options, bitmask, processors, vocab=model.cfg.vocab
    )
    before, count = progress(length, produced), produced.astype(jnp.int32)
    history, after = append(slots.history, slot, before, tokens[:, None], count, options)
    slots = with_progress(slots._replace(history=history), slot, after, produced)
    following = slots.history[chunks.slot[:, None], positions + 1]
    asked = options.prompt_logprobs[: len(chunks.slot)]
    prompt_logprobs = lax.cond(
        jnp.any(asked), lambda: _prompt_logprobs(model, hidden[0], following), lambda: no_logprobs(ids.shape)
    )
    real = (positions >= 0)[..., None]
    pooled = lax.cond(
        jnp.any(chunks.pooling),
        lambda: jnp.sum(jnp.where(real, hidden[0].astype(jnp.float32), 0.0), axis=1),
        lambda: jnp.zeros(last[:, 0].shape, jnp.float32),
    )
    return DeviceState(caches, slots), PrefillOutput(tokens, produced, logprobs, prompt_logprobs, pooled)


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
    """The next token of each row, and its log probabilities; arguments as of `sample`."""
    none = no_logprobs(slot.shape)

    def by_options() -> tuple[jax.Array, Logprobs]:
        tokens = sample(logits, history, slot, length, options, bitmask, processors, vocab=vocab)
        return tokens, record_logprobs(options.logprobs, logits, tokens, (jnp.arange(len(slot)),), none)

    with jax.named_scope("sample"):
        best = greedy(logits)
        return lax.cond(asks_more_than_greedy(options, length), by_options, lambda: (best, none))


def _prompt_logprobs(model: "Decoder", hidden: jax.Array, following: jax.Array) -> Logprobs:
    """Log probabilities of the following tokens, some positions at a time: the logits of all would be large."""
    batch, tokens = following.shape
    size = math.gcd(PROMPT_LOGPROB_POSITIONS, tokens)

    def one(args):
        return logprobs_of(model.logits(args[0]), args[1])

    def split(x):
        return jnp.moveaxis(x.reshape(batch, tokens // size, size, *x.shape[2:]), 1, 0)

    found = lax.map(one, (split(hidden), split(following)))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(batch, tokens, *x.shape[3:]), found)


def build(static: DecoderStatic, sizes: Sizes) -> Callable[..., Any]:
    """The function of these sizes."""
    body = functools.partial(prefill, chunk_size=static.engine.chunk_size, processors=static.processors)
    return static.with_model(body)


def spec(layout: DeviceLayout) -> ProgramSpec[Buckets]:
    """Sizes: `chunks`, `batch` decoding rows beside them, `pages` of a page table."""
    chunk_size = layout.engine.chunk_size

    def arguments(sizes):
        chunks, batch, pages = sizes["chunks"], sizes["batch"], sizes["pages"]
        vector, flag = integers(chunks), flags(chunks)
        inputs = layout.inputs(
            Chunks(vector, vector, vector, flag, flag, integers(chunks, pages)),
            layout.rows(batch, pages),
            layout.bitmask(chunks + batch),
        )
        return (layout.leaves, layout.adapters, layout.state, *inputs)

    return ProgramSpec(
        name="prefill",
        build=build,
        static=layout.static,
        arguments=arguments,
        reachable=lambda buckets: (
            {"chunks": chunks, "batch": batch, "pages": pages}
            for pages in buckets.page_tables
            for chunks in buckets.chunks
            for batch in buckets.prefill_rows
        ),
        donate=(2,),
        out_shardings=None if layout.mesh is None else (layout.state_shardings, None),
        compiler_options=lambda sizes: layout.compiler_options(tokens=sizes["batch"] + sizes["chunks"] * chunk_size),
    )

"""The two pure functions that generation compiles: `prefill` of a chunk of prompts, and `decode` of several steps.

Both take and return the whole device state (donated, so it is updated in place) and read the rows' options from
arrays. Dimensions: B rows of the batch, T tokens of the chunk, P pages a row, C tokens of context, S slots.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.generation.sampling import Logprobs, SamplingArrays, logprobs_of, no_logprobs, sample
from jaxinfer.models import Decoder, KVPages

PROMPT_LOGPROB_BLOCK = 64
"""Most prompt positions whose logits are held at once."""


class DeviceState(NamedTuple):
    """What stays on the device between steps.

    Attributes:
      caches: one KVPages per layer.
      history: int32 [S, C], the tokens of the request in each slot; the last row belongs to no request.
    """

    caches: list[KVPages]
    history: jax.Array


class Rows(NamedTuple):
    """Which requests a batch holds; padding rows have `limit` 0.

    Attributes:
      slot: int32 [B], the row of `DeviceState.history`.
      limit: int32 [B], the total length at which the request ends.
      page_table: int32 [B, P].
      options: the sampling options.
    """

    slot: jax.Array
    limit: jax.Array
    page_table: jax.Array
    options: SamplingArrays


class Prefilled(NamedTuple):
    """A prefill's results: the next token of each row, its log probabilities, and those of the chunk's tokens.

    `prompt` at chunk position t speaks of the token at t + 1.
    """

    tokens: jax.Array  # int32 [B]
    logprobs: Logprobs  # [B]
    prompt: Logprobs  # [B, T]


class Decoded(NamedTuple):
    """A decode's results: `produced` valid tokens a row."""

    tokens: jax.Array  # int32 [B, K]
    produced: jax.Array  # int32 [B]
    logprobs: Logprobs  # [B, K]


def prefill(
    model: Decoder,
    state: DeviceState,
    rows: Rows,
    tokens: jax.Array,
    following: jax.Array,
    start: jax.Array,
    count: jax.Array,
) -> tuple[DeviceState, Prefilled]:
    """Run a chunk of each row's prompt through the model; where the prompt ends, choose the first new token.

    Args:
      tokens: int32 [B, T], the chunk, padded at the end. following: int32 [B, T], the tokens one place later.
      start: int32 [B], the position of the chunk's first token. count: int32 [B], its real tokens.
    The chosen token is meaningful, and stored in the history, only in rows whose chunk completes the prompt.
    """
    index = jnp.arange(tokens.shape[1])
    positions = jnp.where(index < count[:, None], start[:, None] + index, -1)
    context = state.history.shape[1]
    history = state.history.at[rows.slot[:, None], jnp.where(positions < 0, context, positions)].set(
        tokens, mode="drop"
    )
    hidden, caches = model(tokens, positions, state.caches, rows.page_table)
    assert caches is not None
    last = jnp.take_along_axis(hidden, jnp.maximum(count - 1, 0)[:, None, None], axis=1)[:, 0]  # [B, D]
    length = start + count
    chosen, logprobs = sample(model.logits(last), history[rows.slot], length, rows.options)
    complete = (length == rows.options.prompt_length) & (rows.limit > 0)
    history = history.at[rows.slot, jnp.where(complete, length, context)].set(chosen, mode="drop")
    prompt = lax.cond(
        jnp.any(rows.options.prompt_logprobs),
        lambda: _prompt_logprobs(model, hidden, following),
        lambda: no_logprobs(tokens.shape),
    )
    return DeviceState(caches, history), Prefilled(chosen, logprobs, prompt)


def _prompt_logprobs(model: Decoder, hidden: jax.Array, following: jax.Array) -> Logprobs:
    """Log probabilities of the following tokens, a block of positions at a time: the logits of all would be large."""
    batch, tokens = following.shape
    block = math.gcd(PROMPT_LOGPROB_BLOCK, tokens)

    def one(args):
        return logprobs_of(model.logits(args[0]), args[1])

    def blocks(x):
        return jnp.moveaxis(x.reshape(batch, tokens // block, block, *x.shape[2:]), 1, 0)

    found = lax.map(one, (blocks(hidden), blocks(following)))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(batch, tokens, *x.shape[3:]), found)


def decode(
    model: Decoder, state: DeviceState, rows: Rows, length: jax.Array, steps: jax.Array, *, max_steps: int
) -> tuple[DeviceState, Decoded]:
    """Generate up to `steps` (int32 [], at most `max_steps`) tokens a row, stopping early when all rows are done.

    Args:
      length: int32 [B], tokens of each row known so far; the last of them is not in the cache yet.
    """
    batch, context = length.shape[0], state.history.shape[1]
    outputs = Decoded(
        jnp.zeros((batch, max_steps), jnp.int32), jnp.zeros(batch, jnp.int32), no_logprobs((batch, max_steps))
    )

    def going(carry):
        step, _, _, active, _ = carry
        return (step < steps) & jnp.any(active)

    def one(carry):
        step, state, length, active, out = carry
        last = state.history[rows.slot, jnp.maximum(length - 1, 0)]
        positions = jnp.where(active, length - 1, -1)
        hidden, caches = model(last[:, None], positions[:, None], state.caches, rows.page_table)
        assert caches is not None
        logits = model.logits(hidden[:, 0])
        chosen, logprobs = sample(logits, state.history[rows.slot], length, rows.options)
        history = state.history.at[rows.slot, jnp.where(active, length, context)].set(chosen, mode="drop")
        out = Decoded(
            out.tokens.at[:, step].set(chosen),
            out.produced + active,
            jax.tree.map(lambda all_steps, new: all_steps.at[:, step].set(new), out.logprobs, logprobs),
        )
        length = length + active
        stopped = jnp.any(chosen[:, None] == rows.options.stop_ids, axis=1)
        active &= ~stopped & (length < rows.limit)
        return step + 1, DeviceState(caches, history), length, active, out

    carry = (jnp.int32(0), state, length, length < rows.limit, outputs)
    _, state, _, _, outputs = lax.while_loop(going, one, carry)
    return state, outputs

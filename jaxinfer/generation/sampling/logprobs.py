"""Log probabilities under the model's own distribution."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.generation.params import MAX_LOGPROBS


class Logprobs(NamedTuple):
    """Log probabilities of some positions.

    Attributes:
      chosen: float32 [...], of the given token.
      top_ids: int32 [..., MAX_LOGPROBS], the likeliest tokens, best first; -1 where there are no more.
      top: float32 [..., MAX_LOGPROBS], of those.
    """

    chosen: jax.Array
    top_ids: jax.Array
    top: jax.Array


def logprobs_of(logits: jax.Array, tokens: jax.Array) -> Logprobs:
    """logits: float32 [..., V]; tokens: int32 [...]."""
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(logprobs, tokens[..., None], axis=-1)[..., 0]
    count = min(MAX_LOGPROBS, logits.shape[-1])
    top, top_ids = lax.top_k(logprobs, count)
    pad = [(0, 0)] * (top.ndim - 1) + [(0, MAX_LOGPROBS - count)]
    return Logprobs(chosen, jnp.pad(top_ids, pad, constant_values=-1), jnp.pad(top, pad, constant_values=-jnp.inf))


def no_logprobs(shape: tuple[int, ...]) -> Logprobs:
    """Zeros of `logprobs_of`'s shapes, which no row has asked for yet."""
    wide = (*shape, MAX_LOGPROBS)
    return Logprobs(jnp.zeros(shape, jnp.float32), jnp.zeros(wide, jnp.int32), jnp.zeros(wide, jnp.float32))


def record_logprobs(
    wanted: jax.Array, logits: jax.Array, tokens: jax.Array, at: tuple[jax.Array, ...], logprobs: Logprobs
) -> Logprobs:
    """Put the log probabilities of tokens at places of `logprobs`, if any row wants them.

    wanted: bool [B]; logits: float32 [B, V]; tokens: int32 [B]; at: an index for every leading dimension of
    `logprobs`, [B] each, out of range where none is put.
    """

    def put() -> Logprobs:
        return jax.tree.map(lambda old, new: old.at[at].set(new, mode="drop"), logprobs, logprobs_of(logits, tokens))

    with jax.named_scope("logprobs"):
        return lax.cond(jnp.any(wanted), put, lambda: logprobs)

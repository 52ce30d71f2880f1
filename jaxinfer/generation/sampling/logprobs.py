"""Log probabilities under the model's own distribution."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.generation.params import MAX_LOGPROBS
from jaxinfer.pallas_kernels.sampling.api import top_k
from jaxinfer.sharding.collectives import all_gather, axis_size, local_index, local_start, psum


class Logprobs(NamedTuple):
    """Log probabilities of some positions.

    Attributes:
      chosen: float32 [...], of the given token.
      top_ids: int32 [..., MAX_LOGPROBS], the likeliest tokens, best first; -1 where there are no more.
      top: float32 [..., MAX_LOGPROBS], of the likeliest tokens.
    """

    chosen: jax.Array
    top_ids: jax.Array
    top: jax.Array


def logprobs_of(logits: jax.Array, tokens: jax.Array) -> Logprobs:
    """The log probabilities of tokens, and the likeliest tokens in their places.

    logits: float32 [..., V], of this device's part of the vocabulary; tokens: int32 [...], of all of it.

    Devices exchange their best tokens and the sum of their exponentials once, and the token's score once.
    """
    size = logits.shape[-1]
    here = local_index(tokens, "vocab", size)[..., None]
    score = jnp.take_along_axis(logits, jnp.minimum(here, size - 1), axis=-1)
    score = psum(jnp.where(here < size, score, 0.0), "vocab")[..., 0]
    largest = jnp.max(logits, axis=-1, keepdims=True)
    total = jnp.sum(_exp(logits, largest), axis=-1, keepdims=True)
    top, top_ids = top_k(logits, min(MAX_LOGPROBS, size))
    if axis_size("vocab") > 1:
        floats = lax.bitcast_convert_type(jnp.concatenate([largest, total, top], axis=-1), jnp.int32)
        gathered = all_gather(jnp.concatenate([floats, top_ids + local_start("vocab", size)], axis=-1), "vocab")
        gathered = jnp.moveaxis(gathered, 0, -2)  # [..., parts, 2 + 2 * count]
        floats = lax.bitcast_convert_type(gathered[..., : 2 + top.shape[-1]], jnp.float32)
        maxima, sums = floats[..., 0], floats[..., 1]
        largest = jnp.max(maxima, axis=-1, keepdims=True)
        total = jnp.sum(sums * _exp(maxima, largest), axis=-1, keepdims=True)
        top, ids = (x.reshape(*tokens.shape, -1) for x in (floats[..., 2:], gathered[..., 2 + top.shape[-1] :]))
        top, best = top_k(top, min(MAX_LOGPROBS, top.shape[-1]))
        top_ids = jnp.take_along_axis(ids, best, axis=-1)
    log_total, count = jnp.log(total), top.shape[-1]
    chosen, top = score - largest[..., 0] - log_total[..., 0], top - largest - log_total
    pad = [(0, 0)] * (top.ndim - 1) + [(0, MAX_LOGPROBS - count)]
    return Logprobs(chosen, jnp.pad(top_ids, pad, constant_values=-1), jnp.pad(top, pad, constant_values=-jnp.inf))


def _exp(x: jax.Array, largest: jax.Array) -> jax.Array:
    """exp(x - largest), where `largest` is -inf on a device whose rows are all padding: then 0."""
    return jnp.exp(x - jnp.where(largest == -jnp.inf, 0.0, largest))


def no_logprobs(shape: tuple[int, ...]) -> Logprobs:
    """Return zeros of `logprobs_of`'s shapes, before any row has asked."""
    wide = (*shape, MAX_LOGPROBS)
    return Logprobs(jnp.zeros(shape, jnp.float32), jnp.zeros(wide, jnp.int32), jnp.zeros(wide, jnp.float32))


def logprobs_if_asked(asked: jax.Array, logits: jax.Array, tokens: jax.Array) -> Logprobs:
    """`logprobs_of` tokens [B] if any row of bool [B] asks for them, else zeros. logits: float32 [B, V]."""
    with jax.named_scope("logprobs"):
        none = no_logprobs(tokens.shape)
        return lax.cond(jnp.any(asked), lambda: logprobs_of(logits, tokens), lambda: none)


def record_logprobs(
    asked: jax.Array, logits: jax.Array, tokens: jax.Array, start: jax.Array, logprobs: Logprobs
) -> Logprobs:
    """Put the log probabilities of tokens [B, W] into `logprobs` [B, K], if any row wants them.

    Args:
      asked: bool [B].
      logits: float32 [B, W, V].
      start: int32 [B], the column of each row's first token; columns past the last are dropped.
    """
    width = tokens.shape[1]

    def put() -> Logprobs:
        return jax.tree.map(place, logprobs, logprobs_of(logits, tokens))

    def place(old: jax.Array, new: jax.Array) -> jax.Array:
        # Every column chooses, since a scatter takes far longer to compile.
        column = jnp.arange(old.shape[1]) - start[:, None]
        column = column.reshape(column.shape + (1,) * (old.ndim - 2))
        if width > 1:
            new = jnp.take_along_axis(new, jnp.clip(column, 0, width - 1), axis=1)
        return jnp.where((column >= 0) & (column < width), new, old)

    with jax.named_scope("logprobs"):
        return lax.cond(jnp.any(asked), put, lambda: logprobs)

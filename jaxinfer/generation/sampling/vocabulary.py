"""A vocabulary that is split over devices: each has the scores of its own tokens, [B, V / parts] in order.

On one device, or where the vocabulary is not split, all of this is about the whole of it.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.generation.outputs import NO_TOKEN
from jaxinfer.models.fitting import TOKENS_PER_WORD
from jaxinfer.sharding.collectives import all_gather, axis_size, local_part, local_start


def local_bitmask(bitmask: jax.Array, size: int) -> jax.Array:
    """This device's words of uint32 [B, words], for the `size` tokens that each has."""
    if (parts := axis_size("vocab")) == 1:
        return bitmask
    words = parts * size // TOKENS_PER_WORD
    return local_part(jnp.pad(bitmask, ((0, 0), (0, words - bitmask.shape[1]))), "vocab", dim=1)


def whole(scores: jax.Array) -> jax.Array:
    """The scores of all tokens: float32 [B, V / parts] -> [B, V]. It moves all of them."""
    parts = all_gather(scores, "vocab")
    return jnp.moveaxis(parts, 0, 1).reshape(len(scores), -1)


def greedy(scores: jax.Array) -> jax.Array:
    """The best token of each row, of equal ones the first: float32 [B, V / parts] -> int32 [B].

    NO_TOKEN where all scores are -inf, or one is not a number.
    """
    score, token = _best(scores)
    if axis_size("vocab") > 1:
        token += local_start("vocab", scores.shape[-1])
        pairs = jnp.stack([lax.bitcast_convert_type(score, jnp.int32), token])
        found = all_gather(pairs, "vocab")  # [parts, 2, B], in the order of the tokens
        best = lax.bitcast_convert_type(found[:, 0], jnp.float32)
        part = jnp.argmax(best, axis=0)[None]
        token = jnp.take_along_axis(found[:, 1], part, axis=0)[0]
        score = jnp.take_along_axis(best, part, axis=0)[0]
    return jnp.where(score > -jnp.inf, token, NO_TOKEN)


def _best(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The best score of each row, or a NaN if there is one, and its token; `jnp.argmax` by itself gives no score."""

    def better(one: tuple[jax.Array, jax.Array], other: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        wins = (one[0] > other[0]) | (one[0] != one[0])
        first = wins | ((one[0] == other[0]) & (one[1] < other[1]))
        return jnp.where(wins, one[0], other[0]), jnp.where(first, one[1], other[1])

    tokens = lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
    return lax.reduce((scores, tokens), (np.float32(-np.inf), np.int32(0)), better, (scores.ndim - 1,))

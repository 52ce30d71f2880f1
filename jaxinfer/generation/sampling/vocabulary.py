"""A vocabulary that is split over devices: each has the scores of its own tokens, [B, V / parts] in order.

On one device, or where the vocabulary is not split, all of this is about the whole of it.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.generation.outputs import NO_TOKEN
from jaxinfer.models.fitting import TOKENS_PER_WORD
from sharding.collectives import all_gather, axis_size, local_part, local_start


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
    token = jnp.argmax(scores, axis=-1).astype(jnp.int32)  # that of a NaN, if there is one
    score = jnp.take_along_axis(scores, token[:, None], axis=-1)[:, 0]
    if axis_size("vocab") > 1:
        token += local_start("vocab", scores.shape[-1])
        pairs = jnp.stack([lax.bitcast_convert_type(score, jnp.int32), token])
        found = all_gather(pairs, "vocab")  # [parts, 2, B], in the order of the tokens
        best = lax.bitcast_convert_type(found[:, 0], jnp.float32)
        part = jnp.argmax(best, axis=0)[None]
        token = jnp.take_along_axis(found[:, 1], part, axis=0)[0]
        score = jnp.take_along_axis(best, part, axis=0)[0]
    return jnp.where(score > -jnp.inf, token, NO_TOKEN)

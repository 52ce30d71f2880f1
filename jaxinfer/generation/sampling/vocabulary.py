"""A vocabulary that is split over devices: each has the scores of its own tokens, [B, V / parts] in order.

On one device, or where the vocabulary is not split, all of this is about the whole of it.
"""

import jax
import jax.numpy as jnp
from jax import lax

from sharding.collectives import all_gather, axis_index, axis_size

TOKENS_PER_WORD = 32
"""Of a bitmask."""


def first_token(size: int) -> jax.Array:
    """The id of this device's first token, of `size` that each has: int32 []."""
    return axis_index("vocab") * size


def local_index(ids: jax.Array, size: int) -> jax.Array:
    """Where tokens are in this device's scores; `size`, which is out of range, if they are not, or if an id is < 0."""
    local = ids - first_token(size)
    return jnp.where((local >= 0) & (local < size), local, size)


def local_bitmask(bitmask: jax.Array, size: int) -> jax.Array:
    """This device's words of uint32 [B, words]."""
    if (parts := axis_size("vocab")) == 1:
        return bitmask
    words = size // TOKENS_PER_WORD
    bitmask = jnp.pad(bitmask, ((0, 0), (0, parts * words - bitmask.shape[1])))
    return lax.dynamic_slice_in_dim(bitmask, axis_index("vocab") * words, words, axis=1)


def whole(scores: jax.Array) -> jax.Array:
    """The scores of all tokens: float32 [B, V / parts] -> [B, V]. It moves all of them."""
    parts = all_gather(scores, "vocab")
    return jnp.moveaxis(parts, 0, 1).reshape(len(scores), -1)


def greedy(scores: jax.Array) -> jax.Array:
    """The best token of each row, of equal ones the first: float32 [B, V / parts] -> int32 [B]."""
    local = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    if axis_size("vocab") == 1:
        return local
    score = jnp.take_along_axis(scores, local[:, None], axis=-1)[:, 0]
    pairs = jnp.stack([lax.bitcast_convert_type(score, jnp.int32), local + first_token(scores.shape[-1])])
    found = all_gather(pairs, "vocab")  # [parts, 2, B], in the order of the tokens
    part = jnp.argmax(lax.bitcast_convert_type(found[:, 0], jnp.float32), axis=0)
    return jnp.take_along_axis(found[:, 1], part[None], axis=0)[0]

"""A vocabulary that is split over devices: each has the scores of its own tokens, [B, V / parts] in order.

On one device, or if the vocabulary is not split, each function works on all of it.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.generation.outputs import NO_TOKEN
from jaxinfer.models.fitting import TOKENS_PER_WORD
from jaxinfer.pallas_kernels.sampling.api import max_and_argmax
from jaxinfer.sharding.collectives import all_gather, axis_size, local_part, local_start


def local_bitmask(bitmask: jax.Array, size: int) -> jax.Array:
    """Slice this device's words of uint32 [B, words], for the `size` tokens that each device has."""
    if (parts := axis_size("vocab")) == 1:
        return bitmask
    words = parts * size // TOKENS_PER_WORD
    return local_part(jnp.pad(bitmask, ((0, 0), (0, words - bitmask.shape[1]))), "vocab", dim=1)


def whole(scores: jax.Array) -> jax.Array:
    """Gather the scores of all tokens: float32 [B, V / parts] -> [B, V]. All of them are moved."""
    parts = all_gather(scores, "vocab")
    return jnp.moveaxis(parts, 0, 1).reshape(len(scores), -1)


def greedy(scores: jax.Array) -> jax.Array:
    """Compute the best token of each row, the first of equals: float32 [B, V / parts] -> int32 [B].

    NO_TOKEN where all scores are -inf, or one is not a number.
    """
    score, token = max_and_argmax(scores)
    if axis_size("vocab") > 1:
        token += local_start("vocab", scores.shape[-1])
        pairs = jnp.stack([lax.bitcast_convert_type(score, jnp.int32), token])
        gathered = all_gather(pairs, "vocab")  # [parts, 2, B], in the order of the tokens
        parts = lax.bitcast_convert_type(gathered[:, 0], jnp.float32)
        part = jnp.argmax(parts, axis=0)[None]
        token = jnp.take_along_axis(gathered[:, 1], part, axis=0)[0]
        score = jnp.take_along_axis(parts, part, axis=0)[0]
    return jnp.where(score > -jnp.inf, token, NO_TOKEN)

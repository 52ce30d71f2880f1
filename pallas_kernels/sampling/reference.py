"""Sampling in plain JAX: what every implementation computes."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Pair = tuple[jax.Array, jax.Array]


def max_and_argmax(scores: jax.Array) -> Pair:
    """Each row's best score and its index, in one reduction. Arguments as of `api`."""

    def better(left: Pair, right: Pair) -> Pair:
        wins = (left[0] > right[0]) | (left[0] != left[0])
        first = wins | ((left[0] == right[0]) & (left[1] < right[1]))
        return jnp.where(wins, left[0], right[0]), jnp.where(first, left[1], right[1])

    index = lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
    return lax.reduce((scores, index), (np.float32(-np.inf), np.int32(0)), better, (scores.ndim - 1,))


def threshold(keys: jax.Array, weights: jax.Array, target: jax.Array, *, axes: tuple[str, ...]) -> jax.Array:
    """Find the cut by bisection, exactly, with an exchange for each bit of a key. Arguments as of `api`."""

    def halve(_, bounds):
        low, high = bounds  # low reaches the target, high does not
        # floor((low + high) / 2), written so that it cannot overflow
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        total = jnp.sum(jnp.where(keys >= middle[:, None], weights, 0.0), axis=-1)
        enough = (lax.psum(total, axes) if axes else total) >= target
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    low, high = jnp.min(keys, axis=-1), jnp.max(keys, axis=-1)
    if axes:
        low, high = lax.pmin(low, axes), lax.pmax(high, axes)
    return lax.fori_loop(0, 32, halve, (low, high + 1))[0]

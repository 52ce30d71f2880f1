"""Sampling in plain JAX: what every implementation computes."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.pallas_kernels.sampling.keys import key_of

Pair = tuple[jax.Array, jax.Array]


def max_and_argmax(scores: jax.Array) -> Pair:
    """Each row's best score and its index, in one reduction. Arguments as of `api`."""

    def better(left: Pair, right: Pair) -> Pair:
        wins = (left[0] > right[0]) | (left[0] != left[0])
        first = wins | ((left[0] == right[0]) & (left[1] < right[1]))
        return jnp.where(wins, left[0], right[0]), jnp.where(first, left[1], right[1])

    index = lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1)
    return lax.reduce((scores, index), (np.float32(-np.inf), np.int32(0)), better, (scores.ndim - 1,))


def top_k(scores: jax.Array, count: int) -> Pair:
    """Each row's `count` best scores and their indices, by a reduction for each. Arguments as of `api`.

    On a GPU, XLA sorts by a library that cannot be part of a CUDA graph; the host then drives every loop around it.
    """
    axis, size = scores.ndim - 1, np.int32(scores.shape[-1])
    keys = key_of(scores) if scores.dtype == jnp.float32 else scores
    index, lowest = lax.broadcasted_iota(jnp.int32, scores.shape, axis), np.int32(np.iinfo(np.int32).min)

    def better(left: Pair, right: Pair) -> Pair:
        wins = (left[0] > right[0]) | ((left[0] == right[0]) & (left[1] < right[1]))
        return jnp.where(wins, left[0], right[0]), jnp.where(wins, left[1], right[1])

    def find(i: jax.Array, state: tuple[jax.Array, Pair]) -> tuple[jax.Array, Pair]:
        indices, (key, at) = state
        left = (keys < key[..., None]) | ((keys == key[..., None]) & (index > at[..., None]))
        scores_left = jnp.where(left, keys, lowest), jnp.where(left, index, size)
        best = lax.reduce(scores_left, (lowest, size), better, (axis,))
        # An update of a slice would be a copy that no graph can have either.
        return jnp.where(places == i, best[1][..., None], indices), best

    rows, places = scores.shape[:-1], jnp.arange(count)
    before_all = jnp.full(rows, np.iinfo(np.int32).max), jnp.full(rows, -1)
    indices, _ = lax.fori_loop(0, count, find, (jnp.zeros((*rows, count), jnp.int32), before_all))
    return jnp.take_along_axis(scores, indices, axis=-1), indices


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

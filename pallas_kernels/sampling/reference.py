"""Sampling in plain JAX: what every implementation computes."""

import jax
import jax.numpy as jnp
from jax import lax


def max_and_argmax(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return each row's best score and its index. Arguments as of `api`.

    By two reductions, which XLA computes with vectors on a CPU; for one that carries an index along it has a loop over
    numbers, 2 to 8 times as slow.
    """
    best = jnp.max(scores, axis=-1)
    index, size = lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - 1), scores.shape[-1]
    is_best = (scores == best[..., None]) | (scores != scores)
    return best, jnp.min(jnp.where(is_best, index, size), axis=-1)


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

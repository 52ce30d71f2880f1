"""Integers in the order of floats: bisection can halve the distance of two, and there is one below -inf."""

import jax
import jax.numpy as jnp
from jax import lax


def key_of(x: jax.Array) -> jax.Array:
    """float32 -> int32 whose order is that of the floats; a NaN lies above all of them, or below if it is negative."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def float_of(keys: jax.Array) -> jax.Array:
    """Convert keys back to floats."""
    return lax.bitcast_convert_type(jnp.where(keys < 0, keys ^ 0x7FFFFFFF, keys), jnp.float32)

"""LayerNorm and RMSNorm in plain JAX; kernels compute them as part of a larger operation."""

import jax
import jax.numpy as jnp
from jax import lax


def normalize(x: jax.Array, scale: jax.Array, shift: jax.Array | None, *, eps: float) -> jax.Array:
    """Apply LayerNorm over the last dimension, or RMSNorm if `shift` is None; in float32, rounded to x's dtype.

    x: [..., K]; scale, shift: [K].
    """
    y = x.astype(jnp.float32)
    if shift is not None:
        y -= jnp.mean(y, axis=-1, keepdims=True)
    y *= lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    y *= scale
    if shift is not None:
        y += shift
    return y.astype(x.dtype)

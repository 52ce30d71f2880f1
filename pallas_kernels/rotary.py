"""Rotary position embedding: features of queries and keys turned by angles (arXiv:2104.09864, equation 34)."""

import jax
import jax.numpy as jnp


def rotate(x: jax.Array, rotary: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate the leading features of each head in float32: i with i + R / 2, of the first R.

    Args:
      x: [..., H, K]. rotary: cos and sin of each token's angles, float32 [..., 1, R / 2].
    Returns: as x, in its dtype.
    """
    cos, sin = rotary
    half = cos.shape[-1]
    first, second, rest = jnp.split(x.astype(jnp.float32), (half, 2 * half), axis=-1)
    turned = (first * cos - second * sin, second * cos + first * sin, rest)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)

"""Rotary position embedding (RoPE, arXiv:2104.09864, equation 34)."""

import jax
import jax.numpy as jnp


def rotate(x: jax.Array, rotary: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate the first R features of each head in float32: feature i is paired with i + R / 2.

    Args:
      x: [..., H, K]. rotary: cos and sin of each token's angles, float32 [..., 1, R / 2].
    Returns: as x, in its dtype.
    """
    cos, sin = rotary
    half = cos.shape[-1]
    first, second, rest = jnp.split(x.astype(jnp.float32), (half, 2 * half), axis=-1)
    rotated = (first * cos - second * sin, second * cos + first * sin, rest)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)

"""Convolutions in plain JAX: what every implementation computes."""

import jax
from jax import lax

_NHWC = ("NHWC", "HWIO", "NHWC")


def convolution(x: jax.Array, weight: jax.Array, *, stride: int, padding: int) -> jax.Array:
    """Convolve images with a square kernel. Arguments as of `api`."""
    sides = ((padding, padding),) * 2
    return lax.conv_general_dilated(x, weight, (stride,) * 2, sides, dimension_numbers=_NHWC)

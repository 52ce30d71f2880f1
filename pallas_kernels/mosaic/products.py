"""Products of float32 matrices by `mma.sync`, which multiplies bfloat16."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.pallas_kernels.mosaic import plgpu


def split_bfloat16(x: jax.Array) -> list[jax.Array]:
    """Split float32 x into three bfloat16 that add up to it exactly: eight of its 24 bits each."""
    parts = []
    for _ in range(2):
        high = lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int32) & -65536, jnp.float32)
        parts.append(high.astype(jnp.bfloat16))
        x = x - high
    return [*parts, x.astype(jnp.bfloat16)]


def add_float32_product(acc: jax.Array, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    """acc + lhs rhs, as XLA's BF16_BF16_F32_X6: the six products that matter, the smallest first.

    lhs, rhs: float32, laid out as operands of bfloat16.
    """
    lhs_parts, rhs_parts = split_bfloat16(lhs), split_bfloat16(rhs)
    for i, j in ((0, 2), (2, 0), (1, 1), (0, 1), (1, 0), (0, 0)):
        acc = plgpu.mma(acc, lhs_parts[i], rhs_parts[j])
    return acc

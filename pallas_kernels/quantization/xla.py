"""W8A8 by XLA's matmul."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.pallas_kernels.matmul.api import matmul


def quantized_matmul(
    q: jax.Array, q_scale: jax.Array, weight: jax.Array, scale: jax.Array, bias: jax.Array | None, *, dtype: Any
) -> jax.Array:
    """(q * q_scale) (weight * scale)^T + bias, accumulated in int32."""
    y = matmul(q, weight, accumulator=jnp.int32).astype(jnp.float32) * q_scale * scale
    return (y if bias is None else y + bias).astype(dtype)

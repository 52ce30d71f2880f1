"""W8A8 in plain JAX: what every implementation computes."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.pallas_kernels.norm import normalize
from jaxinfer.pallas_kernels.weights import quantize_rows

__all__ = ["norm_quantize", "quantize_rows", "quantized_matmul"]


def norm_quantize(
    x: jax.Array, scale: jax.Array, shift: jax.Array | None, *, eps: float
) -> tuple[jax.Array, jax.Array]:
    """Quantise the rows of norm(x). Arguments as of `api`."""
    return quantize_rows(normalize(x.astype(jnp.float32), scale, shift, eps=eps))


def quantized_matmul(
    q: jax.Array, q_scale: jax.Array, weight: jax.Array, scale: jax.Array, bias: jax.Array | None = None, *, dtype: Any
) -> jax.Array:
    """(q * q_scale) (weight * scale)^T + bias. Arguments as of `api`."""
    sums = jnp.einsum("...k,nk->...n", q, weight, preferred_element_type=jnp.int32)
    y = sums.astype(jnp.float32) * q_scale * scale
    return (y if bias is None else y + bias).astype(dtype)

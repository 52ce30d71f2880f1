"""W8A8: rows quantised to int8, and their product with int8 weights (DeepSpeed Inference, section III-C)."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.pallas_kernels.dispatch import Operation
from jaxinfer.pallas_kernels.implementation import mosaic, reference, xla
from jaxinfer.pallas_kernels.quantization import mosaic as kernels
from jaxinfer.pallas_kernels.quantization import reference as plain
from jaxinfer.pallas_kernels.quantization import xla as fallbacks

_quantize_rows = Operation("quantize_rows", mosaic(kernels.quantize), reference(plain.quantize_rows))
_norm_quantize = Operation("norm_quantize", mosaic(kernels.quantize), reference(plain.norm_quantize))
_quantized_matmul = Operation("quantized_matmul", mosaic(kernels.matmul), xla(fallbacks.quantized_matmul))


def quantize_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Quantise each row symmetrically to int8, x ~ q * scale: [..., K] -> int8 [..., K], float32 [..., 1]."""
    return _quantize_rows(x)


def norm_quantize(
    x: jax.Array, scale: jax.Array, shift: jax.Array | None, *, eps: float
) -> tuple[jax.Array, jax.Array]:
    """Quantise LayerNorm(x), or RMSNorm(x) if `shift` is None, as `quantize_rows`, without rounding in between.

    Args:
      x: [..., K]. scale, shift: [K].
    Returns: int8 [..., K], float32 [..., 1].
    """
    return _norm_quantize(x, scale, shift, eps=eps)


def quantized_matmul(
    q: jax.Array,
    q_scale: jax.Array,
    weight: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None = None,
    *,
    dtype: Any,
) -> jax.Array:
    """(q * q_scale) (weight * scale)^T + bias, accumulated in int32.

    Args:
      q: int8 [..., K]. q_scale: float32 [..., 1]. weight: int8 [N, K]. scale, bias: [N].
    Returns: [..., N] in `dtype`.
    """
    return _quantized_matmul(q, q_scale, weight, scale, bias, dtype=jnp.dtype(dtype))

"""The linear layer for any number of rows: XLA's matmul, or for int8 weights `quantized_matmul`."""

import jax

from jaxinfer.pallas_kernels.quantized_matmul import quantize_rows, quantized_matmul
from jaxinfer.pallas_kernels.weights import Weights, is_int8, matmul


def linear_fallback(x: jax.Array, weights: Weights, bias: jax.Array | None = None) -> jax.Array:
    """x W^T + b. x: [..., K]; weights: N by K; bias: [N]. Returns [..., N] in x's dtype."""
    if is_int8(weights):
        assert weights.scale is not None
        return quantized_matmul(*quantize_rows(x), weights.weight, weights.scale, bias, dtype=x.dtype)
    y = matmul(x, weights)
    return y if bias is None else y + bias.astype(y.dtype)

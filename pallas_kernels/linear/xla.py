"""Linear layers for any number of rows: XLA's matmul, or for int8 weights the operations of `quantization`."""

import jax
import jax.numpy as jnp

from jaxinfer.pallas_kernels.activations import activate_outputs
from jaxinfer.pallas_kernels.matmul.api import matmul
from jaxinfer.pallas_kernels.norm import normalize
from jaxinfer.pallas_kernels.quantization.api import norm_quantize, quantize_rows, quantized_matmul
from jaxinfer.pallas_kernels.weights import GROUP, Weights, dequantize, is_int4, is_int8, unpack_int4

_FEW_ROWS = 16  # of x; with more, the dequantised int4 matrix is smaller than the partial products of all groups


def linear(x: jax.Array, weights: Weights, bias: jax.Array | None = None) -> jax.Array:
    """x W^T + b. x: [..., K]; weights: N by K; bias: [N]. Returns [..., N] in x's dtype."""
    if is_int8(weights):
        assert weights.scale is not None
        return quantized_matmul(*quantize_rows(x), weights.weight, weights.scale, bias, dtype=x.dtype)
    y = _product(x, weights)
    return y if bias is None else y + bias.astype(y.dtype)


def norm_linear(
    x: jax.Array,
    scale: jax.Array,
    shift: jax.Array | None,
    weights: Weights,
    bias: jax.Array | None = None,
    *,
    eps: float,
    activation: str | None = None,
    gated: bool = False,
) -> jax.Array:
    """act(norm(x) W^T + b); with int8 weights through `norm_quantize` and `quantized_matmul`."""
    if is_int8(weights):
        assert weights.scale is not None
        q, q_scale = norm_quantize(x, scale, shift, eps=eps)
        y = quantized_matmul(q, q_scale, weights.weight, weights.scale, bias, dtype=x.dtype)
    else:
        y = linear(normalize(x, scale, shift, eps=eps), weights, bias)
    return activate_outputs(y, activation, gated=gated)


def linear_residual(x: jax.Array, weights: Weights, residual: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """residual + (x W^T + b), as a linear layer and a sum."""
    return residual + linear(x, weights, bias)


def _product(x: jax.Array, weights: Weights) -> jax.Array:
    """x W^T of weights that are not int8: [..., K] -> [..., N] in x's dtype, accumulated in float32."""
    weight, scale = weights
    if scale is None:
        return matmul(x, weight)
    if is_int4(weights):
        return _int4_product(x, weight, scale)
    y = matmul(x, weight.astype(x.dtype), accumulator=jnp.float32)
    return (y * scale).astype(x.dtype)  # scaled after the matmul: XLA would write a scaled matrix to memory


def _int4_product(x: jax.Array, weight: jax.Array, scale: jax.Array) -> jax.Array:
    """x W^T; with few rows the scales multiply each group's partial product, so that no float matrix is written."""
    rows = x.size // x.shape[-1]
    if rows > _FEW_ROWS:
        return matmul(x, dequantize(Weights(weight, scale), x.dtype), accumulator=jnp.float32).astype(x.dtype)
    grouped = x.reshape(rows, -1, GROUP)
    partial = jnp.einsum(
        "bgk,ngk->bgn", grouped, unpack_int4(weight).astype(x.dtype), preferred_element_type=jnp.float32
    )
    y = jnp.sum(partial * scale.astype(jnp.float32), axis=1)
    return y.astype(x.dtype).reshape(*x.shape[:-1], -1)

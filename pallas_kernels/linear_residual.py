"""A linear layer and the residual after it (DeepSpeed Inference, section III-B, region 4)."""

import jax

from jaxinfer.pallas_kernels.dispatch import dispatch
from jaxinfer.pallas_kernels.linear import linear_fallback
from jaxinfer.pallas_kernels.small_batch_linear import fused_small_batch_linear
from jaxinfer.pallas_kernels.weights import Weights


def linear_residual_fallback(
    x: jax.Array,
    weights: Weights,
    residual: jax.Array,
    bias: jax.Array | None = None,
) -> jax.Array:
    """`linear_residual` as a linear layer and a sum."""
    return residual + linear_fallback(x, weights, bias)


def linear_residual(
    x: jax.Array,
    weights: Weights,
    residual: jax.Array,
    bias: jax.Array | None = None,
) -> jax.Array:
    """residual + (x W^T + b); one kernel for up to 16 rows.

    x: [..., K]; weights: N by K; residual: [..., N]; bias: [N]. Returns [..., N] in x's dtype.
    """
    return dispatch("linear_residual", _kernel, linear_residual_fallback, x, weights, residual, bias)


def _kernel(x: jax.Array, weights: Weights, residual: jax.Array, bias: jax.Array | None) -> jax.Array:
    return fused_small_batch_linear(x, weights, bias, residual)

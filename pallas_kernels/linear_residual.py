"""The product that ends a transformer's block, and the residual (DeepSpeed Inference, section III-B, region 4)."""

import jax

from pallas_kernels.dispatch import dispatch
from pallas_kernels.linear import linear_definition
from pallas_kernels.small_batch_linear import small_batch_product
from pallas_kernels.weights import Weights


def linear_residual_definition(
    x: jax.Array, weights: Weights, residual: jax.Array, bias: jax.Array | None = None
) -> jax.Array:
    """`linear_residual` in plain JAX."""
    return residual + linear_definition(x, weights, bias)


def linear_residual(x: jax.Array, weights: Weights, residual: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """residual + (x W^T + b), one kernel for up to 16 rows.

    x: [..., K]; weights: N by K; residual: [..., N]; bias: [N]. Returns [..., N] in x's dtype.
    """
    return dispatch("linear_residual", _kernel, linear_residual_definition, x, weights, residual, bias)


def _kernel(x: jax.Array, weights: Weights, residual: jax.Array, bias: jax.Array | None) -> jax.Array:
    return small_batch_product(x, weights, bias, residual)

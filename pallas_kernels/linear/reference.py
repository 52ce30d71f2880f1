"""Linear layers in plain JAX: what every implementation computes."""

import jax
import jax.numpy as jnp

from jaxinfer.pallas_kernels.activations import activate_outputs
from jaxinfer.pallas_kernels.norm import normalize
from jaxinfer.pallas_kernels.weights import Weights, dequantize, is_int8, quantize_rows


def linear(x: jax.Array, weights: Weights, bias: jax.Array | None = None) -> jax.Array:
    """x W^T + b, accumulated in float32; rows of x are quantised for int8 weights. Arguments as of `api`."""
    if is_int8(weights):
        assert weights.scale is not None
        q, q_scale = quantize_rows(x)
        y = jnp.einsum("...k,nk->...n", q, weights.weight, preferred_element_type=jnp.int32)
        y = y.astype(jnp.float32) * q_scale * weights.scale
    else:
        matrix = dequantize(weights, jnp.float32)
        y = jnp.einsum("...k,nk->...n", x.astype(jnp.float32), matrix, precision="highest")
    return (y if bias is None else y + bias).astype(x.dtype)


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
    """act(norm(x) W^T + b). Arguments as of `api`."""
    y = linear(normalize(x.astype(jnp.float32), scale, shift, eps=eps), weights, bias)
    return activate_outputs(y, activation, gated=gated).astype(x.dtype)


def linear_residual(x: jax.Array, weights: Weights, residual: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """residual + (x W^T + b). Arguments as of `api`."""
    y = residual.astype(jnp.float32) + linear(x.astype(jnp.float32), weights, bias)
    return y.astype(residual.dtype)

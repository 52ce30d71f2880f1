"""A norm, the product with a matrix of weights, and the activation after it.

DeepSpeed Inference, section III-B, regions 1 and 3: the product of a transformer's attention (norm, QKV) and
the first of its MLP (norm, FC1, activation or gate).
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.activations import activate
from pallas_kernels.dispatch import dispatch
from pallas_kernels.small_batch_linear import Norm, linear_definition, small_batch_product
from pallas_kernels.weights import Weights


def normalize(x: jax.Array, scale: jax.Array, shift: jax.Array | None, *, eps: float) -> jax.Array:
    """LayerNorm over the last dimension, or RMSNorm if there is no shift; in float32, rounded to x's dtype.

    x: [..., K]; scale, shift: [K].
    """
    y = x.astype(jnp.float32)
    if shift is not None:
        y -= jnp.mean(y, axis=-1, keepdims=True)
    y *= lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    y *= scale
    if shift is not None:
        y += shift
    return y.astype(x.dtype)


def norm_linear_definition(
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
    """`norm_linear` in plain JAX."""
    y = linear_definition(normalize(x, scale, shift, eps=eps), weights, bias)
    if gated:
        pairs = y.reshape(*y.shape[:-1], -1, 2)
        gate, up = pairs[..., 0], pairs[..., 1]
        return (gate if activation is None else activate(gate, activation)) * up
    return y if activation is None else activate(y, activation)


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
    """act(norm(x) W^T + b), one kernel for up to 16 rows.

    Args:
      x: [..., K]. scale, shift: [K], of LayerNorm, or of RMSNorm if shift is None. weights: N by K. bias: [N].
      activation: as `activate` names it. gated: the outputs alternate (gate, up); the result is act(gate) * up.
    Returns: [..., N], or [..., N / 2] with `gated`, in x's dtype.
    """
    static = {"eps": eps, "activation": activation, "gated": gated}
    return dispatch("norm_linear", _kernel, norm_linear_definition, x, scale, shift, weights, bias, **static)


def _kernel(
    x: jax.Array,
    scale: jax.Array,
    shift: jax.Array | None,
    weights: Weights,
    bias: jax.Array | None,
    *,
    eps: float,
    activation: str | None,
    gated: bool,
) -> jax.Array:
    return small_batch_product(x, weights, bias, norm=Norm(scale, shift), eps=eps, activation=activation, gated=gated)

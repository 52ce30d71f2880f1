"""A norm, a linear layer, and the activation after it.

DeepSpeed Inference, section III-B, regions 1 and 3: a transformer's QKV projection (norm, QKV) and the first layer of
its MLP (norm, FC1, activation or gate).
"""

import jax

from jaxinfer.pallas_kernels.activations import activate_outputs
from jaxinfer.pallas_kernels.dispatch import dispatch
from jaxinfer.pallas_kernels.linear import linear_fallback
from jaxinfer.pallas_kernels.norm import normalize
from jaxinfer.pallas_kernels.quantized_matmul import norm_quantize, quantized_matmul
from jaxinfer.pallas_kernels.small_batch_linear import Norm, fused_small_batch_linear
from jaxinfer.pallas_kernels.weights import Weights, is_int8


def norm_linear_fallback(
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
    """`norm_linear` in plain JAX; with int8 weights through `norm_quantize` and `quantized_matmul`."""
    if is_int8(weights):
        assert weights.scale is not None
        q, q_scale = norm_quantize(x, scale, shift, eps=eps)
        y = quantized_matmul(q, q_scale, weights.weight, weights.scale, bias, dtype=x.dtype)
    else:
        y = linear_fallback(normalize(x, scale, shift, eps=eps), weights, bias)
    return activate_outputs(y, activation, gated=gated)


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
    """act(norm(x) W^T + b); one kernel for up to 16 rows.

    Args:
      x: [..., K]. scale, shift: [K], of a LayerNorm, or of an RMSNorm if shift is None. weights: N by K. bias: [N].
      activation: a name that `activate` knows. gated: outputs alternate (gate, up); the result is act(gate) * up.
    Returns: [..., N], or [..., N / 2] with `gated`, in x's dtype.
    """
    static = {"eps": eps, "activation": activation, "gated": gated}
    return dispatch("norm_linear", _kernel, norm_linear_fallback, x, scale, shift, weights, bias, **static)


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
    return fused_small_batch_linear(
        x, weights, bias, norm=Norm(scale, shift), eps=eps, activation=activation, gated=gated
    )

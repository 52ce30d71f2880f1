"""Linear layers, fused with the norm before them and the activation, gate or residual after them.

DeepSpeed Inference, section III-B: `norm_linear` is regions 1 and 3 of a transformer layer (norm, QKV projection; norm,
first layer of the MLP, activation or gate), `linear_residual` region 4. Up to 16 rows are one kernel.
"""

import jax

from jaxinfer.pallas_kernels.dispatch import Operation
from jaxinfer.pallas_kernels.implementation import composed, ffi, mosaic
from jaxinfer.pallas_kernels.linear import cpu
from jaxinfer.pallas_kernels.linear import mosaic as kernels
from jaxinfer.pallas_kernels.linear import xla as fallbacks
from jaxinfer.pallas_kernels.weights import Weights

_small_batch_linear = Operation(
    "small_batch_linear", mosaic(kernels.linear), ffi(cpu.linear), composed(fallbacks.linear)
)
_norm_linear = Operation(
    "norm_linear", mosaic(kernels.norm_linear), ffi(cpu.norm_linear), composed(fallbacks.norm_linear)
)
_linear_residual = Operation(
    "linear_residual", mosaic(kernels.linear_residual), ffi(cpu.linear_residual), composed(fallbacks.linear_residual)
)


def small_batch_linear(x: jax.Array, weights: Weights, bias: jax.Array | None = None) -> jax.Array:
    """x W^T + b, for any number of rows.

    Args:
      x: [..., K]. weights: N by K. bias: [N].
    Returns: [..., N] in x's dtype.
    """
    return _small_batch_linear(x, weights, bias)


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
    """act(norm(x) W^T + b).

    Args:
      x: [..., K]. scale, shift: [K], of a LayerNorm, or of an RMSNorm if shift is None. weights: N by K. bias: [N].
      activation: a name that `activate` knows. gated: outputs alternate (gate, up); the result is act(gate) * up.
    Returns: [..., N], or [..., N / 2] with `gated`, in x's dtype.
    Raises: ValueError for an activation that `activate` does not know.
    """
    return _norm_linear(x, scale, shift, weights, bias, eps=eps, activation=activation, gated=gated)


def linear_residual(x: jax.Array, weights: Weights, residual: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """residual + (x W^T + b).

    Args:
      x: [..., K]. weights: N by K. residual: [..., N]. bias: [N].
    Returns: [..., N] in x's dtype.
    """
    return _linear_residual(x, weights, residual, bias)

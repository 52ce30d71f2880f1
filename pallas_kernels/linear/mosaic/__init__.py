"""Linear layers of up to 16 rows as one kernel (`small_batch.py`)."""

import jax

from jaxinfer.pallas_kernels.linear.mosaic.small_batch import Norm, fused_small_batch_linear
from jaxinfer.pallas_kernels.linear.mosaic.tiles import TILE_N
from jaxinfer.pallas_kernels.weights import Weights


def linear(x: jax.Array, weights: Weights, bias: jax.Array | None = None) -> jax.Array:
    """x W^T + b. Raises UnsupportedError."""
    if bias is None or bias.size % TILE_N == 0:
        return fused_small_batch_linear(x, weights, bias)
    y = fused_small_batch_linear(x, weights)  # a vocabulary: XLA fuses the bias into what reads the logits
    return y + bias.astype(y.dtype)


def norm_linear(
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
    """act(norm(x) W^T + b). Raises UnsupportedError."""
    return fused_small_batch_linear(
        x, weights, bias, norm=Norm(scale, shift), eps=eps, activation=activation, gated=gated
    )


def linear_residual(x: jax.Array, weights: Weights, residual: jax.Array, bias: jax.Array | None) -> jax.Array:
    """residual + (x W^T + b). Raises UnsupportedError."""
    return fused_small_batch_linear(x, weights, bias, residual)

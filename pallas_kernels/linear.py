"""Matrix products with weights, in float and in int8: the definitions. `weights.py` says how weights are held."""

import jax
import jax.numpy as jnp

from pallas_kernels.weights import contract, quantize_rows


def linear(x: jax.Array, kernel: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """x W^T + b. x: [..., K]; kernel: [N, K]; bias: [N]. Returns [..., N] in x's dtype."""
    y = contract(x, kernel)
    return y if bias is None else y + bias.astype(y.dtype)


def quantized_linear(x: jax.Array, kernel: jax.Array, scale: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """x W^T + b with int8 weights and rows of x quantised on the fly; int32 accumulation, scaled after the product.

    x: [..., K]; kernel: int8 [N, K]; scale: float32 [N], one per output channel; bias: [N].
    Returns [..., N] in x's dtype.
    """
    q, x_scale = quantize_rows(x)
    product = contract(q, kernel, accumulator=jnp.int32)
    y = product.astype(jnp.float32) * x_scale * scale
    return (y if bias is None else y + bias).astype(x.dtype)

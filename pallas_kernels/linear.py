"""Matrix products with weights, in float and in int8: the definitions.

A weight is [N, K]: N outputs of K inputs each, the inputs contiguous. A GPU reduces such rows at batch 1 without
writing the product to memory; XLA:CPU, too, multiplies one row by them faster than by [K, N] (`docs/cpu-speed.md`).
"""

import jax
import jax.numpy as jnp
from jax import lax


def _contract(x: jax.Array, kernel: jax.Array, accumulator=None) -> jax.Array:
    def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return lax.dot_general(x, kernel, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=accumulator)

    def product_of_two_rows(x: jax.Array, kernel: jax.Array) -> jax.Array:
        rows = jnp.pad(x.reshape(1, -1), ((0, 1), (0, 0)))
        return product(rows, kernel)[0].reshape(*x.shape[:-1], -1)

    if x.size == x.shape[-1] and x.dtype != jnp.float32:
        # XLA:CPU has no fast path for one row in anything but float32, and multiplies element by element.
        return lax.platform_dependent(x, kernel, cpu=product_of_two_rows, default=product)
    return product(x, kernel)


def linear(x: jax.Array, kernel: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """x W^T + b. x: [..., K]; kernel: [N, K]; bias: [N]. Returns [..., N] in x's dtype."""
    y = _contract(x, kernel)
    return y if bias is None else y + bias.astype(y.dtype)


def quantize_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Symmetric int8 per row: x ~ q * scale. x: [..., K] -> int8 [..., K], float32 [..., 1].

    DeepSpeed Inference, section III-C (dynamic activation quantisation); weights use it with K last.
    """
    x = x.astype(jnp.float32)
    scale = jnp.maximum(jnp.max(jnp.abs(x), axis=-1, keepdims=True), 1e-30) / 127.0
    return jnp.round(x / scale).astype(jnp.int8), scale


def quantized_linear(x: jax.Array, kernel: jax.Array, scale: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """x W^T + b with int8 weights and rows of x quantised on the fly; int32 accumulation, scaled after the product.

    x: [..., K]; kernel: int8 [N, K]; scale: float32 [N], one per output channel; bias: [N].
    Returns [..., N] in x's dtype.
    """
    q, x_scale = quantize_rows(x)
    product = _contract(q, kernel, accumulator=jnp.int32)
    y = product.astype(jnp.float32) * x_scale * scale
    return (y if bias is None else y + bias).astype(x.dtype)

"""Matrix products with weights, in float and in int8: the definitions.

A weight has N outputs and K inputs. Which of the two lies innermost in memory decides the speed at small batch
and differs by platform, so it is part of the operation (`KernelLayout`), chosen once when weights are loaded.
"""

import enum

import jax
import jax.numpy as jnp
from jax import lax


class KernelLayout(enum.StrEnum):
    """The order of a weight's two dimensions."""

    NK = "nk"  # [outputs, inputs]: contiguous rows for a GPU's row reduction at batch 1
    KN = "kn"  # [inputs, outputs]: what XLA:CPU multiplies fastest at 2 to 8 rows

    @property
    def contraction(self) -> int:
        """The dimension that holds the K inputs."""
        return 1 if self is KernelLayout.NK else 0


def _contract(x: jax.Array, kernel: jax.Array, layout: KernelLayout, accumulator=None) -> jax.Array:
    def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
        dims = (((x.ndim - 1,), (layout.contraction,)), ((), ()))
        return lax.dot_general(x, kernel, dims, preferred_element_type=accumulator)

    def product_of_two_rows(x: jax.Array, kernel: jax.Array) -> jax.Array:
        rows = jnp.pad(x.reshape(1, -1), ((0, 1), (0, 0)))
        return product(rows, kernel)[0].reshape(*x.shape[:-1], -1)

    if x.size == x.shape[-1] and x.dtype != jnp.float32:
        # XLA:CPU has no fast path for one row in anything but float32, and multiplies element by element.
        return lax.platform_dependent(x, kernel, cpu=product_of_two_rows, default=product)
    return product(x, kernel)


def linear(x: jax.Array, kernel: jax.Array, bias: jax.Array | None = None, *, layout: KernelLayout) -> jax.Array:
    """x W + b. x: [..., K]; kernel: [N, K] or [K, N] by `layout`; bias: [N]. Returns [..., N] in x's dtype."""
    y = _contract(x, kernel, layout)
    return y if bias is None else y + bias.astype(y.dtype)


def quantize_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Symmetric int8 per row: x ~ q * scale. x: [..., K] -> int8 [..., K], float32 [..., 1].

    DeepSpeed Inference, section III-C (dynamic activation quantisation); weights use it with K last.
    """
    x = x.astype(jnp.float32)
    scale = jnp.maximum(jnp.max(jnp.abs(x), axis=-1, keepdims=True), 1e-30) / 127.0
    return jnp.round(x / scale).astype(jnp.int8), scale


def quantized_linear(
    x: jax.Array, kernel: jax.Array, scale: jax.Array, bias: jax.Array | None = None, *, layout: KernelLayout
) -> jax.Array:
    """x W + b with int8 weights and rows of x quantised on the fly; int32 accumulation, scaled after the product.

    x: [..., K]; kernel: int8 [N, K] or [K, N] by `layout`; scale: float32 [N], one per output channel; bias: [N].
    Returns [..., N] in x's dtype.
    """
    q, x_scale = quantize_rows(x)
    product = _contract(q, kernel, layout, accumulator=jnp.int32)
    y = product.astype(jnp.float32) * x_scale * scale
    return (y if bias is None else y + bias).astype(x.dtype)

"""Convolutions over images, [B, H, W, C].

Batch normalisation is folded into weight and bias when a checkpoint is converted, so no model has any. Kernels are
stored as [height, width, inputs, outputs]: XLA computes with them as they are on a CPU, where any other layout is
transposed in every call (docs/cpu-speed.md).
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxinfer.models.weight_format import WeightFormat

NHWC = ("NHWC", "HWIO", "NHWC")

SMALL_GRID = 20 * 20
"""Places up to which a convolution on a CPU is a product of patches: XLA's own is slower there, for any batch."""


class Conv(nnx.Module):
    """A convolution and its bias, [B, H, W, inputs] -> [B, H / stride, W / stride, outputs].

    Attributes:
      weight: [size, size, inputs, outputs].
      bias: float32 [outputs].
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        weights: WeightFormat,
        *,
        size: int = 1,
        stride: int = 1,
        padding: int | None = None,  # on every side; None: size // 2
        rngs: nnx.Rngs,
    ):
        self.stride, self.padding = stride, size // 2 if padding is None else padding
        shape = (size, size, inputs, outputs)
        kernel = nnx.initializers.lecun_normal()(rngs.params(), shape, jnp.float32)
        self.weight = nnx.Param(kernel.astype(weights.dtype), axes=(None,) * 4)
        self.bias = nnx.Param(jnp.zeros(outputs, jnp.float32), axes=(None,))

    def __call__(self, x: jax.Array) -> jax.Array:
        return (self._convolve(x) + self.bias[...]).astype(x.dtype)

    def _convolve(self, x: jax.Array) -> jax.Array:
        weight = self.weight[...]
        if weight.shape[:2] == (1, 1):
            return x[:, :: self.stride, :: self.stride] @ weight[0, 0]
        padding = ((self.padding, self.padding),) * 2

        def convolution(x: jax.Array, weight: jax.Array) -> jax.Array:
            return lax.conv_general_dilated(x, weight, (self.stride,) * 2, padding, dimension_numbers=NHWC)

        def product(x: jax.Array, weight: jax.Array) -> jax.Array:
            patches = _patches(jnp.pad(x, ((0, 0), *padding, (0, 0))), len(weight), self.stride)
            return patches @ weight.reshape(patches.shape[-1], -1)

        if x.shape[1] * x.shape[2] <= SMALL_GRID:
            return lax.platform_dependent(x, weight, cpu=product, default=convolution)
        return convolution(x, weight)


def _patches(x: jax.Array, size: int, stride: int) -> jax.Array:
    """What each window of size x size has, [B, H, W, C] -> [B, H', W', size * size * C], as kernels are ordered."""
    rows, columns = (side - size + 1 for side in x.shape[1:3])  # where windows begin, a stride apart
    parts = [x[:, i : i + rows : stride, j : j + columns : stride] for i in range(size) for j in range(size)]
    return jnp.concatenate(parts, axis=-1)


def max_pool(x: jax.Array, *, size: int, stride: int = 1) -> jax.Array:
    """The largest value of each window of size x size; windows reach size // 2 places beyond every side."""
    window, strides, reach = (1, size, size, 1), (1, stride, stride, 1), (size // 2, size // 2)
    lowest = np.array(-np.inf, x.dtype)  # concrete: otherwise JAX does not know it as a maximum, and has no gradient
    return lax.reduce_window(x, lowest, lax.max, window, strides, ((0, 0), reach, reach, (0, 0)))

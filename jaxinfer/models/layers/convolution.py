"""Convolutions over images, [B, H, W, C].

Batch normalisation is folded into weight and bias when a checkpoint is converted, so no model has any.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxinfer.models.weight_format import WeightFormat
from jaxinfer.pallas_kernels.convolution.api import convolution


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
        """convolution(x) + bias."""
        y = convolution(x, self.weight[...], stride=self.stride, padding=self.padding)
        return (y + self.bias[...]).astype(x.dtype)


def max_pool(x: jax.Array, *, size: int, stride: int = 1) -> jax.Array:
    """Take the largest value of each window of size x size; windows reach size // 2 places beyond every side."""
    window, strides, reach = (1, size, size, 1), (1, stride, stride, 1), (size // 2, size // 2)
    lowest = np.array(-np.inf, x.dtype)  # concrete: otherwise JAX does not know it as a maximum, and has no gradient
    return lax.reduce_window(x, lowest, lax.max, window, strides, ((0, 0), reach, reach, (0, 0)))

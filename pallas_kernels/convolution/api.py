"""Convolutions over images, [B, H, W, C].

Kernels are [height, width, inputs, outputs]: XLA computes with them as they are on a CPU, where any other layout is
transposed in every call (docs/cpu-speed.md).
"""

import jax

from jaxinfer.pallas_kernels.convolution import reference as plain
from jaxinfer.pallas_kernels.convolution import xla as fallbacks
from jaxinfer.pallas_kernels.dispatch import Operation
from jaxinfer.pallas_kernels.implementation import Implementation, reference, xla

_convolution = Operation(
    "convolution",
    Implementation(name="pointwise", call=fallbacks.pointwise),
    xla(fallbacks.product_of_patches, platform="cpu"),
    reference(plain.convolution),
)


def convolution(x: jax.Array, weight: jax.Array, *, stride: int, padding: int) -> jax.Array:
    """Convolve images with a square kernel.

    Args:
      x: [B, H, W, inputs]. weight: [size, size, inputs, outputs].
      stride: of the windows, in both directions. padding: zeros on every side.
    Returns: [B, H', W', outputs], H' = (H + 2 padding - size) // stride + 1.
    """
    return _convolution(x, weight, stride=stride, padding=padding)

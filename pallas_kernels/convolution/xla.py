"""Convolutions as matmuls, where XLA's own are slower (docs/cpu-speed.md)."""

import jax
import jax.numpy as jnp

from jaxinfer.pallas_kernels.target import UnsupportedError

SMALL_GRID = 20 * 20
"""Places up to which a convolution on a CPU is a product of patches: XLA's own is slower there, for any batch."""


def pointwise(x: jax.Array, weight: jax.Array, *, stride: int, padding: int) -> jax.Array:
    """Multiply each place by a kernel of one place. Arguments as of `api`. Raises UnsupportedError."""
    if weight.shape[:2] != (1, 1) or padding:
        raise UnsupportedError("a matmul of places takes kernels of 1x1 without padding")
    return x[:, ::stride, ::stride] @ weight[0, 0]


def product_of_patches(x: jax.Array, weight: jax.Array, *, stride: int, padding: int) -> jax.Array:
    """Multiply the contents of all windows by the kernel. Arguments as of `api`. Raises UnsupportedError."""
    if x.shape[1] * x.shape[2] > SMALL_GRID:
        raise UnsupportedError(f"a matmul of patches is for grids of up to {SMALL_GRID} places, got {x.shape[1:3]}")
    patches = _patches(jnp.pad(x, ((0, 0), (padding, padding), (padding, padding), (0, 0))), len(weight), stride)
    return patches @ weight.reshape(patches.shape[-1], -1)


def _patches(x: jax.Array, size: int, stride: int) -> jax.Array:
    """Gather the content of each window of size x size, in the order of the kernels.

    [B, H, W, C] -> [B, H', W', size * size * C].
    """
    rows, columns = (side - size + 1 for side in x.shape[1:3])  # where windows begin, a stride apart
    parts = [x[:, i : i + rows : stride, j : j + columns : stride] for i in range(size) for j in range(size)]
    return jnp.concatenate(parts, axis=-1)

"""The product of rows with their experts' matrices by XLA's matmul."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.pallas_kernels.linear.api import small_batch_linear
from jaxinfer.pallas_kernels.weights import Weights

_FEWEST_ROWS = 8  # of a tile: a copy of the matrix takes longer than as many rows
_MOST_ROWS = 64


def grouped_matmul(x: jax.Array, weights: Weights, offsets: jax.Array, sizes: jax.Array) -> jax.Array:
    """Loop over tiles of rows of one expert each, whose matrix is copied out of the stack. Arguments as of `api`."""
    (rows, _), (experts, outputs, _) = x.shape, weights.shape
    tile_rows = 1 << max(2 * rows // experts - 1, 0).bit_length()  # a power of two
    tile_rows = min(max(tile_rows, _FEWEST_ROWS), _MOST_ROWS)
    tiles = (sizes + tile_rows - 1) // tile_rows
    ends = jnp.cumsum(tiles)
    x = jnp.pad(x, ((0, tile_rows), (0, 0)))

    def multiply(i: jax.Array, y: jax.Array) -> jax.Array:
        expert = jnp.sum(ends <= i)
        first = offsets[expert] + (i - ends[expert] + tiles[expert]) * tile_rows
        matrix = jax.tree.map(lambda leaf: _matrix(leaf, expert), weights)
        product = small_batch_linear(lax.dynamic_slice_in_dim(x, first, tile_rows), matrix)
        # This may write past the expert's rows; the next experts overwrite that.
        return lax.dynamic_update_slice_in_dim(y, product, first, 0)

    y = jnp.pad(x[:, :0], ((0, 0), (0, outputs)))  # zeros with x's sharding
    return lax.fori_loop(0, ends[-1], multiply, y)[:rows]


def _matrix(stack: jax.Array, index: jax.Array) -> jax.Array:
    """Take one out of a stack.

    XLA:CPU would convert a whole stack of fp8 before, but takes one out of bytes; the barrier keeps it from copying all
    bytes ahead of the loop.
    """
    if stack.dtype != jnp.float8_e4m3fn:
        return stack[index]
    stack, index = lax.optimization_barrier((stack, index))
    return lax.bitcast_convert_type(lax.bitcast_convert_type(stack, jnp.uint8)[index], stack.dtype)

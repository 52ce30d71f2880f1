"""How arrays lie in SMEM, and loads, vectors and constants in the register layouts of matrices.

A register layout says which thread has which elements. That of a vector along an axis of a matrix is the matrix's,
reduced over the other axis, so that repeating the vector moves nothing between threads.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.pallas_kernels.mosaic import plgpu
from jaxinfer.pallas_kernels.mosaic.refs import Ref

_SWIZZLE_BYTES = 128  # of a row of a swizzled tile: the widest swizzle


def swizzled(row_bytes: int = _SWIZZLE_BYTES) -> tuple[Any, ...]:
    """The SMEM transforms of rows of `row_bytes`, swizzled over the banks."""
    return (plgpu.SwizzleTransform(row_bytes),)  # pyright: ignore[reportAbstractUsage]  # it takes it for abstract


def swizzled_tiles(dtype: Any, row_bytes: int = _SWIZZLE_BYTES, rows: int = 8) -> tuple[Any, ...]:
    """The SMEM transforms of a matrix in tiles of `rows` rows of `row_bytes`, swizzled over the banks."""
    tiling = plgpu.TilingTransform((rows, row_bytes // np.dtype(dtype).itemsize))  # pyright: ignore[reportAbstractUsage]
    return (tiling, *swizzled(row_bytes))


def load(ref: Ref, layout: Any) -> jax.Array:
    """Load into this register layout, also where that costs bank conflicts or several instructions."""
    return plgpu.load(ref, layout=layout, optimized=False)


def broadcast(vector: jax.Array, shape: tuple[int, ...], axis: int, layout: Any = None) -> jax.Array:
    """Broadcast the vector along `axis` to a matrix of this shape.

    layout: the matrix's, for kernels whose layouts Mosaic does not infer (`LoweringSemantics.Lane`).
    """
    matrix = lax.broadcast_in_dim(vector, shape, (axis,))
    return matrix if layout is None else plgpu.layout_cast(matrix, layout)


def load_broadcast(ref: Ref, shape: tuple[int, ...], axis: int, layout: Any) -> jax.Array:
    """Load a vector and repeat it: along `axis` of a matrix of this shape and layout."""
    return broadcast(load(ref, layout.reduce(1 - axis)), shape, axis)


def full(shape: tuple[int, ...], value: Any, dtype: Any, layout: Any) -> jax.Array:
    """An array of one value in this register layout."""
    return plgpu.layout_cast(jnp.full(shape, value, dtype), layout)


def iota(shape: tuple[int, ...], axis: int, layout: Any) -> jax.Array:
    """Compute each element's index along `axis`, int32, in this register layout."""
    return plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, shape, axis), layout)


def store(ref: Ref, value: jax.Array) -> None:
    """Store also where that costs bank conflicts: the default of JAX 0.11, an option in 0.12."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        ref[...] = value

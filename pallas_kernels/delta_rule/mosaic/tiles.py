"""Sizes and layouts that the two kernels of prompts share, and their products."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.pallas_kernels.mosaic import pl, plgpu
from jaxinfer.pallas_kernels.mosaic.layout import full, load, swizzled_tiles
from jaxinfer.pallas_kernels.mosaic.products import add_float32_product
from jaxinfer.pallas_kernels.mosaic.refs import Ref, smem

CHUNK = 64
"""Tokens of a chunk: the rows of an mma by all four warps."""
SLICE = 16
"""Columns of operands in registers at a time, and of a tile in SMEM: those of an mma."""


def matrix(*shape: int) -> Ref:
    """Declare float32 matrices in SMEM."""
    return smem(shape, jnp.float32, swizzled_tiles(jnp.float32, 4 * SLICE))


def layout() -> Any:
    """The register layout of matrices; a warp has 16 of each 64 rows."""
    return plgpu.Layout.MMA_ACC(jnp.bfloat16)


def multiply(a: Ref, b: Ref, acc: jax.Array | None = None) -> jax.Array:
    """acc + a b^T in float32, of matrices [64, I] and [J, I] in SMEM: Mosaic loads operands along their rows only."""
    lhs, rhs = plgpu.Layout.MMA_LHS(jnp.bfloat16), plgpu.Layout.MMA_RHS(jnp.bfloat16)
    if acc is None:
        acc = full((a.shape[0], b.shape[0]), 0, jnp.float32, layout())

    def add(i: jax.Array, acc: jax.Array) -> jax.Array:
        inner = pl.ds(i * SLICE, SLICE)
        return add_float32_product(acc, load(a.at[:, inner], lhs), load(b.at[:, inner].T, rhs))

    return lax.fori_loop(0, a.shape[1] // SLICE, add, acc)

"""Permuting tokens to their experts and back as kernels, by index tables instead of matmuls with one-hot masks.

DeepSpeed Inference, section V-C, steps 3 and 4. Both kernels only move memory: a thread block copies a tile of columns
of a few rows through registers, 16 bytes per thread and row, with all rows in flight together.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.pallas_kernels.moe.routing import Routing
from jaxinfer.pallas_kernels.mosaic import pl, plgpu
from jaxinfer.pallas_kernels.mosaic.refs import Ref
from jaxinfer.pallas_kernels.target import UnsupportedError

_TILE_ROWS = 8  # rows of a thread block, if there are enough for all SMs
_FEW_ROWS = 1024  # up to this many rows get a thread block each
_MAX_K = 16  # experts per token, whose rows are in registers together


def permute(x: jax.Array, routing: Routing) -> jax.Array:
    """Copy tokens to their rows. Arguments as of `api`. Raises UnsupportedError."""
    columns, rows = x.shape[1], len(routing.tokens)

    def copy(x_g, tokens_g, y_g, *, rows_at, columns_at):
        sources = [tokens_g[row] for row in rows_at]
        values = [_read(x_g, source, columns_at) for source in sources]
        for row, value in zip(rows_at, values, strict=True):
            y_g[row, columns_at] = value

    return _row_kernel("moe_permute", copy, jax.ShapeDtypeStruct((rows, columns), x.dtype))(x, routing.tokens)


def unpermute(y: jax.Array, routing: Routing) -> jax.Array:
    """Sum each token's rows by their weights. Arguments as of `api`. Raises UnsupportedError."""
    (tokens, k), columns = routing.rows.shape, y.shape[1]
    if k > _MAX_K:
        raise UnsupportedError(f"unpermute takes up to {_MAX_K} experts per token, got {k}")

    def combine(y_g, rows_g, weights_g, out_g, *, rows_at, columns_at):
        for token in rows_at:
            sources = [rows_g[token, choice] for choice in range(k)]
            values = [_read(y_g, source, columns_at) for source in sources]
            total = jnp.zeros(values[0].shape, jnp.float32)
            for choice, value in enumerate(values):
                total += weights_g[token, choice] * value.astype(jnp.float32)
            out_g[token, columns_at] = total.astype(y.dtype)

    return _row_kernel("moe_unpermute", combine, jax.ShapeDtypeStruct((tokens, columns), y.dtype))(
        y, routing.rows, routing.weights
    )


def _read(ref: Ref, row: jax.Array, columns: Any) -> jax.Array:
    """A slice of a row; zero if the row is out of bounds, whatever is in a table."""
    layout = plgpu.Layout.WG_STRIDED((columns.size,), vec_size=columns.size // 128)
    last = ref.shape[0] - 1
    value = plgpu.load(ref.at[jnp.clip(row, 0, last), columns], layout=layout)
    return jnp.where(jnp.full(value.shape, (row >= 0) & (row <= last)), value, jnp.zeros_like(value))


def _row_kernel(name: str, body: Callable[..., None], out: jax.ShapeDtypeStruct):
    """A kernel with a thread block per tile of result rows and columns; the last one repeats the last row."""
    rows, columns = out.shape
    width = 2048 // out.dtype.itemsize  # 16 bytes per thread
    while columns % width:
        width //= 2
    if width < 128:
        raise UnsupportedError(f"D must be a multiple of 128, got {columns}")
    tile_rows = 1 if rows <= _FEW_ROWS else _TILE_ROWS

    def kernel(*refs: Ref) -> None:
        rows_at = [jnp.minimum(lax.axis_index("rows") * tile_rows + i, rows - 1) for i in range(tile_rows)]
        body(*refs, rows_at=rows_at, columns_at=pl.ds(lax.axis_index("columns") * width, width))

    return plgpu.kernel(
        kernel,
        out_type=out,
        grid=(pl.cdiv(rows, tile_rows), columns // width),
        grid_names=("rows", "columns"),
        kernel_name=name,
    )

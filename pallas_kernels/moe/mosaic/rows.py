"""Permuting tokens to their experts and back as kernels, by index tables instead of matmuls with one-hot masks.

DeepSpeed Inference, section V-C, steps 3 and 4. Both kernels only move memory: a thread block copies a tile of columns
of a few rows through registers, 16 bytes per thread and row, with all rows in flight together.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.pallas_kernels.moe.routing import Routing
from jaxinfer.pallas_kernels.mosaic import pl, plgpu
from jaxinfer.pallas_kernels.mosaic.refs import Ref, gmem
from jaxinfer.pallas_kernels.target import UnsupportedError

_TILE_ROWS = 8  # rows of a thread block, if there are enough for all SMs
_FEW_ROWS = 1024  # up to this many rows get a thread block each
_MAX_K = 16  # experts per token, whose rows are in registers together


class _Block(NamedTuple):
    """The rows and the columns (a slice) of the result that a thread block computes."""

    rows: list[jax.Array]
    columns: Any


class _PermuteInputs(NamedTuple):
    """Arrays in global memory: x [N, D], and int32 tokens [R]."""

    x: Ref
    tokens: Ref


class _UnpermuteInputs(NamedTuple):
    """Arrays in global memory: y [R, D], int32 rows [N, k], float32 weights [N, k]."""

    y: Ref
    rows: Ref
    weights: Ref


def permute(x: jax.Array, routing: Routing) -> jax.Array:
    """Copy tokens to their rows. Arguments as of `api`. Raises UnsupportedError."""
    result = jax.ShapeDtypeStruct((len(routing.tokens), x.shape[1]), x.dtype)
    return _row_kernel("moe_permute", _copy, result)(_PermuteInputs(gmem(x), gmem(routing.tokens)))


def unpermute(y: jax.Array, routing: Routing) -> jax.Array:
    """Sum each token's rows by their weights. Arguments as of `api`. Raises UnsupportedError."""
    tokens, k = routing.rows.shape
    if k > _MAX_K:
        raise UnsupportedError(f"unpermute takes up to {_MAX_K} experts per token, got {k}")
    inputs = _UnpermuteInputs(gmem(y), gmem(routing.rows), gmem(routing.weights))
    return _row_kernel("moe_unpermute", _combine, jax.ShapeDtypeStruct((tokens, y.shape[1]), y.dtype))(inputs)


def _row_kernel(
    name: str, compute: Callable[[Any, Ref, _Block], None], result: jax.ShapeDtypeStruct
) -> Callable[[Any], jax.Array]:
    """A kernel with a thread block per tile of result rows and columns; the last one repeats the last row."""
    rows, columns = result.shape
    width = 2048 // result.dtype.itemsize  # 16 bytes per thread
    while columns % width:
        width //= 2
    if width < 128:
        raise UnsupportedError(f"D must be a multiple of 128, got {columns}")
    tile_rows = 1 if rows <= _FEW_ROWS else _TILE_ROWS
    return plgpu.kernel(
        functools.partial(_kernel, compute, rows, tile_rows, width),
        out_type=result,
        grid=(pl.cdiv(rows, tile_rows), columns // width),
        grid_names=("rows", "columns"),
        kernel_name=name,
    )


def _kernel(
    compute: Callable[[Any, Ref, _Block], None], rows: int, tile_rows: int, width: int, inputs: Any, result: Ref
) -> None:
    """Compute one tile of the result."""
    tile = [jnp.minimum(lax.axis_index("rows") * tile_rows + i, rows - 1) for i in range(tile_rows)]
    compute(inputs, result, _Block(tile, pl.ds(lax.axis_index("columns") * width, width)))


def _copy(inputs: _PermuteInputs, result: Ref, block: _Block) -> None:
    """Copy the block's rows. result: [R, D] in global memory."""
    sources = [inputs.tokens[row] for row in block.rows]
    values = [_read(inputs.x, source, block.columns) for source in sources]
    for row, value in zip(block.rows, values, strict=True):
        result[row, block.columns] = value


def _combine(inputs: _UnpermuteInputs, result: Ref, block: _Block) -> None:
    """Sum the rows of the block's tokens. result: [N, D] in global memory."""
    k = inputs.rows.shape[1]
    for token in block.rows:
        sources = [inputs.rows[token, choice] for choice in range(k)]
        values = [_read(inputs.y, source, block.columns) for source in sources]
        total = jnp.zeros(values[0].shape, jnp.float32)
        for choice, value in enumerate(values):
            total += inputs.weights[token, choice] * value.astype(jnp.float32)
        result[token, block.columns] = total.astype(result.dtype)


def _read(ref: Ref, row: jax.Array, columns: Any) -> jax.Array:
    """Load a slice of a row; zero if the row is out of bounds, whatever is in a table."""
    layout = plgpu.Layout.WG_STRIDED((columns.size,), vec_size=columns.size // 128)
    last = ref.shape[0] - 1
    value = plgpu.load(ref.at[jnp.clip(row, 0, last), columns], layout=layout)
    return jnp.where(jnp.full(value.shape, (row >= 0) & (row <= last)), value, jnp.zeros_like(value))

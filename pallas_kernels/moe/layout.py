"""Rows to their experts and back: copies by table, where the first MoE implementations multiplied by one-hot masks.

DeepSpeed Inference, section V-C, steps 3 and 4. Both kernels only move memory: a block copies one stretch of columns of
a few rows straight through registers, 16 bytes a thread and a row, all rows in flight together.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import UnsupportedError, dispatch
from pallas_kernels.moe.gating import Routing


def permute(x: jax.Array, routing: Routing) -> jax.Array:
    """The tokens in the order of their rows, sorted by expert: [N, D] -> [R, D]. Empty rows are zero."""
    return dispatch("permute", _permute_kernel, _permute_definition, x, routing)


def unpermute(y: jax.Array, routing: Routing) -> jax.Array:
    """The weighted sum of each token's rows, in float32: [R, D] -> [N, D] in y's dtype. Empty rows are not read."""
    return dispatch("unpermute", _unpermute_kernel, _unpermute_definition, y, routing)


def _permute_definition(x: jax.Array, routing: Routing) -> jax.Array:
    return x.at[routing.tokens].get(mode="fill", fill_value=0)


def _unpermute_definition(y: jax.Array, routing: Routing) -> jax.Array:
    def part(choice: int) -> jax.Array:
        rows = y.at[routing.rows[:, choice]].get(mode="fill", fill_value=0)
        return routing.weights[:, choice, None] * rows.astype(jnp.float32)

    total = part(0)
    for choice in range(1, routing.rows.shape[1]):
        total += part(choice)
    return total.astype(y.dtype)


_GROUP = 8  # rows of a block, where there are enough for all SMs
_FEW = 1024  # rows; fewer get a block each
_MAX_CHOICES = 16  # of a token, whose rows are in registers together


def _permute_kernel(x: jax.Array, routing: Routing) -> jax.Array:
    columns, rows = x.shape[1], len(routing.tokens)

    def copy(x_g, tokens_g, y_g, *, rows_at, columns_at):
        sources = [tokens_g[row] for row in rows_at]
        values = [_read(x_g, source, columns_at) for source in sources]
        for row, value in zip(rows_at, values, strict=True):
            y_g[row, columns_at] = value

    return _launch("moe_permute", copy, jax.ShapeDtypeStruct((rows, columns), x.dtype))(x, routing.tokens)


def _unpermute_kernel(y: jax.Array, routing: Routing) -> jax.Array:
    (tokens, k), columns = routing.rows.shape, y.shape[1]
    if k > _MAX_CHOICES:
        raise UnsupportedError(f"it takes up to {_MAX_CHOICES} choices of a token, got {k}")

    def mix(y_g, rows_g, weights_g, out_g, *, rows_at, columns_at):
        for token in rows_at:
            sources = [rows_g[token, choice] for choice in range(k)]
            values = [_read(y_g, source, columns_at) for source in sources]
            total = jnp.zeros(values[0].shape, jnp.float32)
            for choice, value in enumerate(values):
                total += weights_g[token, choice] * value.astype(jnp.float32)
            out_g[token, columns_at] = total.astype(y.dtype)

    return _launch("moe_unpermute", mix, jax.ShapeDtypeStruct((tokens, columns), y.dtype))(
        y, routing.rows, routing.weights
    )


def _read(ref, row, columns):
    """A stretch of a row, zero if the row is beyond the last."""
    layout = plgpu.Layout.WG_STRIDED((columns.size,), vec_size=columns.size // 128)
    value = plgpu.load(ref.at[jnp.minimum(row, ref.shape[0] - 1), columns], layout=layout)
    return jnp.where(jnp.full(value.shape, row < ref.shape[0]), value, jnp.zeros_like(value))


def _launch(name: str, body, out: jax.ShapeDtypeStruct):
    """A block for each stretch of columns of a few result rows; the last block repeats the last row."""
    rows, columns = out.shape
    width = 2048 // out.dtype.itemsize  # 16 bytes a thread
    while columns % width:
        width //= 2
    if width < 128:
        raise UnsupportedError(f"it takes D in multiples of 128, got {columns}")
    group = 1 if rows <= _FEW else _GROUP

    def kernel(*refs):
        rows_at = [jnp.minimum(lax.axis_index("rows") * group + i, rows - 1) for i in range(group)]
        body(*refs, rows_at=rows_at, columns_at=pl.ds(lax.axis_index("columns") * width, width))

    return plgpu.kernel(
        kernel,
        out_type=out,
        grid=(pl.cdiv(rows, group), columns // width),
        grid_names=("rows", "columns"),
        kernel_name=name,
    )

"""Rows of x that the small-batch kernel normalises or quantises at its start and keeps in shared memory."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.pallas_kernels.linear.mosaic.tiles import Plan
from jaxinfer.pallas_kernels.mosaic import fragmented_array, pl, plgpu
from jaxinfer.pallas_kernels.mosaic.layout import broadcast, load, store
from jaxinfer.pallas_kernels.mosaic.refs import Ref


class NormRefs(NamedTuple):
    """The norm's arrays in global memory, [K]; `shift` is None for an RMSNorm."""

    scale: Ref
    shift: Ref | None


def prepare_rows(
    plan: Plan, x: Ref, norm: NormRefs | None, first_input: jax.Array, x_s: Ref, x_scale_s: Ref | None
) -> None:
    """Normalise and/or quantise rows of x and write this split's inputs, from `first_input` on, to shared memory.

    Every thread block computes the statistics of the whole rows itself: as many rows at a time as fit into 128
    registers per thread, or 64 if it also needs the maximum of the normalised inputs.
    """
    layout, registers_per_row = row_layout(plan.inputs)
    width = plan.iterations * plan.tiles.tile_k
    all_inputs, split_inputs, split_layout = pl.ds(0, plan.inputs), pl.ds(first_input, width), row_layout(width)[0]
    rows_at_once = max(1, (64 if plan.operand.quantizes and plan.eps is not None else 128) // registers_per_row)
    for first in range(0, plan.rows, rows_at_once):
        rows = pl.ds(first, min(rows_at_once, plan.rows - first))
        y = _load_floats(x.at[rows, all_inputs], layout)
        row_norm = None if norm is None else _measure(plan, norm, y, layout)
        x_scale = None
        if plan.operand.quantizes or width == plan.inputs:
            y = _normalise(row_norm, y, all_inputs, layout)
        if plan.operand.quantizes:
            x_scale = jnp.maximum(jnp.max(jnp.abs(y), axis=1), 1e-30) / 127.0
        if width != plan.inputs:
            y = _normalise(row_norm, _load_floats(x.at[rows, split_inputs], split_layout), split_inputs, split_layout)
        if x_scale is not None and x_scale_s is not None:
            y = _round_to_int(y / broadcast(x_scale, y.shape, 0, split_layout))
            if rows.size == 1:
                x_scale_s[first] = jnp.max(x_scale)  # Mosaic cannot store a vector of one element
            else:
                store(x_scale_s.at[rows], x_scale)
        store(x_s.at[rows, pl.ds(0, width)], y.astype(plan.operand.x))
    plgpu.commit_smem()


class _RowNorm(NamedTuple):
    """The norm of some rows with known statistics, [rows]; without a mean if it is an RMSNorm."""

    norm: NormRefs
    mean: jax.Array | None
    factor: jax.Array


def _measure(plan: Plan, norm: NormRefs, y: jax.Array, layout: Any) -> _RowNorm:
    """Compute the statistics of rows, float32 [rows, K]."""
    assert plan.eps is not None
    mean = None if norm.shift is None else jnp.sum(y, axis=1) / plan.inputs
    if mean is not None:
        y -= broadcast(mean, y.shape, 0, layout)
    return _RowNorm(norm, mean, lax.rsqrt(jnp.sum(y * y, axis=1) / plan.inputs + plan.eps))


def _normalise(row_norm: _RowNorm | None, y: jax.Array, inputs: Any, layout: Any) -> jax.Array:
    """Normalise these inputs of the rows, in float32; without a norm they stay as they are."""
    if row_norm is None:
        return y
    norm, mean, factor = row_norm
    if mean is not None:
        y -= broadcast(mean, y.shape, 0, layout)
    y *= broadcast(factor, y.shape, 0, layout)
    y *= broadcast(_load_floats(norm.scale.at[inputs], layout.reduce(0)), y.shape, 1, layout)
    if norm.shift is not None:
        y += broadcast(_load_floats(norm.shift.at[inputs], layout.reduce(0)), y.shape, 1, layout)
    return y


def _round_to_int(y: jax.Array) -> jax.Array:
    """Round to int32, ties to even, for |y| < 2 ** 22: adding 1.5 * 2 ** 23, whose unit in the last place is 1, leaves
    the integer in the lowest mantissa bits."""
    return lax.bitcast_convert_type(y + 1.5 * 2**23, jnp.int32) - 0x4B400000


def _load_floats(ref: Ref, layout: Any) -> jax.Array:
    """Load an array as float32."""
    return load(ref, layout).astype(jnp.float32)


def row_layout(inputs: int) -> tuple[Any, int]:
    """A register layout for rows [R, K] of K inputs over 128 threads, and a thread's elements of each row.

    Adjacent threads hold up to eight adjacent elements each; if K is an odd multiple of 64, every warp holds all of
    them.
    """
    for width in (8, 4, 2, 1):
        if inputs % (128 * width) == 0:
            tiling = fragmented_array.Tiling(((1, 128 * width), (32 * width,), (width,)))
            return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1), inputs // 128
    tiling = fragmented_array.Tiling(((1, 64), (2,)))
    everyone = (fragmented_array.Replicated(4),)
    return plgpu.Layout.TILED(tiling, warp_dims=everyone, lane_dims=(-2,), vector_dim=-1), inputs // 32

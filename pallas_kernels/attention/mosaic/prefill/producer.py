"""The producer warpgroup: it copies queries once, then tiles of keys and values as far ahead as stages are empty."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.pallas_kernels.attention.mosaic.prefill.plan import (
    TILE_Q,
    Block,
    Inputs,
    Plan,
    Scratch,
    key_ring,
    row_layout,
)
from jaxinfer.pallas_kernels.mosaic import pl, plgpu
from jaxinfer.pallas_kernels.mosaic.layout import broadcast, full, iota, load
from jaxinfer.pallas_kernels.mosaic.refs import Barrier, Index, Ref, copy_zero_filled
from jaxinfer.pallas_kernels.mosaic.ring import Ring


class _Pipeline(NamedTuple):
    """The way of int8 keys, or values: fields of `Inputs` and `Scratch`."""

    source: Ref
    scales: Ref
    int8: Ref
    int8_full: Barrier
    stages: Ref
    full: Barrier
    empty: Barrier


def produce(plan: Plan, inputs: Inputs, scratch: Scratch, block: Block) -> None:
    """Copy all that the consumers of this thread block need."""
    s = scratch
    if plan.tiles.consumers == 2:
        plgpu.set_max_registers(104 if plan.int8 else 40, action="decrease")
    _copy_queries(plan, inputs, s, block)
    plgpu.barrier_wait(s.q_full)
    _compute_bounds(plan, inputs, s, block)
    ring = key_ring(plan, s.bounds)
    if inputs.scales is None or s.int8 is None:
        _produce_float(plan, inputs, s, block, ring)
        return
    keys = _Pipeline(inputs.k, inputs.scales.k, s.int8.k, s.int8.k_full, s.k, s.k_full, s.k_empty)
    values = _Pipeline(inputs.v, inputs.scales.v, s.int8.v, s.int8.v_full, s.v, s.v_full, s.v_empty)
    _produce_int8(plan, inputs, s, block, ring, (keys, values))


def _copy_queries(plan: Plan, inputs: Inputs, s: Scratch, block: Block) -> None:
    """Begin the copies of queries, positions and slopes."""
    tokens = plan.consumer_tokens
    for w in range(plan.tiles.consumers):
        token = block.first_token + w * tokens
        positions = inputs.positions.at[pl.ds(block.row * plan.tokens + token, TILE_Q)]
        copy_zero_filled(positions, s.positions.at[w], s.q_full)
        for h in range(plan.heads):
            q = inputs.q.at[block.row, pl.ds(token, tokens), block.head + h]
            plgpu.copy_gmem_to_smem(q, s.q.at[w, pl.ds(h * tokens, tokens)], s.q_full)
    if inputs.slopes is not None and s.slopes is not None:
        plgpu.copy_gmem_to_smem(inputs.slopes.at[pl.ds(block.head * tokens, TILE_Q)], s.slopes, s.q_full)


def _compute_bounds(plan: Plan, inputs: Inputs, s: Scratch, block: Block) -> None:
    """Write `bounds`, by one warpgroup for all: reducing to a scalar needs scratch space, and there is only one."""
    min_position, max_position = np.int32(2**30), np.int32(-1)
    token = iota((TILE_Q,), 0, row_layout())
    for w in range(plan.tiles.consumers):
        positions = load(s.positions.at[w], row_layout())
        # The copied positions run on into the next tile's tokens and into the next row's.
        valid = (positions >= 0) & (token < plan.consumer_tokens)
        valid &= token < plan.tokens - block.first_token - w * plan.consumer_tokens
        min_position = jnp.minimum(min_position, jnp.min(jnp.where(valid, positions, np.int32(2**30))))
        max_position = jnp.maximum(max_position, jnp.max(jnp.where(valid, positions, -1)))
    s.bounds[0], s.bounds[1] = min_position, max_position
    last_key = max_position
    if inputs.lengths is not None:
        last_key = jnp.where(max_position < 0, -1, inputs.lengths[block.row] - 1)
    s.bounds[2] = last_key
    plgpu.barrier_arrive(s.bounds_full)


def _produce_float(plan: Plan, inputs: Inputs, s: Scratch, block: Block, ring: Ring) -> None:
    """Copy keys and values of the queries' dtype to their stages."""

    def iteration(i: jax.Array, _: None) -> None:
        stage = ring.stage(i)
        ring.wait_until_empty(i, s.k_empty.at[stage])
        _copy_tile(plan, inputs, s, block, i, inputs.k, s.k.at[stage], s.k_full.at[stage])
        ring.wait_until_empty(i, s.v_empty.at[stage])
        # If the tile holds more than the last key, its copy is for the producer: see `_clear_hidden_values`.
        has_hidden = s.bounds[2] + 1 < (i + 1) * plan.tiles.tile_kv
        v_full = s.v_full.at[jnp.where(has_hidden, plan.tiles.stages, stage)]
        _copy_tile(plan, inputs, s, block, i, inputs.v, s.v.at[stage], v_full)

    lax.fori_loop(ring.start, ring.stop, iteration, None)

    pl.when(ring.start < ring.stop)(lambda: _clear_hidden_values(plan, s, ring.stop - 1, ring.stage(ring.stop - 1)))


def _produce_int8(
    plan: Plan, inputs: Inputs, s: Scratch, block: Block, ring: Ring, pipelines: tuple[_Pipeline, ...]
) -> None:
    """Copy tiles of int8 keys and values, and convert each while the next one is copied."""

    @pl.when(ring.start < ring.stop)
    def _() -> None:
        for x in pipelines:
            _copy_tile(plan, inputs, s, block, ring.start, x.source, x.int8, x.int8_full)

    def iteration(i: jax.Array, _: None) -> None:
        stage = ring.stage(i)
        for x in pipelines:
            plgpu.barrier_wait(x.int8_full)
            ring.wait_until_empty(i, x.empty.at[stage])
            _dequantize_tile(plan, inputs, s, block, i, x, x.stages.at[stage])
            plgpu.commit_smem()  # makes plain stores visible to wgmma
            plgpu.barrier_arrive(x.full.at[stage])

            # The whole warpgroup has read the int8 tile: the commit was a barrier among its threads.
            @pl.when(i + 1 < ring.stop)
            def _(x: _Pipeline = x) -> None:
                _copy_tile(plan, inputs, s, block, i + 1, x.source, x.int8, x.int8_full)

    lax.fori_loop(ring.start, ring.stop, iteration, None)


def _page_of(plan: Plan, inputs: Inputs, s: Scratch, block: Block, i: Index, copy: int) -> tuple[Index, Index]:
    """The page of one copy of tile i, or of the last copy that is needed, and the offset in it."""
    copy_keys = plan.copy_keys
    position = jnp.minimum(i * plan.tiles.tile_kv + copy * copy_keys, lax.div(s.bounds[2], copy_keys) * copy_keys)
    if inputs.page_table is None:
        return block.row, position
    return inputs.page_table[block.row, lax.div(position, plan.page_size)], lax.rem(position, plan.page_size)


def _copy_tile(
    plan: Plan, inputs: Inputs, s: Scratch, block: Block, i: Index, source: Ref, target: Ref, barrier: Barrier
) -> None:
    """Begin the copies of tile i of keys or values."""
    for copy in range(plan.copies):
        page, offset = _page_of(plan, inputs, s, block, i, copy)
        keys = source.at[page, pl.ds(offset, plan.copy_keys), block.kv_head]
        plgpu.copy_gmem_to_smem(keys, target.at[pl.ds(copy * plan.copy_keys, plan.copy_keys)], barrier)


def _dequantize_tile(
    plan: Plan, inputs: Inputs, s: Scratch, block: Block, i: jax.Array, x: _Pipeline, target: Ref
) -> None:
    """int8 -> q's dtype, times each page's scale; 64 keys by 128 features at a time, to save registers."""
    width, copy_keys = min(plan.head_dim, 128), plan.copy_keys
    for first_key in range(0, plan.tiles.tile_kv, 64):
        scales = full((64,), 0, jnp.float32, row_layout())
        key = iota((64,), 0, row_layout())
        for copy in range(first_key // copy_keys, pl.cdiv(first_key + 64, copy_keys)):
            page, _ = _page_of(plan, inputs, s, block, i, copy)
            scales = jnp.where(key >= copy * copy_keys - first_key, x.scales[page, block.kv_head], scales)
        for feature in range(0, plan.head_dim, width):
            part = pl.ds(first_key, 64), pl.ds(feature, width)
            values = plgpu.load(x.int8.at[part], layout=plgpu.Layout.WGMMA_UPCAST_2X)
            values = plgpu.layout_cast(values, plgpu.Layout.WGMMA).astype(jnp.float32)
            target.at[part][...] = (values * broadcast(scales, values.shape, 0)).astype(target.dtype)


def _eight_rows_layout() -> Any:
    """The layout of 8 rows of a swizzled tile: two rows per warp, four adjacent features per lane."""
    tiling = plgpu.Tiling(((8, 64), (2, 64), (4,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def _clear_hidden_values(plan: Plan, s: Scratch, i: Index, stage: jax.Array) -> None:
    """Put 0 after the last key of the last tile i: another request may have left NaN there, and 0 x NaN is NaN.

    Other tiles have no such slots, so they cost nothing more. For the last one the producer, which has nothing left to
    do, waits until the copy has landed, and tells the consumers itself. Keys need no such care, as hidden scores are
    replaced; nor does int8, since the scales are those of visible pages.
    """
    tile_kv = plan.tiles.tile_kv
    values, hidden_from = s.v.at[stage], s.bounds[2] + 1 - i * tile_kv

    @pl.when(hidden_from < tile_kv)
    def _() -> None:
        plgpu.barrier_wait(s.v_full.at[plan.tiles.stages])

        @pl.loop(lax.div(hidden_from, 8), tile_kv // 8)
        def _(eight: jax.Array) -> None:
            for feature in range(0, plan.head_dim, 64):  # few at a time: the producer has 40 registers
                part = values.at[pl.ds(pl.multiple_of(eight * 8, 8), 8), pl.ds(feature, 64)]
                x = load(part, _eight_rows_layout())
                key = eight * 8 + iota(x.shape, 0, _eight_rows_layout())
                part[...] = jnp.where(key < hidden_from, x, jnp.zeros_like(x))

        plgpu.commit_smem()  # makes plain stores visible to wgmma
        for _copy in range(plan.copies):  # as many arrivals as the copies would have made
            plgpu.barrier_arrive(s.v_full.at[stage])

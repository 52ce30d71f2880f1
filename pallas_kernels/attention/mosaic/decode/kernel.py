"""The kernel's body: a thread block's split of the keys of one row and KV head, then its part of the result."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.pallas_kernels.attention.mosaic.decode.int8 import convert_tile, store_pages, tile_scales
from jaxinfer.pallas_kernels.attention.mosaic.decode.new_tokens import (
    copy_qkv,
    insert_new_tokens,
    prepare_qkv,
    store_tokens,
)
from jaxinfer.pallas_kernels.attention.mosaic.decode.plan import (
    TILE_KV,
    Block,
    Inputs,
    Outputs,
    Plan,
    Scratch,
    Tiles,
    cache_slice,
    key_ring,
    pages_of,
    this_block,
)
from jaxinfer.pallas_kernels.attention.mosaic.decode.result import write_heads
from jaxinfer.pallas_kernels.attention.mosaic.decode.softmax import KeyTile, Softmax, attend, initial_softmax
from jaxinfer.pallas_kernels.mosaic import pl, plgpu
from jaxinfer.pallas_kernels.mosaic.refs import Index
from jaxinfer.pallas_kernels.mosaic.ring import Ring


def run_block(plan: Plan, tiles: Tiles, inputs: Inputs, out: Outputs, s: Scratch) -> None:
    """Run a thread block."""
    block = this_block(plan, inputs.positions)
    ring = key_ring(plan, tiles, block)
    copy_qkv(plan, inputs, s, block)
    ring.fill(lambda tile, stage: _fetch(plan, inputs, s, block, tile, pages_of(plan, inputs, block, tile), stage))
    plgpu.barrier_wait(s.qkv_full)
    prepare_qkv(plan, inputs, s, block)
    add_tile = functools.partial(_add_tile, plan, inputs, s, block, ring)
    state = [initial_softmax(plan, queries) for queries in plan.query_tiles]
    # First the tiles that all queries see in full, then those that contain the row's new tokens.
    first_new = jnp.clip(lax.div(jnp.maximum(block.first, 0), TILE_KV), ring.start, ring.stop)
    state = lax.fori_loop(ring.start, first_new, functools.partial(add_tile, has_new=False), state)
    state = lax.fori_loop(first_new, ring.stop, functools.partial(add_tile, has_new=True), state)
    write_heads(plan, tiles, out, s, block, state)
    # The cluster has synchronised in `write_heads`, so no thread block still reads these pages.
    scales = inputs.cache.scales
    if scales is not None:
        pl.loop(first_new, ring.stop)(lambda tile: store_pages(plan, inputs, scales, s, block, tile, ring.stage(tile)))
    else:
        pl.when(block.split == tiles.splits - 1)(lambda: store_tokens(plan, inputs, s, block))
    plgpu.wait_smem_to_gmem(0)


def _fetch(
    plan: Plan, inputs: Inputs, s: Scratch, block: Block, tile: Index, pages: list[jax.Array], stage: Index
) -> None:
    """Begin the copies of a tile of keys and values into a stage."""
    for i, page in enumerate(pages):
        offset = lax.rem(tile * TILE_KV + i * plan.copy_keys, plan.page_size)
        source = cache_slice(plan, block, page, offset, plan.copy_keys)
        for cache, stages in ((inputs.cache.k, s.k), (inputs.cache.v, s.v)):
            target = stages.at[stage, pl.ds(i * plan.copy_keys, plan.copy_keys)]
            plgpu.copy_gmem_to_smem(cache.at[source], target, s.kv_full.at[stage])


def _add_tile(
    plan: Plan,
    inputs: Inputs,
    s: Scratch,
    block: Block,
    ring: Ring,
    tile: jax.Array,
    state: list[Softmax],
    *,
    has_new: bool,
) -> list[Softmax]:
    """Add a tile of keys and values to the softmax of all queries, and refill its stage."""
    stage = ring.stage(tile)
    # Pages and scales are read from global memory before they are needed, to hide the latency.
    next_pages = pages_of(plan, inputs, block, tile + ring.stages)
    scales = None
    if inputs.cache.scales is not None:
        scales = tile_scales(plan, inputs, inputs.cache.scales, s.max_abs, block, tile, has_new=has_new)
    plgpu.barrier_wait(s.kv_full.at[stage])
    new_start = block.first - tile * TILE_KV
    if s.int8 is not None and scales is not None:
        convert_tile(plan, s, s.int8, block, stage, new_start, scales, has_new=has_new)
        k, v = s.int8.k, s.int8.v
    else:
        k, v = s.k.at[stage], s.v.at[stage]
        if has_new:
            insert_new_tokens(plan, s, block, k, v, new_start)
    keys = KeyTile(k, v, block.head, new_start, scales, has_new)
    state = [attend(plan, inputs, s, keys, queries, x) for queries, x in zip(plan.query_tiles, state, strict=True)]
    # Every warp has its part of the stage in registers before TMA refills it (`Ring.refill`). For `p` and the converted
    # tile, which the next tile overwrites, waiting for its stage is a barrier of the warpgroup too.
    ring.refill(tile, lambda following, stage: _fetch(plan, inputs, s, block, following, next_pages, stage))
    return state

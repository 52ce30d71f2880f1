"""The int8 cache: the scales of pages with new tokens, tiles in the queries' dtype, and writing pages back."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.pallas_kernels.attention.mosaic.decode.plan import (
    TILE_D,
    TILE_KV,
    Block,
    Inputs,
    Int8Scratch,
    Plan,
    Scales,
    Scratch,
    cache_slice,
    pages_of,
)
from jaxinfer.pallas_kernels.mosaic import pl, plgpu
from jaxinfer.pallas_kernels.mosaic.layout import broadcast, iota, load
from jaxinfer.pallas_kernels.mosaic.refs import Index, Ref


class TileScales(NamedTuple):
    """The scales of a tile's pages. new: including the row's new tokens. ratio: old scale / new scale."""

    new: list[jax.Array]
    ratio: list[jax.Array]


def tile_scales(
    plan: Plan, inputs: Inputs, scales: Scales, max_abs: Ref, block: Block, tile: jax.Array, *, has_new: bool
) -> tuple[TileScales, TileScales]:
    """The scales of keys and of values, by the rules of `write_pages`.

    They are computed again when the pages are stored, with the same result: a grown scale does not grow again.
    """
    k, v = (
        _tile_scales(plan, inputs, old, max_abs, plan.group + kv, block, tile, has_new=has_new)
        for kv, old in enumerate(scales)
    )
    return k, v


def _tile_scales(
    plan: Plan,
    inputs: Inputs,
    old_scales: Ref,
    max_abs: Ref,
    qkv_row: int,
    block: Block,
    tile: jax.Array,
    *,
    has_new: bool,
) -> TileScales:
    """The scales of keys, or of values. qkv_row: where those of a token are."""
    scales = TileScales([], [])
    for i, page in enumerate(pages_of(plan, inputs, block, tile)):
        old = old_scales[page, block.head]
        if not has_new:
            scales.new.append(old)
            continue
        start = tile * TILE_KV + i * plan.copy_keys
        # A page that starts with a new token, or after all of them, so that its scale is another request's and may be
        # NaN. It counts as 0, which also hides the keys and values that such a page of a tile holds.
        is_empty = block.first <= start

        def grow(token, scale, start=start):
            offset = block.first + token - start
            min_scale = jnp.maximum(max_abs[token, qkv_row], 1e-30) / 127.0
            return jnp.where((offset >= 0) & (offset < plan.page_size), jnp.maximum(scale, min_scale), scale)

        new = lax.fori_loop(0, block.num_tokens, grow, jnp.where(is_empty, 0.0, old))
        scales.new.append(new)
        scales.ratio.append(jnp.where(is_empty | (new == old), 1.0, old / new))
    return scales


def broadcast_to_keys(plan: Plan, values: list[jax.Array], shape: tuple[int, ...], layout: Any) -> jax.Array:
    """An array [keys, ...] of this shape with the value of each key's page."""
    page = lax.div(iota(shape, 0, layout), plan.copy_keys)
    result = jnp.full(shape, values[0])
    for i, value in enumerate(values[1:], 1):
        result = jnp.where(page == i, value, result)
    return result


def convert_tile(
    plan: Plan,
    s: Scratch,
    int8: Int8Scratch,
    block: Block,
    stage: jax.Array,
    new_start: jax.Array,
    scales: tuple[TileScales, TileScales],
    *,
    has_new: bool,
) -> None:
    """Convert a stage of an int8 cache to the queries' dtype: the tensor cores' transposing loads need 16 bits.

    If the tile may contain new tokens (from `new_start` on), they are also inserted into the stage's int8 tile, and
    what it already holds is rescaled.
    """
    layout, shape = plgpu.Layout.WGMMA_UPCAST_2X, (TILE_KV, TILE_D)
    for kv, (stages, target) in enumerate(((s.k, int8.k), (s.v, int8.v))):
        for features in plan.feature_tiles:
            x = load(stages.at[stage, :, features], layout)
            if has_new:
                key = iota(shape, 0, layout)
                scale, ratio = (broadcast_to_keys(plan, values, shape, layout) for values in scales[kv])
                rescaled = x.astype(jnp.float32) * ratio

                def insert(token, x, key=key, scale=scale, source=(plan.group + kv, features)):
                    new = load(s.qkv_rows.at[(token, *source)], layout.reduce(0)).astype(jnp.float32)
                    return jnp.where(key == new_start + token, broadcast(new, shape, 1) / scale, x)

                rescaled = lax.fori_loop(0, block.num_tokens, insert, rescaled)
                x = lax.round(rescaled, lax.RoundingMethod.TO_NEAREST_EVEN).astype(jnp.int8)
                stages.at[stage, :, features][...] = x
            target.at[:, features][...] = plgpu.layout_cast(x.astype(plan.dtype), plgpu.Layout.WGMMA)
    plgpu.commit_smem()


def store_pages(
    plan: Plan, inputs: Inputs, scales: Scales, s: Scratch, block: Block, tile: jax.Array, stage: Index
) -> None:
    """Write back the pages of a tile that contain new tokens, as `convert_tile` made them, and their scales."""
    k_scales, v_scales = tile_scales(plan, inputs, scales, s.max_abs, block, tile, has_new=True)
    for i, page in enumerate(pages_of(plan, inputs, block, tile)):
        start = tile * TILE_KV + i * plan.copy_keys

        @pl.when((start <= block.last) & (block.first < start + plan.copy_keys))
        def _(i=i, page=page) -> None:
            for stages, cache in ((s.k, inputs.cache.k), (s.v, inputs.cache.v)):
                source = stages.at[stage, pl.ds(i * plan.copy_keys, plan.copy_keys)]
                plgpu.copy_smem_to_gmem(source, cache.at[cache_slice(plan, block, page, jnp.int32(0), plan.copy_keys)])
            scales.k[page, block.head] = k_scales.new[i]
            scales.v[page, block.head] = v_scales.new[i]

"""The row's new tokens: their queries and keys are prepared, and keys and values go into tiles and to their pages."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.pallas_kernels.attention.mosaic.decode.plan import (
    Block,
    Inputs,
    Norms,
    Plan,
    Rotary,
    Scratch,
    cache_slice,
    page_of,
)
from jaxinfer.pallas_kernels.mosaic import pl, plgpu
from jaxinfer.pallas_kernels.mosaic.layout import broadcast, iota, load, load_broadcast
from jaxinfer.pallas_kernels.mosaic.refs import Ref, copy_zero_filled


def _qkv_layout() -> Any:
    """The layout of rows of qkv: of every 8 each warp holds 2, with 16 adjacent features across its lanes."""
    return plgpu.Layout.TILED(
        plgpu.Tiling(((8, 16), (2, 16), (1,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
    )


def copy_qkv(plan: Plan, inputs: Inputs, s: Scratch, block: Block) -> None:
    """Begin the copies of the tokens' queries, keys and values."""

    @pl.loop(0, plan.tokens)
    def _(token: jax.Array) -> None:
        start = ((block.row * plan.tokens + token) * plan.kv_heads + block.head) * (plan.group + 2)
        source = inputs.qkv.at[pl.ds(start, plan.qkv_rows)]
        copy_zero_filled(source, s.qkv_rows.at[token], s.qkv_full)


def prepare_qkv(plan: Plan, inputs: Inputs, s: Scratch, block: Block) -> None:
    """Normalise and rotate queries and keys; lay out the queries for the tensor cores."""
    pl.loop(0, plan.tokens)(lambda token: _prepare_token(plan, inputs, s, block, token))
    if s.int8 is None:
        pl.loop(0, plan.tokens)(lambda token: _contain(plan, s, token))
    for features in plan.feature_tiles:
        tile = pl.ds(0, plan.queries), features
        s.q.at[tile].T[...] = load(s.q_rows.at[tile].T, plan.layouts.rhs)
    plgpu.commit_smem()


def _prepare_token(plan: Plan, inputs: Inputs, s: Scratch, block: Block, token: jax.Array) -> None:
    """Normalise and rotate a token's queries and key, in `qkv_rows` and `q_rows`."""
    qkv = s.qkv_rows.at[token]
    slices = [(slice(None), pl.ds(start, size)) for start, size in plan.rotary_slices]
    loaded = [load(qkv.at[part], _qkv_layout()) for part in slices]
    index = [iota((plan.qkv_rows, size), 0, _qkv_layout()) for _, size in plan.rotary_slices]
    xs = [x.astype(jnp.float32) for x in loaded]
    if inputs.norms is not None:
        xs = _normalize(plan, inputs.norms, xs, index)
    if inputs.rotary is not None:
        xs[:2] = _rotate(inputs.rotary, block.row * plan.tokens + token, xs[0], xs[1])
    max_abs = []
    for part, before, after, i in zip(slices, loaded, xs, index, strict=True):
        x = jnp.where(i <= plan.group, after.astype(plan.dtype), before)  # the value stays as it is
        if s.int8 is not None:  # as in `write_pages`, what is not finite is stored as 0
            x = jnp.where((i < plan.group) | (jnp.maximum(x, -x) < jnp.inf), x, jnp.zeros_like(x))
        qkv.at[part][...] = x
        # This writes some rows past the queries; the next token overwrites them, or nothing reads them.
        s.q_rows[pl.ds(token * plan.group, plan.qkv_rows), part[1]] = x
        magnitude = jnp.maximum(x, -x).astype(jnp.float32)
        max_abs.append(jnp.max(jnp.where(magnitude < jnp.inf, magnitude, jnp.inf), axis=1))
    s.max_abs.at[token][...] = functools.reduce(jnp.maximum, max_abs)
    plgpu.commit_smem()


def _contain(plan: Plan, s: Scratch, token: jax.Array) -> None:
    """Replace a token's key by NaN and its value by 0 if they are not finite, by the rule of `write_pages`."""

    @pl.when(jnp.maximum(s.max_abs[token, plan.group], s.max_abs[token, plan.group + 1]) == jnp.inf)
    def _() -> None:
        qkv = s.qkv_rows.at[token]
        for start, size in plan.rotary_slices:
            part = slice(None), pl.ds(start, size)
            x, i = load(qkv.at[part], _qkv_layout()), iota((plan.qkv_rows, size), 0, _qkv_layout())
            x = jnp.where(i == plan.group, jnp.full_like(x, jnp.nan), x)
            qkv.at[part][...] = jnp.where(i == plan.group + 1, jnp.zeros_like(x), x)
        plgpu.commit_smem()


def _normalize(plan: Plan, norms: Norms, xs: list[jax.Array], index: list[jax.Array]) -> list[jax.Array]:
    """Normalise the rows' slices `xs`, rounded to qkv's dtype. index: of each element's row."""
    mean_square = sum(jnp.sum(x * x, axis=1) for x in xs) * (1.0 / plan.head_dim)
    inverse = lax.rsqrt(mean_square + plan.norm_eps)
    results = []
    for (start, size), x, i in zip(plan.rotary_slices, xs, index, strict=True):
        q, k = (load_broadcast(norm.at[pl.ds(start, size)], x.shape, 1, _qkv_layout()) for norm in norms)
        normalized = x * (broadcast(inverse, x.shape, 0) * jnp.where(i < plan.group, q, k))
        results.append(normalized.astype(plan.dtype).astype(jnp.float32))
    return results


def _rotate(rotary: Rotary, angle: jax.Array, a: jax.Array, b: jax.Array) -> list[jax.Array]:
    """Rotate the two halves of the rotated features. angle: the row of `rotary`."""
    cos, sin = (load_broadcast(x.at[angle], a.shape, 1, _qkv_layout()) for x in rotary)
    return [a * cos - b * sin, b * cos + a * sin]


def insert_new_tokens(plan: Plan, s: Scratch, block: Block, k: Ref, v: Ref, new_start: jax.Array) -> None:
    """Insert the row's new tokens, which are in no page yet, into a tile of keys and values from `new_start` on.

    The slots after them become 0: another request may have left NaN there, which a weight of 0 does not hide. Only
    these last tiles hold such slots, and they go through registers here anyway, so it costs others nothing.
    """
    layout = plan.layouts.lhs
    for kv, ref in enumerate((k, v)):
        for features in plan.feature_tiles:
            x = load(ref.at[:, features], layout)
            key = iota(x.shape, 0, layout)
            x = jnp.where(key < new_start + block.num_tokens, x, jnp.zeros_like(x))

            def insert(token, x, key=key, source=(plan.group + kv, features)):
                new = load_broadcast(s.qkv_rows.at[(token, *source)], x.shape, 1, layout)
                return jnp.where(key == new_start + token, new, x)

            ref.at[:, features][...] = lax.fori_loop(0, block.num_tokens, insert, x)
    plgpu.commit_smem()


def store_tokens(plan: Plan, inputs: Inputs, s: Scratch, block: Block) -> None:
    """Write the new tokens' keys and values to their pages."""

    @pl.loop(0, block.num_tokens)
    def _(token: jax.Array) -> None:
        position = block.first + token
        page, offset = page_of(plan, inputs, block, position), lax.rem(position, plan.page_size)
        target = cache_slice(plan, block, page, offset, 1)
        for kv, cache in enumerate((inputs.cache.k, inputs.cache.v)):
            plgpu.copy_smem_to_gmem(s.qkv_rows.at[token, pl.ds(plan.group + kv, 1)], cache.at[target])

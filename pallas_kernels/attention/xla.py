"""FlashAttention over pages in plain JAX, for CPUs (Dao et al. 2022, arXiv:2205.14135, algorithm 1).

A few rows at a time: a tile of their keys stays in a core's cache, and short rows wait for few long ones. The cost
follows the longest context of these rows, where the reference gathers the whole page table.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.pallas_kernels.attention.heads import split_and_store
from jaxinfer.pallas_kernels.attention.reference import MASKED_SCORE
from jaxinfer.pallas_kernels.kv_pages import KVPages

_TILE_KV = 128  # keys
_TILE_Q = 8  # queries; at least all queries of a row


def paged_attention(
    q: jax.Array,
    pages: KVPages,
    page_table: jax.Array,
    q_positions: jax.Array,
    alibi: jax.Array | None = None,
    **options: Any,
) -> jax.Array:
    """Attend to the row's pages. Arguments as of `api`."""
    attend, groups = _in_groups(q, pages, page_table, q_positions, alibi, **options)
    return lax.map(attend, groups).reshape(q.shape)


def cached_attention(
    qkv: jax.Array,
    pages: KVPages,
    page_table: jax.Array,
    positions: jax.Array,
    rotary: tuple[jax.Array, jax.Array] | None,
    norms: tuple[jax.Array, jax.Array] | None,
    alibi: jax.Array | None,
    *,
    norm_eps: float,
    **options: Any,
) -> tuple[jax.Array, KVPages]:
    """Store keys and values, then attend to the row's pages. Arguments as of `api`."""
    q, pages = split_and_store(qkv, pages, page_table, positions, rotary=rotary, norms=norms, norm_eps=norm_eps)
    attend, groups = _in_groups(q, pages, page_table, positions, alibi, **options)
    return lax.map(attend, groups).reshape(*qkv.shape[:2], -1), pages


class _Rows(NamedTuple):
    """Some rows: queries [B, T, Hq, K], int32 page table [B, P] and positions [B, T]."""

    q: jax.Array
    page_table: jax.Array
    q_positions: jax.Array


def _in_groups(
    q: jax.Array, pages: KVPages, page_table: jax.Array, q_positions: jax.Array, alibi: jax.Array | None, **options: Any
) -> tuple[Callable[[_Rows], jax.Array], _Rows]:
    """The attention of a group of rows, and the groups: `_Rows` of arrays [groups, B, ...]."""
    batch, tokens = q_positions.shape
    rows = math.gcd(batch, max(_TILE_Q // tokens, 1))
    groups = _Rows(*(x.reshape(batch // rows, rows, *x.shape[1:]) for x in (q, page_table, q_positions)))
    return functools.partial(_attend_rows, pages=pages, alibi=alibi, **options), groups


class _OnlineSoftmax(NamedTuple):
    """The softmax over the keys so far. m_i: the largest score; l_i: sum of exp(score - m_i); acc: sum of exp(score -
    m_i) * value."""

    m_i: jax.Array
    l_i: jax.Array
    acc: jax.Array


def _attend_rows(
    group: _Rows,
    *,
    pages: KVPages,
    alibi: jax.Array | None,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> jax.Array:
    """Attend to one tile of keys after another, with an online softmax: [B, T, Hq, K].

    A row's result depends neither on the other rows' contents nor on the table's width: a tile that is fully masked for
    a row leaves its sums unchanged or, before the row's first visible key, makes sums that the factor
    exp(MASKED_SCORE - score) = 0 clears later.
    """
    q, page_table, q_positions = group
    batch, tokens, q_heads, head_dim = q.shape
    page_size, kv_heads = pages.k.shape[1:3]
    queries_per_head = q_heads // kv_heads
    count = max(_TILE_KV // page_size, 1)  # pages of a tile
    size = count * page_size
    # One tile more than needed: XLA compiles the loop over a single tile differently, and the result would round
    # differently.
    page_table = jnp.pad(page_table, ((0, 0), (0, count + -page_table.shape[1] % count)))
    grouped = q.reshape(batch, tokens, kv_heads, queries_per_head, head_dim)
    rows = jnp.einsum("bthgk->bhgtk", grouped).astype(jnp.float32) * scale
    rows = rows.reshape(batch, kv_heads, queries_per_head * tokens, head_dim)
    position = jnp.tile(q_positions, (1, queries_per_head))[:, None, :, None]  # [B, 1, G * T, 1]
    slopes = None if alibi is None else jnp.repeat(alibi, tokens).reshape(kv_heads, -1, 1)

    def iteration(i: jax.Array, state: _OnlineSoftmax) -> _OnlineSoftmax:
        page = lax.dynamic_slice(page_table, (0, i * count), (batch, count)).reshape(-1)
        distance = i * size + jnp.arange(size) - position  # key's position - query's position
        visible = distance <= 0
        if window is not None:
            visible &= distance > -window
        scores = _scores(rows, pages, page, softcap, one_token=tokens == 1)
        if slopes is not None:
            scores = scores + slopes * distance.astype(jnp.float32)
        scores = jnp.where(visible, scores, MASKED_SCORE)
        m_new = jnp.maximum(state.m_i, jnp.max(scores, axis=-1, keepdims=True))
        p, alpha = jnp.exp(scores - m_new), jnp.exp(state.m_i - m_new)
        l_i = state.l_i * alpha + jnp.sum(p, axis=-1, keepdims=True)
        p, v = _visible_values(p, pages, page, jnp.any(visible, axis=(1, 2)))
        return _OnlineSoftmax(m_new, l_i, state.acc * alpha + jnp.einsum("bhrs,bshk->bhrk", p, v))

    last = jnp.max(q_positions, initial=0)
    first = 0 if window is None else _first_visible(q_positions, last, window) // size
    zeros = jnp.zeros((batch, kv_heads, queries_per_head * tokens, 1), jnp.float32)
    state = _OnlineSoftmax(zeros + MASKED_SCORE, zeros, jnp.zeros_like(rows))
    state = lax.fori_loop(first, last // size + 1, iteration, state)
    heads = (state.acc / state.l_i).reshape(batch, kv_heads, queries_per_head, tokens, head_dim)
    return jnp.einsum("bhgtk->bthgk", heads).reshape(q.shape).astype(q.dtype)


def _first_visible(q_positions: jax.Array, last: jax.Array, window: int) -> jax.Array:
    """The first position that a query's window reaches; negative positions are padding, `last` the largest."""
    return jnp.maximum(jnp.min(jnp.where(q_positions < 0, last, q_positions)) - window + 1, 0)


def _scores(rows: jax.Array, pages: KVPages, page: jax.Array, softcap: float | None, *, one_token: bool) -> jax.Array:
    """Compute the capped scores of a tile's keys, [B, Hkv, R, S], for scaled queries [B, Hkv, R, K]."""
    k = _gather(pages.k, page, len(rows))
    if one_token:  # keys on the left: a matmul of many rows is faster than one of many columns
        scores = lax.optimization_barrier(jnp.einsum("bshk,bhrk->bhsr", k, rows)).swapaxes(-1, -2)
    else:
        scores = jnp.einsum("bhrk,bshk->bhrs", rows, k)
    if pages.k_scale is not None:
        scores *= _gather_scales(pages.k_scale, page, len(rows), pages.k.shape[1])
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    return scores


def _visible_values(p: jax.Array, pages: KVPages, page: jax.Array, visible: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A tile's weights, scaled if the cache is int8, and its values, float32 [B, S, Hkv, K].

    A value that no query of a row sees may be NaN, of a request that had the page before, and 0 x NaN is NaN: it
    becomes 0.

    Args:
      p: [B, Hkv, R, S]. visible: bool [B, S], whether a query of the row sees the key.
    """
    v = _gather(pages.v, page, len(p))
    if pages.v_scale is None:
        return p, jnp.where(visible[:, :, None, None], v, 0.0)
    scales = _gather_scales(pages.v_scale, page, len(p), pages.v.shape[1])
    return p * jnp.where(visible[:, None, None], scales, 0.0), v


def _gather(x: jax.Array, page: jax.Array, batch: int) -> jax.Array:
    """Gather the keys (or values) of these pages, float32 [B, S, Hkv, K]."""
    num_pages, _, kv_heads, head_dim = x.shape
    gathered = x.reshape(num_pages, -1).at[page].get(mode="clip")
    return gathered.reshape(batch, -1, kv_heads, head_dim).astype(jnp.float32)


def _gather_scales(scales: jax.Array, page: jax.Array, batch: int, page_size: int) -> jax.Array:
    """Gather the int8 scales of the keys (or values) of these pages, [B, Hkv, 1, S]."""
    gathered = scales.at[page].get(mode="clip").reshape(batch, -1, scales.shape[-1])
    return jnp.repeat(jnp.einsum("bph->bhp", gathered), page_size, axis=-1)[:, :, None]

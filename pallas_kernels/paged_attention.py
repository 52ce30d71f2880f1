"""Causal attention over the pages of a KV cache.

There are three implementations: the `prefill_attention` kernel on a GPU, FlashAttention in plain JAX on a CPU, and a
reference that gathers all pages.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.pallas_kernels.attention import MASKED_SCORE, attention_reference
from jaxinfer.pallas_kernels.dispatch import dispatch
from jaxinfer.pallas_kernels.kv_pages import KVPages
from jaxinfer.pallas_kernels.prefill_attention import prefill_attention

# Tile sizes on a CPU.
_TILE_KV = 128  # keys
_TILE_Q = 8  # queries; at least all queries of a row


def paged_attention(
    q: jax.Array,
    pages: KVPages,
    page_table: jax.Array,
    q_positions: jax.Array,
    alibi: jax.Array | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Causal `attention` of each row's queries over the row's pages.

    The cost follows the longest context in the batch on a CPU, each row's own context on a GPU with kernels, and the
    width of the page table everywhere else.

    Args:
      q: [B, T, Hq, K]; query head h reads KV head h // (Hq / Hkv).
      pages: the cache, which already holds the keys and values of these tokens.
      page_table: int32 [B, P]; page i of a row holds its positions i * page_size to (i + 1) * page_size - 1. Entries
        beyond a row's length may be any page, and what pages hold beyond it may be anything, also NaN.
      q_positions: int32 [B, T], negative for padding (whose result is finite but meaningless).
      alibi, scale, window, softcap: as in `attention`.
    Returns: [B, T, Hq, K] in q's dtype.
    """
    args, options = (q, pages, page_table, q_positions, alibi), {"scale": scale, "window": window, "softcap": softcap}
    return dispatch("paged_attention", prefill_attention, _fallback, *args, **options)


def _fallback(*args: Any, **options: Any) -> jax.Array:
    tiled, gathered = (functools.partial(f, **options) for f in (_flash_attention, paged_attention_reference))
    return lax.platform_dependent(*args, cpu=tiled, default=gathered)


def paged_attention_reference(
    q: jax.Array,
    pages: KVPages,
    page_table: jax.Array,
    q_positions: jax.Array,
    alibi: jax.Array | None = None,
    **options: Any,
) -> jax.Array:
    """`paged_attention` in plain JAX: gathers every page of the table and calls `attention_reference`."""
    batch, count = page_table.shape

    def gather(x: jax.Array, scale: jax.Array | None) -> jax.Array:
        gathered = x[page_table]
        if scale is not None:
            gathered = gathered * scale[page_table][:, :, None, :, None]
        return gathered.reshape(batch, count * x.shape[1], *x.shape[2:]).astype(q.dtype)

    k, v = gather(pages.k, pages.k_scale), gather(pages.v, pages.v_scale)
    return attention_reference(q, k, v, q_positions, jnp.full(batch, k.shape[1]), alibi, **options)


def _flash_attention(
    q: jax.Array,
    pages: KVPages,
    page_table: jax.Array,
    q_positions: jax.Array,
    alibi: jax.Array | None = None,
    **options: Any,
) -> jax.Array:
    """A few rows at a time: a tile of their keys stays in a core's cache, and short rows wait for few long ones."""
    batch, tokens = q_positions.shape
    rows = math.gcd(batch, max(_TILE_Q // tokens, 1))
    groups = [x.reshape(batch // rows, rows, *x.shape[1:]) for x in (q, page_table, q_positions)]
    heads = lax.map(lambda x: _flash_attention_rows(x[0], pages, x[1], x[2], alibi, **options), tuple(groups))
    return heads.reshape(q.shape)


_OnlineSoftmax = tuple[jax.Array, jax.Array, jax.Array]
"""Of the keys so far: m_i: the largest score; l_i: sum of exp(score - m_i); acc: sum of exp(score - m_i) * value."""


def _first_visible(q_positions: jax.Array, last: jax.Array, window: int) -> jax.Array:
    """The first position that a query's window reaches; negative positions are padding, `last` is the largest."""
    return jnp.maximum(jnp.min(jnp.where(q_positions < 0, last, q_positions)) - window + 1, 0)


def _flash_attention_rows(
    q: jax.Array,
    pages: KVPages,
    page_table: jax.Array,
    q_positions: jax.Array,
    alibi: jax.Array | None,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> jax.Array:
    """One tile of keys after another, with an online softmax (Dao et al. 2022, arXiv:2205.14135, algorithm 1).

    A row's result depends neither on the other rows' contents nor on the table's width: a tile that is fully masked for
    a row leaves its sums unchanged or, before the row's first visible key, makes sums that the factor
    exp(MASKED_SCORE - score) = 0 clears later.
    """
    batch, tokens, q_heads, head_dim = q.shape
    num_pages, page_size, kv_heads, _ = pages.k.shape
    group = q_heads // kv_heads
    count = max(_TILE_KV // page_size, 1)  # pages of a tile
    size = count * page_size
    # One tile more than needed: XLA compiles the loop over a single tile differently, and the result would round
    # differently.
    page_table = jnp.pad(page_table, ((0, 0), (0, count + -page_table.shape[1] % count)))
    rows = jnp.einsum("bthgk->bhgtk", q.reshape(batch, tokens, kv_heads, group, head_dim)).astype(jnp.float32) * scale
    rows = rows.reshape(batch, kv_heads, group * tokens, head_dim)
    position = jnp.tile(q_positions, (1, group))[:, None, :, None]  # [B, 1, G * T, 1]
    slopes = None if alibi is None else jnp.repeat(alibi, tokens).reshape(kv_heads, -1, 1)

    def gather(x: jax.Array, page: jax.Array) -> jax.Array:
        """Keys (or values) of these pages, float32 [B, S, Hkv, K]."""
        gathered = x.reshape(num_pages, -1).at[page].get(mode="clip")
        return gathered.reshape(batch, size, kv_heads, head_dim).astype(jnp.float32)

    def scales_of(scales: jax.Array, page: jax.Array) -> jax.Array:
        """The int8 scales of the keys (or values) of these pages, [B, Hkv, 1, S]."""
        gathered = scales.at[page].get(mode="clip").reshape(batch, count, kv_heads)
        return jnp.repeat(jnp.einsum("bph->bhp", gathered), page_size, axis=-1)[:, :, None]

    def scores_of(page: jax.Array, distance: jax.Array) -> jax.Array:
        k = gather(pages.k, page)
        if tokens == 1:  # keys on the left: a matmul of many rows is faster than one of many columns
            scores = lax.optimization_barrier(jnp.einsum("bshk,bhrk->bhsr", k, rows)).swapaxes(-1, -2)
        else:
            scores = jnp.einsum("bhrk,bshk->bhrs", rows, k)
        if pages.k_scale is not None:
            scores *= scales_of(pages.k_scale, page)
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        return scores if slopes is None else scores + slopes * distance.astype(jnp.float32)

    def iteration(i: jax.Array, state: _OnlineSoftmax) -> _OnlineSoftmax:
        m_i, l_i, acc = state
        page = lax.dynamic_slice(page_table, (0, i * count), (batch, count)).reshape(-1)
        distance = i * size + jnp.arange(size) - position  # key's position - query's position
        visible = distance <= 0
        if window is not None:
            visible &= distance > -window
        scores = jnp.where(visible, scores_of(page, distance), MASKED_SCORE)
        m_new = jnp.maximum(m_i, jnp.max(scores, axis=-1, keepdims=True))
        p, alpha = jnp.exp(scores - m_new), jnp.exp(m_i - m_new)
        l_i = l_i * alpha + jnp.sum(p, axis=-1, keepdims=True)
        # What no query of its row sees may be NaN, of a request that had the page before, and 0 x NaN is NaN.
        v, seen = gather(pages.v, page), jnp.any(visible, axis=(1, 2))
        if pages.v_scale is None:
            v = jnp.where(seen[:, :, None, None], v, 0.0)
        else:
            p *= jnp.where(seen[:, None, None], scales_of(pages.v_scale, page), 0.0)
        return m_new, l_i, acc * alpha + jnp.einsum("bhrs,bshk->bhrk", p, v)

    last = jnp.max(q_positions, initial=0)
    first = 0 if window is None else _first_visible(q_positions, last, window) // size
    zeros = jnp.zeros((batch, kv_heads, group * tokens, 1), jnp.float32)
    state = (zeros + MASKED_SCORE, zeros, jnp.zeros_like(rows))
    _, l_i, acc = lax.fori_loop(first, last // size + 1, iteration, state)
    heads = (acc / l_i).reshape(batch, kv_heads, group, tokens, head_dim)
    return jnp.einsum("bhgtk->bthgk", heads).reshape(q.shape).astype(q.dtype)

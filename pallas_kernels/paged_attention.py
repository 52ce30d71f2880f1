"""Causal attention over the pages of a KV cache: the definition, and blocks with a running softmax.

On a CPU the blocks are here; on a GPU they are the kernel of `prefill_attention`.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.attention import _HIDDEN, plain_attention
from pallas_kernels.dispatch import dispatch
from pallas_kernels.kv_pages import KVPages
from pallas_kernels.prefill_attention import prefill_attention

# What the CPU takes at once.
_BLOCK = 128  # keys
_QUERIES = 8  # but always a whole row's


def paged_attention(
    q: jax.Array,
    pages: KVPages,
    page_table: jax.Array,
    q_positions: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    alibi: tuple[float, ...] | None = None,
) -> jax.Array:
    """Causal `attention` of each row's queries over the row's pages.

    On a CPU the time follows the longest context present, on a GPU with kernels each row's own, elsewhere the width of
    the page table.

    Args:
      q: [B, T, Hq, K]; query head h reads KV head h // (Hq / Hkv).
      pages: the cache, which already holds the keys and values of these queries.
      page_table: int32 [B, P]; page i of a row holds its positions from i * page_size on. Entries beyond a row's
        length may be any page.
      q_positions: int32 [B, T], negative for padding (whose result is finite and means nothing).
      scale, window, softcap, alibi: as in `attention`.
    Returns: [B, T, Hq, K] in q's dtype.
    """
    options = {"scale": scale, "window": window, "softcap": softcap, "alibi": alibi}
    return dispatch("paged_attention", prefill_attention, _without_kernel, q, pages, page_table, q_positions, **options)


def _without_kernel(
    q: jax.Array, pages: KVPages, page_table: jax.Array, q_positions: jax.Array, **options
) -> jax.Array:
    blocks, gathered = (functools.partial(f, **options) for f in (_by_blocks, gathered_attention))
    return lax.platform_dependent(q, pages, page_table, q_positions, cpu=blocks, default=gathered)


def gathered_attention(
    q: jax.Array, pages: KVPages, page_table: jax.Array, q_positions: jax.Array, **options
) -> jax.Array:
    """The definition of `paged_attention`: `plain_attention` over every page of the table, side by side."""
    batch, count = page_table.shape

    def gather(x: jax.Array, scale: jax.Array | None) -> jax.Array:
        taken = x[page_table]
        if scale is not None:
            taken = taken * scale[page_table][:, :, None, :, None]
        return taken.reshape(batch, count * x.shape[1], *x.shape[2:]).astype(q.dtype)

    k, v = gather(pages.k, pages.k_scale), gather(pages.v, pages.v_scale)
    return plain_attention(q, k, v, q_positions, jnp.full(batch, k.shape[1]), **options)


def _by_blocks(q: jax.Array, pages: KVPages, page_table: jax.Array, q_positions: jax.Array, **options) -> jax.Array:
    """A few rows at a time: a block of their keys stays in a core's cache, and short rows wait for few long ones."""
    batch, tokens = q_positions.shape
    rows = math.gcd(batch, max(_QUERIES // tokens, 1))
    split = [x.reshape(batch // rows, rows, *x.shape[1:]) for x in (q, page_table, q_positions)]
    heads = lax.map(lambda x: _rows_by_blocks(x[0], pages, x[1], x[2], **options), tuple(split))
    return heads.reshape(q.shape)


def _rows_by_blocks(
    q: jax.Array,
    pages: KVPages,
    page_table: jax.Array,
    q_positions: jax.Array,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    alibi: tuple[float, ...] | None,
) -> jax.Array:
    """Block after block of keys with a running maximum and sum (Dao et al. 2022, arXiv:2205.14135, algorithm 1).

    A row's result depends neither on the other rows' contents nor on the table's width: a block that is hidden from a
    row leaves its sums as they are or, before the first key that the row sees, makes sums that the factor
    exp(_HIDDEN - score) = 0 then clears.
    """
    batch, tokens, q_heads, head_dim = q.shape
    num_pages, page_size, kv_heads, _ = pages.k.shape
    group = q_heads // kv_heads
    count = max(_BLOCK // page_size, 1)  # pages of a block
    size = count * page_size
    # A block more than needed: XLA compiles the loop over a table of one block in another way, which rounds otherwise.
    page_table = jnp.pad(page_table, ((0, 0), (0, count + -page_table.shape[1] % count)))
    rows = jnp.einsum("bthgk->bhgtk", q.reshape(batch, tokens, kv_heads, group, head_dim)).astype(jnp.float32) * scale
    rows = rows.reshape(batch, kv_heads, group * tokens, head_dim)
    at = jnp.tile(q_positions, (1, group))[:, None, :, None]  # [B, 1, G * T, 1]
    slopes = None if alibi is None else jnp.repeat(jnp.asarray(alibi, jnp.float32), tokens).reshape(kv_heads, -1, 1)

    def keys(x: jax.Array, page: jax.Array) -> jax.Array:
        taken = x.reshape(num_pages, -1).at[page].get(mode="clip")
        return taken.reshape(batch, size, kv_heads, head_dim).astype(jnp.float32)

    def times(x: jax.Array, scales: jax.Array | None, page: jax.Array) -> jax.Array:
        """x [B, Hkv, G * T, S] times the scales of its keys."""
        if scales is None:
            return x
        taken = scales.at[page].get(mode="clip").reshape(batch, count, kv_heads)
        return x * jnp.repeat(jnp.einsum("bph->bhp", taken), page_size, axis=-1)[:, :, None]

    def scores_of(i: jax.Array, page: jax.Array) -> jax.Array:
        k = keys(pages.k, page)
        if tokens == 1:  # the keys first: a product of many rows is faster than one of many columns
            scores = lax.optimization_barrier(jnp.einsum("bshk,bhrk->bhsr", k, rows)).swapaxes(-1, -2)
        else:
            scores = jnp.einsum("bhrk,bshk->bhrs", rows, k)
        scores = times(scores, pages.k_scale, page)
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        distance = i * size + jnp.arange(size) - at  # of the key from the query; negative if before it
        if slopes is not None:
            scores += slopes * distance.astype(jnp.float32)
        seen = distance <= 0
        if window is not None:
            seen &= distance > -window
        return jnp.where(seen, scores, _HIDDEN)

    def add(i: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        highest, total, mixed = state
        page = lax.dynamic_slice(page_table, (0, i * count), (batch, count)).reshape(-1)
        scores = scores_of(i, page)
        higher = jnp.maximum(highest, jnp.max(scores, axis=-1, keepdims=True))
        weights, kept = jnp.exp(scores - higher), jnp.exp(highest - higher)
        total = total * kept + jnp.sum(weights, axis=-1, keepdims=True)
        weights = times(weights, pages.v_scale, page)
        return higher, total, mixed * kept + jnp.einsum("bhrs,bshk->bhrk", weights, keys(pages.v, page))

    last = jnp.max(q_positions, initial=0)
    first = 0
    if window is not None:
        lowest = jnp.min(jnp.where(q_positions < 0, last, q_positions))
        first = jnp.maximum(lowest - window + 1, 0) // size
    zeros = jnp.zeros((batch, kv_heads, group * tokens, 1), jnp.float32)
    state = (zeros + _HIDDEN, zeros, jnp.zeros_like(rows))
    _, total, mixed = lax.fori_loop(first, last // size + 1, add, state)
    heads = (mixed / total).reshape(batch, kv_heads, group, tokens, head_dim)
    return jnp.einsum("bhgtk->bthgk", heads).reshape(q.shape).astype(q.dtype)

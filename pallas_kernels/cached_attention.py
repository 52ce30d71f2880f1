"""Attention over the paged KV cache, from the fused QKV projection to the heads' outputs."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.pallas_kernels.decode_attention import MAX_DECODE_TOKENS, decode_attention
from jaxinfer.pallas_kernels.dispatch import dispatch
from jaxinfer.pallas_kernels.kv_pages import KVPages, write_pages
from jaxinfer.pallas_kernels.norm import normalize
from jaxinfer.pallas_kernels.paged_attention import paged_attention
from jaxinfer.pallas_kernels.rotary import rotate


def cached_attention(
    qkv: jax.Array,
    pages: KVPages,
    page_table: jax.Array,
    positions: jax.Array,
    *,
    rotary: tuple[jax.Array, jax.Array] | None = None,
    norms: tuple[jax.Array, jax.Array] | None = None,
    alibi: jax.Array | None = None,
    norm_eps: float = 0.0,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[jax.Array, KVPages]:
    """Store the new keys and values in the cache, then attend from each row's queries to all keys of that row.

    On a GPU, up to MAX_DECODE_TOKENS tokens a row run as one kernel. Those rows must belong to different requests: no
    row may attend to what another row stores in the same call. A row's tokens are consecutive, with padding at the end.

    Args:
      qkv: [B, T, Hkv * (G + 2) * K]; for each KV head its G queries, its key and its value.
      pages: the cache; written in place if the caller donates it.
      page_table: int32 [B, P]; page i of a row holds its positions i * page_size to (i + 1) * page_size - 1. Beyond a
        row's last position, entries may be any page, and pages and scales may hold anything, also NaN.
      positions: int32 [B, T], negative for padding, which stores nothing and whose result is finite.
      rotary: cos and sin of each token's angles, float32 [B, T, 1, R / 2], as in `rotate`.
      norms: RMSNorm scales for the query heads and for the key heads, float32 [K] each.
      alibi, scale, window, softcap: as in `attention`.
    Returns: the heads' outputs, [B, T, Hkv * G * K] in qkv's dtype, and the updated cache.
    """
    options = {"norm_eps": norm_eps, "scale": scale, "window": window, "softcap": softcap}
    args = (qkv, pages, page_table, positions, rotary, norms, alibi)
    if qkv.shape[1] > MAX_DECODE_TOKENS:
        return cached_attention_fallback(*args, **options)
    return dispatch("decode_attention", decode_attention, cached_attention_fallback, *args, **options)


def cached_attention_fallback(
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
    """`cached_attention` as separate operations; `paged_attention` is dispatched on its own."""
    kv_heads, head_dim = pages.k.shape[2:]
    norm_and_rotary: dict[str, Any] = {"rotary": rotary, "norms": norms, "norm_eps": norm_eps}
    q, k, v = split_heads(qkv, kv_heads=kv_heads, head_dim=head_dim, **norm_and_rotary)
    pages = store_kv(pages, k, v, page_table, positions)
    return paged_attention(q, pages, page_table, positions, alibi, **options).reshape(*qkv.shape[:2], -1), pages


def split_heads(
    qkv: jax.Array,
    *,
    kv_heads: int,
    head_dim: int,
    rotary: tuple[jax.Array, jax.Array] | None,
    norms: tuple[jax.Array, jax.Array] | None,
    norm_eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Split a fused projection into queries [B, T, Hq, K], keys and values [B, T, Hkv, K]; normalise, then rotate."""
    grouped = qkv.reshape(*qkv.shape[:2], kv_heads, -1, head_dim)
    q = grouped[..., :-2, :].reshape(*qkv.shape[:2], -1, head_dim)
    k, v = grouped[..., -2, :], grouped[..., -1, :]
    if norms is not None:
        q, k = (normalize(x, norm, None, eps=norm_eps) for x, norm in zip((q, k), norms, strict=True))
    if rotary is not None:
        q, k = rotate(q, rotary), rotate(k, rotary)
    return q, k, v


def store_kv(pages: KVPages, k: jax.Array, v: jax.Array, page_table: jax.Array, positions: jax.Array) -> KVPages:
    """Write keys and values [B, T, Hkv, K] at their rows' positions [B, T]; negative positions are dropped."""
    num_pages, page_size = pages.k.shape[:2]
    page = jnp.take_along_axis(page_table, jnp.maximum(positions, 0) // page_size, axis=1)
    page = jnp.where(positions < 0, num_pages, page).reshape(-1)
    offset = (positions % page_size).reshape(-1)
    new_k, new_v = (x.reshape(-1, *x.shape[2:]) for x in (k, v))
    return write_pages(pages, new_k, new_v, page, offset, rows=len(positions))

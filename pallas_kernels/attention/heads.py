"""From a fused QKV projection to queries, and to keys and values in their pages."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.pallas_kernels.kv_pages import KVPages, write_pages
from jaxinfer.pallas_kernels.norm import normalize
from jaxinfer.pallas_kernels.rotary import rotate


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


def split_and_store(
    qkv: jax.Array,
    pages: KVPages,
    page_table: jax.Array,
    positions: jax.Array,
    **preparation: Any,
) -> tuple[jax.Array, KVPages]:
    """Split a fused projection, write its keys and values at their positions, and return the queries and the cache.

    Args:
      qkv: [B, T, Hkv * (G + 2) * K].
      pages, page_table, positions: as of `api.cached_attention`.
      preparation: as of `split_heads`: rotary, norms, norm_eps.
    """
    kv_heads, head_dim = pages.k.shape[2:]
    q, k, v = split_heads(qkv, kv_heads=kv_heads, head_dim=head_dim, **preparation)
    return q, store_kv(pages, k, v, page_table, positions)


def store_kv(pages: KVPages, k: jax.Array, v: jax.Array, page_table: jax.Array, positions: jax.Array) -> KVPages:
    """Write keys and values [B, T, Hkv, K] at their rows' positions [B, T]; negative positions are dropped."""
    num_pages, page_size = pages.k.shape[:2]
    page = jnp.take_along_axis(page_table, jnp.maximum(positions, 0) // page_size, axis=1)
    page = jnp.where(positions < 0, num_pages, page).reshape(-1)
    offset = (positions % page_size).reshape(-1)
    new_k, new_v = (x.reshape(-1, *x.shape[2:]) for x in (k, v))
    return write_pages(pages, new_k, new_v, page, offset, rows=len(positions))

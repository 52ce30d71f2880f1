"""Attention in plain JAX: what every implementation computes."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.pallas_kernels.attention.heads import split_and_store
from jaxinfer.pallas_kernels.kv_pages import KVPages

# Finite, so that a row with no visible key (padding) gives a harmless average instead of NaN.
MASKED_SCORE = -1e30


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
    """Store keys and values, then attend to all pages of the table. Arguments as of `api`."""
    q, pages = split_and_store(qkv, pages, page_table, positions, rotary=rotary, norms=norms, norm_eps=norm_eps)
    return paged_attention(q, pages, page_table, positions, alibi, **options).reshape(*qkv.shape[:2], -1), pages


def paged_attention(
    q: jax.Array,
    pages: KVPages,
    page_table: jax.Array,
    q_positions: jax.Array,
    alibi: jax.Array | None = None,
    **options: Any,
) -> jax.Array:
    """Gather every page of the table, and attend to them. Arguments as of `api`."""
    batch, count = page_table.shape

    def gather(x: jax.Array, scale: jax.Array | None) -> jax.Array:
        gathered = x[page_table]
        if scale is not None:
            gathered = gathered * scale[page_table][:, :, None, :, None]
        return gathered.reshape(batch, count * x.shape[1], *x.shape[2:]).astype(q.dtype)

    k, v = gather(pages.k, pages.k_scale), gather(pages.v, pages.v_scale)
    return attention(q, k, v, q_positions, jnp.full(batch, k.shape[1]), alibi, **options)


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_positions: jax.Array,
    lengths: jax.Array | None,
    alibi: jax.Array | None = None,
    key_sizes: jax.Array | None = None,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """softmax(scale * q k^T + bias) v. Arguments as of `api`."""
    batch, tokens, q_heads, head_dim = q.shape
    keys, kv_heads = k.shape[1:3]
    grouped = batch, kv_heads, q_heads // kv_heads, tokens, keys
    if exact := math.frexp(scale)[0] == 0.5:  # a power of two: scaled queries give the same scores, for less
        q *= jnp.asarray(scale, q.dtype)
    scores = _scores(q.reshape(batch, tokens, kv_heads, -1, head_dim), k)  # [B, Hkv, G * T, S]
    if not exact:
        scores *= scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    distance = jnp.arange(keys) - q_positions[:, :, None]  # [B, T, S]: key's position - query's position
    if alibi is not None:
        slopes = alibi.reshape(kv_heads, -1, 1, 1)
        bias = slopes * distance.astype(jnp.float32)[:, None, None]
        scores = (scores.reshape(grouped) + bias).reshape(scores.shape)
    conditions = []  # of a key that a query sees, [B, T or 1, S]
    if key_sizes is not None:
        conditions.append((key_sizes > 0)[:, None])
        scores += jnp.log(jnp.where(key_sizes > 0, key_sizes, 1.0))[:, None, None]
    if lengths is not None:
        conditions.append(jnp.arange(keys) < lengths[:, None, None])
    if causal:
        conditions.append(distance <= 0)
    if window is not None:
        conditions.append(distance > -window)
    if conditions:
        visible = functools.reduce(jnp.logical_and, conditions)
        if visible.shape[1] == 1:
            scores = jnp.where(visible[:, None], scores, MASKED_SCORE)
        else:
            masked = jnp.where(visible[:, None, None], scores.reshape(grouped), MASKED_SCORE)
            scores = masked.reshape(scores.shape)
        # What no query of its row sees may be NaN, of a request that had the page before, and 0 x NaN is NaN.
        v = jnp.where(jnp.any(visible, axis=1)[..., None, None], v, 0)
    p = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return _weighted_values(p, v, tokens).reshape(q.shape)


# With several queries, the rows of a KV head (R = G * T) and its keys are first made contiguous, so that the products
# are plain batched matmuls: three times faster on a CPU. There they are one fusion with the softmax if nothing comes
# between them. A single query has nothing to gather, and XLA:GPU reads its pages in place.


def _scores(q: jax.Array, k: jax.Array) -> jax.Array:
    """q k^T in float32: [B, T, Hkv, G, K], [B, S, Hkv, K] -> [B, Hkv, R, S]."""
    batch, tokens, heads, group, size = q.shape
    if tokens == 1:
        scores = jnp.einsum("bthgk,bshk->bhgts", q, k, preferred_element_type=jnp.float32)
        return scores.reshape(batch, heads, group, -1)
    rows = jnp.einsum("bthgk->bhgtk", q).reshape(batch, heads, group * tokens, size)
    if k.dtype == jnp.float32:  # not in bfloat16, where XLA:CPU is faster with an order of its own
        k = jnp.swapaxes(k, 1, 2)
        return jnp.einsum("bhrk,bhsk->bhrs", rows, k)
    return jnp.einsum("bhrk,bshk->bhrs", rows, k, preferred_element_type=jnp.float32)


def _weighted_values(p: jax.Array, v: jax.Array, tokens: int) -> jax.Array:
    """p v: [B, Hkv, R, S], [B, S, Hkv, K] -> [B, T, Hkv, G, K]."""
    batch, heads, rows, keys = p.shape
    if tokens == 1:
        return jnp.einsum("bhgts,bshk->bthgk", p.reshape(batch, heads, rows, 1, keys), v)
    mixed = jnp.einsum("bhrs,bshk->bhrk", p, v)
    return jnp.einsum("bhgtk->bthgk", mixed.reshape(batch, heads, rows // tokens, tokens, -1))

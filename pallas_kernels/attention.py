"""Scaled dot-product attention with grouped queries, windows, soft caps and ALiBi: the definition."""

import jax
import jax.numpy as jnp

# Finite, so that a row with no visible key (padding) gives a harmless average instead of NaN.
_HIDDEN = -1e30


def visible(q_positions: jax.Array, k_positions: jax.Array, *, causal: bool, window: int | None) -> jax.Array:
    """Which key each query may see: [B, T], [B, S] -> bool [B, T, S]. A negative key position is padding."""
    q, k = q_positions[:, :, None], k_positions[:, None, :]
    mask = k >= 0
    if causal:
        mask &= k <= q
    if window is not None:
        mask &= k > q - window
    return mask


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_positions: jax.Array,
    k_positions: jax.Array,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    alibi: tuple[float, ...] | None = None,
) -> jax.Array:
    """softmax(scale * q k^T + bias) v, scores and softmax in float32.

    Args:
      q: [B, T, Hq, K]. k, v: [B, S, Hkv, K]; query head h reads KV head h // (Hq / Hkv).
      q_positions: int32 [B, T]. k_positions: int32 [B, S], negative for padding.
      scale: multiplies the scores.
      causal: hide keys after the query. window: hide keys `window` or more tokens before it.
      softcap: scores become softcap * tanh(scores / softcap).
      alibi: one slope per query head; adds slope * (k_position - q_position).
    Returns: [B, T, Hq, K] in q's dtype.
    """
    batch, tokens, q_heads, head_dim = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(batch, tokens, kv_heads, q_heads // kv_heads, head_dim)
    scores = _scores(grouped, k) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    if alibi is not None:
        slopes = jnp.asarray(alibi, jnp.float32).reshape(kv_heads, -1, 1, 1)
        distance = (k_positions[:, None, :] - q_positions[:, :, None]).astype(jnp.float32)
        scores += slopes * distance[:, None, None]
    mask = visible(q_positions, k_positions, causal=causal, window=window)
    scores = jnp.where(mask[:, None, None], scores, _HIDDEN)
    weights = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return _mix(weights, v).reshape(q.shape)


# With several queries the rows of one KV head are brought together first, which makes the products plain batched ones:
# three times as fast on a CPU. A single query has nothing to bring together, and XLA:GPU reads pages in place for it.


def _scores(q: jax.Array, k: jax.Array) -> jax.Array:
    """q k^T in float32: [B, T, Hkv, G, K], [B, S, Hkv, K] -> [B, Hkv, G, T, S]."""
    batch, tokens, heads, group, size = q.shape
    if tokens == 1:
        return jnp.einsum("bthgk,bshk->bhgts", q, k, preferred_element_type=jnp.float32)
    rows = jnp.einsum("bthgk->bhgtk", q).reshape(batch, heads, group * tokens, size)
    scores = jnp.einsum("bhrk,bshk->bhrs", rows, k, preferred_element_type=jnp.float32)
    return scores.reshape(batch, heads, group, tokens, -1)


def _mix(weights: jax.Array, v: jax.Array) -> jax.Array:
    """weights v: [B, Hkv, G, T, S], [B, S, Hkv, K] -> [B, T, Hkv, G, K]."""
    batch, heads, group, tokens, keys = weights.shape
    if tokens == 1:
        return jnp.einsum("bhgts,bshk->bthgk", weights, v)
    rows = jnp.einsum("bhrs,bshk->bhrk", weights.reshape(batch, heads, group * tokens, keys), v)
    return jnp.einsum("bhgtk->bthgk", rows.reshape(batch, heads, group, tokens, -1))

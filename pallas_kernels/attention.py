"""Scaled dot-product attention with grouped queries, windows, soft caps and ALiBi, over a row's own keys."""

import jax
import jax.numpy as jnp
from jax._src.lib import cuda_versions  # None without JAX's CUDA plugin; there is no public way to ask for cuDNN

from pallas_kernels.dispatch import dispatch
from pallas_kernels.kv_pages import KVPages
from pallas_kernels.prefill_attention import prefill_attention

# Finite, so that a row with no visible key (padding) gives a harmless average instead of NaN.
_HIDDEN = -1e30


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_positions: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    alibi: tuple[float, ...] | None = None,
) -> jax.Array:
    """softmax(scale * q k^T + bias) v, scores and softmax in float32.

    On a GPU: cuDNN for what an encoder asks for, else the kernel of `prefill_attention`, which takes the keys of a row
    as a page.

    Args:
      q: [B, T, Hq, K]. k, v: [B, S, Hkv, K]; query head h reads KV head h // (Hq / Hkv). Key i is at position i.
      q_positions: int32 [B, T], less than the row's length; negative for padding (whose result is finite and means
        nothing).
      lengths: int32 [B]; keys from there on are padding.
      scale: multiplies the scores.
      causal: hide keys after the query. window: hide keys `window` or more tokens before it.
      softcap: scores become softcap * tanh(scores / softcap).
      alibi: one slope per query head; adds slope * (key's position - query's position).
    Returns: [B, T, Hq, K] in q's dtype.
    """
    options = {"scale": scale, "causal": causal, "window": window, "softcap": softcap, "alibi": alibi}
    whole = not causal and window is None and softcap is None and alibi is None
    kernel = _by_cudnn if whole and q.dtype == k.dtype and _cudnn_takes(q) else _by_pages
    return dispatch("attention", kernel, plain_attention, q, k, v, q_positions, lengths, **options)


def _cudnn_takes(q: jax.Array) -> bool:
    """Whether cuDNN is there and has attention for this dtype and head_dim, from compute capability 9.0 on."""
    if q.dtype not in (jnp.bfloat16, jnp.float16) or q.shape[-1] % 8 or q.shape[-1] > 256:
        return False
    try:
        return cuda_versions is not None and cuda_versions.cudnn_get_version() > 0
    except RuntimeError:  # the plugin without the library
        return False


def _by_cudnn(
    q: jax.Array, k: jax.Array, v: jax.Array, q_positions: jax.Array, lengths: jax.Array, *, scale: float, **options
) -> jax.Array:
    """Every query sees all keys of its row, so their positions do not matter; an empty row sees one, to stay finite."""
    del q_positions, options
    lengths = jnp.maximum(lengths, 1)
    return jax.nn.dot_product_attention(q, k, v, scale=scale, key_value_seq_lengths=lengths, implementation="cudnn")


def _by_pages(
    q: jax.Array, k: jax.Array, v: jax.Array, q_positions: jax.Array, lengths: jax.Array, *, causal: bool, **options
) -> jax.Array:
    """Each row's keys as one page. A causal query sees none from `lengths` on, as they are all after it."""
    return prefill_attention(q, KVPages(k, v), None, q_positions, None if causal else lengths, **options)


def plain_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_positions: jax.Array,
    lengths: jax.Array,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    alibi: tuple[float, ...] | None = None,
) -> jax.Array:
    """The definition of `attention`."""
    batch, tokens, q_heads, head_dim = q.shape
    keys, kv_heads = k.shape[1:3]
    grouped = q.reshape(batch, tokens, kv_heads, q_heads // kv_heads, head_dim)
    scores = _scores(grouped, k) * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    distance = jnp.arange(keys) - q_positions[:, :, None]  # [B, T, S], of the key from the query; negative if before it
    if alibi is not None:
        slopes = jnp.asarray(alibi, jnp.float32).reshape(kv_heads, -1, 1, 1)
        scores += slopes * distance.astype(jnp.float32)[:, None, None]
    seen = jnp.arange(keys) < lengths[:, None, None]
    if causal:
        seen &= distance <= 0
    if window is not None:
        seen &= distance > -window
    scores = jnp.where(seen[:, None, None], scores, _HIDDEN)
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

"""Scaled dot-product attention over contiguous keys: grouped queries, sliding windows, soft caps and ALiBi.

Also over merged tokens: proportional attention (ToMe, arXiv:2210.09461, section 3)."""

import functools
import math

import jax
import jax.numpy as jnp
from jax._src.lib import cuda_versions  # None without JAX's CUDA plugin; there is no public way to ask for cuDNN

from jaxinfer.pallas_kernels.dispatch import UnsupportedError, dispatch
from jaxinfer.pallas_kernels.kv_pages import KVPages
from jaxinfer.pallas_kernels.prefill_attention import prefill_attention

# Finite, so that a row with no visible key (padding) gives a harmless average instead of NaN.
MASKED_SCORE = -1e30


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
    """softmax(scale * q k^T + bias) v, with scores and softmax in float32.

    On a GPU this runs cuDNN for unmasked (encoder) attention where it is installed, otherwise the `prefill_attention`
    kernel, which treats each row's keys as one page. With `key_sizes` it is cuDNN, with log(size) rounded to q's dtype,
    or plain XLA.

    Args:
      q: [B, T, Hq, K]. k, v: [B, S, Hkv, K]; query head h reads KV head h // (Hq / Hkv). Key i is at position i.
      q_positions: int32 [B, T], less than the row's length; negative for padding (whose result is finite but
        meaningless).
      lengths: int32 [B]; keys at positions >= length are padding. None: no key is; also with `key_sizes`.
      alibi: float32 [Hq], the slope of each query head; adds slope * (key's position - query's position).
      key_sizes: float32 [B, S], in place of `lengths`: how many tokens each key is the mean of. It counts as so many
        equal keys, which adds log(size) to its scores. Keys of size 0 are padding; they and their values are finite.
      scale: multiplies the scores.
      causal: mask keys after the query. window: mask keys `window` or more tokens before it.
      softcap: scores become softcap * tanh(scores / softcap).
    Returns: [B, T, Hq, K] in q's dtype.
    Raises: ValueError if `key_sizes` is given with `lengths`, or with one of `causal`, `window` and `alibi`: merged
      tokens have no positions.
    """
    if lengths is not None and key_sizes is not None:
        raise ValueError("attention takes either lengths or key_sizes, not both.")
    if key_sizes is not None and (causal or window is not None or alibi is not None):
        raise ValueError(
            "attention with key_sizes takes no causal, window or alibi, since merged tokens have no positions; "
            f"got causal={causal}, window={window}, alibi={'given' if alibi is not None else None}."
        )
    options = {"scale": scale, "causal": causal, "window": window, "softcap": softcap}
    unmasked = not causal and window is None and softcap is None and alibi is None
    kernel = _cudnn_attention if unmasked and q.dtype == k.dtype and _cudnn_supports(q) else _contiguous_attention
    args = (q, k, v, q_positions, lengths, alibi, key_sizes)
    return dispatch("attention", kernel, attention_reference, *args, **options)


def _cudnn_supports(q: jax.Array) -> bool:
    """Whether cuDNN is installed and has attention for this dtype and head_dim on compute capability 9.0 or newer."""
    if q.dtype not in (jnp.bfloat16, jnp.float16) or q.shape[-1] % 8 or q.shape[-1] > 256:
        return False
    try:
        return cuda_versions is not None and cuda_versions.cudnn_get_version() > 0
    except RuntimeError:  # the plugin is installed without the library
        return False


def _cudnn_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_positions: jax.Array,
    lengths: jax.Array | None,
    alibi: None,
    key_sizes: jax.Array | None,
    *,
    scale: float,
    **options,
) -> jax.Array:
    """Every query sees all keys of its row, so positions do not matter; an empty row sees one key, to stay finite."""
    del q_positions, alibi, options
    if key_sizes is not None:
        bias, mask = _size_bias(q, key_sizes), (key_sizes > 0)[:, None, None]
        return jax.nn.dot_product_attention(q, k, v, bias, mask, scale=scale, implementation="cudnn")
    lengths = None if lengths is None else jnp.maximum(lengths, 1)
    return jax.nn.dot_product_attention(q, k, v, scale=scale, key_value_seq_lengths=lengths, implementation="cudnn")


def _size_bias(q: jax.Array, key_sizes: jax.Array) -> jax.Array:
    """log(size), as cuDNN takes a bias: for every query and in q's dtype, [B, 1, T, S]. 0 for padding: JAX adds a large
    negative number where the mask is False, and log(0) is not finite."""
    batch, keys = key_sizes.shape
    logs = jnp.log(jnp.where(key_sizes > 0, key_sizes, 1.0)).astype(q.dtype)
    return jnp.broadcast_to(logs[:, None, None], (batch, 1, q.shape[1], keys))


def _contiguous_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_positions: jax.Array,
    lengths: jax.Array | None,
    alibi: jax.Array | None,
    key_sizes: jax.Array | None,
    *,
    causal: bool,
    **options,
) -> jax.Array:
    """Each row's keys as one page. If causal, no query sees a key past `lengths`: they all come after it."""
    if key_sizes is not None:
        raise UnsupportedError("prefill_attention takes no key_sizes: only cuDNN does")
    if lengths is None:
        lengths = jnp.full(k.shape[0], k.shape[1], jnp.int32)
    return prefill_attention(q, KVPages(k, v), None, q_positions, alibi, None if causal else lengths, **options)


def attention_reference(
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
    """`attention` in plain JAX."""
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

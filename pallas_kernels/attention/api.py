"""Scaled dot-product attention: grouped queries, sliding windows, soft caps, ALiBi; contiguous or paged keys.

Also over merged tokens: proportional attention (ToMe, arXiv:2210.09461, section 3).
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.pallas_kernels.attention import cpu, cudnn
from jaxinfer.pallas_kernels.attention import mosaic as kernels
from jaxinfer.pallas_kernels.attention import reference as plain
from jaxinfer.pallas_kernels.attention import xla as fallbacks
from jaxinfer.pallas_kernels.attention.heads import split_and_store, split_heads
from jaxinfer.pallas_kernels.choices import example_arguments
from jaxinfer.pallas_kernels.dispatch import Operation
from jaxinfer.pallas_kernels.implementation import Implementation, composed, ffi, mosaic, reference, xla
from jaxinfer.pallas_kernels.kv_pages import KVPages

__all__ = ["MAX_DECODE_TOKENS", "attention", "cached_attention", "paged_attention", "split_heads"]

MAX_DECODE_TOKENS = kernels.MAX_DECODE_TOKENS
"""Tokens of a row up to which `cached_attention` is one kernel."""


def _store_then_attend(
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
    """`cached_attention` as separate operations; `paged_attention` is chosen on its own."""
    q, pages = split_and_store(qkv, pages, page_table, positions, rotary=rotary, norms=norms, norm_eps=norm_eps)
    return paged_attention(q, pages, page_table, positions, alibi, **options).reshape(*qkv.shape[:2], -1), pages


def _full_rows(x: Any, pages: Any, page_table: Any, positions: Any, *rest: Any) -> tuple[Any, ...]:
    """Return arguments to measure with: rows whose tokens are the last that their pages hold."""
    last = page_table.shape[1] * pages.k.shape[1]
    places = jnp.broadcast_to(jnp.arange(last - positions.shape[1], last, dtype=jnp.int32), positions.shape)
    x, pages, page_table, *others = example_arguments(x, pages, page_table, *rest)
    return x, pages, page_table, places, *others


_attention = Operation(
    "attention",
    Implementation(name="cudnn", call=cudnn.attention, platform="cuda", needs=("cudnn",)),
    mosaic(kernels.contiguous_attention, "wgmma"),
    reference(plain.attention),
)
_paged_attention = Operation(
    "paged_attention",
    mosaic(kernels.prefill_attention, "wgmma"),
    ffi(cpu.paged_attention),
    xla(fallbacks.paged_attention, platform="cpu"),
    reference(plain.paged_attention),
    example=_full_rows,
)
_decode_attention = Operation(
    "decode_attention",
    mosaic(kernels.decode_attention),
    ffi(cpu.cached_attention),
    xla(fallbacks.cached_attention, platform="cpu"),
    reference(plain.cached_attention, platform="cpu"),
    composed(_store_then_attend),
    example=_full_rows,
)
_cached_attention = Operation(
    "cached_attention",
    ffi(cpu.cached_attention),
    xla(fallbacks.cached_attention, platform="cpu"),
    reference(plain.cached_attention, platform="cpu"),
    composed(_store_then_attend),
    example=_full_rows,
)


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

    On a GPU this is cuDNN for unmasked (encoder) attention where it is installed, otherwise the prefill kernel, which
    treats each row's keys as one page. With `key_sizes` it is cuDNN, with log(size) rounded to q's dtype, or plain XLA.

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
    args = (q, k, v, q_positions, lengths, alibi, key_sizes)
    return _attention(*args, scale=scale, causal=causal, window=window, softcap=softcap)


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
    """Attend causally from each row's queries to the keys in the row's pages, as `attention`.

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
    return _paged_attention(q, pages, page_table, q_positions, alibi, scale=scale, window=window, softcap=softcap)


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
    operation = _cached_attention if qkv.shape[1] > MAX_DECODE_TOKENS else _decode_attention
    args = (qkv, pages, page_table, positions, rotary, norms, alibi)
    return operation(*args, norm_eps=norm_eps, scale=scale, window=window, softcap=softcap)

"""Attention as Mosaic GPU kernels: a few tokens a row (`decode`), and many (`prefill`)."""

import jax
import jax.numpy as jnp

from jaxinfer.pallas_kernels.attention.mosaic.decode import MAX_DECODE_TOKENS, decode_attention
from jaxinfer.pallas_kernels.attention.mosaic.prefill import prefill_attention
from jaxinfer.pallas_kernels.kv_pages import KVPages
from jaxinfer.pallas_kernels.target import UnsupportedError

__all__ = ["MAX_DECODE_TOKENS", "contiguous_attention", "decode_attention", "prefill_attention"]


def contiguous_attention(
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
    """Attend to each row's keys as one page. If causal, no query sees a key past `lengths`: they all come after it.

    Raises UnsupportedError.
    """
    if key_sizes is not None:
        raise UnsupportedError("prefill_attention takes no key_sizes: only cuDNN does")
    if lengths is None:
        lengths = jnp.full(k.shape[0], k.shape[1], jnp.int32)
    return prefill_attention(q, KVPages(k, v), None, q_positions, alibi, None if causal else lengths, **options)

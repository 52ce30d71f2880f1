"""Attention over the pages of a KV cache in C++, for CPUs: pages are written and read in place.

`attention.h` is the kernel, `heads.h` what comes before it, `attention.cc` what XLA calls.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.pallas_kernels.cpu.arguments import or_empty
from jaxinfer.pallas_kernels.cpu.library import ffi_call
from jaxinfer.pallas_kernels.kv_pages import KVPages
from jaxinfer.pallas_kernels.target import UnsupportedError


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
    """Store keys and values, then attend to the row's pages, in one call. Arguments as of `api`."""
    alibi = None if alibi is None else jnp.asarray(alibi)
    vectors = (*(rotary or (None, None)), *(norms or (None, None)), alibi)
    _check_dtypes(qkv, pages, (page_table, positions), vectors)
    kv_heads, head_dim = pages.k.shape[2:]
    heads = (*qkv.shape[:2], qkv.shape[-1] - 2 * kv_heads * head_dim)
    cache = _arrays(pages)
    result, *written = ffi_call(
        "jaxinfer_cached_attention",
        (jax.ShapeDtypeStruct(heads, qkv.dtype), *map(jax.typeof, cache)),
        qkv,
        *cache,
        page_table,
        positions,
        *map(or_empty, vectors),
        aliases={1 + i: 1 + i for i, x in enumerate(cache) if x.size},
        norm_eps=np.float32(norm_eps),
        **_attributes(**options),
    )
    return result, KVPages(*written[: len(jax.tree.leaves(pages))])


def paged_attention(
    q: jax.Array,
    pages: KVPages,
    page_table: jax.Array,
    q_positions: jax.Array,
    alibi: jax.Array | None = None,
    **options: Any,
) -> jax.Array:
    """Attend to the row's pages. Arguments as of `api`."""
    _check_dtypes(q, pages, (page_table, q_positions), (alibi,))
    heads = q.reshape(*q.shape[:2], -1)
    result = ffi_call(
        "jaxinfer_paged_attention",
        jax.typeof(heads),
        heads,
        *_arrays(pages),
        page_table,
        q_positions,
        or_empty(alibi),
        **_attributes(**options),
    )
    return result.reshape(q.shape)


def _check_dtypes(
    x: jax.Array, pages: KVPages, indices: tuple[jax.Array, ...], vectors: tuple[jax.Array | None, ...]
) -> None:
    """Raise UnsupportedError for dtypes that the kernel does not take."""
    if x.dtype not in (jnp.float32, jnp.bfloat16):
        raise UnsupportedError(f"heads must be float32 or bfloat16, got {x.dtype}")
    if pages.k.dtype not in (x.dtype, jnp.bfloat16, jnp.int8):
        kinds = f"in the heads' dtype {x.dtype}, bfloat16 or int8"
        raise UnsupportedError(f"the cache must be {kinds}, got {pages.k.dtype}")
    for index in indices:
        if index.dtype != jnp.int32:
            raise UnsupportedError(f"page table and positions must be int32, got {index.dtype}")
    for vector in vectors:
        if vector is not None and vector.dtype != jnp.float32:
            raise UnsupportedError(f"angles, norms and slopes must be float32, got {vector.dtype}")


def _arrays(pages: KVPages) -> tuple[jax.Array, ...]:
    """Return keys, values and their scales, which are empty for a float cache."""
    return pages.k, pages.v, or_empty(pages.k_scale), or_empty(pages.v_scale)


def _attributes(*, scale: float, window: int | None, softcap: float | None) -> dict[str, Any]:
    """Return what the handlers are told of the scores; 0: no window, no cap."""
    return {"scale": np.float32(scale), "window": np.int64(window or 0), "softcap": np.float32(softcap or 0.0)}

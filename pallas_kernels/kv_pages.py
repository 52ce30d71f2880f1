"""The paged cache of keys and values: its arrays, and storing a step's tokens in them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class KVPages(NamedTuple):
    """One layer's cache, in float or in int8.

    Attributes:
      k, v: [num_pages, page_size, Hkv, K].
      k_scale, v_scale: float32 [num_pages, Hkv] if k and v are int8 (k ~ k * k_scale), else None.
    """

    k: jax.Array
    v: jax.Array
    k_scale: jax.Array | None = None
    v_scale: jax.Array | None = None

    @classmethod
    def shapes(
        cls, num_pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: np.dtype, *, int8: bool = False
    ) -> "KVPages":
        """The shapes and dtypes of a cache; its arrays start as zeros. `dtype` is that of a cache in float."""
        pages = jax.ShapeDtypeStruct((num_pages, page_size, kv_heads, head_dim), np.int8 if int8 else dtype)
        scale = jax.ShapeDtypeStruct((num_pages, kv_heads), np.float32) if int8 else None
        return cls(pages, pages, scale, scale)  # type: ignore[arg-type]  # shapes for arrays


def write_pages(pages: KVPages, k: jax.Array, v: jax.Array, page: jax.Array, slot: jax.Array) -> KVPages:
    """Store a step's keys and values.

    Args:
      k, v: [N, Hkv, K], one row a token.
      page: int32 [N], the page of each token; a token of page num_pages or more is padding and is dropped.
      slot: int32 [N], its place inside the page.
    """
    if pages.k_scale is not None:
        raise NotImplementedError("write_pages: int8 pages are not written yet.")
    return KVPages(_store(pages.k, k, page, slot), _store(pages.v, v, page, slot))


def _store(pages: jax.Array, new: jax.Array, page: jax.Array, slot: jax.Array) -> jax.Array:
    new = new.astype(pages.dtype)
    if page.size == 1:  # a slice, which XLA:GPU writes in one kernel where it takes two for a scatter of one index
        at = (page[0], slot[0], 0, 0)
        kept = jnp.where(page[0] < pages.shape[0], new[None], lax.dynamic_slice(pages, at, (1, *new.shape)))
        return lax.dynamic_update_slice(pages, kept, at)
    return pages.at[page, slot].set(new, mode="drop")

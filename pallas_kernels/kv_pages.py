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


def write_pages(
    pages: KVPages, k: jax.Array, v: jax.Array, page: jax.Array, slot: jax.Array, *, rows: int | None = None
) -> KVPages:
    """Store a step's keys and values.

    An int8 page has one scale per KV head. It grows with the tokens: one that needs more has what the page holds
    rescaled, and one at slot 0 starts the page afresh. A token is therefore rounded again, by at most half a step,
    whenever a later token of its page is the largest so far.

    Args:
      k, v: [N, Hkv, K], one row a token.
      page: int32 [N], the page of each token; a token of page num_pages or more is padding and is dropped.
      slot: int32 [N], its place inside the page. No two tokens share a page and a slot.
      rows: for int8, at most how many runs of tokens start inside a page, where a run is neighbours in `page` that
        are the same. Tokens of R sequences, each in order, make at most R. N if not given.
    """
    if pages.k_scale is None or pages.v_scale is None:
        return KVPages(_put(pages.k, (page, slot), k), _put(pages.v, (page, slot), v))
    rows = page.size if rows is None else min(rows, page.size)
    new_k, k_scale = _put_int8(pages.k, pages.k_scale, k, page, slot, rows)
    new_v, v_scale = _put_int8(pages.v, pages.v_scale, v, page, slot, rows)
    return KVPages(new_k, new_v, k_scale, v_scale)


def _put(x: jax.Array, index: tuple[jax.Array, ...], new: jax.Array) -> jax.Array:
    """x[index] = new, but for what lies beyond x's first dimension."""
    new = new.astype(x.dtype)
    if index[0].size == 1:  # a slice, which XLA:GPU writes in one kernel where it takes two for a scatter of one index
        at = (*(i[0] for i in index), *[0] * (new.ndim - 1))
        new = new.reshape((1,) * len(index) + new.shape[1:])
        kept = jnp.where(at[0] < x.shape[0], new, lax.dynamic_slice(x, at, new.shape))
        return lax.dynamic_update_slice(x, kept, at)
    return x.at[index].set(new, mode="drop")


def _put_int8(
    pages: jax.Array, scale: jax.Array, new: jax.Array, page: jax.Array, slot: jax.Array, rows: int
) -> tuple[jax.Array, jax.Array]:
    """Quantise one of keys and values into its pages; returns pages and scales."""
    new = new.astype(jnp.float32)
    needed = jnp.maximum(jnp.max(jnp.abs(new), axis=-1), 1e-30) / 127.0
    before = scale.at[jnp.where(slot == 0, page, len(scale))].set(0.0, mode="drop")
    after = before.at[page].max(needed, mode="drop")

    # A page that is entered at slot 0 holds nothing to keep.
    entered = jnp.where((slot != 0) & (page != jnp.roll(page, 1).at[0].set(-1)), page, len(scale))
    if rows < page.size:
        entered = entered.at[jnp.nonzero(entered < len(scale), size=rows, fill_value=page.size)].get(
            mode="fill", fill_value=len(scale)
        )
    factor = before.at[entered].get(mode="clip") / after.at[entered].get(mode="clip")
    held = pages.at[entered].get(mode="clip") * factor[:, None, :, None]
    pages = _put(pages, (entered,), jnp.round(held))

    return _put(pages, (page, slot), jnp.round(new / after.at[page].get(mode="clip")[..., None])), after

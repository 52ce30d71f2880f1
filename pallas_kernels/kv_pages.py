"""The paged KV cache: its arrays, and writing new tokens into them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


class KVPages(NamedTuple):
    """One layer's KV cache, in int8 or a float dtype, which may be of fewer bits than what is computed in.

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
        """The shapes and dtypes of a cache, whose arrays start as zeros. `dtype` is of a float cache."""
        pages = jax.ShapeDtypeStruct((num_pages, page_size, kv_heads, head_dim), np.int8 if int8 else dtype)
        scale = jax.ShapeDtypeStruct((num_pages, kv_heads), np.float32) if int8 else None
        return cls(pages, pages, scale, scale)  # type: ignore[arg-type]  # shapes for arrays


def write_pages(
    pages: KVPages, k: jax.Array, v: jax.Array, page: jax.Array, offset: jax.Array, *, rows: int | None = None
) -> KVPages:
    """Write new keys and values into the cache.

    An int8 page has one scale per KV head, which only grows: when a token needs a larger scale, what the page already
    holds is rescaled, and a token at offset 0 resets the page. So a token is rounded again, by at most half a
    quantisation step, each time a later token raises the scale of its page. What is not finite is stored as 0: it would
    make the scale NaN, and so all tokens of the page, whose first ones other requests may share.

    In a float page, a token with a key or value that is not finite has a key of NaN and a value of 0. So every query
    that sees it gets NaN, and no other does: scores that are masked are replaced, while a weight of 0 would still
    multiply the value.

    Args:
      k, v: [N, Hkv, K], one row per token.
      page: int32 [N], each token's page; tokens with page >= num_pages are padding and are dropped.
      offset: int32 [N], the token's offset in its page. No two tokens have the same page and offset.
      rows: for int8, an upper bound on the runs of tokens that start inside a page (offset > 0), where a run is
        consecutive tokens of equal `page`. The tokens of R sequences, each in order, have at most R. Default: N.
    """
    if pages.k_scale is None or pages.v_scale is None:
        k, v = _contained(k.astype(pages.k.dtype), v.astype(pages.v.dtype))
        return KVPages(_write(pages.k, (page, offset), k), _write(pages.v, (page, offset), v))
    rows = page.size if rows is None else min(rows, page.size)
    new_k, k_scale = _write_int8(pages.k, pages.k_scale, k, page, offset, rows)
    new_v, v_scale = _write_int8(pages.v, pages.v_scale, v, page, offset, rows)
    return KVPages(new_k, new_v, k_scale, v_scale)


def _contained(k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The keys and values [..., K], where what is not finite harms those who see it, and nobody else."""
    finite = jnp.all(jnp.isfinite(k) & jnp.isfinite(v), axis=-1, keepdims=True)
    return jnp.where(finite, k, jnp.nan), jnp.where(finite, v, 0)


def _write(x: jax.Array, index: tuple[jax.Array, ...], new: jax.Array) -> jax.Array:
    """x[index] = new, dropping indices beyond x's first dimension."""
    new = new.astype(x.dtype)
    if index[0].size == 1:  # XLA:GPU needs two kernels for a scatter of one index, and one for updating a slice
        start = (*(i[0] for i in index), *[0] * (new.ndim - 1))
        new = new.reshape((1,) * len(index) + new.shape[1:])
        update = jnp.where(start[0] < x.shape[0], new, lax.dynamic_slice(x, start, new.shape))
        return lax.dynamic_update_slice(x, update, start)
    return x.at[index].set(new, mode="drop")


def _write_int8(
    pages: jax.Array, scale: jax.Array, new: jax.Array, page: jax.Array, offset: jax.Array, rows: int
) -> tuple[jax.Array, jax.Array]:
    """Quantise keys (or values) into their pages; returns the pages and their scales."""
    new = new.astype(jnp.float32)
    new = jnp.where(jnp.isfinite(new), new, 0.0)
    min_scale = jnp.maximum(jnp.max(jnp.abs(new), axis=-1), 1e-30) / 127.0
    old_scale = scale.at[jnp.where(offset == 0, page, len(scale))].set(0.0, mode="drop")
    new_scale = old_scale.at[page].max(min_scale, mode="drop")

    # Rescale the pages that are continued. A page that starts at offset 0 holds nothing to keep.
    continued = jnp.where((offset != 0) & (page != jnp.roll(page, 1).at[0].set(-1)), page, len(scale))
    if rows < page.size:
        continued = continued.at[jnp.nonzero(continued < len(scale), size=rows, fill_value=page.size)].get(
            mode="fill", fill_value=len(scale)
        )
    ratio = old_scale.at[continued].get(mode="clip") / new_scale.at[continued].get(mode="clip")
    rescaled = pages.at[continued].get(mode="clip") * ratio[:, None, :, None]
    pages = _write(pages, (continued,), jnp.round(rescaled))

    quantized = jnp.round(new / new_scale.at[page].get(mode="clip")[..., None])
    return _write(pages, (page, offset), quantized), new_scale

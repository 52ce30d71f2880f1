"""Pages as another request may leave them: anything in the slots that no row has filled."""

import jax
import numpy as np

from jaxinfer.pallas_kernels import KVPages


def with_stale_slots(pages: KVPages, table: jax.Array, lengths: np.ndarray, value: float) -> KVPages:
    """Put `value` into every slot but the first `lengths` [B] of each row's pages, all other pages included.

    int8 has no NaN: a page's scale becomes `value` if the page holds none of a row's tokens, and its slots, like those
    after a row's last token in a page that holds some, become 127, or 0 if `value` is.
    """
    filled = np.zeros(pages.k.shape[:2], bool)
    for row, length in zip(np.asarray(table), lengths, strict=True):
        positions = np.arange(length)
        filled[row[positions // filled.shape[1]], positions % filled.shape[1]] = True
    slots = value if pages.k_scale is None else 127 * (value != 0)
    k, v = (np.where(filled[:, :, None, None], x, np.array(slots, x.dtype)) for x in map(np.asarray, pages[:2]))
    if pages.k_scale is None or pages.v_scale is None:
        return KVPages(k, v)
    scales = (np.where(filled[:, :1], x, np.float32(value)) for x in map(np.asarray, (pages.k_scale, pages.v_scale)))
    return KVPages(k, v, *scales)

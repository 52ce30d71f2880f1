"""Recurrent states as pages of a tier: each state takes as many as its bytes fill."""

import hashlib
import itertools
from collections.abc import Iterator

import numpy as np

from jaxinfer.checkpoints.host_memory import ARRAY_ALIGNMENT, aligned
from jaxinfer.generation.engine.batch import PageBlock, StateBlock
from jaxinfer.generation.engine.buckets import Buckets
from jaxinfer.generation.engine.page_tier import arrays_of, bytes_of_array, bytes_of_page, parts_of


def pages_of_state(page: PageBlock, state: StateBlock) -> int:
    """Count the pages, of these shapes, that a state of these shapes takes; one without arrays takes none."""
    return -(-sum(_sizes_of(state)) // bytes_of_page(page))


def _sizes_of(state: StateBlock) -> list[int]:
    """The bytes of each array, with padding after it."""
    return [aligned(bytes_of_array(x), ARRAY_ALIGNMENT) for x in state.arrays]


class StatePages:
    """Turns the recurrent states of a snapshot into pages, and back.

    So a tier knows nothing of states: one limit, one order of use and one record of costs count both.

    Args:
      page: the shapes of a page of a lane, [S, ...] (`PageBlock` without N).
      state: the shapes of a row of states of a lane, [S, ...] (`StateBlock` without N).
      buckets: the sizes that pages are moved in.

    Attributes:
      count: how many pages a state takes.
    """

    def __init__(self, page: PageBlock, state: StateBlock, buckets: Buckets):
        self._page, self._state, self._buckets = page, state, buckets
        self._page_bytes = bytes_of_page(page)
        *self._starts, _ = itertools.accumulate(_sizes_of(state), initial=0)
        self.count = pages_of_state(page, state)

    def keys(self, key: bytes) -> Iterator[bytes]:
        """The keys of the pages of a state, by the key of the page at whose end it lies."""
        for number in range(self.count):
            yield hashlib.blake2b(key + b"state" + number.to_bytes(4), digest_size=32).digest()

    def pack(self, block: StateBlock) -> PageBlock:
        """Copy a state, [S, 1, ...], into pages."""
        content = np.zeros((self.count, self._page_bytes), np.uint8)
        flat = content.reshape(-1)
        for start, x in zip(self._starts, block.arrays, strict=True):
            flat[start : start + x.nbytes] = np.ascontiguousarray(x).reshape(-1).view(np.uint8)
        ends = itertools.accumulate(map(bytes_of_array, parts_of(self._page)))

        def take(x: np.ndarray) -> np.ndarray:
            end = next(ends)
            part = content[:, end - bytes_of_array(x) : end].view(x.dtype)
            return np.moveaxis(part.reshape(self.count, *x.shape), 0, 1)

        return self._page.map(take)

    def unpack(self, block: PageBlock, pages: int) -> tuple[PageBlock, StateBlock]:
        """Divide what came from a tier into the first pages, as a block of their own, and the state after them."""
        parts = []
        for x in arrays_of(block):
            part = np.moveaxis(x[:, pages : pages + self.count], 1, 0)
            parts.append(part.reshape(self.count, -1))
        flat = (parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)).reshape(-1)

        def take(start: int, x: np.ndarray) -> np.ndarray:
            content = flat[start : start + bytes_of_array(x)].view(x.dtype)
            return content.reshape(x.shape[0], 1, *x.shape[1:])

        state = StateBlock(tuple(map(take, self._starts, self._state.arrays)))
        places = sum(self._buckets.moves_of(pages))
        return block.map(lambda x: x[:, :places]), state

"""Pages of the prefix cache in the host's memory, which the devices have forgotten."""

import dataclasses
import functools
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence

import numpy as np

from jaxinfer.checkpoints.host_memory import ARRAY_ALIGNMENT, aligned, aligned_buffer
from jaxinfer.compiled import Costs
from jaxinfer.futures import InterruptibleFuture
from jaxinfer.generation.engine.batch import PageBlock
from jaxinfer.generation.engine.buckets import Buckets
from jaxinfer.generation.engine.page_tier import (
    MAX_WRITES,
    BlockMemory,
    Load,
    Loaded,
    PageTier,
    TierStats,
    arrays_of,
    bytes_of_array,
    bytes_of_page,
    make_worker,
    parts_of,
    places_of,
)

READ_PAGE = "read_page"
"""The name of reading a page into a block, in the record of costs."""


class HostPages(PageTier):
    """A fixed number of pages; the least recently used are forgotten first.

    Each page is contiguous over all layers. One thread copies them, in the order of the calls: so a page is read before
    another takes its place, and after it was written.

    Args:
      count: how many pages.
      page: the shapes of a page of a lane, [S, ...] (`PageBlock` without N).
      buckets: the sizes that pages are moved in.
      costs: the record of the times of reading.

    Attributes:
      page_bytes: bytes of a page.
    """

    def __init__(self, count: int, page: PageBlock, buckets: Buckets, costs: Costs):
        self.count, self._page, self._buckets, self._costs = count, page, buckets, costs
        self.page_bytes = bytes_of_page(page)
        self._block_memory = BlockMemory(page)
        self._worker = make_worker("host-pages")
        self._writes: deque[InterruptibleFuture[None]] = deque()
        self._stats = TierStats(num_pages=count, page_bytes=self.page_bytes)
        self.free_memory()

    def free_memory(self) -> None:
        """Forget all pages, and give their memory back. Nothing may be on its way."""
        self._block_memory.free()
        self._rows: OrderedDict[bytes, int] = OrderedDict()  # the least recently used first
        self._empty = list(reversed(range(self.count)))
        self._memory: list[np.ndarray] | None = None  # uint8 [count, S, ...] for each array of a block

    def __contains__(self, key: bytes) -> bool:
        if key not in self._rows:
            return False
        self._rows.move_to_end(key)
        return True

    def __len__(self) -> int:
        return len(self._rows)

    def wants(self, key: bytes) -> bool:
        return key not in self

    def wants_early(self, key: bytes) -> bool:
        return False

    @property
    def has_room(self) -> bool:
        return True

    def put(self, keys: Sequence[bytes], blocks: Sequence[PageBlock]) -> None:
        new = [(self._take(key), block, at) for key, block, at in places_of(keys, blocks) if key not in self]
        if not new:
            return
        self._stats = dataclasses.replace(self._stats, stored=self._stats.stored + len(new))
        self._memory = memory = self._memory or self._allocate()
        while self._writes and (self._writes[0].done() or len(self._writes) >= MAX_WRITES):
            self._writes.popleft().result()
        self._writes.append(self._worker.submit(_write, memory, new))

    def _take(self, key: bytes) -> int:
        """A row for a new page."""
        row = self._empty.pop() if self._empty else self._rows.popitem(last=False)[1]
        self._rows[key] = row
        return row

    def get(self, keys: Sequence[bytes]) -> Load:
        """Begin to read pages, of which it has some; another tier fills the places of the others."""
        assert self._memory is not None, "it has some"
        rows = [self._rows.get(key) for key in keys]
        self._use(keys)
        read = functools.partial(self._read, self._memory, rows)
        return Load(tuple(keys), self._worker.submit(read), time.perf_counter())

    def _use(self, keys: Sequence[bytes]) -> None:
        """Note that pages are used: the first, which more requests share, are forgotten last."""
        for key in reversed(keys):
            if key in self._rows:
                self._rows.move_to_end(key)

    def _read(self, memory: Sequence[np.ndarray], rows: Sequence[int | None]) -> Loaded:
        """Copy pages into a new block; in the worker."""
        start = time.perf_counter()
        block = self._block_memory.make_block(sum(self._buckets.moves_of(len(rows))))
        for rows_of_all, target in zip(memory, arrays_of(block), strict=True):
            for at, row in enumerate(rows):
                if row is not None:
                    np.copyto(target[:, at], rows_of_all[row])
        self._costs.record(READ_PAGE, (), time.perf_counter() - start, passes=len(rows) - rows.count(None))
        return Loaded(block, len(rows))

    def reads(self, keys: Sequence[bytes]) -> Counter[str]:
        return Counter({READ_PAGE: len(keys)})

    def forget(self, keys: Iterable[bytes]) -> None:
        """Forget pages, such as those that could not be read."""
        self._empty += [self._rows.pop(key) for key in keys if key in self._rows]

    def admitted(self, load: Load, keys: Sequence[bytes]) -> None:
        self._stats = self._stats.admitted(load, len(keys))

    @property
    def stats(self) -> dict[str, TierStats]:
        return {"host_kv": dataclasses.replace(self._stats, pages=len(self._rows))}

    def settle(self) -> None:
        while self._writes:
            self._writes.popleft().result()

    def close(self) -> None:
        self.settle()
        self._worker.close()

    def _allocate(self) -> list[np.ndarray]:
        """Memory for all pages, a row for each; the system takes it as it is written."""
        stride = aligned(self.page_bytes, ARRAY_ALIGNMENT)
        memory, offset, views = aligned_buffer(self.count * stride), 0, []
        for x in parts_of(self._page):
            size = bytes_of_array(x)
            rows = np.lib.stride_tricks.as_strided(memory[offset:], (self.count, size), (stride, 1))
            views.append(rows.reshape(self.count, *x.shape[:-1], -1))
            offset += size
        return views

    def check_integrity(self) -> None:
        """Raise AssertionError unless each row is empty or has one page."""
        assert sorted([*self._empty, *self._rows.values()]) == list(range(self.count))


def _write(memory: Sequence[np.ndarray], pages: Iterable[tuple[int, PageBlock, int]]) -> None:
    """Copy pages of blocks into their rows; in the worker."""
    for row, block, at in pages:
        for rows, source in zip(memory, arrays_of(block), strict=True):
            np.copyto(rows[row], source[:, at])

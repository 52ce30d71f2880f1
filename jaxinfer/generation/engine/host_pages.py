"""Pages of the prefix cache in the host's memory, which the devices have forgotten."""

import dataclasses
import functools
import logging
import math
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from rich.filesize import decimal

from jaxinfer.checkpoints.host_memory import ARRAY_ALIGNMENT, aligned, aligned_buffer
from jaxinfer.compiled import Costs
from jaxinfer.futures import DaemonThreads, InterruptibleFuture
from jaxinfer.generation.engine.batch import PageBlock
from jaxinfer.generation.engine.buckets import Buckets

READ_PAGE = "read_page"
"""The name of reading a page into a block, in the record of costs."""
MAX_WRITES = 8
"""Blocks that wait to be written, which take memory of the devices, before the engine waits for the first."""

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TierStats:
    """A tier's work so far, and its content.

    Attributes:
      pages: pages that it has now.
      num_pages: pages that it has room for.
      page_bytes: bytes of a page.
      stored: pages that were written.
      read_back: pages that came back to the devices.
      hits: admitted completions that got pages from it.
      waited: seconds that these waited for their pages.
    """

    pages: int = 0
    num_pages: int = 0
    page_bytes: int = 0
    stored: int = 0
    read_back: int = 0
    hits: int = 0
    waited: float = 0.0

    @property
    def stored_bytes(self) -> int:
        """Bytes of the pages that were written."""
        return self.stored * self.page_bytes

    @property
    def read_back_bytes(self) -> int:
        """Bytes of the pages that came back to the devices."""
        return self.read_back * self.page_bytes

    def __str__(self) -> str:
        moved = f"{decimal(self.stored_bytes)} stored, {decimal(self.read_back_bytes)} read back"
        return f"{self.pages} of {self.num_pages} in use, {moved} for {self.hits} completions in {self.waited:.3g} s"


class Load(NamedTuple):
    """Pages on their way from a tier.

    Attributes:
      keys: their keys, in the order of the block.
      block: becomes their content, [S, N, ...]; N is that of `Buckets.moves_of`, beyond the keys without meaning.
      began: when it was asked for, by `time.perf_counter`.
    """

    keys: tuple[bytes, ...]
    block: InterruptibleFuture[PageBlock]
    began: float


class PageTier(Protocol):
    """Keeps pages by their keys (`page_pool.page_key`). The engine's thread calls its methods, which are quick."""

    def __contains__(self, key: bytes) -> bool:
        """Check whether it has a page, or will when the next `get` reads it; counts as a use."""
        ...

    def put(self, keys: Sequence[bytes], blocks: Sequence[PageBlock]) -> None:
        """Store pages, which come in their order in the blocks; others may be forgotten for them."""
        ...

    def get(self, keys: Sequence[bytes]) -> Load:
        """Begin to read pages that it has."""
        ...


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
        self._worker = DaemonThreads(1, "jaxinfer-host-pages")
        self._writes: deque[InterruptibleFuture[None]] = deque()
        self._stats = TierStats(num_pages=count, page_bytes=self.page_bytes)
        self.clear()

    def clear(self) -> None:
        """Forget all pages, and give their memory back. Nothing may be on its way."""
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

    def put(self, keys: Sequence[bytes], blocks: Sequence[PageBlock]) -> None:
        places = [(block, at) for block in blocks for at in range(block.kv.shape[1])]
        new = []
        for key, (block, at) in zip(keys, places, strict=False):  # the last block may have padding
            if key not in self:
                new.append((self._take(key), block, at))
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
        assert self._memory is not None, "only pages that it has are read"
        rows = [self._rows[key] for key in keys]
        for key in reversed(keys):  # the first, which more requests share, are forgotten last
            self._rows.move_to_end(key)
        read = functools.partial(self._read, self._memory, rows)
        return Load(tuple(keys), self._worker.submit(read), time.perf_counter())

    def _read(self, memory: Sequence[np.ndarray], rows: Sequence[int]) -> PageBlock:
        """Copy pages into a new block; in the worker."""
        start = time.perf_counter()
        block = empty_block(self._page, sum(self._buckets.moves_of(len(rows))))
        for rows_of_all, target in zip(memory, _bytes_of(block), strict=True):
            for at, row in enumerate(rows):
                np.copyto(target[:, at], rows_of_all[row])
        self._costs.record(READ_PAGE, (), time.perf_counter() - start, passes=len(rows))
        return block

    def forget(self, keys: Iterable[bytes]) -> None:
        """Forget pages, such as those that could not be read."""
        self._empty += [self._rows.pop(key) for key in keys if key in self._rows]

    def admitted(self, pages: int, waited: float) -> None:
        """Count an admitted completion that got so many pages, for which it waited so many seconds."""
        stats = self._stats
        self._stats = dataclasses.replace(
            stats, read_back=stats.read_back + pages, hits=stats.hits + 1, waited=stats.waited + waited
        )

    @property
    def stats(self) -> TierStats:
        """Its work so far; from any thread."""
        return dataclasses.replace(self._stats, pages=len(self._rows))

    def settle(self) -> None:
        """Wait until everything is written."""
        while self._writes:
            self._writes.popleft().result()

    def _allocate(self) -> list[np.ndarray]:
        """Memory for all pages, a row for each; the system takes it as it is written."""
        stride = aligned(self.page_bytes, ARRAY_ALIGNMENT)
        memory, offset, views = aligned_buffer(self.count * stride), 0, []
        for x in _arrays(self._page):
            size = math.prod(x.shape) * x.dtype.itemsize
            rows = np.lib.stride_tricks.as_strided(memory[offset:], (self.count, size), (stride, 1))
            views.append(rows.reshape(self.count, *x.shape[:-1], -1))
            offset += size
        return views

    def check_integrity(self) -> None:
        """Raise AssertionError unless each row is empty or has one page."""
        assert sorted([*self._empty, *self._rows.values()]) == list(range(self.count))


def bytes_of_page(page: PageBlock) -> int:
    """The bytes of a page of these shapes."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in _arrays(page))


def empty_block(page: PageBlock, count: int) -> PageBlock:
    """A block in new memory for `count` pages of these shapes, as programs take it without a copy."""

    def make(x: Any) -> np.ndarray:
        shape = x.shape[0], count, *x.shape[1:]
        return aligned_buffer(math.prod(shape) * x.dtype.itemsize).view(x.dtype).reshape(shape)

    return PageBlock(*map(make, _arrays(page)))


def _arrays(block: PageBlock) -> list[Any]:
    return [x for x in block if x is not None]


def _bytes_of(block: PageBlock) -> list[np.ndarray]:
    """The arrays of a block as bytes, which numpy copies without Python's lock whatever their dtype."""
    return [x.view(np.uint8) for x in _arrays(block)]


def _write(memory: Sequence[np.ndarray], pages: Iterable[tuple[int, PageBlock, int]]) -> None:
    """Copy pages of blocks into their rows; in the worker."""
    for row, block, at in pages:
        for rows, source in zip(memory, _bytes_of(block), strict=True):
            np.copyto(rows[row], source[:, at])

"""Pages of the prefix cache on disk, where they outlive the process."""

import dataclasses
import functools
import itertools
import time
from collections import Counter, deque
from collections.abc import Collection, Sequence

import numpy as np

from jaxinfer.compiled import Costs
from jaxinfer.disk_cache.blocks import BlockFolder
from jaxinfer.futures import InterruptibleFuture
from jaxinfer.generation.engine.batch import PageBlock
from jaxinfer.generation.engine.buckets import Buckets
from jaxinfer.generation.engine.page_tier import (
    CLOSE_SECONDS,
    MAX_WRITES,
    BlockMemory,
    Load,
    Loaded,
    PageTier,
    TierStats,
    arrays_of,
    bytes_of_page,
    make_worker,
    places_of,
)

AHEAD = 8
"""Pages that the system reads from the disk while one is copied: disks are faster with several."""
READ_PAGE_FROM_DISK = "read_page_from_disk"
"""The name of reading a page from disk into a block, in the record of costs."""


class DiskPages(PageTier):
    """Pages as blocks of a folder, which other models may share.

    One thread writes and reads, in the order of the calls, so a page is read after it was written. Nobody waits for
    writes: pages that come faster than the disk takes them are left out.

    Args:
      blocks: the folder.
      page: the shapes of a page of a lane, [S, ...] (`PageBlock` without N).
      buckets: the sizes that pages are moved in.
      costs: the record of the times of reading.
    """

    def __init__(self, blocks: BlockFolder, page: PageBlock, buckets: Buckets, costs: Costs):
        self.blocks, self._buckets, self._costs = blocks, buckets, costs
        self._page_bytes = bytes_of_page(page)
        self._room = MAX_WRITES * buckets.moves[-1]
        self._block_memory = BlockMemory(page)
        self._worker = make_worker("disk-pages")
        self._writing: set[bytes] = set()  # pages that wait to be written
        self._writes: deque[tuple[InterruptibleFuture[None], int]] = deque()  # and the sizes of their blocks
        self._stored = 0  # which the worker counts
        self._stats = TierStats(num_pages=blocks.max_bytes // self._page_bytes, page_bytes=self._page_bytes)

    def __contains__(self, key: bytes) -> bool:
        return key in self._writing or key in self.blocks

    def wants(self, key: bytes) -> bool:
        return self.has_room and key not in self

    def wants_early(self, key: bytes) -> bool:
        return key not in self

    @property
    def has_room(self) -> bool:
        while self._writes and self._writes[0][0].done():
            self._writes.popleft()
        return sum(size for _, size in self._writes) < self._room and self.blocks.can_write

    def put(self, keys: Sequence[bytes], blocks: Sequence[PageBlock]) -> None:
        new = [page for page in places_of(keys, blocks) if page[0] not in self]
        if new and self.has_room:
            self._writing.update(key for key, *_ in new)
            self._writes.append((self._worker.submit(self._write, new), sum(block.places for block in blocks)))

    def _write(self, pages: Sequence[tuple[bytes, PageBlock, int]]) -> None:
        """Write pages of blocks; in the worker."""
        try:
            for key, block, at in pages:
                parts = [np.ascontiguousarray(x[:, at]).reshape(-1) for x in arrays_of(block)]
                self._stored += self.blocks.put(key, *parts)
        finally:
            self._writing.difference_update(key for key, *_ in pages)

    def get(self, keys: Sequence[bytes], base: Load | None = None) -> Load:
        """Begin to read pages. base: a load of the same pages, of which it has some already; None: there is none."""
        missing = frozenset(keys) if base is None else base.from_disk
        read = functools.partial(self._read, tuple(keys), missing, None if base is None else base.result)
        return Load(tuple(keys), self._worker.submit(read), time.perf_counter(), missing)

    def _read(
        self, keys: Sequence[bytes], missing: Collection[bytes], base: InterruptibleFuture[Loaded] | None
    ) -> Loaded:
        """Read the missing pages into their places of a block, up to the first that cannot be read; in the worker."""
        size = sum(self._buckets.moves_of(len(keys)))
        block = self._block_memory.make_block(size) if base is None else base.result().block
        start, arrays = time.perf_counter(), arrays_of(block)
        places = [(at, key) for at, key in enumerate(keys) if key in missing]
        ahead = iter([key for _, key in places])
        for key in itertools.islice(ahead, AHEAD):
            self.blocks.read_ahead(key)
        for at, key in places:
            for later in itertools.islice(ahead, 1):
                self.blocks.read_ahead(later)
            # Each array has a page of each stage, [S, N, ...].
            if not self.blocks.get_into(key, *(memoryview(stage[at].reshape(-1)) for x in arrays for stage in x)):
                return Loaded(block, at)
        self._costs.record(READ_PAGE_FROM_DISK, (), time.perf_counter() - start, passes=len(missing))
        return Loaded(block, len(keys))

    def reads(self, keys: Sequence[bytes]) -> Counter[str]:
        return Counter({READ_PAGE_FROM_DISK: len(keys)})

    def forget(self, keys: Sequence[bytes]) -> None:
        """Do nothing: pages that cannot be read are gone from the folder."""

    def admitted(self, load: Load, keys: Sequence[bytes]) -> None:
        self._stats = self._stats.admitted(load, len(keys))

    @property
    def stats(self) -> dict[str, TierStats]:
        return {"disk_kv": dataclasses.replace(self._stats, pages=len(self.blocks), stored=self._stored)}

    def free_memory(self) -> None:
        self._block_memory.free()

    def settle(self) -> None:
        self._settled().result()

    def check_integrity(self) -> None:
        assert not self._writing
        self.blocks.check_integrity()

    def close(self) -> None:
        self._settled().wait(CLOSE_SECONDS)
        self._worker.close()
        self.blocks.close()

    def _settled(self) -> InterruptibleFuture[None]:
        """A future that ends once everything so far is written."""
        return self._worker.submit(lambda: None)

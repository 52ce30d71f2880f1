"""Tiers of the prefix cache, to which pages move when the devices forget them: what all tiers have in common."""

import dataclasses
import itertools
import math
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from rich.filesize import decimal

from jaxinfer.checkpoints.host_memory import ARRAY_ALIGNMENT, aligned, aligned_buffer
from jaxinfer.compiled import close_at_exit
from jaxinfer.futures import DaemonThreads, InterruptibleFuture
from jaxinfer.generation.engine.batch import PageBlock

MAX_WRITES = 8
"""Blocks of the largest size that may wait to be written to a tier, which take memory."""
CLOSE_SECONDS = 10.0
"""Seconds that the end of a tier, or of the process, waits for its worker."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TierStats:
    """A tier's work so far, and its content.

    Attributes:
      pages: pages that it has now. A recurrent state counts as the pages that its bytes fill, here and below.
      num_pages: pages that it has room for.
      page_bytes: bytes of a page.
      stored: pages that were written.
      read_back: pages that came back to the devices.
      from_back: those of them that came while what is before them was computed.
      hits: admitted completions that got pages from it.
      waited: seconds from when they asked for their pages until they got them.
    """

    pages: int = 0
    num_pages: int = 0
    page_bytes: int = 0
    stored: int = 0
    read_back: int = 0
    from_back: int = 0
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

    def admitted(self, load: "Load", pages: int) -> "TierStats":
        """Add a completion that got so many pages of a load; returns the sum."""
        return dataclasses.replace(
            self,
            read_back=self.read_back + pages,
            from_back=self.from_back + (pages if load.num_computed else 0),
            hits=self.hits + 1,
            waited=self.waited + load.waited,
        )

    def __str__(self) -> str:
        moved = f"{decimal(self.stored_bytes)} stored, {decimal(self.read_back_bytes)} read back"
        return f"{self.pages} of {self.num_pages} in use, {moved} for {self.hits} completions in {self.waited:.3g} s"


class Loaded(NamedTuple):
    """Pages that came from a tier.

    Attributes:
      block: their content, [S, N, ...]; N is that of `Buckets.moves_of`.
      num_pages: how many of the first of the block came; the next one could not be read.
    """

    block: PageBlock
    num_pages: int


class Load(NamedTuple):
    """Pages on their way from a tier.

    Pages of a model with recurrent states end with a state (`StatePages`).

    Attributes:
      keys: their keys, in the order of the block.
      result: becomes their content.
      began: when it was asked for, by `clock`.
      from_disk: those that come from disk.
      num_computed: how many pages before them the tier has, too, which are computed meanwhile.
      until: when they are late, by `clock`.
      clock: the time.
      before: with a state, how many pages of the sequence come before these.
      reach: with a state, how many pages of the sequence it comes after.
    """

    keys: tuple[bytes, ...]
    result: InterruptibleFuture[Loaded]
    began: float
    from_disk: frozenset[bytes] = frozenset()
    num_computed: int = 0
    until: float = math.inf
    clock: Callable[[], float] = time.perf_counter
    before: int = 0
    reach: int = 0

    @property
    def waited(self) -> float:
        """Seconds since it was asked for."""
        return self.clock() - self.began

    @property
    def left(self) -> float:
        """Seconds until it is late."""
        return self.until - self.clock()


class PageTier(Protocol):
    """Keeps pages by their keys (`page_pool.page_key`). The engine's thread calls its methods, which are quick.

    The exceptions are `settle` and `close`.
    """

    def __contains__(self, key: bytes) -> bool:
        """Check whether it has a page, or will when the next `get` reads it; counts as a use."""
        ...

    def wants(self, key: bytes) -> bool:
        """Check whether to bring a page here that gives way to another."""
        ...

    def wants_early(self, key: bytes) -> bool:
        """Check whether to bring a page here that a sequence has left on the devices, since the process may end."""
        ...

    @property
    def has_room(self) -> bool:
        """Whether it takes more pages now without waiting for a disk."""
        ...

    def put(self, keys: Sequence[bytes], blocks: Sequence[PageBlock]) -> None:
        """Store pages, which come in their order in the blocks; others may be forgotten for them."""
        ...

    def get(self, keys: Sequence[bytes]) -> Load:
        """Begin to read pages that it has."""
        ...

    def reads(self, keys: Sequence[bytes]) -> Counter[str]:
        """Count the pages that come from each place, by the name of such a read in the record of costs."""
        ...

    def forget(self, keys: Sequence[bytes]) -> None:
        """Forget pages, such as those that could not be read."""
        ...

    def admitted(self, load: Load, keys: Sequence[bytes]) -> None:
        """Count a completion that got these pages of a load."""
        ...

    @property
    def stats(self) -> Mapping[str, TierStats]:
        """Its work so far, by the field of `EngineStats`; from any thread."""
        ...

    def free_memory(self) -> None:
        """Give the host's memory back; what a disk has stays. Nothing may be on its way."""
        ...

    def settle(self) -> None:
        """Wait until everything is written."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError unless its records fit together; everything is settled."""
        ...

    def close(self) -> None:
        """Settle, and let others have what only one may have at a time."""
        ...


def make_worker(name: str) -> DaemonThreads:
    """Make a tier's thread.

    The process waits at its end for the copy that it makes: JAX's code, interrupted there, would crash the process.
    """
    worker = DaemonThreads(1, f"jaxinfer-{name}")
    for thread in worker.threads:
        close_at_exit(thread, lambda thread: thread.join(CLOSE_SECONDS))
    return worker


def bytes_of_page(page: PageBlock) -> int:
    """The bytes of a page of these shapes."""
    return sum(map(bytes_of_array, parts_of(page)))


def bytes_of_array(x: Any) -> int:
    """The bytes of an array of this shape and dtype."""
    return math.prod(x.shape) * x.dtype.itemsize


class BlockMemory:
    """Memory for blocks of pages that come back, which the next one takes when nobody has the one before any more.

    A system takes longer to give a process new memory than to copy pages there.

    Args:
      page: the shapes of a page, [S, ...].
    """

    def __init__(self, page: PageBlock):
        self._page = page
        self._kept: deque[np.ndarray] = deque(maxlen=1)

    def make_block(self, count: int) -> PageBlock:
        """Make a block for `count` pages, as programs take it without a copy; what is in it has no meaning."""
        sizes = [aligned(count * bytes_of_array(x), ARRAY_ALIGNMENT) for x in parts_of(self._page)]
        memory = self._kept.pop() if self._kept else np.empty(0, np.uint8)
        if memory.size < sum(sizes):
            memory = aligned_buffer(sum(sizes))
        whole = np.frombuffer(memoryview(memory), np.uint8)  # the base of all arrays of the block
        weakref.finalize(whole, self._kept.append, memory).atexit = False
        starts = itertools.accumulate(sizes, initial=0)

        def make(x: Any) -> np.ndarray:
            content = whole[(start := next(starts)) : start + count * bytes_of_array(x)]
            return content.view(x.dtype).reshape(x.shape[0], count, *x.shape[1:])

        return self._page.map(make)

    def free(self) -> None:
        """Give the memory back that no block has."""
        self._kept.clear()


def parts_of(block: PageBlock) -> list[Any]:
    """The arrays or shapes of a block."""
    return [*block.kv, *block.scale]


def arrays_of(block: PageBlock) -> list[np.ndarray]:
    """The arrays of a block as bytes, which numpy copies without Python's lock whatever their dtype."""
    return [x.view(np.uint8) for x in parts_of(block)]


def places_of(keys: Sequence[bytes], blocks: Sequence[PageBlock]) -> Iterator[tuple[bytes, PageBlock, int]]:
    """The pages of blocks: (key, block, place in it); the last block may have padding."""
    places = [(block, at) for block in blocks for at in range(block.places)]
    return ((key, *place) for key, place in zip(keys, places, strict=False))

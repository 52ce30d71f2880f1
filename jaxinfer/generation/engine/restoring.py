"""Pages of the prefix cache that come back from a tier: which, and whether that is faster than computing them."""

import itertools
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Hashable, Sequence

from jaxinfer.generation.engine.batch import Batch, PageBlock, Restored, Stored
from jaxinfer.generation.engine.page_pool import Node, PagePool
from jaxinfer.generation.engine.page_tier import Load, PageTier
from jaxinfer.generation.engine.speculation import PassCosts

WRITE_PAGE = "write_page"
"""The name of a page's way from a block to the devices, in the record of costs."""
TRIES = 3
"""Measurements without which restoring counts as faster: one alone may have met a stall of the machine."""
MAX_EARLY = 32
"""Pages that move to a tier in one step though nothing takes their place."""
STORE_SECONDS = 5.0
"""Seconds that an engine without requests saves pages before it looks for new ones."""
RETRY = 16
"""Restoring is tried again once in so many times that the record speaks against it."""

log = logging.getLogger(__name__)


class Restoring:
    """Moves full pages of a lane's prefix cache to a tier and back.

    Args:
      pool: the lane's pages.
      tier: keeps them, for all lanes.
      costs: the times of passes and of moves.
      chunk_size: tokens of a chunk of a prompt.
    """

    def __init__(self, pool: PagePool, tier: PageTier, costs: PassCosts, chunk_size: int):
        self.tier, self._pool, self._costs, self._chunk_size = tier, pool, costs, chunk_size
        self._refused = 0
        self._early: deque[Node] = deque(maxlen=pool.count)  # pages to move though nothing takes their place

    def released(self, node: Hashable) -> None:
        """Note that a sequence has left the pages up to this node, which have been computed or are in flight."""
        path = []
        while isinstance(node, Node):
            if self.tier.wants_early(self._pool.key_of(node)):
                path.append(node)
            node = node.parent
        self._early.extend(reversed(path))

    def take_stored(self) -> tuple[Stored, ...]:
        """The pages that the step in preparation is to bring to the tier.

        They gave way since the last call, or sequences have left them.
        """
        pool, tier = self._pool, self.tier
        stored = [Stored(node.page, key) for node in pool.take_forgotten() if tier.wants(key := pool.key_of(node))]
        for _ in range(MAX_EARLY):
            if not (self._early and tier.has_room):
                break
            node = self._early.popleft()
            if pool.has(node) and tier.wants_early(key := pool.key_of(node)):
                stored.append(Stored(node.page, key))
        return tuple(stored)

    def store(self, stored: Sequence[Stored], blocks: Sequence[PageBlock]) -> None:
        """Give the tier the pages that a step has brought to the host."""
        self.tier.put([key for _, key in stored], blocks)

    def begin(self, load: Load | None, parent: Hashable, tokens: Sequence[int]) -> Load | None:
        """Begin to read the pages of the tokens that follow a node; None if there are none, or computing is faster.

        load: what this has returned before, which goes on if it has the next page.
        """
        keys = self._pool.keys_after(parent, tokens[:-1])
        if (first := next(keys, None)) is None:
            return None
        if load is not None and first in load.keys:
            return load
        kept = list(itertools.takewhile(self.tier.__contains__, itertools.chain([first], keys)))
        return self.tier.get(kept) if kept and self._pays(kept, len(tokens)) else None

    def _pays(self, keys: Sequence[bytes], tokens: int) -> bool:
        """Check whether restoring the first pages of these tokens saves time; unknown times count as if it did."""
        moves, chunk = self.tier.reads(keys) + Counter({WRITE_PAGE: len(keys)}), self._costs.chunk_seconds()
        costs = {name: cost for name in moves if (cost := self._costs.all.for_sizes(name)) is not None}
        if chunk is None or sum(cost.weight >= TRIES for cost in costs.values()) < len(moves):
            return True
        rest = tokens - len(keys) * self._pool.page_size
        saved = -(-tokens // self._chunk_size) - (-(-rest // self._chunk_size) if rest > 1 else 0)
        pays = sum(count * costs[name].p50 for name, count in moves.items()) < saved * chunk
        self._refused = 0 if pays else (self._refused + 1) % RETRY
        return pays or not self._refused

    def end(self, load: Load, parent: Hashable, tokens: Sequence[int]) -> tuple[PageBlock | None, int, int]:
        """Wait for a load; returns its block, where in it the pages that follow a node begin, and how many these are.

        There are none if it failed: they are then computed.
        """
        try:
            block, count = load.result.result()
        except Exception as error:
            log.warning("%d pages of the KV cache could not be read, and are computed.", len(load.keys), exc_info=error)
            self.tier.forget(load.keys)
            return None, 0, 0
        first = load.keys.index(next(self._pool.keys_after(parent, tokens)))
        if count <= first:  # the tier lost them meanwhile
            return None, 0, 0
        self.tier.admitted(load, load.keys[first:count])
        return block, first, count - first


def store_pages(
    lanes: Sequence[Restoring], read: Callable[[Batch], list[list[PageBlock]]], is_wanted: Callable[[], bool]
) -> None:
    """Bring the pages that sequences have left to the tier of all lanes, since no step follows that would.

    Args:
      lanes: all lanes of an engine.
      read: brings the pages of `Batch.stored` to the host; returns blocks of each lane.
      is_wanted: whether requests wait, so that this ends early.
    """
    until = time.monotonic() + STORE_SECONDS
    while lanes and time.monotonic() < until and not is_wanted():
        if not lanes[0].tier.has_room:
            lanes[0].tier.settle()
        batch = Batch.of_lanes([Batch(stored=lane.take_stored()) for lane in lanes])
        if not batch.stored:
            break
        for lane, part, blocks in zip(lanes, batch.lanes, read(batch), strict=True):
            lane.store(part.stored, blocks)


def restored(pages: Sequence[int], block: PageBlock, first: int) -> Restored:
    """The pages that a block's pages become, from the first of them on."""
    after = block.kv.shape[1] - first - len(pages)
    return Restored([-1] * first + [*pages] + [-1] * after, block)

"""Pages of the prefix cache that come back from a tier: which, while which others are computed."""

import bisect
import itertools
import logging
import math
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
BOTH_ENDS = 0.9
"""Share of the time of the faster single way that both ends may take: they compute, which other requests wait for."""
WAIT_SECONDS = 0.05
"""Most seconds of one wait for pages, after which new requests are looked at."""

log = logging.getLogger(__name__)


class Restoring:
    """Moves full pages of a lane's prefix cache to a tier and back.

    Args:
      pool: the lane's pages.
      tier: keeps them, for all lanes.
      costs: the times of passes and of moves.
      chunk_size: tokens of a chunk of a prompt.

    Attributes:
      tier: as given.
      awaited: pages that a sequence waits for, whose tokens before them are computed; None: none does.
    """

    def __init__(self, pool: PagePool, tier: PageTier, costs: PassCosts, chunk_size: int):
        self.tier, self._pool, self._costs, self._chunk_size = tier, pool, costs, chunk_size
        self.awaited: Load | None = None
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
        """Begin to read pages of the tokens that follow a node; None if there are none, or computing is faster.

        The first of them may be left out, which are to be computed meanwhile (`Load.num_computed`).

        load: what this has returned before, which goes on if it has the next page.
        """
        keys = self._pool.keys_after(parent, tokens[:-1])
        if (first := next(keys, None)) is None:
            return None
        if load is not None and first in load.keys:
            return load
        kept = list(itertools.takewhile(self.tier.__contains__, itertools.chain([first], keys)))
        if not kept:
            return None
        computed, seconds = self._split(kept, len(tokens))
        if computed == len(kept):
            return None
        load = self.tier.get(kept[computed:])
        return load._replace(num_computed=computed, until=load.began + seconds)

    def _split(self, keys: Sequence[bytes], tokens: int) -> tuple[int, float]:
        """Choose how many of the first pages of these tokens to compute while the others are read.

        All, none, or so many that both take about equally long, if that is faster (CacheFlow, arXiv:2604.25080). Also
        returns the seconds after which the others are late: the record's, and a step more. Unknown times count as if
        nothing were faster than reading all.
        """
        moves = self.tier.reads(keys) + Counter({WRITE_PAGE: len(keys)})
        costs = {name: cost for name in moves if (cost := self._costs.all.for_sizes(name)) is not None}
        step, size, chunk = self._costs.prefill_seconds(1), self._pool.page_size, self._chunk_size
        if step is None or sum(cost.weight >= TRIES for cost in costs.values()) < len(moves):
            return 0, math.inf

        def compute(tokens: int) -> float:
            return self._costs.prefill_seconds(-(-tokens // chunk)) or 0.0

        def read(first: int) -> float:
            return sum(count * costs[name].p50 for name, count in self.tier.reads(keys[first:]).items())

        def seconds(first: int) -> float:
            after = tokens - len(keys) * size
            write = (len(keys) - first) * costs[WRITE_PAGE].p50
            return max(compute(first * size), read(first)) + write + (compute(after) if after > 1 else 0.0)

        ways = {0: seconds(0), len(keys): compute(tokens)}
        best = min(ways, key=lambda first: ways[first])
        splits = range(chunk, len(keys) * size, chunk)  # whole chunks of tokens
        meet = bisect.bisect_left(splits, True, key=lambda split: compute(split) >= read(split // size))
        both = [first for split in splits[max(meet - 1, 0) : meet + 1] if (first := split // size)]
        best = min([best, *both], key=lambda first: ways[best] if first == best else seconds(first) / BOTH_ENDS)
        self._refused = 0 if best < len(keys) else (self._refused + 1) % RETRY
        if best == len(keys) and not self._refused:
            best = 0
        return best, read(best) + step

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


def await_pages(lanes: Sequence[Restoring]) -> None:
    """Wait for pages that a sequence of a lane needs, for a short while: no step has anything else to do."""
    if load := next((lane.awaited for lane in lanes if lane.awaited is not None), None):
        load.result.wait(min(load.left, WAIT_SECONDS))


def restored(pages: Sequence[int], block: PageBlock, first: int) -> Restored:
    """The pages that a block's pages become, from the first of them on."""
    after = block.places - first - len(pages)
    return Restored([-1] * first + [*pages] + [-1] * after, block)

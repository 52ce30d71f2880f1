"""Pages of the prefix cache that come back from a tier: which, and whether that is faster than computing them."""

import itertools
import logging
import time
from collections.abc import Hashable, Sequence

from jaxinfer.generation.engine.batch import PageBlock, Restored, Stored
from jaxinfer.generation.engine.host_pages import READ_PAGE, HostPages, Load
from jaxinfer.generation.engine.page_pool import PagePool
from jaxinfer.generation.engine.speculation import PassCosts

WRITE_PAGE = "write_page"
"""The name of a page's way from a block to the devices, in the record of costs."""
TRIES = 3
"""Measurements without which restoring counts as faster: one alone may have met a stall of the machine."""
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

    def __init__(self, pool: PagePool, tier: HostPages, costs: PassCosts, chunk_size: int):
        self.tier, self._pool, self._costs, self._chunk_size = tier, pool, costs, chunk_size
        self._refused = 0

    def take_stored(self) -> tuple[Stored, ...]:
        """The pages that gave way since the last call and that the tier lacks, for the step in preparation."""
        pool = self._pool
        return tuple([Stored(x.page, key) for x in pool.take_forgotten() if (key := pool.key_of(x)) not in self.tier])

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
        return self.tier.get(kept) if kept and self._pays(len(kept), len(tokens)) else None

    def _pays(self, pages: int, tokens: int) -> bool:
        """Check whether restoring the first pages of these tokens saves time; unknown times count as if it did."""
        costs = [self._costs.all.for_sizes(name) for name in (READ_PAGE, WRITE_PAGE)]
        chunk = self._costs.chunk_seconds()
        if chunk is None or sum(cost is not None and cost.weight >= TRIES for cost in costs) < len(costs):
            return True
        rest = tokens - pages * self._pool.page_size
        saved = -(-tokens // self._chunk_size) - (-(-rest // self._chunk_size) if rest > 1 else 0)
        pays = pages * sum(cost.p50 for cost in costs if cost is not None) < saved * chunk
        self._refused = 0 if pays else (self._refused + 1) % RETRY
        return pays or not self._refused

    def end(self, load: Load, parent: Hashable, tokens: Sequence[int]) -> tuple[PageBlock | None, int, int]:
        """Wait for a load; returns its block, where in it the pages that follow a node begin, and how many these are.

        There are none if it failed: they are then computed.
        """
        try:
            block = load.block.result()
        except Exception as error:  # of a disk, say
            log.warning("%d pages of the KV cache could not be read, and are computed.", len(load.keys), exc_info=error)
            self.tier.forget(load.keys)
            return None, 0, 0
        first = load.keys.index(next(self._pool.keys_after(parent, tokens)))
        count = len(load.keys) - first
        self.tier.admitted(count, time.perf_counter() - load.began)
        return block, first, count


def restored(pages: Sequence[int], block: PageBlock, first: int) -> Restored:
    """The pages that a block's pages become, from the first of them on."""
    after = block.kv.shape[1] - first - len(pages)
    return Restored([-1] * first + [*pages] + [-1] * after, block)

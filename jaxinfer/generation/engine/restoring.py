"""Pages of the prefix cache that come back from a tier: which, while which others are computed."""

import bisect
import itertools
import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Sequence

from jaxinfer.generation.engine.batch import Batch, PageBlock, Restored, StateBlock, Stored
from jaxinfer.generation.engine.page_pool import Match, Node, PagePool
from jaxinfer.generation.engine.page_tier import Load, Loaded, PageTier
from jaxinfer.generation.engine.snapshots import Snapshots
from jaxinfer.generation.engine.speculation import PassCosts
from jaxinfer.generation.engine.state_pages import StatePages

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
    """Moves full pages of a lane's prefix cache to a tier and back, and snapshots of recurrent states with them.

    Args:
      pool: the lane's pages.
      tier: keeps them, for all lanes.
      costs: the times of passes and of moves.
      chunk_size: tokens of a chunk of a prompt.
      snapshots: the lane's; None: the model has no states.
      states: turns them into pages of the tier; None: there are none.

    Attributes:
      tier: as given.
      awaited: pages that a sequence waits for, whose tokens before them are computed; None: none does.
    """

    def __init__(
        self,
        pool: PagePool,
        tier: PageTier,
        costs: PassCosts,
        chunk_size: int,
        snapshots: Snapshots | None = None,
        states: StatePages | None = None,
    ):
        assert (snapshots is None) == (states is None)
        self.tier, self._pool, self._costs, self._chunk_size = tier, pool, costs, chunk_size
        self._snapshots, self._states = snapshots, states
        self.awaited: Load | None = None
        self._refused = 0
        self._early: deque[Node] = deque(maxlen=pool.count)  # pages to move though nothing takes their place

    def released(self, node: Hashable) -> None:
        """Note that a sequence has left the pages up to this node, which have been computed or are in flight."""
        path, wants = [], self.tier.wants_early
        while isinstance(node, Node):
            if self._page_wanted(node, wants) or self._state_wanted(node, wants) is not None:
                path.append(node)
            node = node.parent
        self._early.extend(reversed(path))

    def take_stored(self) -> tuple[tuple[Stored, ...], tuple[Stored, ...]]:
        """The pages and the snapshots that the step in preparation is to bring to the tier.

        They gave way since the last call, or sequences have left them.
        """
        pool, tier = self._pool, self.tier
        pages, states = dict[bytes, int](), dict[bytes, int]()

        def store(node: Node, wants: Callable[[bytes], bool]) -> None:
            if self._page_wanted(node, wants):
                pages[pool.key_of(node)] = node.page
            if (place := self._state_wanted(node, wants)) is not None:
                states[pool.key_of(node)] = place

        for node, place in self._snapshots.take_left() if self._snapshots is not None else ():
            if self._wants_state(key := pool.key_of(node), tier.wants):
                states[key] = place
        for node in pool.take_forgotten():
            store(node, tier.wants)
        most = self._count(pages, states) + MAX_EARLY
        for _ in range(MAX_EARLY):
            if not self._early or not tier.has_room or self._count(pages, states) >= most:
                break
            node = self._early.popleft()
            if pool.has(node):
                store(node, tier.wants_early)
        return tuple(Stored(page, key) for key, page in pages.items()), tuple(
            Stored(place, key) for key, place in states.items()
        )

    def _count(self, pages: Collection[bytes], states: Collection[bytes]) -> int:
        """Count the pages that these take in the tier."""
        return len(pages) + (0 if self._states is None else len(states) * self._states.count)

    def _page_wanted(self, node: Node, wants: Callable[[bytes], bool]) -> bool:
        """Check whether a node's page is to come to the tier; without a state after it, it is of no use there."""
        return (self._snapshots is None or node.leads_to_state) and wants(self._pool.key_of(node))

    def _state_wanted(self, node: Node, wants: Callable[[bytes], bool]) -> int | None:
        """The place of a node's snapshot that is to come to the tier; None: there is none."""
        place = None if self._snapshots is None else self._snapshots.copied(node)
        return place if place is not None and self._wants_state(self._pool.key_of(node), wants) else None

    def _wants_state(self, key: bytes, wants: Callable[[bytes], bool]) -> bool:
        assert self._states is not None
        return any(map(wants, self._states.keys(key)))

    def store(self, batch: Batch, blocks: Sequence[PageBlock | StateBlock]) -> None:
        """Give the tier the pages and the states that a lane's step has brought to the host."""
        if batch.stored:
            pages = [block for block in blocks if isinstance(block, PageBlock)]
            self.tier.put([key for _, key in batch.stored], pages)
        states = [block for block in blocks if isinstance(block, StateBlock)]
        for (_, key), block in zip(batch.stored_states, states, strict=False):
            assert self._states is not None
            self.tier.put([*self._states.keys(key)], [self._states.pack(block)])

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

    def reach(self, root: Hashable, tokens: Sequence[int], covered: int) -> int:
        """Count the leading pages of tokens after which the tier has a state, or the devices have.

        The pages are on the devices or in the tier.

        covered: the pages up to the last snapshot of the devices.
        """
        assert self._snapshots is not None
        assert self._states is not None
        nodes, size = self._pool.full_nodes(root, tokens), self._pool.page_size
        after = self._pool.keys_after(nodes[-1] if nodes else root, tokens[len(nodes) * size :])
        keys = [*map(self._pool.key_of, nodes), *itertools.takewhile(self.tier.__contains__, after)]
        for pages in range(len(keys), covered, -1):
            if pages * size % self._snapshots.distance == 0 and self._has_state(keys[pages - 1]):
                return pages
        return covered

    def _has_state(self, key: bytes) -> bool:
        assert self._states is not None
        return all(map(self.tier.__contains__, self._states.keys(key)))

    def begin_state(
        self, load: Load | None, match: Match, tokens: Sequence[int], reach: int, covered: int
    ) -> Load | None:
        """Begin to read a state, and the pages before it that the devices lack; None if computing is faster.

        Args:
          load: what this has returned before, which goes on if it has these.
          match: the pages that the devices have, at most `reach`.
          tokens: all of the sequence.
          reach: the pages before the state.
          covered: those of them that need not be computed without it.
        """
        assert self._states is not None
        pool, size, parent, before = self._pool, self._pool.page_size, match.parent, len(match.pages)
        if load is not None and load.reach == reach and load.before <= before:
            return load
        keys = [*pool.keys_after(parent, tokens[before * size : reach * size])]
        keys += self._states.keys(keys[-1] if keys else pool.key_of(parent))
        computed, seconds = self._split(keys, len(tokens) - covered * size, saved=reach - covered)
        if computed:
            return None
        load = self.tier.get(keys)
        return load._replace(until=load.began + seconds, before=before, reach=reach)

    def _split(self, keys: Sequence[bytes], tokens: int, saved: int | None = None) -> tuple[int, float]:
        """Choose how many of the first pages of these tokens to compute while the others are read.

        All, none, or so many that both take about equally long, if that is faster (CacheFlow, arXiv:2604.25080). Also
        returns the seconds after which the others are late: the record's, and a step more. Unknown times count as if
        nothing were faster than reading all.

        saved: how many pages of tokens are not computed if all are read, which end with a state: then it is all or
          none. None: as many as there are keys.
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
            after = tokens - (len(keys) if saved is None else saved) * size
            write = (len(keys) - first) * costs[WRITE_PAGE].p50
            return max(compute(first * size), read(first)) + write + (compute(after) if after > 1 else 0.0)

        ways = {0: seconds(0), len(keys): compute(tokens)}
        best = min(ways, key=lambda first: ways[first])
        splits = range(chunk, len(keys) * size if saved is None else 0, chunk)  # whole chunks of tokens
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
        if (loaded := self._result(load)) is None:
            return None, 0, 0
        block, count = loaded
        first = load.keys.index(next(self._pool.keys_after(parent, tokens)))
        if count <= first:  # the tier lost them meanwhile
            return None, 0, 0
        self.tier.admitted(load, load.keys[first:count])
        return block, first, count - first

    def _result(self, load: Load) -> Loaded | None:
        """Wait for a load; None if it failed."""
        try:
            return load.result.result()
        except Exception as error:
            log.warning("%d pages of the KV cache could not be read, and are computed.", len(load.keys), exc_info=error)
            self.tier.forget(load.keys)
            return None

    def end_state(self, load: Load, before: int) -> tuple[PageBlock, StateBlock, int] | None:
        """Wait for a load with a state; None if a part of it is missing.

        before: pages of the sequence before those that it lacks.

        Returns the pages' block, the state's, and how many pages of the tier the latter took.
        """
        assert self._states is not None
        loaded = self._result(load)
        if loaded is None or loaded.num_pages < len(load.keys):
            return None
        self.tier.admitted(load, load.keys[before - load.before :])
        return *self._states.unpack(loaded.block, load.reach - load.before), self._states.count


def store_pages(
    lanes: Sequence[Restoring],
    read: Callable[[Batch], list[list[PageBlock | StateBlock]]],
    is_wanted: Callable[[], bool],
) -> None:
    """Bring the pages that sequences have left to the tier of all lanes, since no step follows that would.

    Args:
      lanes: all lanes of an engine.
      read: brings what the batch is to store to the host; returns blocks of each lane (`StepOutput.stored`).
      is_wanted: whether requests wait, so that this ends early.
    """
    until = time.monotonic() + STORE_SECONDS
    while lanes and time.monotonic() < until and not is_wanted():
        if not lanes[0].tier.has_room:
            lanes[0].tier.settle()
        taken = [lane.take_stored() for lane in lanes]
        batch = Batch.of_lanes([Batch(stored=pages, stored_states=states) for pages, states in taken])
        if not batch.keeps:
            break
        for lane, part, blocks in zip(lanes, batch.lanes, read(batch), strict=True):
            lane.store(part, blocks)


def await_pages(lanes: Sequence[Restoring]) -> None:
    """Wait for pages that a sequence of a lane needs, for a short while: no step has anything else to do."""
    if load := next((lane.awaited for lane in lanes if lane.awaited is not None), None):
        load.result.wait(min(load.left, WAIT_SECONDS))


def restored(pages: Sequence[int], block: PageBlock, first: int) -> Restored:
    """The pages that a block's pages become, from the first of them on."""
    after = block.places - first - len(pages)
    return Restored([-1] * first + [*pages] + [-1] * after, block)

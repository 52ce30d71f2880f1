"""Resources of a running sequence: a slot, pages of the KV cache, an adapter on the device."""

import dataclasses
from array import array
from collections.abc import Hashable
from collections.abc import Sequence as Ordered
from typing import Any, NamedTuple

from jaxinfer.generation.engine.batch import (
    Admission,
    Batch,
    DecodeRow,
    PageBlock,
    Restored,
    RestoredState,
    StepOutput,
)
from jaxinfer.generation.engine.config import EngineConfig
from jaxinfer.generation.engine.page_pool import Match, Node, PagePool
from jaxinfer.generation.engine.page_tier import Load
from jaxinfer.generation.engine.request import Sequence
from jaxinfer.generation.engine.restoring import Restoring, restored
from jaxinfer.generation.engine.snapshots import Snapshots
from jaxinfer.generation.engine.speculation import SpeculationControl
from jaxinfer.generation.lora.cache import AdapterCache

NO_PAGES = array("i")
"""Shared by all allocations without pages, since many may wait."""


@dataclasses.dataclass(eq=False, kw_only=True)
class Allocation:
    """The scheduler's view of a sequence. Only the scheduler and its `Allocator` write to it.

    Attributes:
      sequence: the sequence it belongs to.
      order: its place in the queue, by `queue_order`; the smallest is served first and preempted last.
      speculation: whether speculation pays off for it; None if the engine does not speculate.
      slot: its place on the device while it runs; -1 while it waits.
      adapter_index: its adapter's place on the device, from 1; 0 is none.
      pages: its pages, in the order of its tokens; int32, and never changed in place, since batches hold it too.
      prefilling: whether more than its last token has to go through the model before it can decode.
      num_prefilled_tokens: leading tokens whose keys and values the cache had or that went into chunks.
      num_inserted_pages: leading pages that are in the tree of cached prefixes.
      node: the last of these in the tree.
      ends: numbers of leading tokens after which it takes a snapshot of its recurrent states, ascending.
      load: pages on their way from a tier, while it waits, or computes what is before them; None: there are none.
      meeting: how many tokens are before these pages, while it runs; else 0.
      row: its last row in a batch, which stays the same while its pages do; None before.
      min_in_flight: the fewest tokens that the steps in flight will add.
      max_in_flight: the most.
    """

    sequence: Sequence
    order: tuple[int, int]
    speculation: SpeculationControl | None = None
    slot: int = -1
    adapter_index: int = 0
    pages: array[int] = dataclasses.field(default_factory=lambda: NO_PAGES)
    prefilling: bool = True
    num_prefilled_tokens: int = 0
    num_inserted_pages: int = 0
    node: Hashable = None
    ends: tuple[int, ...] = ()
    load: Load | None = None
    meeting: int = 0
    row: DecodeRow | None = None
    min_in_flight: int = 0
    max_in_flight: int = 0

    def reset(self) -> None:
        """Forget all that it was given: it waits, and is computed from its first token."""
        self.slot, self.adapter_index, self.pages = -1, 0, NO_PAGES
        self.prefilling, self.num_prefilled_tokens = True, 0
        self.num_inserted_pages, self.node, self.ends = 0, None, ()
        self.load, self.meeting = None, 0
        self.min_in_flight = self.max_in_flight = 0

    @property
    def running(self) -> bool:
        return self.slot >= 0

    @property
    def num_computed_tokens(self) -> int:
        """Leading tokens whose keys and values are in the cache, as far as the host has seen, or on their way."""
        return self.num_prefilled_tokens if self.prefilling else len(self.sequence.token_ids) - 1

    @property
    def computable(self) -> int:
        """Leading tokens that may be computed by the end of the step.

        All, those before pages that come, unless these are late, or those before a snapshot.
        """
        load = self.load
        if load is not None and self.meeting and (self.num_prefilled_tokens < self.meeting or load.left > 0):
            return self.meeting
        return next((end for end in self.ends if end > self.num_prefilled_tokens), len(self.sequence.token_ids))

    @property
    def max_remaining(self) -> int:
        """The most tokens that it can still get after the steps in flight, unless something ends it."""
        sequence = self.sequence
        return sequence.request.max_length - len(sequence.token_ids) - self.min_in_flight


class _Pages(NamedTuple):
    """The pages that a sequence begins with.

    Attributes:
      pages: all of them.
      num_shared: how many of the first are shared with others.
      node: the last shared page in the tree of cached prefixes.
      num_cached_tokens: leading tokens whose keys and values they have, after the copy.
      copy: the (source, target) page to copy, or None.
    """

    pages: list[int]
    num_shared: int
    node: Hashable
    num_cached_tokens: int
    copy: tuple[int, int] | None = None


class Allocator:
    """Gives slots, pages and adapters to sequences, and takes them back.

    Args:
      config: the engine's sizes.
      pages: the pages of the cache.
      adapters: the adapters on the device; None: there is no room for any.
      restoring: brings pages to a tier that the cache forgets, and back; None: they are forgotten.
      snapshots: of the recurrent states, without which cached pages are of no use; None: the model has no states.

    Attributes:
      restored: the pages that come back from a tier in the step in preparation.
      restored_states: the snapshots that do.
      loading: the running sequence that computes what is before its pages from a tier; None: there is none.
    """

    def __init__(
        self,
        config: EngineConfig,
        pages: PagePool,
        adapters: AdapterCache | None,
        restoring: Restoring | None = None,
        snapshots: Snapshots | None = None,
    ):
        self.config, self.pages, self.adapters, self.restoring = config, pages, adapters, restoring
        self.snapshots = snapshots
        self._free_slots: list[int] = []
        self._written: set[int] = set()  # pages that the step in preparation writes
        self.restored: list[Restored] = []
        self.restored_states: list[RestoredState] = []
        self.loading: Allocation | None = None
        self.reset()

    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    def begin_step(self) -> None:
        """Forget the pages that the previous step writes: the next step reads after it."""
        self._written.clear()
        self.restored, self.restored_states = [], []
        if self.restoring is not None:
            self.restoring.awaited = None
        if self.snapshots is not None:
            self.snapshots.begin_step()

    def admit(self, allocation: Allocation, *, spare: int, wait: bool = True) -> Admission | None:
        """Give a waiting sequence all that it needs to run; None if it has to wait.

        Args:
          spare: pages to leave free for others.
          wait: whether to wait for its adapter's files and its pages, as when nothing else runs.

        Raises ValueError or OSError if its adapter cannot be read.
        """
        sequence = allocation.sequence
        adapter_index = self._pin_adapter(sequence, wait=wait)
        if adapter_index is None:
            return None
        taken = self._take_pages(allocation, spare, wait=wait)
        if taken is None:
            self._unpin_adapter(sequence)
            return None
        allocation.slot, allocation.adapter_index = self._free_slots.pop(), adapter_index
        allocation.pages = array("i", taken.pages)
        allocation.node, allocation.num_inserted_pages = taken.node, taken.num_shared
        allocation.num_prefilled_tokens = taken.num_cached_tokens
        coming = 0
        if (load := allocation.load) is not None:
            allocation.meeting = (taken.num_shared + load.num_computed) * self.pages.page_size
            coming, self.loading = len(load.keys) * self.pages.page_size, allocation
        snapshot = None if self.snapshots is None else self._use_snapshot(allocation, self.snapshots)
        # After a snapshot the last token is a chunk, as it is without the cache.
        whole = _needs_every_token(sequence) or snapshot is not None
        allocation.prefilling = whole or taken.num_cached_tokens < len(sequence.token_ids) - 1
        return Admission(
            sequence=sequence,
            slot=allocation.slot,
            adapter_index=adapter_index,
            token_ids=list(sequence.token_ids),
            num_cached_tokens=taken.num_cached_tokens + coming,
            decodes=not allocation.prefilling,
            copy=taken.copy,
            snapshot=snapshot,
        )

    def _use_snapshot(self, allocation: Allocation, snapshots: Snapshots) -> int | None:
        """The snapshot that a sequence with its pages goes on from; None: there is none. Plans its own, too."""
        sequence, start = allocation.sequence, allocation.num_prefilled_tokens
        if self._reuses(sequence):
            allocation.ends = snapshots.ends(_root(sequence), sequence.token_ids[:-1], start)
        return snapshots.use(allocation.node, extends=bool(allocation.ends))

    def count_cached_tokens(self, sequence: Sequence) -> int:
        """Return how many leading tokens of a sequence are in full cached pages that it could share."""
        return self.pages.count_cached_tokens(_root(sequence), self._reusable(sequence))

    def has_room(self, sequence: Sequence, *, spare: int) -> bool:
        """Check that there are a slot and pages for a sequence; `spare` pages stay free for others."""
        shared = self.pages.count_shared_pages(_root(sequence), self._reusable(sequence))
        count = self.pages.pages_for(len(sequence.token_ids)) - shared
        return self.free_slots > 0 and count + spare <= self.pages.free

    def _reuses(self, sequence: Sequence) -> bool:
        return self.config.prefix_caching and not _needs_every_token(sequence)

    def _reusable(self, sequence: Sequence) -> list[int]:
        """The leading tokens that a sequence may take from the cache; of states, those up to a snapshot."""
        if not self._reuses(sequence):
            return []
        tokens = sequence.token_ids[:-1]
        return tokens if self.snapshots is None else tokens[: self.snapshots.covered(_root(sequence), tokens)]

    def _is_coming(self, match: Match) -> bool:
        """Check whether the step in preparation computes what a sequence would copy: it must wait for the next."""
        if match.num_copied_tokens:
            return match.copy_from in self._written
        return self.snapshots is not None and self.snapshots.is_coming(match.parent)

    def _take_pages(self, allocation: Allocation, spare: int, *, wait: bool) -> _Pages | None:
        """Take pages for all known tokens, shared, restored or copied where cached; None if it has to wait."""
        sequence, pages, size = allocation.sequence, self.pages, self.pages.page_size
        reusable = self._reusable(sequence)
        if (reach := self._reach(sequence, covered := len(reusable) // size)) > covered:
            match = self._match(sequence, self._cached(sequence, reach), spare)
            if match is None:
                return None
            if (load := self._begin_state(allocation, match, reach, covered)) is not None:
                if not wait and not load.result.done():
                    pages.release(match.pages)
                    return None
                if (taken := self._restore_state(allocation, load, match)) is not None:
                    return taken
            pages.release(match.pages)
        if self.snapshots is not None:
            allocation.load = None
        match = self._match(sequence, reusable, spare)
        if match is None:
            return None
        if self.restoring is not None and self.snapshots is None and self._reuses(sequence):
            rest = sequence.token_ids[len(match.pages) * size :]
            load = allocation.load = self.restoring.begin(allocation.load, match.parent, rest)
            if load is not None and not load.num_computed:
                if match.num_copied_tokens:
                    pages.release([match.copy_from])
                if not wait and not load.result.done():
                    pages.release(match.pages)
                    return None
                return self._restore(allocation, load, match, rest)
        new, copy = pages.allocate(pages.pages_for(len(sequence.token_ids)) - len(match.pages)), None
        if match.num_copied_tokens:
            copy = match.copy_from, new[0]
            pages.release([match.copy_from])  # safe now: a new owner writes only after this copy has read
        return _Pages(
            pages=match.pages + new,
            num_shared=len(match.pages),
            node=match.parent,
            num_cached_tokens=len(match.pages) * size + match.num_copied_tokens,
            copy=copy,
        )

    def _match(self, sequence: Sequence, tokens: Ordered[int], spare: int) -> Match | None:
        """Find the cached pages of a sequence's first tokens, if there is room for all others; None: it has to wait."""
        pages = self.pages
        match = pages.match(_root(sequence), tokens)
        if self._is_coming(match):
            pages.release([*match.pages, match.copy_from] if match.num_copied_tokens else match.pages)
            return None
        needed = pages.pages_for(len(sequence.token_ids)) - len(match.pages)
        if match.num_copied_tokens and needed + spare > pages.free:
            pages.release([match.copy_from])
            match = match._replace(copy_from=-1, num_copied_tokens=0)
        if needed + spare > pages.free:
            pages.release(match.pages)
            return None
        return match

    def _reach(self, sequence: Sequence, covered: int) -> int:
        """Count the leading pages up to a state of a tier, or the `covered` ones up to the devices' last snapshot."""
        if self.restoring is None or self.snapshots is None or not self._reuses(sequence):
            return covered
        return self.restoring.reach(_root(sequence), sequence.token_ids[:-1], covered)

    def _cached(self, sequence: Sequence, reach: int) -> list[int]:
        """The tokens of the first pages of these that the devices have."""
        tokens = sequence.token_ids[: reach * self.pages.page_size]
        return tokens[: self.pages.count_cached_tokens(_root(sequence), tokens)]

    def _begin_state(self, allocation: Allocation, match: Match, reach: int, covered: int) -> Load | None:
        """Begin to read a state of a tier, and the pages before it that the devices lack; None if that is slower."""
        assert self.restoring is not None
        tokens = allocation.sequence.token_ids
        allocation.load = self.restoring.begin_state(allocation.load, match, tokens, reach, covered)
        return allocation.load

    def _restore_state(self, allocation: Allocation, load: Load, match: Match) -> _Pages | None:
        """Take pages of which the first come from a tier, with the state after them; None if a part is missing."""
        assert self.restoring is not None
        assert self.snapshots is not None
        pages, size, tokens = self.pages, self.pages.page_size, allocation.sequence.token_ids
        allocation.load, node, shared = None, match.parent, len(match.pages)
        if (come := self.restoring.end_state(load, shared)) is None:
            return None
        block, state, taken = come
        new = pages.allocate(pages.pages_for(len(tokens)) - shared)
        for index in range(shared, load.reach):
            node = pages.insert(node, tokens[index * size : (index + 1) * size], new[index - shared])
        if shared < load.reach:
            self._bring_back(new[: load.reach - shared], block, shared - load.before)
        assert isinstance(node, Node)
        self.restored_states.append(RestoredState(self.snapshots.restore(node), state, taken))
        return _Pages(pages=match.pages + new, num_shared=load.reach, node=node, num_cached_tokens=load.reach * size)

    def _restore(self, allocation: Allocation, load: Load, match: Match, tokens: list[int]) -> _Pages:
        """Take pages for these tokens after the shared ones, of which the first come from a tier."""
        assert self.restoring is not None
        pages, size, node = self.pages, self.pages.page_size, match.parent
        block, first, count = self.restoring.end(load, node, tokens)
        allocation.load = None
        new = pages.allocate(pages.pages_for(len(tokens)))
        for index in range(count):
            node = pages.insert(node, tokens[index * size : (index + 1) * size], new[index])
        self._bring_back(new[:count], block, first)
        return _Pages(
            pages=match.pages + new,
            num_shared=len(match.pages) + count,
            node=node,
            num_cached_tokens=(len(match.pages) + count) * size,
        )

    def _bring_back(self, pages: Ordered[int], block: PageBlock | None, first: int) -> None:
        """Have the step in preparation put a block's pages, from the first of them on, into these."""
        if block is not None:
            self._written.update(pages)
            self.restored.append(restored(pages, block, first))

    def meet(self, allocation: Allocation) -> None:
        """Give the sequence that is loading its pages, if they have come and all before them is computed.

        If they are late, it goes on to compute them, and gets those that it has not computed when they come.
        """
        load, size, count = allocation.load, self.pages.page_size, allocation.num_prefilled_tokens
        if load is None or count < allocation.meeting:
            return
        assert self.restoring is not None
        if not load.result.done():
            self.restoring.awaited = load
            return
        first = count // size
        rest = allocation.sequence.token_ids[first * size :]
        block, at, pages = self.restoring.end(load, allocation.node, rest)
        self._end_load(allocation)
        self._bring_back(allocation.pages[first : first + pages], block, at)
        allocation.num_prefilled_tokens = max(count, (first + pages) * size)
        self.insert_prefix(allocation, allocation.num_prefilled_tokens, partial=False)

    def _end_load(self, allocation: Allocation) -> None:
        allocation.load, allocation.meeting = None, 0
        if self.loading is allocation:
            self.loading = None

    def missing_pages(self, allocation: Allocation, length: int) -> int:
        """Return how many pages the sequence lacks for this many tokens, or for as many as it can have."""
        tokens = min(length, allocation.sequence.request.max_cached_tokens)
        return max(0, self.pages.pages_for(tokens) - len(allocation.pages))

    def extend(self, allocation: Allocation, length: int) -> bool:
        """Give the sequence pages for this many tokens; False, and nothing changes, if too few are free."""
        if missing := self.missing_pages(allocation, length):
            if missing > self.pages.free:
                return False
            allocation.pages = allocation.pages + array("i", self.pages.allocate(missing))
        return True

    def prefill(self, allocation: Allocation, count: int) -> None:
        """Note that the step in preparation computes the next `count` tokens of a prompt."""
        start, stop = allocation.num_prefilled_tokens, allocation.num_prefilled_tokens + count
        size = self.pages.page_size
        self._written.update(allocation.pages[start // size : (stop - 1) // size + 1])
        allocation.num_prefilled_tokens = stop
        allocation.prefilling = stop < len(allocation.sequence.token_ids)
        if (load := allocation.load) is not None and stop >= allocation.meeting + len(load.keys) * size:
            self._end_load(allocation)  # which came too late
        self.insert_prefix(allocation, stop, partial=not allocation.prefilling)
        if self.snapshots is not None and stop in allocation.ends:
            assert isinstance(allocation.node, Node)
            self.snapshots.take(allocation.node, allocation.slot)

    def insert_prefix(self, allocation: Allocation, count: int, *, partial: bool) -> None:
        """Let others share the full pages of the first `count` tokens, and with `partial` copy the one after them."""
        size = self.pages.page_size
        if self.snapshots is not None:  # pages after the last one are of no use to others
            count, partial = min(count, max(allocation.ends, default=0)), False
        if not self.config.prefix_caching or (not partial and count < (allocation.num_inserted_pages + 1) * size):
            return  # nearly always after a row's token: its page is not full yet
        sequence = allocation.sequence
        prompt = sequence.request.prompt_token_ids
        token_ids = prompt if count <= len(prompt) else sequence.token_ids  # slices of a tuple are not copied again
        node, pages, insert = allocation.node, allocation.pages, self.pages.insert
        for index in range(allocation.num_inserted_pages, count // size):
            node = insert(node, token_ids[index * size : (index + 1) * size], pages[index])
            allocation.node, allocation.num_inserted_pages = node, index + 1
        last = allocation.num_inserted_pages
        if partial and (rest := token_ids[last * size : count]):
            self.pages.insert(allocation.node, rest, allocation.pages[last])

    def release(self, allocation: Allocation) -> None:
        """Take everything back; the pages' content stays in the tree of cached prefixes."""
        self.insert_prefix(allocation, allocation.num_computed_tokens, partial=True)
        if self.restoring is not None:
            self.restoring.released(allocation.node)
        self.pages.release(allocation.pages)
        self._free_slots.append(allocation.slot)
        if allocation.adapter_index:
            self._unpin_adapter(allocation.sequence)
        allocation.slot, allocation.adapter_index, allocation.pages = -1, 0, NO_PAGES
        allocation.prefilling, allocation.num_prefilled_tokens, allocation.ends = True, 0, ()
        self._end_load(allocation)

    def take_moves(self, *, runs: bool) -> dict[str, Any]:
        """Take what the step in preparation copies, brings to the host and gets from there: fields of `Batch`.

        runs: whether it runs anything; else what is to be copied stays where it is.
        """
        come = {"restored": tuple(self.restored), "restored_states": tuple(self.restored_states)}
        if not runs:
            return come
        copied = () if self.snapshots is None else self.snapshots.take_due()  # first: they can be stored then
        stored, states = ((), ()) if self.restoring is None else self.restoring.take_stored()
        return come | {"snapshots": copied, "stored": stored, "stored_states": states}

    def store(self, batch: Batch, output: StepOutput) -> None:
        """Keep what a step has brought to the host."""
        assert self.restoring is not None
        (blocks,) = output.stored
        self.restoring.store(batch, blocks)

    def has_adapter(self, sequence: Sequence) -> bool:
        """Check that a sequence's adapter is on the devices, or it needs none."""
        name = sequence.params.adapter
        return name is None or self.adapters is None or name in self.adapters

    def prefetch(self, sequence: Sequence) -> None:
        """Begin to read a waiting sequence's adapter from disk."""
        if sequence.params.adapter is not None and self.adapters is not None:
            self.adapters.prefetch(sequence.params.adapter)

    def _pin_adapter(self, sequence: Sequence, *, wait: bool) -> int | None:
        """The index of its adapter on the device, 0 without one; None while it is read or all are in use."""
        name = sequence.params.adapter
        return 0 if name is None or self.adapters is None else self.adapters.pin(name, wait=wait)

    def _unpin_adapter(self, sequence: Sequence) -> None:
        if sequence.params.adapter is not None and self.adapters is not None:
            self.adapters.unpin(sequence.params.adapter)

    def reset(self) -> None:
        """Take everything back, whatever state the records are in, and forget what the device holds."""
        self._free_slots = list(reversed(range(self.config.max_batch)))
        self._written.clear()
        self.loading = None
        self.pages.reset()
        if self.snapshots is not None:
            self.snapshots.reset()
        if self.adapters is not None:
            self.adapters.reset()

    def check_integrity(self, running: list[Allocation]) -> None:
        """Raise AssertionError unless slots, pages and adapters fit together."""
        self.pages.check_integrity([a.pages for a in running])
        slots = [a.slot for a in running] + self._free_slots
        assert sorted(slots) == list(range(self.config.max_batch)), f"slots lost or doubled: {sorted(slots)}"
        if self.adapters is not None:
            self.adapters.check_integrity()
        if self.snapshots is not None:
            self.snapshots.check_integrity()


def _root(sequence: Sequence) -> Hashable:
    """All that sequences must have in common, in addition to tokens, to share pages; the last part is the adapter."""
    return "root", sequence.params.adapter


def _needs_every_token(sequence: Sequence) -> bool:
    """Return whether every token of its prompt must go through the model, cached or not."""
    return sequence.request.pooling or sequence.request.sampling.prompt_logprobs is not None

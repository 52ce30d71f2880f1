"""What runs next: admits waiting sequences, gives them pages, and chooses each step's batch."""

import bisect
import dataclasses
import itertools
from collections.abc import Iterator

from jaxinfer.generation.adapters import AdapterSlots
from jaxinfer.generation.config import EngineConfig
from jaxinfer.generation.pages import PagePool
from jaxinfer.generation.request import FinishReason, Sequence

PRIORITY_WEIGHT = 64
"""A request of priority p is served as though p times so many others had come before it."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """`count` known tokens of a sequence from `start` on; `last` if no known token comes after them."""

    sequence: Sequence
    start: int
    count: int
    last: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """One step.

    Attributes:
      admitted: sequences that have just got their slot. copies: (source, target) pages, before anything is written.
      pieces: of prompts. rows: sequences that generate.
      steps: passes through the model, 1 if there are pieces. drafts: most drafts of a row in each pass.
    """

    admitted: tuple[Sequence, ...]
    copies: tuple[tuple[int, int], ...]
    pieces: tuple[Piece, ...]
    rows: tuple[Sequence, ...]
    steps: int
    drafts: int

    @property
    def sequences(self) -> list[Sequence]:
        """All that the step is about, each once."""
        return list(dict.fromkeys([*(p.sequence for p in self.pieces), *self.rows]))

    def growth(self) -> Iterator[tuple[Sequence, int, int]]:
        """The least and most tokens that each sequence gets, unless something ends it."""
        for piece in self.pieces:
            if piece.last:
                yield piece.sequence, 1, 1
        for sequence in self.rows:
            yield sequence, self.steps, self.steps * (1 + self.drafts)


class Scheduler:
    """Queues, slots and pages; no arrays.

    Sequences are admitted in their order, when a slot and the pages of their known tokens are free. A step takes a
    token of every generating sequence and fills up with pieces of prompts. A sequence that finds no page for its next
    token takes those of the one last in order, which waits and is computed again (recomputation: Kwon et al. 2023,
    arXiv:2309.06180, section 4.5).

    The first in order always runs, since any sequence fits into the cache alone; and only a bounded number of later
    requests comes before one of a higher number of priority. So none waits for ever.
    """

    def __init__(self, config: EngineConfig, pages: PagePool, adapters: AdapterSlots | None):
        self.config, self.pages, self.adapters = config, pages, adapters
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0
        self.dropped: list[Sequence] = []  # failed before they could run; the engine takes them from here
        self._slots = list(reversed(range(config.slots)))
        self._arrivals = itertools.count()
        self._fresh: set[int] = set()  # pages that the step being made writes

    def check(self, sequence: Sequence) -> None:
        """Raise ValueError if the sequence could never run."""
        needed = self.pages.pages_for(sequence.limit - 1)
        if needed > self.pages.count:
            raise ValueError(
                f"{sequence.limit} tokens with max_tokens need {needed} pages of {self.pages.page_size} tokens; "
                f"the cache has {self.pages.count}. Lower max_tokens, or give the cache more memory."
            )

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that passed `check`."""
        sequence.order = next(self._arrivals) + PRIORITY_WEIGHT * sequence.params.priority
        sequence.arrive()
        self._wait(sequence)

    @property
    def stepwise(self) -> bool:
        """Whether a sequence must see its token on the host before its next step can be made."""
        return any(s.matcher is not None for s in self.running)

    # A step

    def schedule(self, steps: int, drafts: int = 0) -> Batch | None:
        """The next step, or None if there is nothing to do before the steps in flight have come back.

        Args:
          steps: most passes through the model; fewer where a mask, a piece or a lack of pages says so.
          drafts: most drafts of a row, in steps without pieces.
        """
        self._fresh.clear()
        admitted: list[Sequence] = []
        copies: list[tuple[int, int]] = []
        preempted = self.preemptions
        rows = self._rows()
        pieces = self._pieces(admitted, copies, rows, may_admit=self.preemptions == preempted)
        if not pieces and not rows:
            return None
        if pieces or self.stepwise:
            steps, drafts = 1, 0
        else:
            steps, drafts = self._extend(rows, steps, drafts)
        batch = Batch(
            admitted=tuple(admitted),
            copies=tuple(copies),
            pieces=tuple(pieces),
            rows=tuple(rows),
            steps=steps,
            drafts=drafts,
        )
        for sequence, least, most in batch.growth():
            sequence.least += least
            sequence.most += most
        return batch

    def _rows(self) -> list[Sequence]:
        """All that generate, with a page for their next token; takes pages from the last in order if it must."""
        rows = []
        for sequence in sorted(self.running, key=_order):
            if sequence.slot < 0 or sequence.prefilling or len(sequence.ids) + sequence.least >= sequence.limit:
                continue  # preempted for another's sake; not there yet; or ended by the steps in flight
            while not self._reserve(sequence, len(sequence.ids) + sequence.most):
                victim = max(reversed(self.running), key=_order)  # of equals the later one, as in the order above
                self._preempt(victim)
                if victim is sequence:
                    break
            else:
                rows.append(sequence)
        return rows

    def _reserve(self, sequence: Sequence, tokens: int) -> bool:
        """Give the sequence pages for this many tokens, if so many are free."""
        needed = self.pages.pages_for(min(tokens, sequence.limit - 1)) - len(sequence.pages)
        if needed > self.pages.free:
            return False
        sequence.pages += self.pages.allocate(max(needed, 0))
        return True

    def _extend(self, rows: list[Sequence], steps: int, drafts: int) -> tuple[int, int]:
        """Pages for several passes of all rows, with drafts, as far as they are free; returns what they allow."""
        steps = min(steps, max(s.limit - len(s.ids) - s.least for s in rows))

        def reach(sequence: Sequence) -> int:
            tokens = len(sequence.ids) + sequence.most + steps * (1 + drafts) - 1
            return self.pages.pages_for(min(tokens, sequence.limit - 1))

        while sum(max(0, reach(s) - len(s.pages)) for s in rows) > self.pages.free:
            assert (steps, drafts) != (1, 0), "one pass without drafts has its pages already"
            steps, drafts = (steps // 2, drafts) if steps > 1 else (1, 0)
        for sequence in rows:
            sequence.pages += self.pages.allocate(max(0, reach(sequence) - len(sequence.pages)))
        return steps, drafts

    def _pieces(
        self, admitted: list[Sequence], copies: list[tuple[int, int]], rows: list[Sequence], *, may_admit: bool
    ) -> list[Piece]:
        """Pieces of prompts up to the token budget: of those that run, then of those that can be admitted."""
        pieces: list[Piece] = []
        room = self._room()
        for sequence in self._prompts(admitted, copies, rows, may_admit=may_admit):
            pieces += itertools.islice(self._cut(sequence), room - len(pieces))
            if len(pieces) == room:
                break
        return pieces

    def _room(self) -> int:
        """How many pieces the step takes: so many that the program for them is well filled."""
        width = self.config.piece_tokens
        rests = [len(s.ids) - s.computed for s in self.running if s.prefilling]
        rests += [len(s.ids) for s in self.waiting[: len(self._slots)]]
        return self.config.well_filled(sum(-(-rest // width) for rest in rests))

    def _prompts(
        self, admitted: list[Sequence], copies: list[tuple[int, int]], rows: list[Sequence], *, may_admit: bool
    ) -> Iterator[Sequence]:
        """Sequences to cut pieces from; the next waiting one is admitted when it is asked for."""
        yield from sorted((s for s in self.running if s.prefilling), key=_order)
        while may_admit and (sequence := self._admit(copies)) is not None:
            admitted.append(sequence)
            if sequence.prefilling:
                yield sequence
            else:
                rows.append(sequence)

    def _cut(self, sequence: Sequence) -> Iterator[Piece]:
        width, known = self.config.piece_tokens, len(sequence.ids)
        while sequence.prefilling:
            start, count = sequence.computed, min(width, known - sequence.computed)
            sequence.computed += count
            sequence.prefilling = sequence.computed < known
            first, last = start // self.pages.page_size, (start + count - 1) // self.pages.page_size
            self._fresh.update(sequence.pages[first : last + 1])
            self._make_findable(sequence, sequence.computed, tail=not sequence.prefilling)
            yield Piece(sequence, start, count, last=not sequence.prefilling)

    def _admit(self, copies: list[tuple[int, int]]) -> Sequence | None:
        """Give the first waiting sequence a slot and pages, with what the cache knows of it; None if it has to wait."""
        while self.waiting and self._slots and not self.waiting[0].most:
            sequence = self.waiting[0]
            try:
                adapter = self._acquire_adapter(sequence)
            except (ValueError, OSError) as error:  # it cannot be read: that is this request's end alone
                sequence.fail(str(error))
                self.dropped.append(self.waiting.pop(0))
                continue
            if adapter is None:
                return None
            sequence.adapter_slot = adapter
            if not self._take_pages(sequence, copies):
                self._release_adapter(sequence)
                return None
            del self.waiting[0]
            sequence.slot = self._slots.pop()
            self.running.append(sequence)
            return sequence
        return None

    def _acquire_adapter(self, sequence: Sequence) -> int | None:
        """The slot of its adapter, 0 without one; None while others use all slots."""
        name = sequence.params.adapter
        return 0 if name is None or self.adapters is None else self.adapters.acquire(name)

    def _release_adapter(self, sequence: Sequence) -> None:
        if sequence.adapter_slot:
            assert self.adapters is not None
            assert sequence.params.adapter is not None
            self.adapters.release(sequence.params.adapter)
            sequence.adapter_slot = 0

    def _take_pages(self, sequence: Sequence, copies: list[tuple[int, int]]) -> bool:
        """Pages for all known tokens, shared or copied as far as their contents are known. False: they have to wait."""
        whole = sequence.pooled or sequence.params.prompt_logprobs is not None  # wants every token computed
        known = [] if whole or not self.config.prefix_caching else sequence.ids[:-1]
        match = self.pages.match(_root(sequence), known)
        if match.copied and match.copy_from in self._fresh:  # it is being written: a copy has to wait for that
            self.pages.release([*match.pages, match.copy_from])
            return False
        needed = self.pages.pages_for(len(sequence.ids)) - len(match.pages)
        spare = len(self.running)  # a page for each that runs, lest one be preempted at once
        if match.copied and needed + spare > self.pages.free:
            self.pages.release([match.copy_from])
            match = match._replace(copy_from=-1, copied=0)
        if needed + spare > self.pages.free:
            self.pages.release(match.pages)
            return False
        sequence.pages = match.pages + self.pages.allocate(needed)
        if match.copied:
            copies.append((match.copy_from, sequence.pages[len(match.pages)]))
            self.pages.release([match.copy_from])  # what takes it writes later than the copy reads
        sequence.node, sequence.findable = match.parent, len(match.pages)
        sequence.computed = len(match.pages) * self.pages.page_size + match.copied
        sequence.prefilling = whole or sequence.computed < len(sequence.ids) - 1
        if sequence.cached is None:
            sequence.cached = min(sequence.computed, sequence.prompt_length)
        return True

    def _make_findable(self, sequence: Sequence, ready: int, *, tail: bool) -> None:
        """Let others find the pages of the first `ready` tokens; with `tail`, also the one that is not full."""
        if not self.config.prefix_caching:
            return
        size = self.pages.page_size
        for index in range(sequence.findable, ready // size):
            tokens = sequence.ids[index * size : (index + 1) * size]
            sequence.node = self.pages.register(sequence.node, tokens, sequence.pages[index])
            sequence.findable = index + 1
        if tail and (rest := sequence.ids[sequence.findable * size : ready]):
            self.pages.register(sequence.node, rest, sequence.pages[sequence.findable])

    # After a step

    def commit(self, batch: Batch) -> list[Sequence]:
        """After a step has come back and its tokens are in its sequences. Releases what has finished; returns all."""
        for sequence, least, most in batch.growth():
            sequence.least -= least
            sequence.most -= most
        for sequence in batch.sequences:
            if sequence.slot < 0:  # preempted or given up since
                if sequence.finished and sequence in self.waiting:
                    self.waiting.remove(sequence)
            elif sequence.finished:
                self._leave(sequence)
            elif not sequence.prefilling:
                self._make_findable(sequence, len(sequence.ids) - 1, tail=False)
        return batch.sequences

    def abort(self, request_id: str) -> None:
        """Give up every sequence of a request; its slot and pages are free at once."""
        for sequence in [s for s in (*self.waiting, *self.running) if s.request_id == request_id]:
            if not sequence.finished:
                sequence.finish_reason = FinishReason.ABORT
            if sequence.slot < 0:
                self.waiting.remove(sequence)
            else:
                self._leave(sequence)

    def restart(self) -> None:
        """After the device has lost its state: everything that runs waits again, and no page is known."""
        for sequence in list(self.running):
            self._leave(sequence)
            if not sequence.finished:
                self._wait(sequence)
        self.waiting = [s for s in self.waiting if not s.finished]
        for sequence in self.waiting:
            sequence.least = sequence.most = 0
        self.pages.clear()

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        self._leave(sequence)
        self._wait(sequence)

    def _wait(self, sequence: Sequence) -> None:
        bisect.insort(self.waiting, sequence, key=_order)

    def _leave(self, sequence: Sequence) -> None:
        """Give back slot and pages; what they hold can be found again."""
        self._make_findable(sequence, sequence.ready, tail=True)
        self.running.remove(sequence)
        self.pages.release(sequence.pages)
        self._slots.append(sequence.slot)
        self._release_adapter(sequence)
        sequence.slot, sequence.pages = -1, []
        sequence.prefilling, sequence.computed = True, 0

    def check_integrity(self) -> None:
        """Raise AssertionError unless slots, pages and queues fit together."""
        self.pages.check_integrity([s.pages for s in self.running])
        slots = [s.slot for s in self.running] + self._slots
        assert sorted(slots) == list(range(self.config.slots)), f"slots lost or doubled: {sorted(slots)}"
        assert self.waiting == sorted(self.waiting, key=_order)
        assert not any(s.pages or s.slot >= 0 or s.finished for s in self.waiting)
        assert not any(s.finished for s in self.running)
        if self.adapters is not None:
            self.adapters.check_integrity()


def _order(sequence: Sequence) -> int:
    return sequence.order


def _root(sequence: Sequence) -> tuple[str, str | None]:
    return "root", sequence.params.adapter

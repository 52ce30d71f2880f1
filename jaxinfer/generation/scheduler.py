"""What runs next: admits waiting sequences, and chooses each step's batch."""

import dataclasses
from collections import deque

from jaxinfer.generation.pages import PagePool
from jaxinfer.generation.request import FinishReason, Sequence


@dataclasses.dataclass(frozen=True)
class Prefill:
    """The next `counts[i]` prompt tokens of `sequences[i]`."""

    sequences: tuple[Sequence, ...]
    counts: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Decode:
    """Up to `steps` new tokens of every sequence."""

    sequences: tuple[Sequence, ...]
    steps: int


Batch = Prefill | Decode


class Scheduler:
    """Queues, slots and pages; no arrays.

    A sequence is admitted, first come first served, when a slot and pages for its whole length are free, so it never
    has to give any back. Prompts run before decoding goes on, in chunks of at most `chunk` tokens a row.
    """

    def __init__(self, *, slots: int, pages: PagePool, page_size: int, chunk: int, prefill_tokens: int):
        self.pages, self.page_size = pages, page_size
        self.chunk, self.prefill_tokens = chunk, prefill_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._free_slots = list(reversed(range(slots)))

    def pages_needed(self, tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-tokens // self.page_size)

    def check(self, sequence: Sequence) -> None:
        """Raise ValueError if the sequence could never run."""
        needed = self.pages_needed(sequence.limit)
        if needed > self.pages.count:
            raise ValueError(
                f"{sequence.limit} tokens (prompt and max_tokens) need {needed} pages of {self.page_size} tokens; the "
                f"cache has {self.pages.count}. Lower max_tokens, or give the cache more memory."
            )

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that passed `check`."""
        sequence.arrive()
        self.waiting.append(sequence)

    def schedule(self, max_steps: int) -> Batch | None:
        """The next batch, or None if there is nothing to do."""
        self._admit()
        pending = [s for s in self.running if not s.prefilled]
        if pending:
            return self._prefill(pending)
        if not self.running:
            return None
        remaining = max(s.limit - len(s.ids) for s in self.running)
        return Decode(tuple(self.running), min(max_steps, remaining))

    def _admit(self) -> None:
        while self.waiting and self._free_slots:
            needed = self.pages_needed(self.waiting[0].limit)
            if needed > self.pages.free:
                return
            sequence = self.waiting.popleft()
            sequence.slot, sequence.pages = self._free_slots.pop(), self.pages.allocate(needed)
            self.running.append(sequence)

    def _prefill(self, pending: list[Sequence]) -> Prefill:
        """As many rows as `prefill_tokens` allows when all are padded to the longest chunk."""
        chosen: list[Sequence] = []
        counts: list[int] = []
        for sequence in pending:
            count = min(self.chunk, sequence.prompt_length - sequence.computed)
            if chosen and max(*counts, count) * (len(chosen) + 1) > self.prefill_tokens:
                break
            chosen.append(sequence)
            counts.append(count)
        return Prefill(tuple(chosen), tuple(counts))

    def commit(self, batch: Batch) -> list[Sequence]:
        """After a batch has run: advance prefills, release what has finished. Returns the batch's sequences."""
        if isinstance(batch, Prefill):
            for sequence, count in zip(batch.sequences, batch.counts, strict=True):
                sequence.computed += count
        for sequence in batch.sequences:
            if sequence.finished:
                self._release(sequence)
        return list(batch.sequences)

    def abort(self, request_id: str) -> None:
        """Give up every sequence of a request; its slot and pages are free at once."""
        for sequence in [s for s in (*self.waiting, *self.running) if s.request_id == request_id]:
            sequence.finish_reason = FinishReason.ABORT
            if sequence in self.running:
                self._release(sequence)
            else:
                self.waiting.remove(sequence)

    def _release(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pages.release(sequence.pages)
        self._free_slots.append(sequence.slot)
        sequence.slot, sequence.pages = -1, []

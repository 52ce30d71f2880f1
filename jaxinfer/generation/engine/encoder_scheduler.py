"""Which prompts an encoder embeds next: no pages, no slots, every prompt goes through in one pass."""

import bisect
import itertools

from jaxinfer.generation.engine.batch import Batch, Chunk, StepOutput
from jaxinfer.generation.engine.buckets import EncoderBuckets
from jaxinfer.generation.engine.config import EngineConfig
from jaxinfer.generation.engine.request import Request, Sequence
from jaxinfer.generation.engine.scheduler import check_context, queue_order


class EncoderScheduler:
    """A queue by priority and arrival; a batch is the first prompt and the next ones that pad to the same length."""

    needs_host_sync = False  # no step needs what the one before has found

    def __init__(self, config: EngineConfig, buckets: EncoderBuckets):
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self._context, self._buckets = config.context, buckets
        self._orders: dict[Sequence, int] = {}  # of those that wait or run
        self._arrivals = itertools.count()

    def check(self, request: Request) -> None:
        """Raise ValueError if the prompt is longer than the context."""
        check_context(request, self._context)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self._orders[sequence] = queue_order(self._arrivals, sequence)
        bisect.insort(self.waiting, sequence, key=self._orders.__getitem__)

    def schedule(self, max_passes: int | None = None) -> Batch:
        """The next batch: of one pass, since a prompt is through after it."""
        if not self.waiting:
            return Batch()
        length = self._buckets.length(self.waiting[0])
        same = (s for s in self.waiting if self._buckets.length(s) == length)
        chosen = list(itertools.islice(same, self._buckets.max_rows(length)))
        self.waiting = [s for s in self.waiting if s not in chosen]
        self.running += chosen
        return Batch(
            chunks=tuple(
                Chunk(sequence=s, slot=row, start=0, count=s.num_prompt_tokens, last=True, pages=())
                for row, s in enumerate(chosen)
            )
        )

    def commit(self, batch: Batch, output: StepOutput) -> None:
        """After a batch has come back: forget what has finished."""
        for sequence in [s for s in self.running if s.finished]:
            self.running.remove(sequence)
            del self._orders[sequence]

    def remove(self, request_id: str) -> list[Sequence]:
        """Forget a request, whether it waits or runs; returns its sequences that had not left yet."""
        leaving = [s for s in self._orders if s.request_id == request_id]
        for sequence in leaving:
            (self.waiting if sequence in self.waiting else self.running).remove(sequence)
            del self._orders[sequence]
        return leaving

    @property
    def sequences(self) -> list[Sequence]:
        """All that have not left."""
        return list(self._orders)

    def restart(self) -> None:
        """After a step that failed: what runs and has not ended waits again."""
        self._orders = {s: order for s, order in self._orders.items() if not s.finished}
        self.waiting, self.running = sorted(self._orders, key=self._orders.__getitem__), []

    def check_integrity(self) -> None:
        """Raise AssertionError unless every sequence is in one queue, in order, and not at its end."""
        sequences = [*self.waiting, *self.running]
        assert self.waiting == sorted(self.waiting, key=self._orders.__getitem__)
        assert len(set(sequences)) == len(sequences), "a sequence is queued twice"
        assert set(sequences) == set(self._orders)
        assert not any(s.finished for s in sequences)

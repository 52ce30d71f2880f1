"""The scheduler of an encoder: no pages, no slots, every prompt goes through in one pass."""

import itertools

from jaxinfer.generation.engine.allocation import NO_PAGES
from jaxinfer.generation.engine.batch import Batch, Chunk, StepOutput
from jaxinfer.generation.engine.buckets import EncoderBuckets
from jaxinfer.generation.engine.config import EncoderEngineConfig
from jaxinfer.generation.engine.request import Request, Sequence
from jaxinfer.generation.engine.scheduler import check_context, queue_order
from jaxinfer.generation.engine.stats import SchedulerStats
from jaxinfer.generation.engine.waiting import WaitingQueue


class EncoderScheduler:
    """Queues by priority and arrival; a batch is the first prompt and the next ones that pad to the same length."""

    needs_host_sync = False  # no step needs the results of the one before
    pools = ()

    def __init__(self, config: EncoderEngineConfig, buckets: EncoderBuckets):
        self._context, self._buckets, self.slots = config.context, buckets, config.max_batch
        self._orders: dict[Sequence, tuple[int, int]] = {}  # of all that wait or run
        self._waiting = self._queues()
        self._running: set[Sequence] = set()
        self._sequences: dict[str, Sequence] = {}  # by request, each of which has one sequence
        self._arrivals = itertools.count()

    def _queues(self) -> dict[int, WaitingQueue[Sequence]]:
        """Make an empty queue for each padded length."""
        return {length: WaitingQueue(self._orders.__getitem__) for length in self._buckets.lengths}

    def check(self, request: Request) -> None:
        """Raise ValueError if the prompt is longer than the context."""
        check_context(request, self._context)

    def waits(self, sequence: Sequence) -> bool:
        """Check whether a sequence is queued and has not run yet."""
        return sequence in self._orders and sequence not in self._running

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self._sequences[sequence.request_id] = sequence
        self._orders[sequence] = queue_order(self._arrivals, sequence)
        self._queue(sequence).add(sequence)

    def _queue(self, sequence: Sequence) -> WaitingQueue[Sequence]:
        return self._waiting[self._buckets.length(sequence)]

    def schedule(self, max_passes: int | None = None) -> Batch:
        """Schedule the next batch, of one pass: a prompt needs no more."""
        firsts = [queue.first for queue in self._waiting.values() if queue.first is not None]
        if not firsts:
            return Batch()
        first = min(firsts, key=self._orders.__getitem__)
        queue, rows = self._queue(first), self._buckets.max_rows(self._buckets.length(first))
        chosen = list(itertools.islice(queue, rows))
        for sequence in chosen:
            queue.remove(sequence)
        self._running.update(chosen)
        return Batch(
            chunks=tuple(
                Chunk(sequence=s, slot=row, start=0, count=s.num_prompt_tokens, last=True, pages=NO_PAGES)
                for row, s in enumerate(chosen)
            )
        )

    def commit(self, batch: Batch, output: StepOutput) -> None:
        """Forget the sequences of a collected batch that have finished."""
        for sequence in batch.sequences:
            if sequence.finished:
                self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        """Forget a sequence, unless it has left already."""
        if self._sequences.get(sequence.request_id) is not sequence:
            return
        if sequence in self._running:
            self._running.remove(sequence)
        else:
            self._queue(sequence).remove(sequence)
        del self._sequences[sequence.request_id], self._orders[sequence]

    def remove(self, request_id: str) -> list[Sequence]:
        """Forget a request, whether it waits or runs; returns its sequences that had not left yet."""
        leaving = [self._sequences[request_id]] if request_id in self._sequences else []
        for sequence in leaving:
            self._forget(sequence)
        return leaving

    @property
    def load(self) -> SchedulerStats:
        """The completions and pages that it holds; in any thread."""
        return SchedulerStats(running=len(self._running), waiting=len(self._orders) - len(self._running))

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences that have not left."""
        return list(self._orders)

    def restart(self) -> None:
        """Start over, whatever state the records are in: all unfinished sequences wait."""
        self._orders = {s: order for s, order in self._orders.items() if not s.finished}
        self._sequences = {s.request_id: s for s in self._orders}
        self._waiting, self._running = self._queues(), set()
        for sequence in self._orders:
            self._queue(sequence).add(sequence)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every sequence is in one queue, in order, and not at its end."""
        for queue in self._waiting.values():
            assert list(queue) == sorted(queue, key=self._orders.__getitem__)
            assert all(self._queue(sequence) is queue for sequence in queue)
        sequences = [*itertools.chain.from_iterable(self._waiting.values()), *self._running]
        assert len(set(sequences)) == len(sequences), "a sequence is queued twice"
        assert set(sequences) == set(self._orders) == set(self._sequences.values())
        assert not any(s.finished for s in sequences)

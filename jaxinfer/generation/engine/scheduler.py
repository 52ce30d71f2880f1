"""The scheduler of a decoder: admits waiting sequences, gives them pages, and chooses each step's batch."""

import itertools
import operator
from collections.abc import Collection, Iterator

import numpy as np

from jaxinfer.generation.engine.allocation import Allocation, Allocator
from jaxinfer.generation.engine.batch import Admission, Batch, Chunk, DecodeRow, Failure, StepOutput
from jaxinfer.generation.engine.buckets import Buckets
from jaxinfer.generation.engine.config import EngineConfig
from jaxinfer.generation.engine.page_pool import PagePool
from jaxinfer.generation.engine.passes import STEP_SECONDS, ChosenPasses, PassChooser, PreparedStep
from jaxinfer.generation.engine.request import Request, Sequence
from jaxinfer.generation.engine.restoring import Restoring
from jaxinfer.generation.engine.running import RunningSequences
from jaxinfer.generation.engine.snapshots import Snapshots
from jaxinfer.generation.engine.speculation import PassCosts, SpeculationControl
from jaxinfer.generation.engine.stats import SchedulerStats
from jaxinfer.generation.engine.unfinished import UnfinishedSequences
from jaxinfer.generation.engine.waiting import WaitingQueue
from jaxinfer.generation.lora.cache import AdapterCache
from jaxinfer.generation.lora.peft import Adapter

PRIORITY_WEIGHT = 64
"""A request of priority p is served as if p times this many others had arrived before it."""
_order = operator.attrgetter("order")


def queue_order(arrivals: Iterator[int], sequence: Sequence) -> tuple[int, int]:
    """The queue position of a sequence that has just arrived; ties go to the earlier one."""
    arrival = next(arrivals)
    return arrival + PRIORITY_WEIGHT * sequence.params.priority, arrival


def check_context(request: Request, context: int) -> None:
    """Raise ValueError for a prompt that exceeds the context, or leaves no room for a token."""
    count = len(request.prompt_token_ids)
    if count + (not request.pooling) > context:
        why = "is shorter" if request.pooling else "leaves no room to generate"
        raise ValueError(
            f"The prompt has {count} tokens; the context of {context} {why}. Shorten the prompt or raise the context."
        )


class DecoderScheduler:
    """Queues, slots and pages; no arrays.

    Sequences are admitted in order, when a slot and the pages of their known tokens are free. A step runs one token of
    every decoding sequence and fills up with chunks of prompts (chunked prefill: Agrawal et al. 2023,
    arXiv:2308.16369). A sequence that finds no page for its next token takes the pages of the last sequence in order,
    which waits and is computed again (recomputation: Kwon et al. 2023, arXiv:2309.06180, section 4.5).

    The first in order always runs, since any sequence fits into the cache alone; and only a bounded number of later
    requests precede one with a higher priority number. So none waits for ever.

    The schedulers of several lanes share `arrivals` and `adapters` (`lanes.py`).

    Args:
      config: the engine's sizes.
      buckets: the sizes that programs are compiled for.
      pages: the pages of the cache.
      adapters: the adapters on the device; None: there is no room for any.
      restoring: brings pages to a tier that the cache forgets, and back; None: they are forgotten.
      snapshots: of recurrent states; None: the model has none.
      costs: the times of passes.
      step_seconds: the longest time that a decode step of several passes should take.
      arrivals: numbers of arrivals; None: it counts for itself.

    Attributes:
      waiting: the allocations that wait, in order.
      running: those with a slot.
      allocator: gives slots and pages.
      passes: chooses the passes of steps.
      preemptions: how many there were.
    """

    def __init__(
        self,
        config: EngineConfig,
        buckets: Buckets,
        pages: PagePool,
        adapters: AdapterCache | None = None,
        *,
        costs: PassCosts,
        restoring: Restoring | None = None,
        snapshots: Snapshots | None = None,
        step_seconds: float = STEP_SECONDS,
        arrivals: Iterator[int] | None = None,
    ):
        self.config, self.pages = config, pages
        self.passes = PassChooser(config.max_decode_passes, buckets, costs, step_seconds)
        self.allocator = Allocator(config, pages, adapters, restoring, snapshots)
        self.waiting: WaitingQueue[Allocation] = WaitingQueue(_order)
        self.running = RunningSequences()
        self.preemptions = 0
        self._buckets, self._adapters = buckets, adapters
        self._unfinished = UnfinishedSequences()
        self._arrivals = itertools.count() if arrivals is None else arrivals

    def check(self, request: Request) -> None:
        """Raise ValueError if the request could never run."""
        check_context(request, self.config.context)
        needed = self.pages.pages_for(request.max_cached_tokens)
        if needed > self.pages.count:
            raise ValueError(
                f"{request.max_length} tokens with max_tokens need {needed} pages of {self.pages.page_size} tokens; "
                f"the cache has {self.pages.count}. Lower max_tokens, or give the cache more memory."
            )

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence whose request passed `check`."""
        speculative = self.config.num_speculative_tokens
        allocation = Allocation(
            sequence=sequence,
            order=queue_order(self._arrivals, sequence),
            speculation=SpeculationControl(speculative) if speculative else None,
        )
        self._enter(allocation)
        self.allocator.prefetch(sequence)

    def _enter(self, allocation: Allocation) -> None:
        self._unfinished.add(allocation)
        self.waiting.add(allocation)

    def allocation(self, sequence: Sequence) -> Allocation | None:
        """A sequence's allocation; None once it has left."""
        return self._unfinished.allocations.get(sequence)

    @property
    def pools(self) -> tuple[PagePool, ...]:
        """The pages of its one lane."""
        return (self.pages,)

    @property
    def slots(self) -> int:
        """How many sequences can run at once."""
        return self.config.max_batch

    def waits(self, sequence: Sequence) -> bool:
        """Check whether a sequence is queued and has not run yet."""
        allocation = self.allocation(sequence)
        return allocation is not None and not allocation.running and sequence.num_cached_tokens is None

    @property
    def needs_host_sync(self) -> bool:
        """Whether a running sequence needs a token bitmask, which depends on the token before."""
        return self.running.num_constrained > 0

    @property
    def load(self) -> SchedulerStats:
        """The completions and pages that it holds; in any thread."""
        used = self.pages.count - self.pages.free
        return SchedulerStats(len(self.running), len(self.waiting), self.preemptions, used, self.pages.count)

    def hand_over(self, allocation: Allocation, other: "DecoderScheduler") -> None:
        """Move a waiting sequence to another lane, where it keeps its place in the order."""
        other._enter(allocation)  # first: an interrupt must not lose it
        self._remove(allocation)

    # A step

    def schedule(self, max_passes: int | None = None) -> Batch:
        """Schedule the next step.

        Decoding sequences come first, which may preempt others; then chunks of running prompts, and of prompts that can
        be admitted as long as the step has room for chunks.

        Args:
          max_passes: the most passes of a decode step; a bitmask or a lack of pages may reduce them. None: the
            config's limit.
        """
        step = self.prepare()
        return self.finish(step, self.passes.choose([self], [step], max_passes))

    def prepare(self, *, wait: bool = True, adapters_before: tuple[int, int] | None = None) -> PreparedStep:
        """Choose what the next step runs, apart from its passes; each row has a page for its next token.

        Args:
          wait: whether to wait for an adapter's files if nothing runs.
          adapters_before: of the sequences with adapters, only those before this place in the order are admitted, or
            at it; None: any.
        """
        self.allocator.begin_step()
        preempted = self.preemptions
        step = PreparedStep(decoding=self._decoding())
        if self.allocator.loading is not None:  # here: nothing gives way any more
            self.allocator.meet(self.allocator.loading)
        room = self._chunk_room()
        for allocation in self.running.prefilling[: room + 1]:  # one of which may wait for its pages
            step.chunks += self._chunks(allocation, room - len(step.chunks))
        while self.preemptions == preempted and len(step.chunks) < room:
            match self._admit_next(wait=wait, adapters_before=adapters_before):
                case None:
                    break
                case Failure() as failure:
                    step.failures.append(failure)
                case Admission() as admission:
                    step.admissions.append(admission)
                    allocation = self._unfinished.allocations[admission.sequence]
                    if admission.decodes:
                        step.decoding.append(allocation)
                    if allocation.load is not None or allocation.ends:  # so it has fewer chunks than it seemed to have
                        room = min(room, self._chunk_room(len(step.chunks)))
                    step.chunks += self._chunks(allocation, room - len(step.chunks))
        return step

    def possible_passes(self, step: PreparedStep, passes: int) -> int:
        """Return how many passes, at most so many, the free pages allow."""
        speculative = self._speculative_tokens(step)
        while passes > 1 and not self._fits(step, passes, speculative):
            passes //= 2
        return passes

    def finish(self, step: PreparedStep, chosen: ChosenPasses) -> Batch:
        """Give the rows their pages and return the batch, which is from now on in flight.

        Args:
          step: what `prepare` has returned last.
          chosen: at most as many passes as `possible_passes` allows.
        """
        passes, speculative = chosen.passes, self._speculative_tokens(step) if chosen.speculates else 0
        if speculative and not self._fits(step, passes, speculative):
            speculative = 0
        if ahead := passes * (1 + speculative) - 1:  # for the next token `prepare` has given a page
            for allocation in step.decoding:
                self.allocator.extend(allocation, _length(allocation) + ahead)
        runs = bool(step.chunks or step.decoding)
        batch = Batch(
            admissions=tuple(step.admissions),
            adapter_uploads=self._uploads() if runs else (),
            **self.allocator.take_moves(runs=runs),
            chunks=tuple(step.chunks),
            rows=tuple([self._row(allocation, speculative) for allocation in step.decoding]),
            passes=passes,
            num_speculative_tokens=speculative,
            micro_batches=chosen.micro_batches,
            failures=tuple(step.failures),
        )
        self._count_in_flight(batch, 1)
        return batch

    def _uploads(self) -> tuple[tuple[int, Adapter], ...]:
        return () if self._adapters is None else self._adapters.take_uploads()

    def _decoding(self) -> list[Allocation]:
        """Give each decoding sequence a page for its next token, and return them; preempt the last if needed."""
        decoding = []
        page_size = self.pages.page_size
        for allocation in self.running.decoding:  # from whose end those that are preempted leave
            if allocation.max_remaining <= 0:
                continue  # ended by the steps in flight
            length = _length(allocation)
            if length <= len(allocation.pages) * page_size:  # nearly always
                decoding.append(allocation)
                continue
            while not self.allocator.extend(allocation, length):
                victim = self.running.last
                self._preempt(victim)
                if victim is allocation:
                    break
            else:
                decoding.append(allocation)
        return decoding

    def _chunk_room(self, count: int = 0) -> int:
        """Return how many chunks the step takes, so that their program is well filled; it has `count` already."""
        most, allocator = self._buckets.chunks[-1], self.allocator
        admissible = () if allocator.loading else itertools.islice(self.waiting, allocator.free_slots)
        for allocation in itertools.chain(self.running.prefilling, admissible):
            rest = allocation.computable - allocation.num_prefilled_tokens
            count += -(-rest // self.config.chunk_size)
            if count >= most:
                break
        return self._buckets.full_chunks(count)

    def _chunks(self, allocation: Allocation, room: int) -> list[Chunk]:
        """Take the next chunks of a prompt, at most `room`."""
        sequence, size, first = allocation.sequence, self.config.chunk_size, allocation.num_prefilled_tokens
        stop = min(first + room * size, allocation.computable)
        if not allocation.prefilling or stop <= first:
            return []
        self.allocator.prefill(allocation, stop - first)
        slot, pages = allocation.slot, allocation.pages
        chunks = [Chunk(sequence, slot, start, size, False, pages) for start in range(first, stop, size)]
        last = chunks[-1]
        last.count = stop - last.start
        if not allocation.prefilling:
            self.running.begin_decoding(allocation)
            last.last = True
            last.bitmask, last.error = _token_bitmask(sequence)
        return chunks

    def _admit_next(self, *, wait: bool, adapters_before: tuple[int, int] | None) -> Admission | Failure | None:
        """Admit the first waiting sequence; None if it has to wait, as for pages that it may share, or none waits."""
        allocation = self.waiting.first
        if allocation is None or not self.allocator.free_slots or allocation.max_in_flight or self.allocator.loading:
            return None
        if adapters_before is not None and allocation.sequence.params.adapter and allocation.order > adapters_before:
            return None
        try:
            # Spares a page for each running sequence, so that none is preempted at once.
            running = len(self.running)
            admission = self.allocator.admit(allocation, spare=running, wait=wait and not running)
        except Exception as error:  # its adapter cannot be read: only this request fails
            self._remove(allocation)
            return Failure(allocation.sequence, str(error))
        if admission is not None:
            self.waiting.remove(allocation)
            self.running.add(allocation)
        return admission

    def _speculative_tokens(self, step: PreparedStep) -> int:
        """Return how many speculative tokens a pass may have."""
        if not self.config.num_speculative_tokens:
            return 0
        speculates = any(_speculative_tokens(allocation) > 0 for allocation in step.decoding)
        return self.config.num_speculative_tokens if speculates else 0

    def _fits(self, step: PreparedStep, passes: int, speculative: int) -> bool:
        """Check whether there are pages for so many passes."""
        ahead = passes * (1 + speculative) - 1
        missing = (self.allocator.missing_pages(a, _length(a) + ahead) for a in step.decoding)
        return sum(missing) <= self.pages.free

    def _row(self, allocation: Allocation, speculative: int) -> DecodeRow:
        sequence, row = allocation.sequence, allocation.row
        if speculative:
            speculative = min(speculative, _speculative_tokens(allocation))
        if (
            row is not None
            and row.pages is allocation.pages  # so its slot is the same, too
            and row.num_speculative_tokens == speculative
            and sequence.matcher is None
        ):
            return row
        bitmask, error = _token_bitmask(sequence)
        row = allocation.row = DecodeRow(sequence, allocation.slot, allocation.pages, bitmask, error, speculative)
        return row

    def _count_in_flight(self, batch: Batch, sign: int) -> None:
        """Count the tokens of a step that is sent (1) or has come back (-1)."""
        find = self._unfinished.allocations.get
        for sequence, least, most in batch.growth:
            if allocation := find(sequence):
                allocation.min_in_flight += sign * least
                allocation.max_in_flight += sign * most

    # After a step

    def commit(self, batch: Batch, output: StepOutput, *, rows: int | None = None) -> None:
        """Release what has finished, after a step's results are in its sequences.

        rows: of the lane with the most, to which the others were padded; None: those of the batch.
        """
        self._count_in_flight(batch, -1)
        if batch.keeps:
            self.allocator.store(batch, output)
        if batch.num_speculative_tokens:
            self._learn(batch, output, len(batch.rows) if rows is None else rows)
        find, insert_prefix = self._unfinished.allocations.get, self.allocator.insert_prefix
        for sequence in batch.sequences:
            allocation = find(sequence)
            if allocation is None:  # given up meanwhile
                continue
            if sequence.finished:
                self._remove(allocation)
            elif allocation.running and not allocation.prefilling:
                insert_prefix(allocation, len(sequence.token_ids) - 1, partial=False)

    def _learn(self, batch: Batch, output: StepOutput, rows: int) -> None:
        """Learn from the gain of speculation in a decode step of so many rows."""
        cost = self.passes.speculative_cost(rows)
        for row, result in zip(batch.rows, output.outputs, strict=True):
            allocation = self._unfinished.allocations.get(row.sequence)
            if allocation is not None and allocation.speculation is not None and result.num_draft_tokens:
                allocation.speculation.record(
                    passes=-(-result.num_draft_tokens // batch.num_speculative_tokens),
                    accepted=result.num_accepted_tokens,
                    num_output_tokens=row.sequence.num_output_tokens,
                    cost=cost,
                )

    def remove(self, request_id: str) -> list[Sequence]:
        """Forget a request; its slots and pages are free at once. Returns its sequences that had not left yet."""
        leaving = self._unfinished.of_request(request_id)
        for allocation in leaving:
            self._remove(allocation)
        return [allocation.sequence for allocation in leaving]

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences that have not left, in no particular order."""
        return list(self._unfinished.allocations)

    def restart(self, *, without: Collection[Sequence] = ()) -> None:
        """Start over, whatever state the records are in: all unfinished sequences wait, and no page is cached.

        Reads only which sequences there are and their order: an interrupt may have come anywhere.

        without: sequences that another lane has.
        """
        known = self._unfinished.allocations.items()
        allocations = [a for sequence, a in known if not sequence.finished and sequence not in without]
        waiting: WaitingQueue[Allocation] = WaitingQueue(_order)
        for allocation in allocations:
            allocation.reset()
            waiting.add(allocation)
        self.waiting, self.running, self._unfinished = waiting, RunningSequences(), UnfinishedSequences(allocations)
        self.allocator.reset()

    def _preempt(self, allocation: Allocation) -> None:
        self.preemptions += 1
        self._stop(allocation)
        self.waiting.add(allocation)

    def _stop(self, allocation: Allocation) -> None:
        self.running.remove(allocation)
        self.allocator.release(allocation)

    def _remove(self, allocation: Allocation) -> None:
        if allocation.running:
            self._stop(allocation)
        else:
            self.waiting.remove(allocation)
        self._unfinished.remove(allocation.sequence)

    def check_integrity(self) -> None:
        """Raise AssertionError unless slots, pages and queues fit together."""
        self.allocator.check_integrity(list(self.running))
        self.running.check_integrity()
        queued = [*self.waiting, *self.running]
        assert len(queued) == len(self.waiting) + len(self.running)
        assert list(self.waiting) == sorted(self.waiting, key=_order)
        assert not any(a.pages or a.running for a in self.waiting)
        assert all(a.running for a in self.running)
        assert not any(a.sequence.finished for a in queued)
        assert [a for a in self.running if a.load] == [a for a in [self.allocator.loading] if a]
        assert not any(a.load for a in self.running.decoding)
        assert {a.sequence: a for a in queued} == self._unfinished.allocations
        assert len(queued) == len(self._unfinished.allocations)
        self._unfinished.check_integrity()


def _length(allocation: Allocation) -> int:
    """The most tokens that may be known when the next step begins."""
    return len(allocation.sequence.token_ids) + allocation.max_in_flight


def _speculative_tokens(allocation: Allocation) -> int:
    """Return how many speculative tokens a pass may have for this sequence."""
    if allocation.speculation is None:
        return 0
    return min(allocation.speculation.limit(allocation.sequence.num_output_tokens), allocation.max_remaining - 1)


def _token_bitmask(sequence: Sequence) -> tuple[np.ndarray | None, str | None]:
    """The tokens that may come next (None: all), and an error if none may (else None)."""
    asked = sequence.request.bitmask
    if sequence.matcher is None or sequence.matcher.finished:
        return asked, None
    try:
        follows = sequence.matcher.token_bitmask()
    except Exception as error:  # no token of this model can continue: only this request fails
        return None, str(error)
    return follows if asked is None else follows & asked, None

"""The scheduler of a mesh with several lanes, which run a step together: one scheduler for each of them."""

import dataclasses
from collections.abc import Sequence as Ordered

from jaxinfer.generation.engine.allocation import Allocation
from jaxinfer.generation.engine.batch import Batch, Failure, StepOutput
from jaxinfer.generation.engine.page_pool import PagePool
from jaxinfer.generation.engine.passes import PreparedStep
from jaxinfer.generation.engine.request import Request, Sequence
from jaxinfer.generation.engine.scheduler import DecoderScheduler
from jaxinfer.generation.engine.stats import SchedulerStats

PREFIX_WEIGHT = 4
"""A lane that has all of a prompt in its cache may be this many sequences busier than another one."""


class LaneScheduler:
    """Queues, slots and pages of several lanes; no arrays.

    A sequence stays in its lane while it runs. A step is one program for all lanes, which make equally many passes: one
    if any has chunks of prompts, else what the rows with most to come can use. A lane whose rows have ended idles.

    Args:
      lanes: their schedulers, which share the order of arrival and the adapters on the devices.
    """

    def __init__(self, lanes: Ordered[DecoderScheduler]):
        self.lanes = tuple(lanes)
        self._failures: list[Failure] = []  # in no step yet: the lane after theirs may have failed

    def check(self, request: Request) -> None:
        """Raise ValueError if the request could never run."""
        self.lanes[0].check(request)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence whose request passed `check`, in the lane that it suits best."""

        def busyness(lane: DecoderScheduler) -> float:
            load = lane.load
            return load.running + load.waiting - PREFIX_WEIGHT * _cached_share(lane, sequence)

        min(self.lanes, key=busyness).add(sequence)

    def allocation(self, sequence: Sequence) -> Allocation | None:
        """A sequence's allocation; None once it has left."""
        return next((a for lane in self.lanes if (a := lane.allocation(sequence)) is not None), None)

    @property
    def pools(self) -> tuple[PagePool, ...]:
        """The pages of each lane."""
        return tuple(lane.pages for lane in self.lanes)

    @property
    def slots(self) -> int:
        """How many sequences can run at once."""
        return sum(lane.slots for lane in self.lanes)

    def waits(self, sequence: Sequence) -> bool:
        """Check whether a sequence is queued and has not run yet."""
        return any(lane.waits(sequence) for lane in self.lanes)

    @property
    def needs_host_sync(self) -> bool:
        """Whether a running sequence needs a token bitmask, which depends on the token before."""
        return any(lane.needs_host_sync for lane in self.lanes)

    @property
    def load(self) -> SchedulerStats:
        """The completions and pages of all lanes; in any thread."""
        return SchedulerStats(*map(sum, zip(*(lane.load for lane in self.lanes), strict=True)))

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences that have not left, in no particular order."""
        return [sequence for lane in self.lanes for sequence in lane.sequences]

    def schedule(self, max_passes: int | None = None) -> Batch:
        """Schedule the next step of all lanes. max_passes: the most passes of a decode step, as for one lane."""
        self._balance()
        steps = self._prepare()
        chosen = self.lanes[0].passes.choose(self.lanes, steps, max_passes)
        batch = Batch.of_lanes([lane.finish(step, chosen) for lane, step in zip(self.lanes, steps, strict=True)])
        batch = dataclasses.replace(batch, failures=tuple(self._failures))
        self._failures = []
        return batch

    def _prepare(self) -> list[PreparedStep]:
        """Prepare the steps of all lanes.

        An adapter that is yet to come has a place once those that came before it in the order are used no longer: so
        until then no lane uses one for a later sequence.
        """
        orders = [order for lane in self.lanes if (order := _order_of_next_adapter(lane)) is not None]
        adapters_before, steps = min(orders, default=None), []
        for lane in self.lanes:
            wait = not any(other.running for other in self.lanes)
            steps.append(lane.prepare(wait=wait, adapters_before=adapters_before))
            self._failures += steps[-1].failures
        return steps

    def _balance(self) -> None:
        """Move sequences that their lane has no slot or no pages for to lanes that have, and for which none waits."""
        for lane in self.lanes:
            while (first := _movable(lane)) is not None and not _can_admit(lane, first):
                others = [other for other in self.lanes if _open_slots(other) > 0 and _can_admit(other, first)]
                if not others:
                    break
                lane.hand_over(first, max(others, key=_open_slots))

    def commit(self, batch: Batch, output: StepOutput) -> None:
        """Release what has finished in each lane, after a step's results are in its sequences."""
        outputs, most = iter(output.outputs), max(len(part.rows) for part in batch.lanes)
        chunks = [[next(outputs) for _ in part.chunks] for part in batch.lanes]
        rows = [[next(outputs) for _ in part.rows] for part in batch.lanes]
        for index, (lane, part) in enumerate(zip(self.lanes, batch.lanes, strict=True)):
            results = StepOutput(outputs=chunks[index] + rows[index], stored=output.stored[index : index + 1])
            lane.commit(part, results, rows=most)

    def remove(self, request_id: str) -> list[Sequence]:
        """Forget a request in all lanes. Returns its sequences that had not left yet."""
        return [sequence for lane in self.lanes for sequence in lane.remove(request_id)]

    def restart(self) -> None:
        """Start over, whatever state the records are in: all unfinished sequences wait, and no page is cached."""
        restarted: set[Sequence] = set()  # one that was moving may be in two lanes
        for lane in self.lanes:
            lane.restart(without=restarted)
            restarted.update(lane.sequences)

    def check_integrity(self) -> None:
        """Raise AssertionError unless the records of each lane fit together, and no sequence is in two."""
        for lane in self.lanes:
            lane.check_integrity()
        assert len(set(self.sequences)) == len(self.sequences)


def _open_slots(lane: DecoderScheduler) -> int:
    """Count a lane's free slots beyond those that its waiting sequences can take; negative if too few."""
    return lane.allocator.free_slots - len(lane.waiting)


def _movable(lane: DecoderScheduler) -> Allocation | None:
    """The first that waits in a lane, if the steps in flight do not have it; another lane may take it."""
    first = lane.waiting.first
    return None if first is None or first.max_in_flight else first


def _can_admit(lane: DecoderScheduler, allocation: Allocation) -> bool:
    """Check whether a waiting sequence, of this lane or another, finds a slot and pages in a lane."""
    return lane.allocator.has_room(allocation.sequence, spare=len(lane.running))


def _order_of_next_adapter(lane: DecoderScheduler) -> tuple[int, int] | None:
    """The place in the order of the first that waits, if there is a slot for it and its adapter is yet to come."""
    first = lane.waiting.first
    if first is None or not lane.allocator.free_slots or lane.allocator.has_adapter(first.sequence):
        return None
    return first.order


def _cached_share(lane: DecoderScheduler, sequence: Sequence) -> float:
    """The share of a sequence's tokens that full cached pages of a lane have, from 0 to 1."""
    return lane.allocator.count_cached_tokens(sequence) / max(len(sequence.token_ids), 1)

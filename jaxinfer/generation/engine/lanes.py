"""The scheduler of a mesh with several lanes, which run a step together: one scheduler for each of them."""

import dataclasses
from collections.abc import Sequence as Ordered

from jaxinfer.generation.engine.allocation import Allocation
from jaxinfer.generation.engine.batch import Batch, Failure, StepOutput
from jaxinfer.generation.engine.request import Request, Sequence
from jaxinfer.generation.engine.scheduler import DecoderScheduler
from jaxinfer.generation.engine.stats import SchedulerStats

PREFIX_WEIGHT = 4
"""A lane that has all of a prompt in its cache may be this many sequences busier than another one."""


class LaneScheduler:
    """Queues, slots and pages of several lanes; no arrays.

    A sequence stays in its lane from when it is admitted. A step is one program for all lanes: what each has chosen is
    cut to what all can run, which is one plain pass as soon as one of them has chunks of prompts.

    Args:
      lanes: their schedulers, which share the order of arrival and the adapters on the devices.
    """

    def __init__(self, lanes: Ordered[DecoderScheduler]):
        self.lanes = tuple(lanes)
        self._failures: list[Failure] = []  # in no step yet: the lane after theirs may have failed to schedule

    def check(self, request: Request) -> None:
        """Raise ValueError if the request could never run."""
        self.lanes[0].check(request)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence whose request passed `check`, in the lane that it suits best."""

        def busyness(lane: DecoderScheduler) -> float:
            load = lane.load
            return load.running + load.waiting - PREFIX_WEIGHT * lane.cached_share(sequence)

        min(self.lanes, key=busyness).add(sequence)

    def allocation(self, sequence: Sequence) -> Allocation | None:
        """Return a sequence's allocation; None once it has left."""
        return next((a for lane in self.lanes if (a := lane.allocation(sequence)) is not None), None)

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
        """Return the next step of all lanes; max_passes: the most passes of a decode step, as for one lane."""
        self._balance()
        batches = []
        for lane in self.lanes:
            batches.append(lane.schedule(max_passes))
            self._failures += batches[-1].failures
        prefills = any(batch.chunks for batch in batches)
        passes = 1 if prefills else min((batch.passes for batch in batches if batch.rows), default=1)
        parts = zip(self.lanes, batches, strict=True)
        joined = Batch.of_lanes(lane.shorten(batch, passes, speculates=not prefills) for lane, batch in parts)
        failures, self._failures = tuple(self._failures), []
        return dataclasses.replace(joined, failures=failures)

    def _balance(self) -> None:
        """Move sequences that wait for a slot to lanes that have slots for which none waits."""
        for lane in self.lanes:
            while lane.is_full and lane.can_hand_over:
                free = next((other for other in self.lanes if other.is_idle), None)
                if free is None:
                    return
                lane.hand_over(free)

    def commit(self, batch: Batch, output: StepOutput) -> None:
        """Release what has finished in each lane, after a step's results are in its sequences."""
        outputs = iter(output.outputs)
        chunks = [[next(outputs) for _ in part.chunks] for part in batch.lanes]
        rows = [[next(outputs) for _ in part.rows] for part in batch.lanes]
        for lane, part, *results in zip(self.lanes, batch.lanes, chunks, rows, strict=True):
            lane.commit(part, StepOutput(outputs=[*results[0], *results[1]]))

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

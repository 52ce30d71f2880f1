"""The scheduler of a mesh with several lanes, which run a step together: one scheduler for each of them."""

import dataclasses
from collections.abc import Sequence as Ordered

from jaxinfer.generation.engine.allocation import Allocation
from jaxinfer.generation.engine.batch import Batch, Failure, StepOutput
from jaxinfer.generation.engine.request import Request, Sequence
from jaxinfer.generation.engine.scheduler import DecoderScheduler, PreparedStep, choose_passes
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
            return load.running + load.waiting - PREFIX_WEIGHT * lane.cached_share(sequence)

        min(self.lanes, key=busyness).add(sequence)

    def allocation(self, sequence: Sequence) -> Allocation | None:
        """A sequence's allocation; None once it has left."""
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
        """Schedule the next step of all lanes. max_passes: the most passes of a decode step, as for one lane."""
        self._balance()
        steps = self._prepare()
        chosen = choose_passes(self.lanes, steps, max_passes)
        batch = Batch.of_lanes([lane.finish(step, chosen) for lane, step in zip(self.lanes, steps, strict=True)])
        batch = dataclasses.replace(batch, failures=tuple(self._failures))
        self._failures = []
        return batch

    def _prepare(self) -> list[PreparedStep]:
        """Prepare the steps of all lanes.

        An adapter that is yet to come has a place once those that came before it in the order are used no longer: so
        until then no lane uses one for a later sequence.
        """
        orders = [order for lane in self.lanes if (order := lane.order_of_next_adapter) is not None]
        adapters_before, steps = min(orders, default=None), []
        for lane in self.lanes:
            wait = not any(other.running for other in self.lanes)
            steps.append(lane.prepare(wait=wait, adapters_before=adapters_before))
            self._failures += steps[-1].failures
        return steps

    def _balance(self) -> None:
        """Move sequences that their lane has no slot or no pages for to lanes that have, and for which none waits."""
        for lane in self.lanes:
            while (first := lane.movable) is not None and not lane.can_admit(first):
                others = [other for other in self.lanes if other.open_slots > 0 and other.can_admit(first)]
                if not others:
                    break
                lane.hand_over(first, max(others, key=lambda other: other.open_slots))

    def commit(self, batch: Batch, output: StepOutput) -> None:
        """Release what has finished in each lane, after a step's results are in its sequences."""
        outputs, most = iter(output.outputs), max(len(part.rows) for part in batch.lanes)
        chunks = [[next(outputs) for _ in part.chunks] for part in batch.lanes]
        rows = [[next(outputs) for _ in part.rows] for part in batch.lanes]
        for lane, part, *results in zip(self.lanes, batch.lanes, chunks, rows, strict=True):
            lane.commit(part, StepOutput(outputs=[*results[0], *results[1]]), rows=most)

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

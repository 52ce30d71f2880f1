"""The number of passes of a step, which all lanes of a mesh make together."""

import dataclasses
from collections.abc import Sequence as Ordered
from typing import NamedTuple, Protocol

from jaxinfer.generation.engine.allocation import Allocation
from jaxinfer.generation.engine.batch import Admission, Chunk, Failure
from jaxinfer.generation.engine.buckets import Buckets
from jaxinfer.generation.engine.speculation import PassCosts
from jaxinfer.sizes import round_up

STEP_SECONDS = 0.01
"""Longest time that a decode step of several passes should take: a new request waits for it."""
PIPELINE_PASSES = 8
"""Fewest passes that a decode step through a pipeline should have, whose stages idle while it fills and drains."""


@dataclasses.dataclass(kw_only=True)
class PreparedStep:
    """The next step of a lane, before its passes are chosen.

    Attributes:
      decoding: what decodes.
      chunks: chunks of prompts.
      admissions: sequences that have just got their slot.
      failures: sequences that cannot run.
    """

    decoding: list[Allocation]
    chunks: list[Chunk] = dataclasses.field(default_factory=list)
    admissions: list[Admission] = dataclasses.field(default_factory=list)
    failures: list[Failure] = dataclasses.field(default_factory=list)


class ChosenPasses(NamedTuple):
    """The passes of a step.

    Attributes:
      passes: how many.
      speculates: whether they may have speculative tokens; they have none where pages are too few.
      micro_batches: in how many parts the rows go through the stages of a pipeline.
    """

    passes: int = 1
    speculates: bool = False
    micro_batches: int = 1


class Lane(Protocol):
    """The records of a lane, as far as they limit its passes."""

    @property
    def needs_host_sync(self) -> bool:
        """Whether a running sequence needs a token bitmask, which depends on the token before."""
        ...

    def possible_passes(self, step: PreparedStep, passes: int) -> int:
        """Return how many passes, at most so many, the free pages allow."""
        ...


class PassChooser:
    """Chooses the passes of a step by their times.

    Args:
      max_passes: the most passes of a decode step.
      buckets: the sizes that programs are compiled for.
      costs: the times of passes.
      step_seconds: the longest time that a decode step of several passes should take.

    Attributes:
      costs: as given.
    """

    def __init__(self, max_passes: int, buckets: Buckets, costs: PassCosts, step_seconds: float):
        self._max_passes, self._step_seconds = max_passes, step_seconds
        self._buckets, self.costs = buckets, costs

    def choose(self, lanes: Ordered[Lane], steps: Ordered[PreparedStep], max_passes: int | None) -> ChosenPasses:
        """Choose the passes of a step that lanes run together.

        As many as the rows with most to come can use, and every lane has pages for; one plain pass beside chunks, and
        for rows whose bitmask changes with each token.

        max_passes: the most that the caller wants; None: no limit.
        """
        rows = max([len(step.decoding) for step in steps])
        if [step for step in steps if step.chunks] or not rows:
            return ChosenPasses()
        rows = self._padded(rows)
        micro_batches = self.costs.micro_batches(rows)
        if [lane for lane in lanes if lane.needs_host_sync]:
            return ChosenPasses(micro_batches=micro_batches)
        passes = self._affordable(rows, micro_batches, max_passes)
        if passes > 1:
            remaining = [allocation.max_remaining for step in steps for allocation in step.decoding]
            passes = min(passes, max(remaining))
        passes = min([lane.possible_passes(step, passes) for lane, step in zip(lanes, steps, strict=True)])
        return ChosenPasses(passes, speculates=True, micro_batches=micro_batches)

    def speculative_cost(self, rows: int) -> float:
        """Return how much longer a speculative pass of so many rows takes than a plain one."""
        return self.costs.ratio(self._padded(rows))

    def _affordable(self, rows: int, micro_batches: int, max_passes: int | None) -> int:
        """Return how many passes the time of a step holds."""
        least = PIPELINE_PASSES if self.costs.stages > 1 else 1
        seconds = self.costs.seconds(rows, micro_batches)  # None: one pass, to learn what it costs
        affordable = 1 if seconds is None else max(least, int(self._step_seconds / seconds))
        return min(max_passes or affordable, self._max_passes, affordable)

    def _padded(self, rows: int) -> int:
        """The number of rows that a decode step is padded to."""
        return round_up(rows, self._buckets.decode_rows)

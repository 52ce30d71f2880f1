"""The device side of a simulated engine: a clock, and an executor that only lets time pass."""

from collections.abc import Iterable
from typing import Any, Protocol

from jaxinfer.compiled import Costs, ProgramCache
from jaxinfer.generation.engine.batch import (
    NOTHING,
    Batch,
    Chunk,
    DecodeRow,
    PageBlock,
    SequenceOutput,
    StateBlock,
    StepOutput,
)
from jaxinfer.generation.engine.protocols import InFlightStep
from jaxinfer.generation.engine.request import Sequence
from jaxinfer.generation.engine.stats import ExecutorReport

TOKEN = 0
"""The token that every step makes."""


class StepTimes(Protocol):
    """Tells how long steps take."""

    def seconds(self, batch: Batch) -> float:
        """Compute the seconds of a step on its device."""
        ...


class VirtualClock:
    """Time that passes only when someone waits.

    Attributes:
      now: seconds since the start.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Read the time."""
        return self.now

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.now += max(0.0, seconds)


class VirtualExecutor:
    """Runs steps in virtual time, one after the other; each of them makes a constant token in each pass.

    Implements `Executor`. It times steps as the record of costs does: from when a step is sent, or the step before it
    has ended, to its results.

    Args:
      clock: the engine's clock.
      times: tells how long steps take.
      page_seconds: by which each page that comes from the host lengthens a step.
      depth: as in `Executor`.
    """

    def __init__(self, clock: VirtualClock, times: StepTimes, *, page_seconds: float = 0.0, depth: int = 1):
        self.depth, self.programs, self.costs = depth, ProgramCache[Any]([]), Costs(learns=False)
        self._clock, self._times, self._page_seconds, self._free = clock, times, page_seconds, 0.0

    def launch(self, batch: Batch) -> InFlightStep:
        """Send a batch; its output is the time at which it ends."""
        seconds = self._times.seconds(batch) + batch.num_restored_pages * self._page_seconds
        self._free = max(self._clock.now, self._free) + seconds
        return InFlightStep(batch, self._free, self._clock.now)

    def collect(self, step: InFlightStep) -> StepOutput:
        """Wait for a step's end; returns its tokens."""
        self.wait(step)
        batch = step.batch
        return StepOutput(
            outputs=[_output(part, batch.passes) for part in batch.parts],
            stored=self.read_pages(batch) if batch.stored else [],
        )

    def read_pages(self, batch: Batch) -> list[list[PageBlock | StateBlock]]:
        """Make a block without content for each lane."""
        return [[PageBlock(kv=())] for _ in batch.lanes]

    def wait(self, step: InFlightStep) -> None:
        """Wait for a step's end."""
        self._clock.wait(step.output - self._clock.now)

    @property
    def chunk_seconds(self) -> float | None:
        """None: what a cached page is worth is not asked for here."""
        return None

    def report(self) -> ExecutorReport:
        """Make an empty report."""
        return ExecutorReport()

    def compile_ahead(self, sequences: Iterable[Sequence] | None = None) -> int:
        """Compile nothing."""
        return 0

    def compile_in_background(self) -> None:
        """Compile nothing."""

    def restart(self) -> None:
        """Do nothing: the device holds nothing."""

    def sleep(self) -> None:
        """Do nothing: the device holds nothing."""

    def free_state(self) -> None:
        """Do nothing: the device holds nothing."""

    def wake_up(self, leaves: list[Any]) -> None:
        """Do nothing: the device holds nothing."""

    def interrupt(self) -> None:
        """Do nothing: nobody waits for a disk."""


def _output(part: Chunk | DecodeRow, passes: int) -> SequenceOutput:
    """The tokens of a chunk or a row; a row that has reached its length makes no more."""
    if isinstance(part, Chunk):
        return SequenceOutput([TOKEN]) if part.chooses else NOTHING
    sequence = part.sequence
    return SequenceOutput([TOKEN] * min(passes, sequence.max_length - len(sequence.token_ids)))

"""The protocols of the engine's parts: a `Scheduler` decides what runs, an `Executor` runs it on the device."""

import dataclasses
from collections.abc import Iterable
from typing import Any, Protocol

from jaxinfer.compiled import Costs, ProgramCache
from jaxinfer.generation.engine.batch import Batch, PageBlock, StateBlock, StepOutput
from jaxinfer.generation.engine.page_pool import PagePool
from jaxinfer.generation.engine.request import Request, Sequence
from jaxinfer.generation.engine.stats import ExecutorReport, SchedulerStats


@dataclasses.dataclass(frozen=True)
class InFlightStep:
    """A step on the device.

    Attributes:
      batch: the step's batch.
      output: the pending results, as the executor's `collect` takes them.
      launched: when it was sent.
    """

    batch: Batch
    output: Any
    launched: float


class Scheduler(Protocol):
    """Decides what every step runs."""

    @property
    def needs_host_sync(self) -> bool:
        """Whether a sequence's tokens must be on the host before its next step can be scheduled."""
        ...

    @property
    def load(self) -> SchedulerStats:
        """The completions and pages that it holds; in any thread."""
        ...

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences that have not left."""
        ...

    @property
    def pools(self) -> tuple[PagePool, ...]:
        """The pages of each lane; none for an encoder."""
        ...

    @property
    def slots(self) -> int:
        """How many sequences can run at once."""
        ...

    def check(self, request: Request) -> None:
        """Raise ValueError if the request could never run."""
        ...

    def waits(self, sequence: Sequence) -> bool:
        """Check whether a sequence is queued and has not run yet."""
        ...

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence whose request passed `check`."""
        ...

    def schedule(self, max_passes: int | None = None) -> Batch:
        """Schedule the next step; it is empty if all wait for the steps in flight, or nothing is left."""
        ...

    def commit(self, batch: Batch, output: StepOutput) -> None:
        """Release what has finished, after a step's results are in its sequences."""
        ...

    def remove(self, request_id: str) -> list[Sequence]:
        """Forget a request; returns those of its sequences that had not left yet."""
        ...

    def restart(self) -> None:
        """Start over, whatever state the records are in: all unfinished sequences wait again, and nothing is cached."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError unless the scheduler's records fit together."""
        ...


class Executor(Protocol):
    """Runs batches on the device."""

    @property
    def depth(self) -> int:
        """How many steps may be in flight while the next one is scheduled; 0: none."""
        ...

    @property
    def programs(self) -> ProgramCache[Any]:
        """All executables."""
        ...

    @property
    def costs(self) -> Costs:
        """The record of their times, to which every step is added."""
        ...

    @property
    def chunk_seconds(self) -> float | None:
        """The fewest seconds that a chunk of a prompt has taken; None if that is unknown."""
        ...

    def report(self) -> ExecutorReport:
        """Return what it has needed and done so far; from any thread."""
        ...

    def compile_ahead(self, sequences: Iterable[Sequence] | None = None) -> int:
        """Compile every program that these sequences, or any (None), can need; returns how many were missing.

        Raises MemoryError if the largest leaves no room to run it.
        """
        ...

    def compile_in_background(self) -> None:
        """Compile every program that any request can need, one at a time in a thread, until `interrupt`."""
        ...

    def launch(self, batch: Batch) -> InFlightStep:
        """Send a batch to the device, without waiting for it."""
        ...

    def collect(self, step: InFlightStep) -> StepOutput:
        """Wait for a step; returns its results."""
        ...

    def wait(self, step: InFlightStep) -> None:
        """Wait for a step whose results nobody wants. Raises its error, if it failed."""
        ...

    def read_pages(self, batch: Batch) -> list[list[PageBlock | StateBlock]]:
        """Bring what a batch stores to the host while nothing runs; returns `StepOutput.stored`."""
        ...

    def restart(self) -> None:
        """Start over, after a step that failed or was interrupted may have destroyed what is on the device."""
        ...

    def sleep(self) -> None:
        """Free the weights on the devices; nothing runs before `wake_up`."""
        ...

    def free_state(self) -> None:
        """Free the state on the devices, while it sleeps; does nothing if there is none."""
        ...

    def wake_up(self, leaves: list[Any]) -> None:
        """Take weights, in the order in which programs take them; the state is empty if it was freed."""
        ...

    def interrupt(self) -> None:
        """End a step that waits for a disk, with an error, and compiling beyond the programs that have begun.

        From any thread, when no other step is to follow.
        """
        ...

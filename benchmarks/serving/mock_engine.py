"""An `AsyncLLM` without a device, or without an engine: a clock stands in its place, and all else is real."""

import time
from pathlib import Path
from typing import Any, cast

from benchmarks.engine.host import TEXT
from benchmarks.engine.queues import InstantDecoder
from benchmarks.serving.load import FIRST_TOKEN
from jaxinfer import AsyncLLM
from jaxinfer.generation.engine.batch import Batch, StepOutput
from jaxinfer.generation.engine.protocols import InFlightStep
from jaxinfer.generation.engine.request import Sequence
from jaxinfer.generation.engine.stats import SchedulerStats
from jaxinfer.generation.outputs import FinishReason


class ClockedDecoder(InstantDecoder):
    """Executor of a device that takes the same time for every step, and no CPU.

    Attributes:
      step_s: seconds of a step on the device.
      begun: when each step was launched, with the number of its rows.
    """

    def __init__(self, real: Any, step_s: float):
        super().__init__(real.state.layout, real._packer.buckets, real.costs)
        self.step_s = step_s
        self.begun: list[tuple[int, float]] = []
        self._free = 0.0  # when the device has run all steps

    def launch(self, batch: Batch) -> InFlightStep:
        step, now = super().launch(batch), time.perf_counter()
        self.begun.append((len(batch.rows), now))
        self._free = max(now, self._free) + self.step_s
        return InFlightStep(step.batch, step.output, self._free)

    def collect(self, step: InFlightStep) -> StepOutput:
        time.sleep(max(0.0, step.launched - time.perf_counter()))
        return super().collect(step)


class MockEngine:
    """An engine that gives each completion a token and a piece of text in each step, and costs next to nothing.

    It is its own scheduler: its completions never wait.
    """

    def __init__(self, slots: int, step_s: float):
        self.slots, self.step_s = slots, step_s
        self.sequences: dict[Sequence, None] = {}

    @property
    def scheduler(self) -> "MockEngine":
        return self

    @property
    def load(self) -> SchedulerStats:
        return SchedulerStats(running=len(self.sequences), waiting=0, preemptions=0, used_pages=0, num_pages=0)

    def waits(self, sequence: Sequence) -> bool:
        return False

    def add(self, sequences: list[Sequence]) -> None:
        self.sequences.update(dict.fromkeys(sequences))

    def abort(self, request_id: str) -> None:
        for sequence in [each for each in self.sequences if each.request_id == request_id]:
            self._end(sequence, FinishReason.ABORT)

    def step(self) -> list[Sequence]:
        time.sleep(self.step_s)
        now, advanced = time.perf_counter(), list(self.sequences)
        for sequence in advanced:
            sequence.token_ids.append(FIRST_TOKEN)
            sequence.text.add(" text")
            sequence.first_token_time = sequence.first_token_time or now
            sequence.last_token_time = now
            if len(sequence.token_ids) == len(sequence.request.prompt_token_ids) + (
                sequence.request.sampling.max_tokens or 1
            ):
                self._end(sequence, FinishReason.LENGTH)
        return advanced

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        del self.sequences[sequence]

    def compile_for(self, sequences: list[Sequence]) -> None:
        """Do nothing, as there are no programs."""

    def _nothing(self) -> None:
        """Do nothing, as there is no device."""

    compile_in_background = interrupt = drain = close = _nothing


def with_mock_device(model: Path, *, step_s: float, max_batch: int) -> tuple[AsyncLLM, ClockedDecoder]:
    """Load a model, and replace its device. Every row gets one token in each step."""
    llm = AsyncLLM(model, max_batch=max_batch, max_decode_passes=1, progress=False)
    assert llm.tokenizer is not None
    device = ClockedDecoder(llm.engine.executor, step_s)
    device.answers = llm.tokenizer.encode(TEXT)
    cast(Any, llm.engine)._executor = device
    return llm, device


def with_mock_engine(model: Path, *, step_s: float, max_batch: int) -> AsyncLLM:
    """Load a model, and replace its engine, except that it prepares requests."""
    llm = AsyncLLM(model, max_batch=max_batch, progress=False)
    cast(Any, llm)._loop._decider._engine = MockEngine(max_batch, step_s)
    return llm

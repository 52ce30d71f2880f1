"""An `AsyncLLM` whose device is a clock: everything else is real, from the scheduler to the streams of outputs."""

import time
from pathlib import Path
from typing import Any, cast

from benchmarks.engine.host import TEXT
from benchmarks.engine.queues import InstantDecoder
from jaxinfer import AsyncLLM
from jaxinfer.generation.engine.batch import Batch, StepOutput
from jaxinfer.generation.engine.protocols import InFlightStep


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


def mock_llm(model: Path, *, step_s: float, max_batch: int) -> tuple[AsyncLLM, ClockedDecoder]:
    """Load a model, and replace its device. Every row gets one token in each step."""
    llm = AsyncLLM(model, max_batch=max_batch, max_decode_passes=1, progress=False)
    assert llm.tokenizer is not None
    device = ClockedDecoder(llm.engine.executor, step_s)
    device.answers = llm.tokenizer.encode(TEXT)
    cast(Any, llm.engine)._executor = device
    return llm, device

"""The engine: requests in, tokens out, one step at a time."""

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator

from jaxinfer.compiled import Origin
from jaxinfer.compiled.costs import SAVE_SECONDS
from jaxinfer.generation.engine.batch import Batch, Failure, StepOutput
from jaxinfer.generation.engine.config import EngineConfig
from jaxinfer.generation.engine.input import InputProcessor
from jaxinfer.generation.engine.output import OutputProcessor
from jaxinfer.generation.engine.protocols import Clock, Executor, InFlightStep, Scheduler
from jaxinfer.generation.engine.request import Request, Sequence
from jaxinfer.generation.lora.cache import AdapterCache
from jaxinfer.generation.params import PoolingParams, SamplingParams
from jaxinfer.generation.text import Prompt

log = logging.getLogger(__name__)


class Engine:
    """Runs requests together on one model; a request may come or go between any two steps.

    `build_engine` (api/build.py) makes one from a loaded model.

    Args:
      config: the engine's sizes.
      inputs: makes requests of prompts.
      scheduler: decides what every step runs.
      executor: runs it on the device.
      clock: the time of sequences, real or virtual.
    """

    def __init__(
        self,
        config: EngineConfig,
        inputs: InputProcessor,
        scheduler: Scheduler,
        executor: Executor,
        *,
        clock: Clock = time.perf_counter,
    ):
        self._config = config
        self.inputs, self.scheduler, self.executor = inputs, scheduler, executor
        self._outputs = OutputProcessor(clock)
        self._in_flight: deque[InFlightStep] = deque()
        self._running = threading.Lock()  # held by `run`
        self._origin = Origin("This model")

    @property
    def config(self) -> EngineConfig:
        """The engine's sizes, which cannot be changed."""
        return self._config

    @property
    def adapters(self) -> AdapterCache | None:
        """Where LoRA adapters are registered; None for an engine without room for them."""
        return self.inputs.adapters

    # Requests

    def prepare(self, prompt: Prompt, params: SamplingParams | PoolingParams) -> Request:
        """A checked request, not yet queued; in any thread.

        Raises ValueError for one that this engine could never run, RuntimeError in a process that was forked.
        """
        self._origin.check()
        request = self.inputs.process(prompt, params)
        self.scheduler.check(request)
        return self.inputs.with_grammar(request)

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Queue the sequences of a request (`Request.sequences`)."""
        for sequence in sequences:
            self._outputs.arrive(sequence)
            self.scheduler.add(sequence)

    def abort(self, request_id: str) -> None:
        """Give up a request; its pages are free at once."""
        for sequence in self.scheduler.remove(request_id):
            if not sequence.finished:
                self._outputs.abort(sequence)

    # Steps

    def step(self, max_passes: int | None = None) -> list[Sequence]:
        """Send the next step to the device and take back the one before; returns sequences that have advanced.

        `max_passes` bounds the passes through the model in the step, and so the tokens of each sequence, speculative
        ones aside.
        """
        depth = 0 if self.scheduler.needs_host_sync else self.executor.depth
        advanced = self._collect(depth)
        batch = self.scheduler.schedule(max_passes)
        advanced += self._fail(batch.failures)
        if batch:
            advanced += self._launch(batch)
        return advanced + self._collect(depth if batch else 0)

    def _fail(self, failures: tuple[Failure, ...]) -> list[Sequence]:
        for failure in failures:
            self._outputs.fail(failure.sequence, failure.message)
        return [failure.sequence for failure in failures]

    def _launch(self, batch: Batch) -> list[Sequence]:
        try:
            self._in_flight.append(self.executor.launch(batch))
        except Exception as error:
            return self._recover(batch, error)
        return []

    def _collect(self, depth: int) -> list[Sequence]:
        """Collect steps and commit what they found, until at most `depth` are in flight."""
        advanced = []
        while len(self._in_flight) > depth:
            step = self._in_flight.popleft()
            try:
                output = self.executor.collect(step)
            except Exception as error:
                return advanced + self._recover(step.batch, error)
            advanced += self._commit(step.batch, output)
        return advanced

    def _commit(self, batch: Batch, output: StepOutput) -> list[Sequence]:
        """Give a step's results to its sequences, and release those that have finished."""
        self._outputs.process(batch, output)
        self.scheduler.commit(batch, output)
        return batch.sequences

    def _recover(self, batch: Batch, error: Exception) -> list[Sequence]:
        """End the requests of a step that failed; all others begin again from the tokens that the host has."""
        log.error("A step failed; its %d sequences end with an error.", len(batch.sequences), exc_info=error)
        for sequence in batch.sequences:
            if not sequence.finished:
                self._outputs.fail(sequence, f"{type(error).__name__}: {error}")
        self._in_flight.clear()
        self.scheduler.restart()
        self.executor.restart()
        return batch.sequences

    def drain(self) -> list[Sequence]:
        """Wait for the steps in flight, and keep what they cost; returns sequences that have advanced."""
        advanced = self._collect(0)
        self.executor.costs.save(every=SAVE_SECONDS)
        return advanced

    def compile_ahead(self) -> int:
        """Compile every program that any request can need; returns how many were missing."""
        return self.executor.compile_ahead()

    # Whole requests

    def run(
        self, groups: list[list[Sequence]], max_passes: int | None = None, *, compiled: bool = False
    ) -> Iterator[list[Sequence]]:
        """Queue sequences, a list for each request, and step until all have ended.

        Yields the sequences that each step has advanced. Closing the iterator gives the requests up.

        Args:
          max_passes: as in `step`.
          compiled: whether what the requests need has been compiled ahead.

        Raises RuntimeError while another run has not ended: each would take the other's sequences for its own. And in a
        process that was forked.
        """
        self._origin.check()
        if not self._running.acquire(blocking=False):
            raise RuntimeError(
                "This model runs other requests, in another thread or for a stream that was not read to its end: close "
                "that stream, or use AsyncLLM, which runs the requests of many threads together."
            )
        try:
            yield from self._run([s for group in groups for s in group], max_passes, compiled)
        finally:
            self._running.release()

    def _run(self, sequences: list[Sequence], max_passes: int | None, compiled: bool) -> Iterator[list[Sequence]]:
        if sequences and not compiled:
            self.executor.compile_ahead(sequences)
        try:
            self.add(sequences)
            left = sequences[::-1]
            while left:
                if left[-1].finished:
                    left.pop()
                else:
                    yield self.step(max_passes)
        finally:
            for request_id in dict.fromkeys(s.request_id for s in sequences):
                self.abort(request_id)
            self.drain()

"""The time that the device waits for the host between two steps, with and without overlapping them."""

import math
import queue
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

from benchmarks.engine.settings import Settings
from benchmarks.report import Report
from jaxinfer import LLM, SamplingParams
from jaxinfer.compiled import Program

PROGRAMS = ("prefill", "decode")  # the programs that run the model
SWITCH_SECONDS = 1e-4  # maximum time that the watching thread waits for the interpreter's lock


class StepGaps:
    """Recorder of the times when each step's results were ready, and the next step dispatched.

    A thread waits for the results and records the time within SWITCH_SECONDS. Dispatch is recorded when the call of the
    program returns, so that a gap includes all the host's work in between.
    """

    def __init__(self) -> None:
        self.dispatched: list[float] = []
        self.ready: list[float] = []
        self._results: queue.SimpleQueue[jax.Array | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while (result := self._results.get()) is not None:
            result.block_until_ready()
            self.ready.append(time.perf_counter())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record every call of a program that runs the model, within this context."""
        call, interval = Program.__call__, sys.getswitchinterval()
        dispatched, results = self.dispatched, self._results

        def recorded(self: Program, *args: Any) -> Any:
            result = call(self, *args)
            if self.name in PROGRAMS:
                dispatched.append(time.perf_counter())
                results.put(jax.tree.leaves(result[1])[0])  # not the state, result[0]: the next step donates it
            return result

        sys.setswitchinterval(SWITCH_SECONDS)
        self._thread.start()
        try:
            Program.__call__ = recorded
            yield
        finally:
            Program.__call__ = call
            self._results.put(None)
            self._thread.join()
            sys.setswitchinterval(interval)

    def seconds(self) -> list[float]:
        """The gap before every step but the first."""
        return [max(0.0, then - ready) for ready, then in zip(self.ready, self.dispatched[1:], strict=False)]


def measure_gaps(llm: LLM, steps: int) -> list[float]:
    """Measure milliseconds between steps of one token for eight requests, in ascending order."""
    prompts = [f"def part_{index}():\n" for index in range(8)]
    params = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)
    llm.generate(prompts, params)  # compiles
    gaps = StepGaps()
    with gaps.watching():
        llm.generate(prompts, params)
    return sorted(1e3 * value for value in gaps.seconds())


def step_gap(report: Report, settings: Settings) -> None:
    steps = 64 if settings.quick else 256
    for overlap in (False, True):
        gaps = measure_gaps(LLM(settings.demo, max_decode_passes=1, overlap=overlap), steps)
        median, p99 = statistics.median(gaps), gaps[math.ceil(0.99 * len(gaps)) - 1]
        report.row(
            figure="step gap", overlap=overlap, steps=len(gaps), median_ms=round(median, 3), p99_ms=round(p99, 3)
        )
        if overlap:
            report.check("step_gap_ms", median, "ms", target=0.5, better="lower")

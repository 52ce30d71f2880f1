"""The host's CPU time of a step, by what it is spent on, with a device that answers instantly."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple, cast

from benchmarks.engine.queues import VOCAB, InstantDecoder, decoder_engine
from benchmarks.engine.settings import Settings
from benchmarks.report import Report
from jaxinfer import SamplingParams
from jaxinfer.generation.engine.engine import Engine
from jaxinfer.generation.engine.ticket import RequestTicket
from jaxinfer.generation.engine.view import RequestSnapshot
from jaxinfer.serving.ticket import Reader

PAGE = 16
TOKEN_BUDGET = 8192
OUTPUT, STEPS = 1000, 32  # tokens that each row has got before steps are measured, and how many are
TEXT = '''def read_lines(path, encoding="utf-8"):
    """Return the lines of a file, without those that are empty."""
    with open(path, encoding=encoding) as file:
        return [line for line in map(str.strip, file) if line]  # naïve, 日本
'''


class Case(NamedTuple):
    """Rows that decode together, each with its own prompt; `target_ms` is for a step on AMD Zen 3."""

    rows: int
    context: int
    prompt: int
    target_ms: float | None

    def __str__(self) -> str:
        return f"{self.rows}x{self.context}"


CASES = (Case(256, 2048, 500, 8.0), Case(1000, 2048, 500, None), Case(1000, 8192, 4000, 40.0))
MAX_GROWTH = 4.5  # from the first case to the second, which has 3.9 times as many rows
PREFILL_SECONDS = 6.0  # of the last case


class Stopwatch:
    """Adds up the CPU time of this thread under some names."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    def timed[**P, T](self, name: str, function: Callable[P, T]) -> Callable[P, T]:
        """Return the function, timed."""

        def run(*args: P.args, **kwargs: P.kwargs) -> T:
            start = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += time.thread_time() - start

        return run


class Streams:
    """Requests of which a reader reads every output, all in one thread."""

    def __init__(self, folder: Path, case: Case):
        self.engine = decoder_engine(
            folder,
            num_pages=case.rows * -(-case.context // PAGE),
            max_batch=case.rows,
            context=case.context,
            page_size=PAGE,
            token_budget=TOKEN_BUDGET,
        )
        assert self.engine.inputs.tokenizer is not None
        cast(InstantDecoder, self.engine.executor).answers = self.engine.inputs.tokenizer.encode(TEXT)
        self._watch = Stopwatch()
        self._time_parts(self.engine)
        random, params = Random(0), SamplingParams(max_tokens=case.context - case.prompt, ignore_eos=True)
        requests = [
            self.engine.prepare(random.choices(range(1, VOCAB), k=case.prompt), params) for _ in range(case.rows)
        ]
        self._tickets = {r.request_id: RequestTicket(r.sequences(), owner=None, reader=Reader()) for r in requests}
        self._rows, self._seen = case.rows, dict[str, RequestSnapshot]()

    def _time_parts(self, engine: Engine) -> None:
        scheduler, executor = cast(Any, engine.scheduler), cast(Any, engine.executor)
        scheduler.schedule = self._watch.timed("schedule", scheduler.schedule)
        scheduler.commit = self._watch.timed("commit_pack", scheduler.commit)
        executor.launch = self._watch.timed("commit_pack", executor.launch)
        executor.collect = self._watch.timed("commit_pack", executor.collect)
        self._step = self._watch.timed("step", self.engine.step)
        self._advance = self._watch.timed("snapshots", self._make_snapshots)
        self._read = self._watch.timed("outputs", self._make_outputs)

    def _make_snapshots(self, names: dict[str, None]) -> list[RequestTicket]:
        return [ticket for name in names if (ticket := self._tickets[name]).advance()]

    def _make_outputs(self, changed: list[RequestTicket]) -> None:
        """Read what is new, as `OutputStream.deltas` does."""
        for ticket in changed:
            snapshot: RequestSnapshot = cast(Any, ticket.reader).newest
            snapshot.output(since=self._seen.get(ticket.key))
            self._seen[ticket.key] = snapshot

    def prefill(self) -> float:
        """Add all requests; return the CPU seconds until each has its first token."""
        sequences = [sequence for ticket in self._tickets.values() for sequence in ticket.sequences]
        self.engine.add(sequences)
        start = time.thread_time()
        while not sequences[-1].num_output_tokens:  # they begin in order
            self.engine.step()
        return time.thread_time() - start

    def measure(self) -> dict[str, float]:
        """Run a step in which each row decodes one token; return the CPU milliseconds of its parts."""
        self._watch.seconds.clear()
        advanced = self._step()
        assert len(advanced) == self._rows
        self._read(self._advance(dict.fromkeys(sequence.request_id for sequence in advanced)))
        parts = {name: 1e3 * seconds for name, seconds in self._watch.seconds.items()}
        process = parts.pop("step") - parts["schedule"] - parts["commit_pack"]
        return {"schedule": parts.pop("schedule"), "process": process, **parts}

    def medians(self, output: int, count: int) -> dict[str, float]:
        """Measure steps after some tokens of output; return the median of each part, and of the sum."""
        for _ in range(output):
            self.engine.step()
        self.measure()  # reads all of the output so far
        steps = [self.measure() for _ in range(count)]
        medians = {name: statistics.median(step[name] for step in steps) for name in steps[0]}
        return {**medians, "sum": statistics.median(sum(step.values()) for step in steps)}


def host(report: Report, settings: Settings) -> None:
    sums: list[float] = []
    for case in CASES:
        streams = Streams(settings.demo, case)
        prefill, parts = streams.prefill(), streams.medians(64 if settings.quick else OUTPUT, STEPS)
        sums.append(parts["sum"])
        shown = {f"{name}_ms": round(value, 2) for name, value in parts.items()}
        report.row(figure="host step", **case._asdict(), prefill_s=round(prefill, 2), **shown)
        print(report.rows[-1], flush=True)
        if case.target_ms is not None:
            report.check(f"host_step_ms_{case}", sums[-1], "ms", target=case.target_ms, better="lower")
        if case is CASES[-1]:
            report.check("host_prefill_s", prefill, "s", target=PREFILL_SECONDS, better="lower")
    report.check("host_step_growth", sums[1] / sums[0], "x", target=MAX_GROWTH, better="lower")

"""The cost of an event from the engine to the socket, with a clock in place of the engine, or of the device alone.

All else is that of `jaxinfer serve`: the streams of `AsyncLLM`, the HTTP code and uvicorn; with a mock device, the
scheduler and detokenisation too. Every completion gets a token in each step, and each token is an event unless the
server falls behind.
"""

import asyncio
import json
import math
import statistics
from pathlib import Path

import rich

from benchmarks.report import Report
from benchmarks.serving.load import Load, under_load
from benchmarks.serving.processes import Bare, CpuTime, Server, async_command
from benchmarks.serving.settings import Settings

LOAD = Load(streams=64, prompt=16, tokens=900)
STEP_MS = {"engine": 4.0, "device": 10.0}
"""A step in which 64 streams want 16,000 events a second, and that of an 8B model on one GPU."""


def front_end(report: Report, settings: Settings) -> None:
    """Measure events per CPU second, answers of `/health` meanwhile, and what HTTP adds to an engine's step."""
    load = LOAD._replace(tokens=60) if settings.quick else LOAD
    engine = _rows(report, settings, load, "engine")
    report.check("front_end_events_per_s", engine["http"]["events_per_cpu_s"], "events/s", target=20_000)
    report.check("health_p99_ms", engine["http"]["health_p99_ms"], "ms", target=50, better="lower")
    device = _rows(report, settings, load, "device")
    added = device["http"]["step_ms"] - device["bare"]["step_ms"]
    report.check("engine_ms_64_streams", added, "ms", target=0.1, better="lower")


def _rows(report: Report, settings: Settings, load: Load, mock: str) -> dict[str, dict[str, float]]:
    """Measure with and without HTTP, in turn; return the medians of both."""
    served, bare = [], []
    for _ in range(settings.rounds):
        bare.append(measure_bare(settings, load, mock))
        served.append(measure_served(settings.demo, load, mock))
    rows = {"http": medians(served), "bare": medians(bare)}
    for kind, row in rows.items():
        row = {name: round(value, 3) for name, value in row.items()}
        report.row(figure="front end", kind=kind, mock=mock, mock_ms=STEP_MS[mock], **load._asdict(), **row)
        rich.print(f"front end, {kind}, a mock {mock} of {STEP_MS[mock]} ms a step: {row}")
    return rows


def measure_served(model: Path, load: Load, mock: str) -> dict[str, float]:
    """Start a server, and run the load twice, of which the first is a warm-up."""
    command = async_command(model, load, "{port}", mock=mock, step_ms=STEP_MS[mock])
    with Server(f"the server with a mock {mock}", command) as server:
        server.wait()
        asyncio.run(under_load(server.port, load._replace(tokens=32)))
        before = server.cpu()
        events, health = asyncio.run(under_load(server.port, load))
        figures = figures_of(load, events, server.cpu() - before)
        figures["health_p99_ms"] = 1e3 * sorted(health)[math.ceil(0.99 * len(health)) - 1]
        return figures | _printed(server.stop())


def measure_bare(settings: Settings, load: Load, mock: str) -> dict[str, float]:
    """Run the load without HTTP, in the same way."""
    command = async_command(settings.demo, load, "0", mock=mock, step_ms=STEP_MS[mock])
    with Bare(f"AsyncLLM with a mock {mock}", command) as bare:
        bare.wait()
        bare.run(load._replace(tokens=32))
        before = bare.cpu()
        events = bare.run(load)["events"]
        return figures_of(load, events, bare.cpu() - before) | _printed(bare.stop())


def _printed(text: str) -> dict[str, float]:
    """The figures of the last line that a process printed."""
    return {name: value for name, value in json.loads(text.splitlines()[-1]).items() if value is not None}


def figures_of(load: Load, events: int, cpu: CpuTime) -> dict[str, float]:
    """Rates, and CPU time by thread: that of the event loop, and all others, of which the engine's has most."""
    tokens = load.streams * load.tokens
    return {
        "events_per_cpu_s": events / cpu.total,
        "tokens_per_event": tokens / events,
        "event_loop_us_per_event": 1e6 * cpu.main / events,
        "engine_us_per_event": 1e6 * (cpu.total - cpu.main) / events,
        "cpu_us_per_token": 1e6 * cpu.total / tokens,
    }


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    """The median of each figure."""
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}

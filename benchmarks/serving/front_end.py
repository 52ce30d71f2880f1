"""The cost of an event from the engine to the socket, with a device that is a clock.

Only the device is replaced: the scheduler, the streams of `AsyncLLM`, the HTTP code and uvicorn are those of
`jaxinfer serve`. Every row gets a token in each step, and each token is an event unless the server falls behind.
"""

import asyncio
import json
import math
import statistics

import rich

from benchmarks.report import Report
from benchmarks.serving.load import Load, under_load
from benchmarks.serving.processes import Bare, CpuTime, Server, async_command
from benchmarks.serving.settings import Settings

LOAD = Load(streams=64, prompt=16, tokens=900)
STEP_MS = (4.0, 10.0)
"""A step of the device: one in which 64 streams want 16,000 events a second, and that of an 8B model on one GPU."""


def front_end(report: Report, settings: Settings) -> None:
    """Measure events per CPU second, answers of `/health` meanwhile, and what HTTP adds to an engine's step."""
    load = LOAD._replace(tokens=60) if settings.quick else LOAD
    for step_ms in STEP_MS:
        served, bare = [], []
        for _ in range(settings.rounds):
            bare.append(measure_bare(settings, load, step_ms))
            served.append(measure_served(settings, load, step_ms))
        rows = {"http": medians(served), "bare": medians(bare)}
        for kind, row in rows.items():
            row = {name: round(value, 3) for name, value in row.items()}
            report.row(figure="front end", kind=kind, device_ms=step_ms, **load._asdict(), **row)
            rich.print(f"front end, {kind}, a device of {step_ms} ms a step: {row}")
        if step_ms == STEP_MS[0]:
            report.check("front_end_events_per_s", rows["http"]["events_per_cpu_s"], "events/s", target=20_000)
            report.check("health_p99_ms", rows["http"]["health_p99_ms"], "ms", target=50, better="lower")
        else:
            added = rows["http"]["step_ms"] - rows["bare"]["step_ms"]
            report.check("engine_ms_64_streams", added, "ms", target=0.1, better="lower")


def measure_served(settings: Settings, load: Load, step_ms: float) -> dict[str, float]:
    """Start a server, and run the load twice, of which the first is a warm-up."""
    command = async_command(settings.demo, load, step_ms, "{port}")
    with Server("the server with a mock device", command) as server:
        server.wait()
        asyncio.run(under_load(server.port, load._replace(tokens=32)))
        before = server.cpu()
        events, health = asyncio.run(under_load(server.port, load))
        figures = figures_of(load, events, server.cpu() - before)
        figures["health_p99_ms"] = 1e3 * sorted(health)[math.ceil(0.99 * len(health)) - 1]
        return figures | json.loads(server.stop().splitlines()[-1])


def measure_bare(settings: Settings, load: Load, step_ms: float) -> dict[str, float]:
    """Run the load without HTTP, in the same way."""
    with Bare("AsyncLLM with a mock device", async_command(settings.demo, load, step_ms, "0")) as bare:
        bare.wait()
        bare.run(load._replace(tokens=32))
        before = bare.cpu()
        events = bare.run(load)["events"]
        return figures_of(load, events, bare.cpu() - before) | json.loads(bare.stop())


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

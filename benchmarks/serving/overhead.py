"""The CPU time of a token of the server, against that of `AsyncLLM` alone, with the real device."""

import asyncio
from pathlib import Path

import rich

from benchmarks.report import Report
from benchmarks.serving.front_end import figures_of, medians
from benchmarks.serving.load import Load, count_events
from benchmarks.serving.processes import Bare, Server, async_command
from benchmarks.serving.settings import Settings

LOAD = Load(streams=64, prompt=16, tokens=128)
WARM_UP = 16  # tokens


def overhead(report: Report, settings: Settings) -> None:
    """Measure `server_overhead`; a row shows it for the demo model, whose tokens cost far less."""
    load = LOAD._replace(streams=4, tokens=16) if settings.quick else LOAD
    shares = {}
    for model in dict.fromkeys((settings.demo, settings.model())):
        served, bare = [], []
        for _ in range(settings.rounds):
            bare.append(measure_bare(model, load))
            served.append(measure_served(model, load))
        rows = {"bare": medians(bare), "http": medians(served)}
        shares[model] = rows["http"]["cpu_us_per_token"] / rows["bare"]["cpu_us_per_token"] - 1
        for kind, row in rows.items():
            row = {name: round(value, 3) for name, value in row.items()}
            report.row(figure="overhead", kind=kind, model=model.name, **load._asdict(), **row)
            rich.print(f"overhead, {kind}, {model.name}: {row}")
        rich.print(f"overhead of {model.name}: {shares[model]:.3f}")
    report.check("server_overhead", shares[settings.model()], "x", target=0.10, better="lower")


def measure_served(model: Path, load: Load) -> dict[str, float]:
    """Start a server, and run the load after a short one as a warm-up."""
    with Server("the server", async_command(model, load, "{port}")) as server:
        server.wait()
        asyncio.run(count_events(server.port, load._replace(tokens=WARM_UP)))
        before = server.cpu()
        events = asyncio.run(count_events(server.port, load))
        return figures_of(load, events, server.cpu() - before)


def measure_bare(model: Path, load: Load) -> dict[str, float]:
    """Run the load without HTTP, in the same way."""
    with Bare("AsyncLLM", async_command(model, load, "0")) as bare:
        bare.wait()
        bare.run(load._replace(tokens=WARM_UP))
        before = bare.cpu()
        events = bare.run(load)["events"]
        return figures_of(load, events, bare.cpu() - before)

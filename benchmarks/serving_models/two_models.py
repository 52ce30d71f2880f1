"""Two models that take turns, in the memory of 1.3 of one, next to both in memory and to processes that are swapped.

A burst of 16 requests of 64 tokens for 64 more goes to one model, then to the other. A request is good if its first
token comes within four seconds. Bursts come as often as gives both models in memory the most good requests a second.
"""

import asyncio
import dataclasses
import re
import time
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rich

from benchmarks.report import Report
from benchmarks.serving.processes import Server
from benchmarks.serving.servers import OURS, make_requests
from benchmarks.serving_models.goodput import Load, figures, one_server, room_for, run
from benchmarks.serving_models.settings import Settings
from benchmarks.serving_models.swap import ProcessSwap
from benchmarks.serving_models.switch import demo_models
from jaxinfer.evaluation.serving.client import CompletionClient, LoadRequest, RequestRecord

NAMES = ("a", "b")
BURST, TOKENS = 16, 64
TTFT_MS = 4000.0
ROOM = 1.3
INTERVALS = (24.0, 16.0, 12.0, 8.0)
"""Seconds between bursts."""
CACHES = (None, "int8")


def make_bursts(interval: float, seconds: float, *, seed: int = 0) -> Load:
    """Bursts for the two models in turn, so many seconds apart."""
    bursts = max(2, round(seconds / interval))
    requests = make_requests(bursts * BURST, TOKENS, TOKENS, seed=seed)
    return [
        (
            NAMES[index // BURST % 2],
            dataclasses.replace(
                request,
                prompt=(request.prompt * 2)[:TOKENS],
                output_tokens=TOKENS,
                arrival=index // BURST * interval,
            ),
        )
        for index, request in enumerate(requests)
    ]


def metric(server: Server, name: str) -> float:
    """The sum of a metric of our server over its models."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics") as answer:
        text = answer.read().decode()
    return sum(float(value) for value in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


def served(
    models: Mapping[str, Path], room: int | None, options: Mapping[str, Any], loads: Mapping[float, Load]
) -> tuple[dict[float, list[RequestRecord]], dict[str, float]]:
    """Run loads on one server of both models; return them, and how often it compiled and switched meanwhile."""

    async def measure(server: Server) -> tuple[dict[float, list[RequestRecord]], dict[str, float]]:
        clients = {name: CompletionClient(f"http://127.0.0.1:{server.port}", model=name) for name in models}

        async def complete(name: str, request: LoadRequest, start: float) -> RequestRecord:
            return await clients[name].complete(request, start)

        await run(complete, make_bursts(1.0, 4.0, seed=99))  # both are loaded and compiled
        counters = {"compiles": "jaxinfer_compile_misses_total", "switches": "jaxinfer_model_switches_total"}
        before = {name: metric(server, counter) for name, counter in counters.items()}
        results = {interval: await run(complete, load) for interval, load in loads.items()}
        after = {name: metric(server, counter) for name, counter in counters.items()}
        for client in clients.values():
            await client.aclose()
        return results, {name: after[name] - before[name] for name in counters}

    with one_server(dict(models), room, options) as server:
        server.wait()
        return asyncio.run(measure(server))


def swapped(models: Mapping[str, Path], options: Mapping[str, Any], load: Load) -> list[RequestRecord]:
    """Run a load on processes that end and start, each of which was started before, so that its caches are warm."""

    async def measure() -> list[RequestRecord]:
        async with ProcessSwap(lambda name: one_server({name: models[name]}, None, options)) as swap:
            for name in (*NAMES, *NAMES):
                await swap.complete(name, make_bursts(1.0, 1.0)[0][1], time.perf_counter())
            return await run(swap.complete, load)

    return asyncio.run(measure())


def two_models(report: Report, settings: Settings) -> None:
    """Measure `two_models_goodput` and `two_models_vs_reload`, with a cache of the weights' type and one of int8."""
    quick = settings.serving.quick
    models = demo_models(settings) if quick else settings.models("one")
    models = {name: models[name] for name in NAMES}
    for cache in CACHES[:1] if quick else CACHES:
        options: dict[str, Any] = {"max_batch": 2 if quick else BURST, "context": 4 * TOKENS}
        options |= {} if cache is None else {"kv_dtype": cache}
        compare(report, settings, models, options, "" if cache is None else f"_{cache}")


def compare(
    report: Report, settings: Settings, models: Mapping[str, Path], options: Mapping[str, Any], suffix: str
) -> None:
    """Measure the figures of one kind of cache."""
    intervals, seconds = ((2.0,), 8.0) if settings.serving.quick else (INTERVALS, settings.seconds)
    loads = {interval: make_bursts(interval, seconds) for interval in intervals}
    rooms = {share: room_for(dict(models), share, options) for share in (2.1, ROOM)}
    resident, _ = served(models, rooms[2.1], options, loads)
    interval = max(resident, key=lambda each: figures(resident[each], TTFT_MS)["goodput"])
    load = loads[interval]
    lent, counted = served(models, rooms[ROOM], options, {interval: load})
    results = {
        f"{OURS}, both in memory": resident[interval],
        f"{OURS}, {ROOM} of one": lent[interval],
        f"{OURS}, swapped": swapped(models, options, load),
    }
    rows = {name: figures(records, TTFT_MS) for name, records in results.items()}
    for name, row in rows.items():
        report.row(figure="two_models", server=name, kv_dtype=str(options.get("kv_dtype")), interval=interval, **row)
        rich.print(name, row)
    both, ours, processes = (row["goodput"] for row in rows.values())
    least = 1 / seconds
    invalid = "" if counted["switches"] else "no model made room for the other"
    report.check(f"two_models_goodput{suffix}", ours / max(both, least), "x", target=0.7, invalid=invalid)
    report.check(f"two_models_vs_reload{suffix}", ours / max(processes, least), "x", target=5, invalid=invalid)
    report.check(f"two_models_compiles{suffix}", counted["compiles"], "programs", target=0, better="lower")

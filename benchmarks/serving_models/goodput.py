"""Requests of three models drawn at random, in one server or in processes that are swapped.

A request is good if its first token comes within two seconds of its arrival. The rate is the highest of a search at
which 95% of ours are good; the swapped processes then get the same load.
"""

import asyncio
import dataclasses
import json
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import rich

from benchmarks.report import Report
from benchmarks.serving.processes import Server, free_port
from benchmarks.serving.servers import LLAMA, OURS, absent_peers, llama_server, make_requests, our_server
from benchmarks.serving_models.settings import NAMES, Settings
from benchmarks.serving_models.swap import ProcessSwap
from jaxinfer.evaluation.serving.arrivals import poisson
from jaxinfer.evaluation.serving.client import CompletionClient, LoadRequest, RequestRecord
from jaxinfer.evaluation.serving.figures import Objective, ttft_ms

PROMPT, OUTPUT = 64, 16
TTFT_MS, SHARE = 2000.0, 0.95
RATES = (0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4, 1.6, 1.8, 2.0)
"""Requests a second that are tried."""
FEWEST = 60
"""Requests of a load, at least: with 20, one more or less is five percent."""
BURST = 16
MAX_BATCH, CONTEXT = 8, 1024
OPTIONS = {"max_batch": MAX_BATCH, "context": CONTEXT}
Complete = Callable[[str, LoadRequest, float], Awaitable[RequestRecord]]
Load = list[tuple[str, LoadRequest]]
Work = Callable[[Complete], Awaitable[dict[Any, list[RequestRecord]]]]
"""Runs loads, and returns their records by a key."""


def make_load(rate: float, seconds: float, *, burst: int = 1, seed: int = 0) -> Load:
    """Poisson arrivals of bursts, each for a random model; `rate` counts requests."""
    count = max(1, round(max(rate * seconds, FEWEST) / burst))
    arrivals, rng = poisson(rate / burst, count, np.random.default_rng(seed)), random.Random(seed)
    requests = make_requests(count * burst, PROMPT, OUTPUT, seed=seed)
    load = []
    for index, arrival in enumerate(arrivals):
        name = rng.choice(NAMES)
        for request in requests[index * burst : (index + 1) * burst]:
            prompt = (request.prompt * 2)[:PROMPT]
            made = dataclasses.replace(request, prompt=prompt, output_tokens=OUTPUT, arrival=arrival.arrival)
            load.append((name, made))
    return load


async def run(complete: Complete, load: Load) -> list[RequestRecord]:
    """Send each request at its arrival."""
    start = time.perf_counter()

    async def one(name: str, request: LoadRequest) -> RequestRecord:
        await asyncio.sleep(max(0.0, start + request.arrival - time.perf_counter()))
        return await complete(name, request, start)

    return await asyncio.gather(*(one(*each) for each in load))


def figures(records: list[RequestRecord], limit: float = TTFT_MS) -> dict[str, Any]:
    """The share of good requests, and their number a second. limit: of the time to the first token, in ms."""
    objective = Objective(ttft_ms=limit)
    good = sum(map(objective.is_kept, records))
    seconds = max(record.arrival for record in records) or 1.0
    return {
        "good_share": round(good / len(records), 4),
        "goodput": round(good / seconds, 4),
        "ttft_p50_ms": round(float(np.median([ttft_ms(record) for record in records])), 1),
        "requests": len(records),
        "errors": sum(bool(record.error) for record in records),
    }


def one_server(models: dict[str, Path], room: int | None, options: Mapping[str, object] = OPTIONS) -> Server:
    """Our server, with the models on demand. room: bytes for all; None: all that are free. options: of each model."""
    port = free_port()
    lines = [f"port = {port}"] + ([] if room is None else [f"device_memory = {room}"])
    for name, path in models.items():
        lines += [f"[models.{name}]", f'path = "{path}"', 'dtype = "float32"', "on_demand = true"]
        lines += ["compile_ahead = true", *(f"{option} = {json.dumps(value)}" for option, value in options.items())]
    file = Path(tempfile.mkdtemp()) / "serve.toml"
    file.write_text("\n".join(lines))
    return Server(OURS, [sys.executable, "-m", "jaxinfer", "serve", file], port=port, JAXINFER_PROGRESS="0")


def room_for(models: dict[str, Path], share: float, options: Mapping[str, Any] = OPTIONS) -> int:
    """Bytes for so many models: of weights, pages and workspace."""
    from jaxinfer import AsyncLLM

    with AsyncLLM(next(iter(models.values())), dtype="float32", asleep=True, **options) as llm:
        return int(share * llm.needed.total())


def in_turn(loads: Mapping[Any, Load]) -> Work:
    """Run loads one after the other."""

    async def work(complete: Complete) -> dict[Any, list[RequestRecord]]:
        return {key: await run(complete, load) for key, load in loads.items()}

    return work


def search(seconds: float) -> Work:
    """Find the highest of `RATES` at which most are good, by halving; each load that was run is kept by its rate."""

    async def work(complete: Complete) -> dict[Any, list[RequestRecord]]:
        results, left = dict[Any, list[RequestRecord]](), list(RATES)
        while left:
            rate = left[len(left) // 2]
            results[rate] = await run(complete, make_load(rate, seconds))
            left = [each for each in left if (each > rate if most_are_good(results[rate]) else each < rate)]
        return results

    return work


def most_are_good(records: list[RequestRecord]) -> bool:
    """Check whether at least `SHARE` of the requests are good."""
    return figures(records)["good_share"] >= SHARE


def ours(models: dict[str, Path], work: Work, room: int) -> dict[Any, list[RequestRecord]]:
    """Run loads on our server."""

    async def measure(server: Server) -> dict[Any, list[RequestRecord]]:
        clients = {name: CompletionClient(f"http://127.0.0.1:{server.port}", model=name) for name in models}

        async def complete(name: str, request: LoadRequest, start: float) -> RequestRecord:
            return await clients[name].complete(request, start)

        await run(complete, make_load(0.5, 12.0, seed=99))  # every model is loaded and compiled
        results = await work(complete)
        for client in clients.values():
            await client.aclose()
        return results

    with one_server(models, room) as server:
        server.wait()
        return asyncio.run(measure(server))


def swapped(start: Callable[[str], Server], work: Work) -> dict[Any, list[RequestRecord]]:
    """Run loads on swapped processes, which were started twice before, so that their caches are warm."""

    async def measure() -> dict[Any, list[RequestRecord]]:
        async with ProcessSwap(start) as swap:
            for name in (*NAMES, *NAMES):
                await swap.complete(name, make_load(1.0, 1.0)[0][1], time.perf_counter())
            return await work(swap.complete)

    return asyncio.run(measure())


def goodput(report: Report, settings: Settings) -> None:
    """Measure `vs_process_swap`."""
    models = settings.models("one")
    room = room_for(models, 1.5)
    tried = ours(models, search(settings.seconds), room)
    for rate, records in sorted(tried.items()):
        report.row(figure="search", rate=rate, **figures(records))
        rich.print(rate, figures(records))
    rate = max((rate for rate, records in tried.items() if most_are_good(records)), default=None)
    if rate is None:
        report.check("vs_process_swap", 0.0, "x", target=5, invalid=f"at no rate {SHARE:.0%} were good")
        return
    compare(report, settings, models, rate, room)
    others = settings.models("three")
    single = in_turn({1: make_load(rate, settings.seconds, seed=1)})
    (records,) = ours(others, single, room_for(others, 1.5)).values()
    report.row(figure="goodput", server=f"{OURS}, three configs", rate=rate, burst=1, **figures(records))


def compare(report: Report, settings: Settings, models: dict[str, Path], rate: float, room: int) -> None:
    """Compare at one rate, with single requests and with bursts."""
    work = in_turn({burst: make_load(rate, settings.seconds, burst=burst, seed=1) for burst in (1, BURST)})
    gguf = settings.gguf()
    options = ("--max-batch", str(MAX_BATCH), "--context", str(CONTEXT))
    starts = {"jaxinfer, swapped": lambda name: our_server(models[name], *options)}
    invalid = ""
    if LLAMA in absent_peers(settings.serving):
        invalid = f"{LLAMA} is not here"
    else:
        starts[f"{LLAMA}, swapped"] = lambda name: llama_server(settings.serving, MAX_BATCH, gguf[name])
    results = {OURS: ours(models, work, room)} | {name: swapped(start, work) for name, start in starts.items()}
    for name, by_load in results.items():
        for burst, records in by_load.items():
            report.row(figure="goodput", server=name, rate=rate, burst=burst, **figures(records))
            rich.print(name, burst, figures(records))
    best = max(figures(records[1])["goodput"] for name, records in results.items() if name != OURS)
    mine = figures(results[OURS][1])["goodput"]
    seconds = settings.seconds
    report.check("vs_process_swap", mine / max(best, 1 / seconds), "x", target=5, invalid=invalid)

"""Throughput and inter-token latency of servers at 16 concurrent requests, with the same weights in float32."""

import statistics
from collections.abc import Callable
from typing import Any

import rich

from benchmarks.report import Report
from benchmarks.serving.processes import Server
from benchmarks.serving.servers import (
    LLAMA,
    OURS,
    VLLM,
    absent_peers,
    ask,
    llama_server,
    make_requests,
    our_server,
    peer_version,
    vllm_server,
)
from benchmarks.serving.settings import Settings
from benchmarks.workers import EngineError
from jaxinfer.evaluation.serving.figures import Objective, summarise

CONCURRENCY, REQUESTS = 16, 64
PROMPT, OUTPUT = 128, 64  # mean tokens
ENOUGH = 0.98  # of the output tokens that were asked for


def compare(report: Report, settings: Settings) -> None:
    """Measure all servers in turns; the best peer is the one with the highest throughput."""
    model, absent = settings.model(), {VLLM: "quick", LLAMA: "quick"} if settings.quick else absent_peers(settings)
    options = ("--max-batch", str(CONCURRENCY), "--compile-ahead")
    starts: dict[str, Callable[[], Server]] = {
        OURS: lambda: our_server(model, *options),
        VLLM: lambda: vllm_server(settings, CONCURRENCY),
        LLAMA: lambda: llama_server(settings, CONCURRENCY),
    }
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in starts if name not in absent}
    for _ in range(settings.rounds):
        for name in [name for name in rounds if name not in absent]:
            try:
                rounds[name].append(measure(starts[name](), settings))
            except EngineError as error:
                absent[name] = str(error)
                rich.print(f"{name} is left out: {error}")
                continue
            rich.print(f"{name}: {rounds[name][-1]}")
    report.versions |= {name: version for name in rounds if (version := peer_version(settings, name))}
    figures = {}
    for name, each in rounds.items():
        if name not in absent:
            figures[name] = {key: round(statistics.median(one[key] for one in each), 3) for key in each[0]}
            report.row(figure="servers", server=name, concurrency=CONCURRENCY, **figures[name], rounds=each)
    for name, reason in absent.items():
        report.row(figure="servers", server=name, absent=reason)
    add_checks(report, figures, absent)


def measure(server: Server, settings: Settings) -> dict[str, float]:
    """Run a warm-up, then the load. Raises EngineError for a server that fails at one of the requests."""
    count = CONCURRENCY if settings.quick else REQUESTS
    prompt, output = (16, 8) if settings.quick else (PROMPT, OUTPUT)
    with server:
        server.wait()
        ask(server, make_requests(CONCURRENCY, prompt, output, seed=1), concurrency=CONCURRENCY)
        requests = make_requests(count, prompt, output)
        summary = summarise(ask(server, requests, concurrency=CONCURRENCY), Objective())
    if summary.errors:
        raise EngineError(f"{server.name} failed at requests: {summary.errors}")
    if (share := summary.output_tokens / sum(each.output_tokens for each in requests)) < ENOUGH:
        raise EngineError(f"{server.name} ended texts early: {share:.0%} of the output tokens came.")
    latencies: dict[str, Any] = {
        f"{name}_{rank}": value for name, values in summary.percentiles.items() for rank, value in values.items()
    }
    return {"tokens_per_s": summary.output_tokens_per_s, "requests_per_s": summary.requests_per_s, **latencies}


def add_checks(report: Report, figures: dict[str, dict[str, float]], absent: dict[str, str]) -> None:
    """Compare with the best peer; without one of them the checks say nothing."""
    ours, peers = figures.get(OURS), {name: each for name, each in figures.items() if name != OURS}
    invalid = "; ".join(f"{name} absent" for name in absent)
    throughput = itl = 0.0
    if ours and peers:
        best = max(peers.values(), key=lambda each: each["tokens_per_s"])
        throughput = ours["tokens_per_s"] / best["tokens_per_s"]
        itl = best["itl_ms_p99"] / ours["itl_ms_p99"]
    report.check("throughput_vs_best_peer", throughput, "x", target=1.3, invalid=invalid)
    report.check("itl_p99_vs_best_peer", itl, "x", target=1.0, invalid=invalid)

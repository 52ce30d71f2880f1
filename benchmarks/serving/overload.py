"""Goodput at ten times the load that saturates the server, which refuses what it cannot serve in time.

The saturating rate is what a closed loop of as many requests as rows gets. Both loads are Poisson arrivals.
"""

import dataclasses
import statistics
from typing import NamedTuple

import numpy as np
import rich

from benchmarks.report import Report
from benchmarks.serving.processes import Server
from benchmarks.serving.servers import ask, make_requests, our_server
from benchmarks.serving.settings import Settings
from jaxinfer.evaluation.serving.arrivals import poisson
from jaxinfer.evaluation.serving.client import RequestRecord
from jaxinfer.evaluation.serving.figures import Objective, summarise, tpot_ms

BATCH, SATURATED = 8, 64  # requests at a time; and in all, to find the saturated rate
OVERLOAD, SECONDS = 10, 30
PROMPT, OUTPUT = 32, 32  # mean tokens
TTFT_MS, TPOT_FACTOR = 2000.0, 3.0  # the objective; TPOT relative to that of an unloaded server


class Goodput(NamedTuple):
    """Good requests a second at saturation and under overload, and what became of the latter's requests.

    Attributes:
      admitted_good: share of the admitted requests that kept the objective.
      refused_p99_ms: until the refusal of a request, from its arrival.
      other_errors: number of requests that ended otherwise.
    """

    saturated: float
    overloaded: float
    tpot_ms: float
    rate: float
    admitted_good: float
    refused_p99_ms: float
    other_errors: float


def overload(report: Report, settings: Settings) -> None:
    """Measure `overload_goodput`."""
    options = ("--max-batch", str(BATCH), "--max-requests", str(BATCH), "--max-waiting", "0", "--compile-ahead")
    rounds = []
    for _ in range(settings.rounds):
        with our_server(settings.model(), *options) as server:
            server.wait()
            rounds.append(measure(server, settings))
        rich.print(rounds[-1])
    row = Goodput(*(statistics.median(values) for values in zip(*rounds, strict=True)))
    report.row(figure="overload", **{name: round(value, 3) for name, value in row._asdict().items()})
    share = row.overloaded / row.saturated if row.saturated else 0.0
    invalid = "" if row.saturated else "no good request at saturation"
    report.check("overload_goodput", share, "x", target=0.8, invalid=invalid)


def measure(server: Server, settings: Settings) -> Goodput:
    """Measure an unloaded, a saturated and an overloaded server."""
    prompt, output = (8, 8) if settings.quick else (PROMPT, OUTPUT)
    count, seconds = (BATCH, 2) if settings.quick else (SATURATED, SECONDS)
    ask(server, make_requests(BATCH, prompt, output, seed=1), concurrency=BATCH)
    alone = ask(server, make_requests(8, prompt, output, seed=2), concurrency=1)
    unloaded = statistics.median(tpot_ms(record) or 0.0 for record in alone)
    objective = Objective(ttft_ms=TTFT_MS, tpot_ms=TPOT_FACTOR * unloaded)
    full = summarise(ask(server, make_requests(count, prompt, output, seed=3), concurrency=BATCH), objective)

    def at(rate: float) -> list[RequestRecord]:
        arrivals = poisson(rate, max(1, round(rate * seconds)), np.random.default_rng(0))
        requests = make_requests(len(arrivals), prompt, output, seed=4)
        return ask(server, [dataclasses.replace(x, arrival=y.arrival) for x, y in zip(requests, arrivals, strict=True)])

    saturated = summarise(at(full.requests_per_s), objective).goodput
    assert saturated is not None
    rate = OVERLOAD * full.requests_per_s
    return Goodput(saturated, *under_overload(at(rate), objective, unloaded, rate))


def under_overload(
    records: list[RequestRecord], objective: Objective, unloaded: float, rate: float
) -> tuple[float, ...]:
    """The fields of `Goodput` after the first."""
    summary = summarise(records, objective)
    assert summary.goodput is not None
    kept = [objective.is_kept(record) for record in records if not record.error]
    refused = [1e3 * (record.ended - record.arrival) for record in records if record.error == "HTTP 429"]
    others = sum(summary.errors.values()) - len(refused)
    p99 = float(np.percentile(refused, 99)) if refused else 0.0
    return summary.goodput, unloaded, rate, float(np.mean(kept)) if kept else 0.0, p99, float(others)

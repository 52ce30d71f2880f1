"""How fast a fleet's plan is: 1,000 configurations are ranked, and the best 20 simulated."""

import itertools
import time

from benchmarks.planner.settings import Settings
from benchmarks.report import ROOT, Report
from jaxinfer.evaluation.generation.fleet import PlannedModel, Traffic, replicas
from jaxinfer.evaluation.serving.arrivals import read_arrivals
from jaxinfer.sharding.planner import Catalogue
from jaxinfer.sharding.planner.search import FORMATS

MODEL, DEVICE, MOST = "qwen3-235b-a22b", "h200", 64
CONFIGURATIONS, SIMULATED, REQUESTS = 1000, 20, 200
RATE, PROMPT, GENERATE = 2000.0, 1155, 211
"""The mean lengths are those of the Azure conversation trace (Splitwise, ISCA 2024)."""


def speed(report: Report, settings: Settings) -> None:
    """Rank and simulate on one core."""
    catalogue = Catalogue.read()
    model, form = catalogue.model(MODEL), FORMATS["int8"]
    target = PlannedModel(model=model, device=catalogue.device(DEVICE), system=catalogue.system(model, form), form=form)
    trace = read_arrivals(ROOT / "benchmarks" / "data" / "azure_llm_2023_conv.txt.gz")
    count, simulated = (50, 2) if settings.quick else (CONFIGURATIONS, SIMULATED)
    start, cpu = time.perf_counter(), time.process_time()
    traffic = Traffic.from_trace(trace, RATE, prompt=PROMPT, generate=GENERATE)
    made = list(itertools.islice(replicas(target, MOST, traffic.workload), count))
    made.sort(key=lambda replica: replica.device_seconds)
    ranked = time.perf_counter() - start
    for replica in made[:simulated]:
        of = max(1, round(RATE / replica.requests_per_s(traffic.workload.generate)))
        replica.simulate(traffic.share(of, REQUESTS), traffic.workload)
    seconds = time.perf_counter() - start
    report.row(
        figure="speed",
        model=MODEL,
        configurations=len(made),
        simulated=simulated,
        requests=REQUESTS,
        ranking_s=round(ranked, 2),
        seconds=round(seconds, 2),
        cpu_seconds=round(time.process_time() - cpu, 2),
    )
    invalid = "" if len(made) == count else f"only {len(made)} configurations fit"
    report.check("configs_per_s", len(made) / seconds, "configurations/s", target=1.7, invalid=invalid)

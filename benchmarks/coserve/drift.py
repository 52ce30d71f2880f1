"""Loads from disk while popularity stays or changes: usage as configured, learned usage, and LRU, on a simulated clock.

36 classifiers, 2 detectors for every tenth of them, and room for 8 of ResNet-101's size on one GPU. Popularity follows
Zipf's law. The config's shares are those of the first inputs.
"""

import dataclasses
import itertools
import random
import statistics

import numpy as np

from benchmarks.coserve.machines import EFFICIENT, UMA, Layout, system
from benchmarks.coserve.workload import expert, make_graph
from benchmarks.report import Report
from jaxinfer.evaluation.experts.simulator import Simulator
from jaxinfer.evaluation.experts.workloads import TraceRequest
from jaxinfer.experts.scheduling.experts import ExpertGraph
from jaxinfer.experts.scheduling.policy import POLICIES, Policy

MACHINE = dataclasses.replace(EFFICIENT, name="NUMA, efficient loader, 3 GB/s", disk=UMA.disk)
"""A machine on which loads keep up with 6 inputs a second: one takes 0.13 s, and an execution 0.04 s."""
ROOM = 8
TYPES, DETECTORS, ZIPF = 36, 2, 1.1
INPUTS, RATE = 1500, 6.0
HEAD, PHASE = 8, 300
"""Number of types that lose their popularity when it changes, and of inputs after which it does."""
SEEDS = range(5)
BEST = POLICIES["best"]
COMPARED: dict[str, Policy] = {
    "as configured": dataclasses.replace(BEST, learns_usage=False),
    "learned": BEST,
    "lru": dataclasses.replace(BEST, evict="lru"),
    "paper": POLICIES["paper"],
}
NAMES = [f"type{place:02}" for place in range(TYPES)]
_WEIGHTS = [1 / (place + 1) ** ZIPF for place in range(TYPES)]
FOLLOWS = {name: f"detector{place % DETECTORS}" for place, name in enumerate(NAMES[5::10])}
"""The detectors of the types that have one."""


def make_experts() -> ExpertGraph:
    """Make the experts, with the shares of the first inputs."""
    detectors = [expert(f"detector{place}", "yolov5m") for place in range(DETECTORS)]
    experts = [*(expert(name, "resnet101") for name in NAMES), *detectors]
    return make_graph(experts, dict(zip(NAMES, _WEIGHTS, strict=True)), FOLLOWS)


def make_trace(seed: int, *, drifts: bool, inputs: int = INPUTS) -> list[TraceRequest]:
    """Draw inputs of a Poisson process.

    Args:
      drifts: whether the `HEAD` most popular types change places with as many random others after each `PHASE` inputs.
    """
    rng, ranking, now, trace = random.Random(seed), list(NAMES), 0.0, list[TraceRequest]()
    for place in range(inputs):
        if drifts and place and place % PHASE == 0:
            for head, other in enumerate(rng.sample(range(HEAD, TYPES), HEAD)):
                ranking[head], ranking[other] = ranking[other], ranking[head]
        now += rng.expovariate(RATE)
        (name,) = rng.choices(ranking, _WEIGHTS)
        trace.append(TraceRequest(arrival=now, experts=(name, FOLLOWS[name]) if name in FOLLOWS else (name,)))
    return trace


def run(policy: Policy, trace: list[TraceRequest]) -> tuple[int, float]:
    """Return the number of loads from disk, and the seconds within which 99% of the inputs have a result."""
    scheduler, hardware = system(MACHINE, Layout(gpus=1, cpus=0, experts=ROOM), policy, make_experts())
    outcome = Simulator(scheduler, hardware).run(trace)
    assert outcome.finished == len(trace)
    return outcome.statistics.loads["disk"], float(np.percentile(outcome.latencies, 99))


def measure(report: Report, *, quick: bool = False) -> None:
    """Add both cells and their checks to the report; `quick`: of one seed."""
    loads: dict[tuple[str, str], float] = {}
    for popularity, (name, policy) in itertools.product(("fixed", "drifting"), COMPARED.items()):
        traces = [make_trace(seed, drifts=popularity == "drifting") for seed in SEEDS[: 1 if quick else None]]
        counts, p99 = zip(*(run(policy, trace) for trace in traces), strict=True)
        loads[popularity, name] = statistics.fmean(counts)
        report.row(
            figure="drift",
            popularity=popularity,
            policy=name,
            disk_loads=round(loads[popularity, name], 1),
            least=min(counts),
            most=max(counts),
            p99=round(statistics.fmean(p99), 3),
        )
    fixed = loads["fixed", "learned"] / loads["fixed", "as configured"]
    report.check("learned_vs_known_usage", fixed, "x its loads, fixed popularity", target=1.05, better="lower")
    drifting = loads["drifting", "lru"] / loads["drifting", "learned"]
    report.check("drift_vs_lru", drifting, "x as many loads of LRU, drifting popularity", target=1.0)

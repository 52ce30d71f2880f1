"""Throughput of bursts under eight conditions, on a simulated clock: `best` against LRU in its place, and the others.

36 classifiers and 2 detectors, as in the real part, on two executors that share a GPU's memory. Costs are near those
measured there: an image takes 6 ms at 32 pixels and 100 ms at 224.
"""

import dataclasses
import random
import statistics
from collections.abc import Mapping

from benchmarks.coserve.drift import DETECTORS, FOLLOWS, NAMES, TYPES
from benchmarks.coserve.machines import COPY_RATE, COPY_SECONDS, MB
from benchmarks.coserve.workload import INTERVAL, OFFSET, make_graph
from benchmarks.report import Report
from jaxinfer.evaluation.experts.simulator import Simulator
from jaxinfer.evaluation.experts.workloads import TraceRequest
from jaxinfer.experts.scheduling.executor_state import ExecutorConfig
from jaxinfer.experts.scheduling.experts import ExpertGraph, ExpertInfo
from jaxinfer.experts.scheduling.policy import POLICIES, Policy
from jaxinfer.experts.scheduling.profile import Profile, Tier
from jaxinfer.experts.scheduling.scheduler import Scheduler

SMALL, LARGE = (0.006, 0.004), (0.1, 0.015)
"""K and B in seconds at 32 and at 224 pixels."""
EQUAL = (170 * MB, 170 * MB)
INPUTS, MAX_BATCH = 600, 8
HOST_EXPERTS = 4
SEEDS = range(3)
BEST = POLICIES["best"]
LRU = dataclasses.replace(BEST, evict="lru")
COMPARED: Mapping[str, Policy] = {
    "best": BEST,
    "lru": LRU,
    **{name: POLICIES[name] for name in ("paper", "parallel_grouping", "samba_grouping", "samba")},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Burst:
    """A condition.

    Attributes:
      costs: K and B in seconds.
      read: seconds to read an expert of 170 MB from disk; larger ones take longer.
      zipf: exponent of the types' popularity; None: that of the paper's tasks.
      room: number of experts of 170 MB in memory.
      sizes: the least and the most bytes of an expert.
    """

    name: str
    costs: tuple[float, float]
    read: float
    zipf: float | None = None
    room: int = 8
    sizes: tuple[int, int] = EQUAL


BURSTS = (
    Burst(name="32 pixels, slow disk", costs=SMALL, read=0.05),
    Burst(name="224 pixels", costs=LARGE, read=0.03),
    Burst(name="224 pixels, 1 s to read", costs=LARGE, read=1.0),
    Burst(name="32 pixels, files in the page cache", costs=SMALL, read=0.0),
    Burst(name="32 pixels, experts of 40 to 340 MB", costs=SMALL, read=0.05, sizes=(40 * MB, 340 * MB)),
    Burst(name="224 pixels, experts of 40 to 340 MB", costs=LARGE, read=0.03, sizes=(40 * MB, 340 * MB)),
    Burst(name="32 pixels, Zipf 1.1", costs=SMALL, read=0.05, zipf=1.1),
    Burst(name="32 pixels, room for 30", costs=SMALL, read=0.05, room=30),
)


def make_experts(burst: Burst, seed: int) -> tuple[ExpertGraph, list[TraceRequest]]:
    """Make the experts and a burst of inputs."""
    rng = random.Random(seed)
    weights = [1 / (i + OFFSET) if burst.zipf is None else 1 / (i + 1) ** burst.zipf for i in range(TYPES)]
    experts = [
        ExpertInfo(name=name, architecture=name, bytes=rng.randint(*burst.sizes))
        for name in [*NAMES, *(f"detector{i}" for i in range(DETECTORS))]
    ]
    trace = [
        TraceRequest(arrival=place * INTERVAL, experts=(name, FOLLOWS[name]) if name in FOLLOWS else (name,))
        for place, name in enumerate(rng.choices(NAMES, weights, k=INPUTS))
    ]
    return make_graph(experts, dict(zip(NAMES, weights, strict=True)), FOLLOWS), trace


def throughput(burst: Burst, policy: Policy, seed: int) -> float:
    """Simulate a burst; return the inputs with a result per second."""
    graph, trace = make_experts(burst, seed)
    k, b = burst.costs
    profiles: dict[tuple[str, str], Profile] = {}
    for name, expert in graph.experts.items():
        copied = COPY_SECONDS + expert.bytes / COPY_RATE
        loads: dict[Tier, float] = {"disk": burst.read * expert.bytes / EQUAL[0] + copied, "host": copied}
        profiles[name, "gpu"] = Profile(k=k, b=b, max_batch=MAX_BATCH, load=loads)
    executors = 1 if policy.one_executor else 2
    configs = [
        ExecutorConfig(name=f"gpu{i}", processor="gpu", device="gpu", expert_bytes=burst.room * EQUAL[0] // executors)
        for i in range(executors)
    ]
    host = HOST_EXPERTS * EQUAL[0] if policy.host_cache else 0
    scheduler = Scheduler(graph, profiles, configs, policy, host_bytes=host)
    scheduler.manager.place()
    outcome = Simulator(scheduler).run(trace)
    assert outcome.finished == len(trace)
    return outcome.throughput


def measure(report: Report, *, quick: bool = False) -> None:
    """Add a row for each burst, and the check, to the report; `quick`: of one seed."""
    ratios = []
    for burst in BURSTS:
        means = {
            name: statistics.fmean(throughput(burst, policy, seed) for seed in SEEDS[: 1 if quick else None])
            for name, policy in COMPARED.items()
        }
        ratios.append(means["best"] / means["lru"])
        report.row(figure="burst", burst=burst.name, **{name: round(mean, 2) for name, mean in means.items()})
    report.check("best_vs_lru", statistics.median(ratios), f"x, median of {len(BURSTS)} bursts", target=0.99)

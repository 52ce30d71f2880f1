"""The time of decisions while many requests wait for many experts.

It is CPU time of the thread, so that other processes do not count.
"""

import dataclasses
import time
from collections.abc import Sequence

import numpy as np

from benchmarks.coserve.machines import NUMA, best_layout, executors, profiles
from benchmarks.coserve.workload import Task, make_task
from jaxinfer.evaluation.experts.simulator import Simulator
from jaxinfer.evaluation.experts.workloads import TraceRequest
from jaxinfer.experts.scheduling.policy import Policy
from jaxinfer.experts.scheduling.request import Action, Request
from jaxinfer.experts.scheduling.scheduler import Scheduler

QUEUED, EXPERTS, FURTHER = 3500, 350, 2000
INTERVAL = 0.035
"""Seconds between further images: they arrive about as fast as they are served."""


@dataclasses.dataclass(frozen=True)
class Latencies:
    """Times of calls in seconds."""

    seconds: Sequence[float]

    @property
    def p99(self) -> float:
        return float(np.percentile(self.seconds, 99))

    def ms(self) -> dict[str, float]:
        """The quantiles as fields of a row."""
        quantiles = {f"p{q}_ms": round(1e3 * float(np.percentile(self.seconds, q)), 4) for q in (50, 99, 99.9)}
        return {"calls": len(self.seconds), **quantiles, "max_ms": round(1e3 * max(self.seconds), 4)}


class TimedScheduler(Scheduler):
    """Scheduler that times its decisions once all initial requests wait."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.seconds: dict[str, list[float]] = {"submit": [], "poll": []}

    def submit(self, request: Request, now: float) -> int:
        begun = time.thread_time()
        try:
            return super().submit(request, now)
        finally:
            if now:
                self.seconds["submit"].append(time.thread_time() - begun)

    def poll(self, now: float) -> list[Action]:
        begun = time.thread_time()
        try:
            return super().poll(now)
        finally:
            if now and self.queued > QUEUED // 2:
                self.seconds["poll"].append(time.thread_time() - begun)


def decision_latencies(policy: Policy) -> dict[str, Latencies]:
    """Time `submit` and `poll`: 3,500 images wait at the start, and as many arrive as are served."""
    task = Task(name="A-queued", images=QUEUED + FURTHER, gpus=3, active=EXPERTS - 8)
    graph, trace = make_task(task, seed=0)
    arrivals = [max(place - QUEUED, 0) * INTERVAL for place in range(len(trace))]
    trace = [TraceRequest(arrival=at, experts=item.experts) for at, item in zip(arrivals, trace, strict=True)]
    configs = executors(NUMA, best_layout(NUMA, "A", task.gpus))
    scheduler = TimedScheduler(graph, profiles(NUMA, task.gpus), configs, policy)
    scheduler.manager.place()
    Simulator(scheduler).run(trace)
    return {what: Latencies(seconds) for what, seconds in scheduler.seconds.items()}

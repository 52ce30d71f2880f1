"""One real run of a system of experts: `python -m benchmarks.coserve.run_system OPTIONS`, OPTIONS a JSON object.

Options: folder, pixels, mode, executors, pool, host (both in experts), requests, seed, bandwidth (bytes/s of the disk;
null: as fast as it is), rate (of a Poisson process of inputs; null: a burst), way ("live", "replay", "virtual" or
"rates"). Prints one JSON object: throughput, loads, the simulator's prediction, memory, where time went.
"""

import functools
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.coserve.boards import config, inputs_of
from jaxinfer.evaluation.experts.replay import Recorder, Replayer
from jaxinfer.evaluation.experts.simulator import SimulatedRun, Simulator
from jaxinfer.evaluation.experts.workloads import TraceRequest
from jaxinfer.experts.opened import OpenedSystem
from jaxinfer.experts.scheduling.profile import Profiles
from jaxinfer.experts.scheduling.request import Action, Batch
from jaxinfer.experts.scheduling.scheduler import Scheduler
from jaxinfer.experts.system import System

P99 = 3.0
"""Seconds within which 99% of the inputs must be judged, for the highest rate."""
RATES = (1, 2, 3, 4, 6, 8, 10, 13, 16, 20, 25, 30, 40, 50, 65, 80)
"""Inputs a second at the points of the curve of latencies."""
CURVE_SEEDS, CURVE_REQUESTS = range(3), 1500
PRECISION = 0.02


class Disk:
    """`os.preadv`, limited to a rate over all threads; counts the experts read.

    Args:
      rate: bytes/s; None: no limit.

    Attributes:
      experts: number of files read from their beginning.
    """

    def __init__(self, rate: float | None):
        self.experts = 0
        self._rate, self._free, self._lock = rate, 0.0, threading.Lock()

    def __repr__(self) -> str:
        """Name the disk in the record of costs: another rate is another disk."""
        return f"Disk({self._rate})"

    def __call__(self, handle: int, buffers: list[Any], offset: int) -> int:
        count = os.preadv(handle, buffers, offset)
        with self._lock:
            self.experts += offset == 0
            if self._rate is None:
                return count
            self._free = max(self._free, time.perf_counter()) + count / self._rate
            until = self._free
        time.sleep(max(until - time.perf_counter(), 0.0))
        return count


class ResidentMemory:
    """The peak memory of this process in bytes while the context is open, sampled every 20 ms."""

    def __init__(self) -> None:
        self.most, self._ended = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "ResidentMemory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        process = psutil.Process()
        while not self._ended.wait(0.02):
            self.most = max(self.most, process.memory_info().rss)


def run(options: dict[str, Any]) -> dict[str, Any]:
    """Run a system and return the result that the module's docstring describes."""
    before = psutil.Process().memory_info().rss
    made, disk = config(Path(options["folder"]), options), Disk(options["bandwidth"])

    def build(scheduler: Callable[..., Scheduler] = Scheduler, profiles: Profiles | None = None) -> System:
        opened = OpenedSystem(made, progress=False, preadv=disk, scheduler_type=scheduler)
        return System(opened, profiles=profiles, progress=False)

    if options["way"] == "rates":
        opened = OpenedSystem(made, progress=False, preadv=disk)
        return _rates(opened, opened.measure())
    trace = inputs_of(options["requests"], options["seed"], rate=options["rate"])
    image = np.zeros((options["pixels"], options["pixels"], 3), np.uint8)
    if options["way"] == "virtual":
        return _virtual(build, disk, trace)
    recorder = Recorder if options["way"] == "replay" else Scheduler
    with ResidentMemory() as memory, build(scheduler=recorder) as system:
        result = _live(system, disk, trace, image)
        result |= {"resident": memory.most - before, "predicted": _predict(system, trace)}
        first = system.scheduler
    if isinstance(first, Recorder):
        again = functools.partial(Replayer, recording=first.recording)
        with build(scheduler=again, profiles=first.profiles) as system:
            result["replayed"] = _live(system, disk, trace, image)
    return result


def _live(system: System, disk: Disk, trace: list[TraceRequest], image: np.ndarray) -> dict[str, Any]:
    """Submit a trace at its arrivals, and wait for all results."""
    already, begun, futures = disk.experts, time.perf_counter(), []
    cpu = time.process_time()
    for item in trace:
        time.sleep(max(begun + item.arrival - time.perf_counter(), 0.0))
        futures.append(system.submit(item.experts[0], image))
    results = [future.result() for future in futures]
    seconds = time.perf_counter() - begun
    assert [[stage.expert for stage in result.stages] for result in results] == [list(item.experts) for item in trace]
    counted = system.stats()
    latencies = [result.latency for result in results]
    return {
        "seconds": seconds,
        "throughput": len(trace) / seconds,
        "loads": dict(counted.loads),
        "read": disk.experts - already,
        "prefetched": counted.prefetched,
        "batches": counted.batches,
        "cpu_seconds": time.process_time() - cpu,
        "scheduling": counted.scheduling_seconds,
        "managing": counted.managing_seconds,
        "running": counted.running_seconds,
        "loading": counted.loading_seconds,
        "management_share": counted.management_share,
        "p50": float(np.percentile(latencies, 50)),
        "p99": float(np.percentile(latencies, 99)),
        "initially": sorted(system.initial_experts),
    }


def _virtual(build: Callable[..., System], disk: Disk, trace: list[TraceRequest]) -> dict[str, Any]:
    """The loads of a simulation, and of a run on the simulated clock in which everything is really done.

    The latter also has the number of experts really read, and of verdicts that lead where the trace says.
    """
    routed = []
    with build() as system:
        predicted = _predict(system, trace)
        already = disk.experts

        def act(action: Action) -> None:
            judgements = system.run_now(action)
            if isinstance(action, Batch):
                for request, judgement in zip(action.requests, judgements, strict=True):
                    following = trace[request.id].experts[request.stage + 1 :][:1]
                    routed.append(system.graph.next(action.expert, judgement.verdict) == next(iter(following), None))

        outcome = Simulator(system.scheduler, act=act).run(trace)
        return {
            "loads": dict(outcome.statistics.loads),
            "read": disk.experts - already,
            "routed": sum(routed),
            "stages": sum(len(item.experts) for item in trace),
            "predicted": predicted,
        }


def _predict(system: System, trace: list[TraceRequest]) -> dict[str, Any]:
    """Simulate the same system and trace with the costs seen in the run."""
    outcome = _simulate(system.opened, system.profiles, trace)
    profiles = {
        " on ".join(key): {"k": p.k, "b": p.b, "max_batch": p.max_batch, "load": dict(p.load), "evict": p.evict}
        for key, p in system.profiles.items()
    }
    loads = dict(outcome.statistics.loads)
    return {
        "throughput": outcome.throughput,
        "loads": loads,
        "seconds": outcome.seconds,
        "p99": float(np.percentile(outcome.latencies, 99)),
        "profiles": profiles,
    }


def _simulate(opened: OpenedSystem, profiles: Profiles, trace: list[TraceRequest]) -> SimulatedRun:
    scheduler = opened.make_scheduler(profiles)
    scheduler.manager.place()
    return Simulator(scheduler).run(trace)


def _rates(opened: OpenedSystem, profiles: Profiles) -> dict[str, Any]:
    """Simulate latencies by the rate of a Poisson process, and find the highest rate with a p99 of at most `P99`."""

    @functools.cache
    def latency(rate: float) -> tuple[float, float]:
        runs = [
            _simulate(opened, profiles, inputs_of(CURVE_REQUESTS, seed, rate=rate)).latencies for seed in CURVE_SEEDS
        ]
        p50, p99 = (statistics.median(float(np.percentile(run, q)) for run in runs) for q in (50, 99))
        return p50, p99

    low, high = 0.0, float(RATES[-1])
    while high - low > PRECISION * high:
        middle = (low + high) / 2
        low, high = (middle, high) if latency(middle)[1] <= P99 else (low, middle)
    return {"curve": [[rate, *latency(rate)] for rate in RATES], "highest": low}


if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.argv[1]))))

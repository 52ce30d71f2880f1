"""One real run of a system of experts: `python -m benchmarks.coserve.run_system OPTIONS`, OPTIONS a JSON object.

Options: folder, image_size, mode, executors, pool, host (both in experts), requests, interval, seed, rate (bytes/s of
the disk; null: as fast as it is), way ("live", "replay" or "virtual"). Prints one JSON object: throughput, loads, what
the simulator predicts, memory, where time went.
"""

import functools
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.coserve.boards import config, inputs_of
from jaxinfer.collaboration.scheduling.replay import Recorder, Replayer
from jaxinfer.collaboration.scheduling.scheduler import Scheduler
from jaxinfer.collaboration.simulator import Simulator, TraceRequest
from jaxinfer.collaboration.system import System


class Throttle:
    """`os.preadv` at a rate, whichever threads call it.

    Args:
      rate: bytes/s.
    """

    def __init__(self, rate: float):
        self._rate, self._free, self._lock = rate, 0.0, threading.Lock()

    def __call__(self, handle: int, buffers: list[Any], offset: int) -> int:
        count = os.preadv(handle, buffers, offset)
        with self._lock:
            self._free = max(self._free, time.perf_counter()) + count / self._rate
            until = self._free
        time.sleep(max(until - time.perf_counter(), 0.0))
        return count


class ResidentMemory:
    """The most memory that this process has while the context is open, in bytes, looked at every 20 ms."""

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
    """What the module's docstring says that it prints."""
    before = psutil.Process().memory_info().rss
    made = config(Path(options["folder"]), options)
    preadv = Throttle(options["rate"]) if options["rate"] else os.preadv
    build = functools.partial(System, made, preadv=preadv, progress=lambda what, done, total: None)
    trace = inputs_of(options["requests"], options["interval"], options["seed"])
    image = np.zeros((options["image_size"], options["image_size"], 3), np.uint8)
    if options["way"] == "virtual":
        return _virtual(build, trace)
    recorder = Recorder if options["way"] == "replay" else Scheduler
    with ResidentMemory() as memory, build(scheduler=recorder) as system:
        found = _live(system, trace, image) | {"resident": memory.most - before, "predicted": _predict(system, trace)}
        first = system.scheduler
    if isinstance(first, Recorder):
        again = functools.partial(Replayer, recording=first.recording)
        with build(scheduler=again, profiles=first.profiles) as system:
            found["replayed"] = _live(system, trace, image)
    return found


def _live(system: System, trace: list[TraceRequest], image: np.ndarray) -> dict[str, Any]:
    """Submit a trace as its arrivals say, and wait for all results."""
    begun, futures = time.perf_counter(), []
    cpu = time.process_time()
    for item in trace:
        time.sleep(max(begun + item.arrival - time.perf_counter(), 0.0))
        futures.append(system.submit(item.experts[0], image))
    results = [future.result() for future in futures]
    seconds = time.perf_counter() - begun
    assert [len(result.stages) for result in results] == [len(item.experts) for item in trace]
    statistics, times = system.statistics, system.times
    return {
        "seconds": seconds,
        "throughput": len(trace) / seconds,
        "loads": dict(statistics.loads),
        "prefetched": statistics.prefetched,
        "batches": statistics.batches,
        "cpu_seconds": time.process_time() - cpu,
        "scheduling": times.scheduling,
        "managing": times.managing,
        "running": times.running,
        "loading": times.loading,
        "management_share": times.management_share,
        "p50": float(np.median([result.latency for result in results])),
        "initially": sorted(system.initially),
    }


def _virtual(build: Callable[..., System], trace: list[TraceRequest]) -> dict[str, Any]:
    """The loads of a run on the simulated clock with everything really done, and of the simulation alone."""
    with build() as system:
        predicted = _predict(system, trace)
        outcome = Simulator(system.scheduler, act=system.perform).run(trace)
        return {"loads": dict(outcome.statistics.loads), "predicted": predicted}


def _predict(system: System, trace: list[TraceRequest]) -> dict[str, Any]:
    """What the simulator says of the same system and the same trace."""
    scheduler = system.make_scheduler(system.profiles)
    scheduler.manager.place()
    outcome = Simulator(scheduler).run(trace)
    profiles = {
        " on ".join(key): {"k": p.k, "b": p.b, "max_batch": p.max_batch, "load": dict(p.load), "evict": p.evict}
        for key, p in system.profiles.items()
    }
    loads = dict(outcome.statistics.loads)
    return {"throughput": outcome.throughput, "loads": loads, "seconds": outcome.seconds, "profiles": profiles}


if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.argv[1]))))

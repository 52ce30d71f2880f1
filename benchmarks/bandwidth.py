"""The read bandwidth of the memory with all cores: the best of a C++ loop over an array and of XLA's reductions."""

import ctypes
import functools
import itertools
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

SOURCE = Path(__file__).with_name("read_array.cc")
COMPILERS = ("c++", "g++", "clang++")
ROWS, WIDTH = 1024, 200 * 1024  # 839 MB in float32, about as much as the weights of a decode step
ROUNDS = 8


class ReadBandwidth:
    """The best GB/s so far, by way of reading: "loop" (without a C++ compiler there is none) and "xla"."""

    def __init__(self) -> None:
        self.ways: dict[str, float] = {}

    @property
    def best(self) -> float:
        return max(self.ways.values())

    def measure(self) -> float:
        """Measure again, and return the best median of this time: of the loop, or of one of the reductions."""
        array = np.ones((ROWS, WIDTH), np.float32)
        seconds = {"xla": _by_xla(array)} | ({"loop": [_by_loop(loop, array)]} if (loop := read_loop()) else {})
        self.include({way: array.nbytes / min(map(min, reads)) / 1e9 for way, reads in seconds.items()})
        return array.nbytes / min(statistics.median(taken) for reads in seconds.values() for taken in reads) / 1e9

    def in_turn[Measured](self, measure: Callable[[], Measured], rounds: int) -> tuple[list[Measured], list[float]]:
        """Return what `measure` returned in each round, and the GB/s that the memory gave just before and after it."""
        measured, given = [], [self.measure()]
        for _ in range(rounds):
            measured.append(measure())
            given.append(self.measure())
        return measured, [statistics.mean(pair) for pair in itertools.pairwise(given)]

    def include(self, ways: Mapping[str, float]) -> None:
        """Take in the best by each way of other measurements, such as those of another process."""
        for way, rate in ways.items():
            self.ways[way] = max(self.ways.get(way, 0.0), rate)

    def row(self) -> dict[str, Any]:
        """The figures as a row of a report."""
        ways = {f"{way}_gb_per_s": round(value, 1) for way, value in sorted(self.ways.items())}
        return {"figure": "read bandwidth", "gb_per_s": round(self.best, 1), **ways}


@functools.cache
def read_loop() -> Callable[..., float] | None:
    """Compile the loop for this CPU; None if there is no C++ compiler, or it fails."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "read_array.so"
        flags = ["-std=c++17", "-O3", "-march=native", "-funroll-loops", "-pthread", "-shared", "-fPIC"]
        done = subprocess.run([compiler, *flags, SOURCE, "-o", library], capture_output=True, text=True)
        if done.returncode:
            print(f"{compiler} cannot compile {SOURCE.name}, so XLA alone measures: {done.stderr[-500:]}", flush=True)
            return None
        function = ctypes.CDLL(str(library)).read_array
    function.restype = ctypes.c_double
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]
    return function


def _by_loop(loop: Callable[..., float], array: np.ndarray) -> list[float]:
    """The seconds that the loop takes."""
    total = ctypes.c_uint64()
    words = array.ctypes.data, array.nbytes // 8
    return [loop(*words, os.cpu_count(), ctypes.byref(total)) for _ in range(ROUNDS)]


def _by_xla(array: np.ndarray) -> list[list[float]]:
    """The seconds that each of the reductions takes."""
    import jax

    x, vector = jax.device_put(array), jax.device_put(np.ones(ROWS, np.float32))

    def seconds(reduction: Callable[..., Any]) -> float:
        start = time.perf_counter()
        reduction(x, vector).block_until_ready()
        return time.perf_counter() - start

    return [[seconds(reduction) for _ in range(ROUNDS)] for reduction in _reductions()]


@functools.cache
def _reductions() -> list[Callable[..., Any]]:
    import jax

    calls: list[Callable[..., Any]] = [
        lambda x, v: v @ x,
        lambda x, v: x.reshape(-1, ROWS) @ v,
        lambda x, v: x.sum(),
    ]
    return [jax.jit(call) for call in calls]

"""Whole decode steps of a model of 1B parameters at batch 1: how close reading its weights and cache is to the memory.

Ours alone: float32 models of several engines do not fit into memory together.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.bandwidth import ReadBandwidth
from benchmarks.cpu_decode.peers import OURS, SHORT, step_row
from benchmarks.random_models import save_random
from benchmarks.report import Report
from benchmarks.workers import OUR_SCRIPT, Engines, Worker, workers
from jaxinfer.models.presets import preset

MODEL = "llama3.2-1b"
TARGETS = {"float32": 0.85, "int8": 0.80, "int4": 0.70}
LONG, LONG_TARGET = 8192, 0.75
"""Tokens before the first timed step of the long context, in float32."""
ROOM = 672
"""Further tokens that the cache has room for."""


def make_model(folder: Path) -> None:
    """Write the model of random weights unless it exists."""
    if not (folder / MODEL).exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            save_random(Path(temporary) / MODEL, preset(MODEL))
            (Path(temporary) / MODEL).rename(folder / MODEL)


def timed_step(worker: Worker, context: int, steps: int, rounds: int) -> tuple[float, float]:
    """Return the median milliseconds of a step, and the mean tokens in the cache; the first round is not counted.

    The engine takes the prompt for computed: its keys and values are 0, which are read like any others.
    """
    worker.ask(do="remember", tokens=context)
    request = {"do": "decode", "batch": 1, "context": context, "steps": steps}
    seconds = [worker.ask(**request)["seconds"] for _ in range(1 + rounds)]
    return 1e3 * statistics.median(seconds[1:]), context + steps * (1 + rounds / 2)


def run(report: Report, args: argparse.Namespace) -> None:
    """Measure every format, and float32 with a long context."""
    make_model(args.work_dir)
    bandwidth = ReadBandwidth()
    figures = {
        f"decode_{SHORT.get(dtype, dtype)}_b1_of_step_bandwidth": (dtype, args.context, target)
        for dtype, target in TARGETS.items()
    }
    figures["decode_8k_of_bandwidth"] = ("float32", LONG, LONG_TARGET)
    rates = {}
    for name, (dtype, context, _) in figures.items():
        engines: Engines = {(OURS, dtype): (OUR_SCRIPT, MODEL, "1", str(context + ROOM))}
        with workers(dtype, args.work_dir, Path(sys.executable), args.threads, engines) as (worker,):
            bandwidth.measure()
            ms, tokens = timed_step(worker, context, args.steps, args.rounds)
        row = step_row(MODEL, dtype, tokens, ms, bandwidth)
        rates[name] = row["gb"] / row["step_ms"] * 1e3
        print(f"{name}: {row}", flush=True)
        report.row(**row)
        report.save(args.json)
    for name, rate in rates.items():  # of the best bandwidth of all
        report.check(name, rate / bandwidth.best, "", target=figures[name][2])
    report.row(**bandwidth.row())

"""Whole decode steps of a model of 1B parameters at batch 1: how close reading its weights and cache is to the memory.

Ours alone: float32 models of several engines do not fit into memory together.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.bandwidth import ReadBandwidth
from benchmarks.cpu_decode.peers import OURS, step_row
from benchmarks.random_models import save_random
from benchmarks.report import Report
from benchmarks.workers import OUR_SCRIPT, Engines, Worker, workers
from jaxinfer.models.presets import preset

MODEL = "llama3.2-1b"
LONG = 8192
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


def timed_steps(
    worker: Worker, context: int, steps: int, rounds: int, bandwidth: ReadBandwidth
) -> tuple[list[float], list[float]]:
    """The milliseconds of a step in each round, and the GB/s that the memory gave just before and after it.

    The engine takes the prompt for computed: its keys and values are 0, which are read like any others.
    """
    worker.ask(do="remember", tokens=context)
    request = {"do": "decode", "batch": 1, "context": context, "steps": steps}
    worker.ask(**request)  # the first round is not counted
    return bandwidth.in_turn(lambda: 1e3 * worker.ask(**request)["seconds"], rounds)


def run(report: Report, args: argparse.Namespace) -> None:
    """Measure every format, and float32 with a long context."""
    make_model(args.work_dir)
    bandwidth = ReadBandwidth()
    figures = {
        "decode_fp32_b1_of_step_bandwidth": ("float32", args.context),
        "decode_int8_b1_of_step_bandwidth": ("int8", args.context),
        "decode_int4_b1_of_step_bandwidth": ("int4", args.context),
        "decode_8k_of_bandwidth": ("float32", LONG),
    }
    for name, (dtype, context) in figures.items():
        engines: Engines = {(OURS, dtype): (OUR_SCRIPT, MODEL, "1", str(context + ROOM), "remember")}
        with workers(dtype, args.work_dir, Path(sys.executable), args.threads, engines) as (worker,):
            ms, given = timed_steps(worker, context, args.steps, args.rounds, bandwidth)
        row = step_row(MODEL, dtype, context + args.steps * (1 + args.rounds / 2), statistics.median(ms))
        shares = [row["gb"] / step * 1e3 / rate for step, rate in zip(ms, given, strict=True)]
        row |= {"in_turn": round(statistics.median(shares), 3), "check": name}
        print(row, flush=True)
        report.row(**row)
        report.save(args.json)
    report.row(**bandwidth.row())

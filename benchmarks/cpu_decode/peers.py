"""Prefill and decode against CTranslate2, llama.cpp, ik_llama.cpp and transformers, in every format.

One random model in every engine's own format. Each engine is a process that loads it once; every figure is the median
over rounds in which all engines take turns. Nothing is timed unless all float32 engines generate the same greedy
continuation of a prompt.
"""

import argparse
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rich
from rich.table import Table

from benchmarks.bandwidth import ReadBandwidth
from benchmarks.cpu_decode.step_bytes import matrix_bytes, step_bytes
from benchmarks.report import Report
from benchmarks.workers import (
    ENGINES,
    IK_ENGINES,
    IK_MODULE,
    INT4_ENGINES,
    OWN_MODEL,
    Engines,
    Worker,
    find_peers,
    make_models,
    missing_modules,
    quantise_models,
    workers,
)
from jaxinfer.compiled.machine import machine
from jaxinfer.models.presets import preset

OURS = "jaxinfer"
PROMPT = 512  # tokens of the timed prefill
BATCHES = (1, 8)
BFLOAT16 = {"avx512_bf16", "amx_bf16"}
"""Features of a CPU, of which one multiplies bfloat16: elsewhere no engine is used to decode in it."""
SHORT = {"float32": "fp32", "bfloat16": "bf16"}
"""A dtype's name in those of checks."""


def check_agreement(engines: list[Worker]) -> None:
    """Exit unless all engines continue a prompt with the same tokens: otherwise they run different models."""
    prompt = list(range(100, 132))
    answers = {worker.engine: worker.ask(do="greedy", prompt=prompt, count=8)["tokens"] for worker in engines}
    if len({tuple(tokens) for tokens in answers.values()}) != 1:
        raise SystemExit(f"The engines' greedy continuations differ, so no comparison would be meaningful: {answers}")


def take_turns(engines: list[Worker], rounds: int, figure: str, **request: Any) -> list[dict[str, Any]]:
    """Make a row for every engine: its milliseconds in every round, after one unmeasured round."""
    times: dict[str, list[float]] = {worker.engine: [] for worker in engines}
    rich.print(f"{figure}, {engines[0].dtype}: {rounds} rounds of {', '.join(times)}")
    for counted in [False] + [True] * rounds:
        for worker in engines:
            time.sleep(0.2)  # until the previous engine's threads are idle
            seconds = worker.ask(**request)["seconds"]
            if counted:
                times[worker.engine].append(1e3 * seconds)
    return [
        {
            "figure": figure,
            "engine": worker.engine,
            "dtype": worker.dtype,
            "ms": round(statistics.median(times[worker.engine]), 2),
            "all_ms": [round(value, 2) for value in times[worker.engine]],
        }
        for worker in engines
    ]


def engines_here(python: Path) -> Engines:
    """The engines to compare: those of the optional package only if this interpreter has it."""
    if missing_modules(python, (IK_MODULE,)):
        print(f"{python} has no {IK_MODULE}, so ik_llama.cpp is left out (benchmarks/peers/optional.txt).", flush=True)
        return {**ENGINES, **INT4_ENGINES}
    return {**ENGINES, **INT4_ENGINES, **IK_ENGINES}


def figures_of(dtype: str, context: int, steps: int) -> dict[str, dict[str, Any]]:
    """The requests by the name of their figure."""
    figures: dict[str, dict[str, Any]] = {}
    if dtype != "int4":
        figures[f"prefill {PROMPT}"] = {"do": "prefill", "tokens": PROMPT}
    if dtype != "bfloat16" or BFLOAT16 & set(machine()["features"]):
        for batch in BATCHES:
            figures[f"decode batch {batch}"] = {"do": "decode", "batch": batch, "context": context, "steps": steps}
    return figures


class Times:
    """The medians of a report's rows: by figure, dtype and engine."""

    def __init__(self, rows: list[dict[str, Any]]):
        self.ms = {(row["figure"], row["dtype"], row["engine"]): row["ms"] for row in rows if "ms" in row}

    def peers(self, figure: str, dtype: str) -> dict[str, float]:
        """The milliseconds of the other engines."""
        return {
            engine: ms
            for (name, kind, engine), ms in self.ms.items()
            if (name, kind) == (figure, dtype) and engine != OURS
        }

    def ratio(self, figure: str, dtype: str, *engines: str) -> float:
        """Compute the milliseconds of the best of these peers (of all, if none is named) by ours."""
        peers = self.peers(figure, dtype)
        return min(ms for engine, ms in peers.items() if engine in (engines or peers)) / self.ms[figure, dtype, OURS]

    def cells(self) -> dict[tuple[str, str], float]:
        """The ratio of every cell of decoding that has peers: by figure and dtype."""
        keys = dict.fromkeys((name, kind) for name, kind, _ in self.ms if name.startswith("decode"))
        return {key: self.ratio(*key) for key in keys if self.peers(*key)}


def add_checks(report: Report) -> None:
    """Check the peers' times relative to ours."""
    times, b1, b8, prefill = Times(report.rows), "decode batch 1", "decode batch 8", f"prefill {PROMPT}"
    targets: Mapping[str, tuple[float, float]] = {
        "decode_fp32_b1_vs_best_peer": (times.ratio(b1, "float32"), 1.0),
        "decode_fp32_b1_vs_hf": (times.ratio(b1, "float32", "transformers"), 1.5),
        "decode_fp32_b8_vs_best_peer": (times.ratio(b8, "float32"), 1.1),
        "decode_int8_b1_vs_best_peer": (times.ratio(b1, "int8"), 1.0),
        "decode_int8_b1_vs_ctranslate2": (times.ratio(b1, "int8", "ctranslate2"), 1.0),
        "decode_int8_b8_vs_best_peer": (times.ratio(b8, "int8"), 1.0),
        "decode_int4_b1_vs_best_peer": (times.ratio(b1, "int4"), 1.0),
        "worst_decode_cell_vs_best_peer": (min(times.cells().values()), 1.0),
        "prefill_vs_best_peer": (times.ratio(prefill, "float32"), 0.9),
        "prefill_int8_vs_best_peer": (times.ratio(prefill, "int8"), 0.9),
    }
    for name, (ratio, target) in targets.items():
        report.check(name, ratio, "x", target=target)


def read_rows(report: Report, model: str, context: float) -> None:
    """Report what a decode step of ours at batch 1 reads: all of it in every dtype, the matrices alone in float32."""
    times = Times(report.rows).ms
    for (figure, dtype, engine), ms in times.items():
        if figure == "decode batch 1" and engine == OURS:
            report.row(**step_row(model, dtype, context, ms))
    ms = times["decode batch 1", "float32", OURS]
    rate = round(matrix_bytes(preset(model)) / ms / 1e6, 2)
    check = "decode_fp32_b1_of_read_bandwidth"
    report.row(figure="matrices of a step", model=model, dtype="float32", step_ms=ms, gb_per_s=rate, check=check)


def step_row(model: str, dtype: str, context: float, ms: float) -> dict[str, Any]:
    """A whole decode step at batch 1 as a row: its bytes, and how many a second."""
    size = step_bytes(preset(model), dtype, context)
    return {
        "figure": "whole step",
        "model": model,
        "dtype": dtype,
        "context": round(context),
        "step_ms": round(ms, 2),
        "gb": round(size / 1e9, 3),
        "gb_per_s": round(size / ms / 1e6, 2),
    }


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Print the measurements: a row per engine, a column per figure."""
    columns = list(dict.fromkeys(row["figure"] for row in rows))
    table = Table("engine", "dtype", *columns, title="milliseconds, median (minimum)")
    for key in dict.fromkeys((row["engine"], row["dtype"]) for row in rows):
        cells = {
            r["figure"]: f"{r['ms']:.1f} ({min(r['all_ms']):.1f})" for r in rows if (r["engine"], r["dtype"]) == key
        }
        table.add_row(*key, *(cells.get(column, "") for column in columns))
    rich.print(table)


def run(report: Report, args: argparse.Namespace) -> None:
    """Measure every figure of every dtype, and check them."""
    peer_python = find_peers(args.peer_python)
    folder = args.work_dir if args.model == OWN_MODEL else args.work_dir.with_name(f"cpu_decode-{args.model}")
    make_models(folder, peer_python, args.model)
    quantise_models(folder, peer_python)
    engines, bandwidth = engines_here(peer_python), ReadBandwidth()
    report.row(
        figure="settings",
        model=args.model,
        context=args.context,
        steps=args.steps,
        rounds=args.rounds,
        peer_threads=args.threads,
    )
    for dtype in ("float32", "int8", "int4", "bfloat16")[: 3 if args.quick else 4]:
        with workers(dtype, folder, peer_python, args.threads, engines) as processes:
            report.versions |= {w.engine: w.version for w in processes if not w.is_ours}
            if dtype == "float32":
                check_agreement(processes)
            for figure, request in figures_of(dtype, args.context, args.steps).items():
                bandwidth.measure()
                for row in take_turns(processes, args.rounds, figure, **request):
                    report.row(**row)
                report.save(args.json)
    print_rows([row for row in report.rows if "ms" in row])
    # Rounds go on where the one before has stopped, and the first is not counted.
    read_rows(report, args.model, args.context + args.steps * (1 + args.rounds / 2))
    report.row(**bandwidth.row())
    add_checks(report)

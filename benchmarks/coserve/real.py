"""The real evaluation: systems of ResNet-101s on this machine's disk and CPU, each run in a process of its own.

A run that is done is kept in FOLDER/runs.jsonl and not done again.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.coserve.boards import EXPERT_BYTES, LARGE, SMALL, inputs_of, make_experts
from benchmarks.report import ROOT, Report
from jaxinfer.collaboration.scheduling.bounds import compulsory_loads

BASELINES = ("samba", "fifo", "parallel")
OURS = "best"
POOL, HOST, REQUESTS, INTERVAL = 8, 4, 1000, 0.004
"""Experts in pools and in the host cache, inputs, seconds between them: the paper's shape at a third of its size."""
SLACK_BYTES = 3 * EXPERT_BYTES + (700 << 20)
"""What a process may have beside its experts: a buffer for the next one; for each executor an expert that is copied to
the host's memory and so there twice; programs, activations and what XLA has compiled them with."""


class Runs:
    """The runs that are done, and those to do.

    Args:
      folder: where experts are, and what runs have given.
      quick: far fewer inputs: to see that all works.
    """

    def __init__(self, folder: Path, *, quick: bool):
        self._folder, self._quick = folder, quick
        self._file = folder / ("runs-quick.jsonl" if quick else "runs.jsonl")
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        self._done = {entry["key"]: entry["result"] for entry in map(json.loads, lines)}

    def get(self, variant: str, mode: str, round_: int = 0, **options: Any) -> dict[str, Any]:
        """What a run has given; runs it unless it has been."""
        key = f"{variant} {mode} {round_}"
        if key not in self._done:
            begun = time.perf_counter()
            print(f"{time.strftime('%H:%M:%S')} {key}", flush=True)
            self._done[key] = self._run(variant, {"mode": mode, "seed": 1 + round_, **self._sizes(), **options})
            with self._file.open("a") as file:
                file.write(json.dumps({"key": key, "result": self._done[key]}) + "\n")
            print(f"  {time.perf_counter() - begun:.0f} s: {_summary(self._done[key])}", flush=True)
        return self._done[key]

    def left(self, planned: list[tuple[str, str, int]]) -> int:
        """How many of these runs are to be done."""
        return sum(f"{variant} {mode} {round_}" not in self._done for variant, mode, round_ in planned)

    def _sizes(self) -> dict[str, Any]:
        return {
            "folder": str(self._folder),
            "image_size": SMALL,
            "executors": 2,
            "pool": POOL,
            "host": HOST,
            "requests": 60 if self._quick else REQUESTS,
            "interval": INTERVAL,
            "rate": None,
            "way": "live",
        }

    def _run(self, variant: str, options: dict[str, Any]) -> dict[str, Any]:
        # Costs are kept by architecture: a slower disk is another machine.
        env = os.environ | {"JAXINFER_CACHE": str(self._folder / f"cache-{variant.split()[0]}")}
        command = [sys.executable, "-m", "benchmarks.coserve.run_system", json.dumps(options)]
        done = subprocess.run(command, cwd=ROOT, env=env | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise SystemExit(f"benchmarks.coserve: the run {variant} {options['mode']} ended with {done.returncode}.")
        return json.loads(done.stdout.splitlines()[-1])


def measure(report: Report, folder: Path, *, quick: bool, rounds: int, ratios: Sequence[int]) -> None:
    """Add the rows and checks of the real evaluation.

    Args:
      folder: where experts are, and what runs have given.
      quick: as of `Runs`.
      rounds: of all modes in turn, with the paper's ratio of loading to execution (10) and as fast as the disk is.
      ratios: others, of which our policy and the best baseline run once; 1 has larger images.
    """
    folder.mkdir(parents=True, exist_ok=True)
    make_experts(folder, SMALL)
    runs, modes = Runs(folder, quick=quick), (*BASELINES, "paper", OURS)
    print(
        f"{runs.left(_planned(modes, rounds, ratios))} runs to do, 1 to 6 minutes each; those that are done are kept."
    )
    execution = _execution(runs.get("fast", "samba"))
    rate = EXPERT_BYTES / (10 * execution)
    fast, slow = ({mode: list[dict[str, Any]]() for mode in modes} for _ in range(2))
    for round_ in range(rounds):
        for mode in modes:
            fast[mode].append(runs.get("fast", mode, round_))
            slow[mode].append(runs.get("ratio-10", mode, round_, rate=rate))
    _report_rounds(report, "as fast as the disk", fast)
    _report_rounds(report, "load:execution 10", slow)
    _check_rounds(report, fast, slow)
    _check_bound(report, slow, rounds, quick=quick)
    _check_replay(report, runs.get("ratio-10 replay", "paper", rate=rate, way="replay"))
    _check_virtual(report, [runs.get("fast virtual", mode, way="virtual", requests=200) for mode in ("paper", OURS)])
    best_baseline = max(BASELINES, key=lambda mode: _throughput(slow[mode]))
    for ratio in ratios:
        given: dict[str, Any] = {"image_size": LARGE} if ratio == 1 else {"rate": EXPERT_BYTES / (ratio * execution)}
        if ratio == 1:
            make_experts(folder, LARGE)
        found = {mode: [runs.get(f"ratio-{ratio}", mode, **given)] for mode in (best_baseline, OURS)}
        _report_rounds(report, f"load:execution {ratio}", found)


def _planned(modes: Sequence[str], rounds: int, ratios: Sequence[int]) -> list[tuple[str, str, int]]:
    main = [(variant, mode, round_) for variant in ("fast", "ratio-10") for mode in modes for round_ in range(rounds)]
    others = [(f"ratio-{ratio}", mode, 0) for ratio in ratios for mode in ("parallel", OURS)]
    return [*main, *others, ("ratio-10 replay", "paper", 0), ("fast virtual", "paper", 0), ("fast virtual", OURS, 0)]


def _execution(run: dict[str, Any]) -> float:
    """Seconds of a classifier's batch of one, with one executor."""
    classifier = next(v for name, v in run["predicted"]["profiles"].items() if name.startswith("classifier"))
    return classifier["k"] + classifier["b"]


def _throughput(runs: list[dict[str, Any]]) -> float:
    return statistics.median(run["throughput"] for run in runs)


def _loads(runs: list[dict[str, Any]], *tiers: str) -> float:
    return statistics.median(sum(run["loads"].get(tier, 0) for tier in tiers) for run in runs)


def _report_rounds(report: Report, what: str, found: dict[str, list[dict[str, Any]]]) -> None:
    for mode, runs in found.items():
        last = runs[-1]
        report.row(
            figure="real",
            loading=what,
            mode=mode,
            rounds=len(runs),
            throughput=round(_throughput(runs), 2),
            loads_disk=_loads(runs, "disk"),
            loads_host=_loads(runs, "host"),
            predicted_throughput=round(statistics.median(run["predicted"]["throughput"] for run in runs), 2),
            load_seconds=round(_load_seconds(last), 3),
            execution_seconds=round(_execution(last), 4),
            resident_gb=round(max(run["resident"] for run in runs) / 1e9, 2),
            seconds=[round(run["seconds"], 1) for run in runs],
        )


def _load_seconds(run: dict[str, Any]) -> float:
    classifier = next(v for name, v in run["predicted"]["profiles"].items() if name.startswith("classifier"))
    return classifier["load"]["disk"]


def _check_rounds(report: Report, fast: dict[str, Any], slow: dict[str, Any]) -> None:
    for mode in BASELINES:
        ratio = _throughput(slow[OURS]) / _throughput(slow[mode])
        report.check(f"paperlike_vs_{mode}", ratio, "x", target=4.5)
    best = max(_throughput(fast[mode]) for mode in BASELINES)
    report.check("fastloader_vs_best_baseline", _throughput(fast[OURS]) / best, "x", target=2.5)
    report.check("switch_cut", 1 - _loads(slow[OURS], "disk") / _loads(slow["samba"], "disk"), "of loads", target=0.78)
    report.check("real_best_vs_paper_mode", _throughput(slow[OURS]) / _throughput(slow["paper"]), "x", target=1.3)
    runs = [run for found in (fast, slow) for mode in found for run in found[mode]]
    errors = [abs(run["predicted"]["throughput"] / run["throughput"] - 1) for run in runs]
    report.check("simulator_error", statistics.median(errors), "of throughput", target=0.1, better="lower")
    wrong = [abs(sum(run["predicted"]["loads"].values()) / max(sum(run["loads"].values()), 1) - 1) for run in runs]
    report.check("simulator_loads_error", statistics.median(wrong), "of loads", target=0.05, better="lower")
    ours = [run["management_share"] for found in (fast, slow) for run in found[OURS]]
    report.check("management_share", max(ours), "of executors' time", target=0.002, better="lower")
    budget = (POOL + HOST) * EXPERT_BYTES + SLACK_BYTES
    report.check(
        "resident_of_budget", max(run["resident"] for run in runs) / budget, "of budget", target=1.0, better="lower"
    )


def _check_bound(report: Report, slow: dict[str, Any], rounds: int, *, quick: bool) -> None:
    """Disk loads of the mode that has the fewest, against every used expert once."""
    ratios = []
    for round_ in range(rounds):
        used = {name for item in inputs_of(60 if quick else REQUESTS, INTERVAL, 1 + round_) for name in item.experts}
        runs = [slow[mode][round_] for mode in ("paper", OURS)]
        ratios.append(min(run["loads"].get("disk", 0) / compulsory_loads(used, set(run["initially"])) for run in runs))
    report.check("real_switches_vs_bound", statistics.median(ratios), "x", target=1.5, better="lower")


def _check_replay(report: Report, run: dict[str, Any]) -> None:
    again = run["replayed"]
    assert again["loads"] == run["loads"], (again["loads"], run["loads"])
    report.check("live_vs_replayed", run["throughput"] / again["throughput"], "x", target=0.97)


def _check_virtual(report: Report, runs: list[dict[str, Any]]) -> None:
    same = all(run["loads"] == run["predicted"]["loads"] for run in runs)
    report.check("virtual_loads_exact", float(same), "of 1", target=1.0)


def _summary(run: dict[str, Any]) -> str:
    if "throughput" not in run:
        return f"loads {run['loads']}"
    predicted = run["predicted"]["throughput"]
    return f"{run['throughput']:.1f} inputs/s (predicted {predicted:.1f}), loads {run['loads']}"

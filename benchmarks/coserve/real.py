"""The real evaluation: systems of ResNet-101s on this machine's disk and CPU, each run in its own process.

Finished runs are kept in FOLDER/runs.jsonl and not repeated.
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.coserve.boards import EXPERT_BYTES, inputs_of, make_experts
from benchmarks.coserve.tables import BASELINES, GROUPING
from benchmarks.report import ROOT, Report
from jaxinfer.evaluation.experts.forecast import compulsory_loads

OURS = "best"
POOL, HOST = 8, 4
"""Number of experts in pools and in the host cache: the paper's shape at a third of its size."""
SLACK_BYTES = 3 * EXPERT_BYTES + (700 << 20)
"""Memory of a process on top of its experts.

A buffer for the next one; per executor an expert that is copied to the host's memory and so there twice; programs,
activations and what XLA has compiled them with.
"""
LIVE_RATES = (0.5, 0.8, 1.0)
"""Shares of our highest simulated rate at which systems really run."""
Rounds = dict[str, list[dict[str, Any]]]
"""Runs by mode."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """The common settings of a table's runs.

    Attributes:
      name: name in tables and runs.
      pixels: height and width of the images, which determine the duration of an execution.
      ratio: ratio of loading to execution; None: loads are as fast as the disk.
      requests: number of inputs.
      modes: the modes of the systems.
      rate: inputs per second, a Poisson process; None: a burst.
    """

    name: str
    pixels: int
    ratio: float | None
    requests: int
    modes: tuple[str, ...]
    rate: float | None = None


LOAD_BOUND = Setting(name="load-bound", pixels=32, ratio=10, requests=600, modes=(*BASELINES, *GROUPING, "paper", OURS))
AS_IT_IS = Setting(
    name="disk as it is",
    pixels=224,
    ratio=None,
    requests=300,
    modes=("samba", "parallel", *GROUPING, "paper", OURS),
)

SATURATING = dataclasses.replace(AS_IT_IS, modes=(OURS,))
BELOW_SATURATION = 0.6
"""Share of our highest throughput at which inputs come: 8 inputs/s on a machine that has 13.2."""


def other_ratio(ratio: float) -> Setting:
    """The setting for another ratio of loading to execution, for ours and the baselines that group."""
    name = f"load:execution {ratio:g}"
    return dataclasses.replace(LOAD_BOUND, name=name, ratio=ratio, modes=(*GROUPING, OURS))


class Runs:
    """Finished runs, and running the others.

    Args:
      folder: the folder of experts and results.
      quick: far fewer inputs: to see that everything works.
    """

    def __init__(self, folder: Path, *, quick: bool):
        self._folder, self._quick = folder, quick
        self._file = folder / ("runs-quick.jsonl" if quick else "runs.jsonl")
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        self._done = {entry["key"]: entry["result"] for entry in map(json.loads, lines)}
        self.execution = 0.0  # seconds of `LOAD_BOUND`'s images, measured by `rounds`

    def get(self, what: str, setting: Setting, mode: str, round_: int = 0, **options: Any) -> dict[str, Any]:
        """Return the result of a run, running it if needed."""
        key = f"{what} / {setting.name} / {mode} / {round_}"
        if key not in self._done:
            begun = time.perf_counter()
            print(f"{time.strftime('%H:%M:%S')} {key}", flush=True)
            self._done[key] = self._run(setting, {"mode": mode, "seed": 1 + round_, **options})
            with self._file.open("a") as file:
                file.write(json.dumps({"key": key, "result": self._done[key]}) + "\n")
            print(f"  {time.perf_counter() - begun:.0f} s: {_summary(self._done[key])}", flush=True)
        return self._done[key]

    def rounds(self, setting: Setting, count: int) -> Rounds:
        """Run all modes in turn, `count` times."""
        if setting.ratio and not self.execution:
            at_once = dataclasses.replace(LOAD_BOUND, name="unhindered", ratio=None)
            self.execution = _execution(self.get("execution", at_once, "samba", requests=60))
        results: Rounds = {mode: [] for mode in setting.modes}
        for round_ in range(count):
            for mode in setting.modes:
                results[mode].append(self.get("burst", setting, mode, round_))
        return results

    def _run(self, setting: Setting, options: dict[str, Any]) -> dict[str, Any]:
        sizes = {
            "folder": str(self._folder),
            "pixels": setting.pixels,
            "executors": 2,
            "pool": POOL,
            "host": HOST,
            "requests": setting.requests,
            "bandwidth": EXPERT_BYTES / (setting.ratio * self.execution) if setting.ratio else None,
            "rate": setting.rate,
            "way": "live",
        }
        given = sizes | options
        if self._quick:
            given["requests"] = 60
        env = os.environ | {"JAXINFER_CACHE": str(self._folder / "cache")}
        command = [sys.executable, "-m", "benchmarks.coserve.run_system", json.dumps(given)]
        done = subprocess.run(command, cwd=ROOT, env=env | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise SystemExit(
                f"benchmarks.coserve: the run {setting.name} {given['mode']} ended with {done.returncode}."
            )
        return json.loads(done.stdout.splitlines()[-1])


def measure(report: Report, folder: Path, *, quick: bool, rounds: int, ratios: Sequence[float]) -> None:
    """Add the rows and checks of the real evaluation.

    Args:
      folder: the folder of experts and results.
      quick: see `Runs`.
      rounds: number of rounds of all modes in turn.
      ratios: other ratios of loading to execution, at which ours and the baselines that group run once.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for setting in (LOAD_BOUND, AS_IT_IS):
        make_experts(folder, setting.pixels)
    runs = Runs(folder, quick=quick)
    slow, fast = runs.rounds(LOAD_BOUND, rounds), runs.rounds(AS_IT_IS, rounds)
    others = {setting: runs.rounds(setting, 1) for setting in map(other_ratio, ratios)}
    for setting, results in {LOAD_BOUND: slow, AS_IT_IS: fast, **others}.items():
        _report_rounds(report, setting, results)
    _check_gains(report, slow, fast)
    _check_simulator(report, [*_all(slow), *_all(fast), *(run for results in others.values() for run in _all(results))])
    _check_overhead(report, slow, fast)
    _check_bound(report, slow, quick=quick)
    _check_replay(report, [runs.get("replay", LOAD_BOUND, "paper", round_, way="replay") for round_ in range(rounds)])
    _check_virtual(
        report, [runs.get("virtual", LOAD_BOUND, mode, way="virtual", requests=200) for mode in ("paper", OURS)]
    )
    _rates(report, runs)


def measure_latency(report: Report, folder: Path, *, quick: bool, rounds: int) -> None:
    """Add the latencies of inputs that come below saturation, and their check; arguments as of `measure`."""
    folder.mkdir(parents=True, exist_ok=True)
    make_experts(folder, AS_IT_IS.pixels)
    runs = Runs(folder, quick=quick)
    highest = _throughput(runs.rounds(SATURATING, 1)[OURS])
    rate = round(BELOW_SATURATION * highest, 1)
    setting = dataclasses.replace(
        AS_IT_IS, name=f"disk as it is, {rate:g} inputs/s", modes=(*GROUPING, OURS), rate=rate
    )
    results = runs.rounds(setting, rounds)
    for mode, of_mode in results.items():
        report.row(
            figure="latency",
            pixels=setting.pixels,
            requests=setting.requests,
            rate=rate,
            mode=mode,
            p50=[round(run["p50"], 3) for run in of_mode],
            p99=[round(run["p99"], 3) for run in of_mode],
            predicted_p99=[round(run["predicted"]["p99"], 3) for run in of_mode],
            loads_disk=_loads(of_mode, "disk"),
        )
    p99 = {mode: statistics.median(run["p99"] for run in of_mode) for mode, of_mode in results.items()}
    gain = min(p99[mode] for mode in GROUPING) / p99[OURS]
    report.check("p99_vs_grouping_224", gain, f"x, 224 pixels, {rate:g} of at most {highest:.1f} inputs/s", target=2.0)


def measure_modes(report: Report, folder: Path, modes: Sequence[str], *, quick: bool, rounds: int) -> None:
    """Add the rows of some modes alone, at a ratio of 10, without the checks, which compare modes."""
    setting = dataclasses.replace(LOAD_BOUND, modes=tuple(modes))
    folder.mkdir(parents=True, exist_ok=True)
    make_experts(folder, setting.pixels)
    _report_rounds(report, setting, Runs(folder, quick=quick).rounds(setting, rounds))


def _execution(run: dict[str, Any]) -> float:
    """Measure the seconds of a classifier's batch of one."""
    return _classifier(run)["k"] + _classifier(run)["b"]


def _classifier(run: dict[str, Any]) -> dict[str, Any]:
    return next(v for name, v in run["predicted"]["profiles"].items() if name.startswith("classifier"))


def _all(results: Rounds) -> Iterable[dict[str, Any]]:
    return (run for runs in results.values() for run in runs)


def _throughput(runs: list[dict[str, Any]]) -> float:
    return statistics.median(run["throughput"] for run in runs)


def _loads(runs: list[dict[str, Any]], *tiers: str) -> float:
    return statistics.median(sum(run["loads"].get(tier, 0) for tier in tiers) for run in runs)


def _best_of(results: Rounds, modes: Iterable[str]) -> float:
    """Compute the highest throughput of these modes."""
    return max(_throughput(results[mode]) for mode in modes if mode in results)


def _report_rounds(report: Report, setting: Setting, results: Rounds) -> None:
    for mode, runs in results.items():
        last = runs[-1]
        report.row(
            figure="real",
            loading=setting.name,
            pixels=setting.pixels,
            requests=setting.requests,
            mode=mode,
            rounds=len(runs),
            throughput=round(_throughput(runs), 2),
            loads_disk=_loads(runs, "disk"),
            loads_host=_loads(runs, "host"),
            predicted_throughput=round(statistics.median(run["predicted"]["throughput"] for run in runs), 2),
            load_seconds=round(_classifier(last)["load"]["disk"], 3),
            execution_seconds=round(_execution(last), 4),
            resident_gb=round(max(run["resident"] for run in runs) / 1e9, 2),
            seconds=[round(run["seconds"], 1) for run in runs],
        )


def _check_gains(report: Report, slow: Rounds, fast: Rounds) -> None:
    for mode in BASELINES:
        report.check(f"paperlike_vs_{mode}", _throughput(slow[OURS]) / _throughput(slow[mode]), "x", target=4.5)
    at_once = _throughput(fast[OURS]) / _best_of(fast, BASELINES)
    report.check("fastloader_vs_best_baseline", at_once, "x, 224 pixels", target=2.5)
    for name, results, target in (("", slow, 1.5), ("_224_pixels", fast, 1.0)):
        gain = _throughput(results[OURS]) / _best_of(results, GROUPING)
        report.check(f"grouping_baseline_gain{name}", gain, "x", target=target)
    report.check("switch_cut", 1 - _loads(slow[OURS], "disk") / _loads(slow["samba"], "disk"), "of loads", target=0.78)
    report.check("real_best_vs_paper_mode", _throughput(slow[OURS]) / _throughput(slow["paper"]), "x", target=1.3)


def _check_simulator(report: Report, runs: list[dict[str, Any]]) -> None:
    """Check the simulator's throughput and loads, by each run's costs, against the run."""
    errors = [abs(run["predicted"]["throughput"] / run["throughput"] - 1) for run in runs]
    report.check("simulator_error", statistics.median(errors), "of throughput, median", target=0.1, better="lower")
    report.check("simulator_error_max", max(errors), "of throughput, all runs", target=0.15, better="lower")
    wrong = [abs(sum(run["predicted"]["loads"].values()) / max(sum(run["loads"].values()), 1) - 1) for run in runs]
    report.check("simulator_loads_error", statistics.median(wrong), "of loads", target=0.05, better="lower")
    counted = statistics.fmean(run["read"] == run["loads"].get("disk", 0) for run in runs)
    report.check("reads_are_loads", counted, "of the runs", target=1.0)


def _check_overhead(report: Report, slow: Rounds, fast: Rounds) -> None:
    ours = [run["management_share"] for results in (fast, slow) for run in results[OURS]]
    report.check("management_share", max(ours), "of executors' time", target=0.002, better="lower")
    budget = (POOL + HOST) * EXPERT_BYTES + SLACK_BYTES
    most = max(run["resident"] for run in (*_all(slow), *_all(fast)))
    report.check("resident_of_budget", most / budget, "of budget", target=1.0, better="lower")


def _check_bound(report: Report, slow: Rounds, *, quick: bool) -> None:
    """Check the disk loads of the mode with the fewest against one load per used expert."""
    ratios = []
    for round_, runs in enumerate(zip(slow["paper"], slow[OURS], strict=True)):
        inputs = inputs_of(60 if quick else LOAD_BOUND.requests, 1 + round_)
        used = {name for item in inputs for name in item.experts}
        ratios.append(min(run["loads"].get("disk", 0) / compulsory_loads(used, set(run["initially"])) for run in runs))
    report.check("real_switches_vs_bound", statistics.median(ratios), "x", target=1.5, better="lower")


def _check_replay(report: Report, runs: list[dict[str, Any]]) -> None:
    """Check the cost of deciding: against the same decisions replayed, which read the same experts."""
    ratios = sorted(run["throughput"] / run["replayed"]["throughput"] for run in runs)
    report.row(figure="replay", live_by_replayed=[round(ratio, 4) for ratio in ratios])
    same = statistics.fmean(run["replayed"]["read"] == run["read"] == run["loads"]["disk"] for run in runs)
    report.check("replayed_reads_same", same, "of the runs", target=1.0)
    report.check("live_vs_replayed", statistics.median(ratios), f"x, median of {len(ratios)}", target=0.97)


def _check_virtual(report: Report, runs: list[dict[str, Any]]) -> None:
    """Check that runs on the simulated clock read and route experts as simulated."""
    same = all(run["read"] == run["predicted"]["loads"]["disk"] and run["routed"] == run["stages"] for run in runs)
    report.check("virtual_loads_exact", float(same), "of 1", target=1.0)


def _rates(report: Report, runs: Runs) -> None:
    """Report latency by the rate of inputs: all systems simulated, and ours at three rates for real."""
    highest = {}
    for mode in LOAD_BOUND.modes:
        result = runs.get("rates", LOAD_BOUND, mode, way="rates")
        highest[mode] = result["highest"]
        for rate, p50, p99 in result["curve"]:
            report.row(figure="rates", mode=mode, rate=rate, p50=round(p50, 3), p99=round(p99, 3))
    for mode, rate in highest.items():
        report.row(figure="highest rate", mode=mode, rate=round(rate, 2))
    for part in LIVE_RATES:
        rate = round(part * highest[OURS], 2)
        result = runs.get(f"rate {part}", LOAD_BOUND, OURS, rate=rate)
        report.row(
            figure="live rate",
            mode=OURS,
            rate=rate,
            p50=round(result["p50"], 3),
            p99=round(result["p99"], 3),
            predicted_p99=round(result["predicted"]["p99"], 3),
        )
    best = max(highest[mode] for mode in GROUPING)
    report.check("rate_at_p99_vs_grouping", highest[OURS] / best, "x", target=1.0)
    report.check("rate_at_p99_vs_samba", highest[OURS] / highest["samba"], "x", target=1.0)


def _summary(run: dict[str, Any]) -> str:
    if "highest" in run:
        return f"{run['highest']:.1f} inputs/s at most"
    if "throughput" not in run:
        return f"loads {run['loads']}"
    predicted = run["predicted"]["throughput"]
    return f"{run['throughput']:.1f} inputs/s (predicted {predicted:.1f}), loads {run['loads']}, p99 {run['p99']:.2f} s"

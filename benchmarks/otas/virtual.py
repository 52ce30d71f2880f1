"""Policies on a simulated clock: the same controller, latencies drawn from those that were measured."""

import statistics
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import rich
from rich.progress import track
from rich.table import Table
from scipy.stats import t as students_t

from benchmarks.otas.setting import TRACES, Setting, policies
from benchmarks.report import Report
from jaxinfer.elastic.scheduling.policies import Policy
from jaxinfer.elastic.scheduling.query import Outcome
from jaxinfer.elastic.scheduling.simulator import Served, simulate
from jaxinfer.elastic.scheduling.workloads import burstiness

OURS = "elastic"
CELLS = {
    "wandering": (0.5, 0.8, 0.95, 1.05, 1.1, 1.3, 1.6),
    "bursty": (0.8,),
    "azure code": (0.8,),
    "azure conv": (1.1,),
}
"""Loads of each trace, as multiples of the capacity at level 0."""

Cell = tuple[str, float]


def virtual(report: Report, setting: Setting, *, seeds: int, queries: int) -> None:
    """All policies and fixed levels in all cells.

    Args:
      report: where rows and checks go.
      setting: what is served.
      seeds: of each cell.
      queries: of each run, about.
    """
    known = policies(setting)
    runs: dict[tuple[Cell, str], list[Served]] = {}
    cells = [(trace, load) for trace, loads in CELLS.items() for load in loads]
    for cell in track(cells, "simulated"):
        for name, make in known.items():
            runs[cell, name] = [serve(setting, cell, make, seed=seed, queries=queries) for seed in range(seeds)]
            _add_row(report, cell, name, runs[cell, name])
        arrivals = TRACES[cell[0]](cell[1] * setting.capacity, queries / (cell[1] * setting.capacity), seed=0)
        found = {name: round(float(value), 3) for name, value in burstiness(arrivals / setting.scale).items()}
        report.row(figure="trace", trace=cell[0], load=cell[1], **found)
    _print(cells, list(known), runs)
    _check(report, list(known), runs)


def serve(setting: Setting, cell: Cell, make: Callable[[], Policy], *, seed: int, queries: int) -> Served:
    """One run. The seed draws arrivals, queries and latencies, the same for all policies."""
    trace, load = cell
    rate = load * setting.capacity
    # Traces wander within seconds of the paper's device: ours lives as many times faster as its batches are.
    arrivals = setting.scale * TRACES[trace](rate * setting.scale, queries / rate / setting.scale, seed=seed)
    given = setting.queries(arrivals, seed)
    served = simulate(given, make(), setting.profile, seconds=setting.sampler(seed), right=setting.is_right)
    return Served(answers=served.answers, best=setting.best(given))


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half the width of its 95% interval."""
    if len(values) < 2:
        return values[0], float("nan")
    half = students_t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return statistics.mean(values), float(half)


def _add_row(report: Report, cell: Cell, name: str, runs: list[Served]) -> None:
    mean, half = mean_interval([run.normalised for run in runs])
    levels = sum((run.levels for run in runs), start=type(runs[0].levels)())
    report.row(
        figure="virtual",
        trace=cell[0],
        load=cell[1],
        policy=name,
        utility=round(mean, 4),
        interval=round(half, 4),
        outcomes=[round(statistics.mean(run.share(outcome) for run in runs), 4) for outcome in Outcome],
        levels={str(level): round(levels[level] / levels.total(), 4) for level in sorted(levels)},
    )


def _print(cells: Sequence[Cell], names: Sequence[str], runs: Mapping[tuple[Cell, str], list[Served]]) -> None:
    table = Table("trace, load", *names, title="utility, as a share of all that there was to earn")
    for cell in cells:
        means = {name: mean_interval([run.normalised for run in runs[cell, name]])[0] for name in names}
        most = max(means.values())
        marked = [f"[bold]{mean:.3f}[/]" if mean == most else f"{mean:.3f}" for mean in means.values()]
        table.add_row(f"{cell[0]} {cell[1]}x", *marked)
    rich.print(table)


def _check(report: Report, names: Sequence[str], runs: Mapping[tuple[Cell, str], list[Served]]) -> None:
    cells = list(dict.fromkeys(cell for cell, _ in runs))

    def utilities(cell: Cell, name: str) -> list[float]:
        return [run.normalised for run in runs[cell, name]]

    def ratios(cell: Cell, name: str) -> list[float]:
        return [ours / theirs for ours, theirs in zip(utilities(cell, OURS), utilities(cell, name), strict=True)]

    def lower_bound(cell: Cell, name: str) -> float:
        mean, half = mean_interval(ratios(cell, name))
        return mean - half

    def of_wandering(most: float, least: float = 0.0) -> list[Cell]:
        return [cell for cell in cells if cell[0] == "wandering" and least <= cell[1] <= most]

    for name, most, target in (("utility_1_1x", 1.1, 0.95), ("utility_1_3x", 1.3, 0.9)):
        least = min(statistics.mean(utilities(cell, OURS)) for cell in of_wandering(most))
        report.check(name, least, "of all there is", target=target)
    report.check("utility_bursty", statistics.mean(utilities(("bursty", 0.8), OURS)), "of all there is", target=0.9)
    busy = [("wandering", load) for load in (1.05, 1.3, 1.6)]
    report.check("gain_vs_pets", min(statistics.mean(ratios(cell, "pets")) for cell in busy), "x", target=1.2)
    usual = of_wandering(1.3, 0.8)
    report.check("gain_vs_paper_mode", min(statistics.mean(ratios(cell, "paper")) for cell in usual), "x", target=1.05)
    levels = [name for name in names if name.startswith("level") or name == "pets"]
    best_level = {cell: max(levels, key=lambda name: np.mean(utilities(cell, name))) for cell in cells}
    rivals = {
        "gain_vs_best_fixed": best_level,
        "gain_vs_slack": dict.fromkeys(cells, "slack"),
        "gain_vs_slackfit": dict.fromkeys(cells, "slackfit"),
    }
    for name, rival in rivals.items():
        report.check(name, min(lower_bound(cell, rival[cell]) for cell in cells), "x, lower 95% bound", target=0.99)
        bursty = lower_bound(("bursty", 0.8), rival["bursty", 0.8])
        report.check(f"{name}_bursty", bursty, "x, lower 95% bound", target=1.0)
    late = max(statistics.mean(run.share(Outcome.LATE) for run in runs[cell, OURS]) for cell in cells)
    report.check("late_share_virtual", late, "of queries", target=0.001, better="lower")

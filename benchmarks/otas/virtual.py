"""Policies on a simulated clock: the same controller, with latencies drawn from measured ones."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import rich
from rich.progress import track
from rich.table import Table
from scipy.special import stdtrit

from benchmarks.otas.fragile import fragile
from benchmarks.otas.infaas import LINKS, simulated_gain
from benchmarks.otas.setting import EQUAL_WORTH, FAR_DEADLINES, HIGH, INFAAS, LOW, TABLE_II, Cell, Setting
from benchmarks.report import Report
from jaxinfer.cli.display import show
from jaxinfer.elastic.scheduling.policies import POLICIES
from jaxinfer.elastic.scheduling.query import Outcome
from jaxinfer.evaluation.elastic.runs import Run
from jaxinfer.evaluation.elastic.simulator import Served
from jaxinfer.evaluation.elastic.summaries import summarise
from jaxinfer.evaluation.elastic.workloads import burstiness

OURS = "elastic"
SWINGING = Cell("swinging", round((LOW + HIGH) / 2, 3))
BURSTY = Cell("bursty", 0.8)
FAR = Cell("wandering", 1.1, FAR_DEADLINES)
CELLS = (
    *(Cell("wandering", load) for load in (0.5, 0.8, 0.95, 1.05, 1.1, 1.3, 1.6)),
    BURSTY,
    Cell("azure code", 0.8),
    Cell("azure conv", 1.1),
    SWINGING,
    FAR,
    *(Cell("wandering", load, EQUAL_WORTH) for load in (1.1, 1.6)),
)
BUSY = (1.05, 1.3, 1.6)
STATED_LINK = "NVMe, 2 GB/s"
"""The link over which INFaaS's models are loaded in the simulation whose gain is checked."""

SHOWN = (BURSTY, Cell("wandering", 1.1))
"""The cells whose figures are in docs/elastic.md."""

Runs = Mapping[tuple[Cell, str], Sequence[Served]]


def virtual(report: Report, setting: Setting, *, seeds: int, queries: int) -> Runs:
    """Simulate all policies and fixed levels in all cells.

    Args:
      report: collects rows and checks.
      setting: the measured setting.
      seeds: number of seeds per cell.
      queries: approximate number of queries per run.

    Returns:
      The runs by cell and policy.
    """
    runs: dict[tuple[Cell, str], list[Served]] = {}
    for cell in track(CELLS, "simulated"):
        for name in setting.policies:
            runs[cell, name] = [setting.simulate(cell, name, seed=seed, count=queries) for seed in range(seeds)]
            _add_row(report, cell, name, runs[cell, name])
        arrivals = np.array([query.arrival for query in setting.queries(cell, seed=0, count=queries)])
        traits = {name: round(float(value), 3) for name, value in burstiness(arrivals / setting.levels.scale).items()}
        report.row(figure="trace", **cell._asdict(), **traits)
    report.rows += [summary_row(setting, cell, runs) for cell in SHOWN]
    _print(CELLS, setting.policies, runs)
    _check(report, setting.policies, runs)
    fragile(report, seeds=seeds, queries=queries)
    _infaas_simulated(report, seeds=seeds, queries=queries)
    return runs


def shown(report: Report, setting: Setting, *, queries: int) -> None:
    """Simulate one run of all policies in the cells of `SHOWN`, for figures over time."""
    for cell in track(SHOWN, "simulated"):
        runs = {(cell, name): [setting.simulate(cell, name, seed=0, count=queries)] for name in setting.policies}
        report.rows.append(summary_row(setting, cell, runs))


def summary_row(setting: Setting, cell: Cell, runs: Runs) -> dict[str, Any]:
    """Summarise a cell's runs in the row that its figures are drawn from."""
    recorded = []
    for (run_cell, policy), served in runs.items():
        if run_cell != cell:
            continue
        measured = setting.models if policy == INFAAS else setting.levels
        recorded += [
            Run.from_served(
                run, measured, policy=policy, arrivals=cell.trace, load=cell.load, seed=seed, clock="simulated"
            )
            for seed, run in enumerate(served)
        ]
    return {"figure": "shown", "summary": msgspec.to_builtins(summarise(recorded), str_keys=True)}


def _infaas_simulated(report: Report, *, seeds: int, queries: int) -> None:
    """Simulate ViT-S/B/L against ViT-B's levels.

    Rates and accuracies are from the literature: nothing of it was run.
    """
    for link, bandwidth in LINKS.items():
        gains = {
            load: statistics.mean(simulated_gain(load, bandwidth, seed=seed, count=queries) for seed in range(seeds))
            for load in BUSY
        }
        rounded = {str(load): round(gain, 3) for load, gain in gains.items()}
        report.row(figure="infaas simulated", link=link, gains=rounded)
        rich.print(f"INFaaS with ViT-S/B/L over {link} (simulated): {rounded}")
        if link == STATED_LINK:
            report.check("gain_vs_infaas_simulated", min(gains.values()), f"x, simulated, {link}", target=1.75)


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half the width of its 95% interval."""
    if len(values) < 2:
        return values[0], float("nan")
    half = stdtrit(len(values) - 1, 0.975) * statistics.stdev(values) / len(values) ** 0.5
    return statistics.mean(values), float(half)


def _add_row(report: Report, cell: Cell, name: str, runs: Sequence[Served]) -> None:
    mean, half = mean_interval([run.normalised for run in runs])
    levels = sum((run.levels for run in runs), start=type(runs[0].levels)())
    report.row(
        figure="virtual",
        **cell._asdict(),
        policy=name,
        utility=round(mean, 4),
        interval=round(half, 4),
        outcomes=[round(statistics.mean(run.share(outcome) for run in runs), 4) for outcome in Outcome],
        levels={str(level): round(levels[level] / levels.total(), 4) for level in sorted(levels)},
    )


def _print(cells: Sequence[Cell], names: Sequence[str], runs: Runs) -> None:
    """Print two tables: a row per cell is too wide with all fixed levels."""
    fixed = [name for name in names if _is_fixed(name)]
    shown = {
        "policies": [*POLICIES, INFAAS],
        "fixed levels": [OURS, *sorted(fixed, key=lambda name: int(name.removeprefix("level").replace("pets", "0")))],
    }
    for title, columns in shown.items():
        names_shown = (name.removeprefix("level") for name in columns)
        table = Table("trace, load", *names_shown, title=f"utility, of all that there was to earn: {title}")
        for cell in cells:
            means = {name: mean_interval([run.normalised for run in runs[cell, name]])[0] for name in columns}
            most = max(means.values())
            marked = [f"[bold]{mean:.3f}[/]" if mean == most else f"{mean:.3f}" for mean in means.values()]
            table.add_row(str(cell), *marked)
        show(table)


def _is_fixed(name: str) -> bool:
    return name.startswith("level") or name == "pets"


def _check(report: Report, names: Sequence[str], runs: Runs) -> None:
    cells = list(dict.fromkeys(cell for cell, _ in runs))

    def utilities(cell: Cell, name: str) -> list[float]:
        return [run.normalised for run in runs[cell, name]]

    def ratios(cell: Cell, name: str) -> list[float]:
        return [ours / theirs for ours, theirs in zip(utilities(cell, OURS), utilities(cell, name), strict=True)]

    def lower_bound(cell: Cell, name: str) -> float:
        mean, half = mean_interval(ratios(cell, name))
        return mean - half

    def of_wandering(most: float, least: float = 0.0) -> list[Cell]:
        usual = [cell for cell in cells if (cell.trace, cell.mix) == ("wandering", TABLE_II)]
        return [cell for cell in usual if least <= cell.load <= most]

    for name, most, target in (("utility_1_1x", 1.1, 0.95), ("utility_1_3x", 1.3, 0.9)):
        least = min(statistics.mean(utilities(cell, OURS)) for cell in of_wandering(most))
        report.check(name, least, "of all there is", target=target)
    report.check("utility_bursty", statistics.mean(utilities(BURSTY, OURS)), "of all there is", target=0.9)
    usual = statistics.mean(utilities(FAR._replace(mix=TABLE_II), OURS))
    with_far = statistics.mean(utilities(FAR, OURS))
    report.check("utility_far_deadlines", with_far / usual, "of that without them", target=0.95)
    right = statistics.mean(run.share(Outcome.CORRECT) for run in runs[Cell("wandering", 1.1), OURS])
    report.check("type1_share", right, "of queries, right and in time, 1.1x", target=0.78)
    busy = [Cell("wandering", load) for load in BUSY]
    report.check("gain_vs_pets", min(statistics.mean(ratios(cell, "pets")) for cell in busy), "x", target=1.2)
    everywhere = min(statistics.mean(ratios(cell, INFAAS)) for cell in cells)
    report.check("gain_vs_infaas_real", everywhere, "x, measured loads", target=1.0)
    usual = of_wandering(1.3, 0.8)
    report.check("gain_vs_paper_mode", min(statistics.mean(ratios(cell, "paper")) for cell in usual), "x", target=1.05)
    profiled = [*of_wandering(1.6, 1.1), SWINGING, Cell("azure conv", 1.1)]
    gain = min(statistics.mean(ratios(cell, "paper_profiled")) for cell in profiled)
    report.check("gain_vs_paper_profiled", gain, "x, from 1.1x on", target=1.05)
    levels = [name for name in names if _is_fixed(name)]
    best_level = {cell: max(levels, key=lambda name: np.mean(utilities(cell, name))) for cell in cells}
    rivals = {
        "gain_vs_best_fixed": best_level,
        "gain_vs_slack": dict.fromkeys(cells, "slack"),
        "gain_vs_slackfit": dict.fromkeys(cells, "slackfit"),
    }
    for name, rival in rivals.items():
        report.check(name, min(lower_bound(cell, rival[cell]) for cell in cells), "x, lower 95% bound", target=0.99)
        bursty = lower_bound(BURSTY, rival[BURSTY])
        report.check(f"{name}_bursty", bursty, "x, lower 95% bound", target=1.0)
    swing = statistics.mean(ratios(SWINGING, best_level[SWINGING]))
    report.check("gain_vs_best_fixed_swing", swing, "x", target=1.05)
    late = max(statistics.mean(run.share(Outcome.LATE) for run in runs[cell, OURS]) for cell in cells)
    report.check("late_share_virtual", late, "of queries", target=0.001, better="lower")

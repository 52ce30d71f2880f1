"""Policies on a simulated clock: the same controller, with latencies drawn from measured ones."""

import functools
import multiprocessing
import os
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import msgspec
import numpy as np
import rich
from rich.progress import track
from rich.table import Table
from scipy.special import stdtrit

from benchmarks.otas.fragile import fragile
from benchmarks.otas.infaas import LINKS, simulated_gain
from benchmarks.otas.setting import (
    BY_WORTH,
    EQUAL_WORTH,
    FAR_DEADLINES,
    INFAAS,
    OURS,
    SWINGS,
    TABLE_II,
    Cell,
    Setting,
    best_fixed,
    is_infaas,
)
from benchmarks.report import Report
from jaxinfer.cli.display import show
from jaxinfer.elastic.scheduling.policies import POLICIES
from jaxinfer.elastic.scheduling.query import Outcome
from jaxinfer.evaluation.elastic.runs import Run
from jaxinfer.evaluation.elastic.simulator import ServedTrace
from jaxinfer.evaluation.elastic.summaries import summarise
from jaxinfer.evaluation.elastic.workloads import burstiness

SWINGING, *SWINGS_AT_PERIODS = (Cell(trace, swing.mean) for trace, swing in SWINGS.items())
BURSTY = Cell("bursty", 0.8)
FAR = Cell("wandering", 1.1, FAR_DEADLINES)
PUBLISHED = (
    *(Cell("wandering", load) for load in (0.5, 0.8, 0.95, 1.05, 1.1, 1.3, 1.6)),
    BURSTY,
    Cell("azure code", 0.8),
    Cell("azure conv", 1.1),
    SWINGING,
    FAR,
    *(Cell("wandering", load, EQUAL_WORTH) for load in (1.1, 1.6)),
)
"""The cells of the checks against rivals that batch as the paper does."""
CELLS = (*PUBLISHED, *SWINGS_AT_PERIODS, Cell("bursty", 1.1), Cell("azure code", 1.1))
BUSY = (1.05, 1.3, 1.6)
EQUALLY_BATCHED = [Cell("wandering", load) for load in (1.05, 1.1, 1.3)]
"""The cells of the gain over PetS that batches as `elastic` does."""
THEIR_BATCHING = "the rival batches as in the paper"
STATED_LINK = "NVMe, 2 GB/s"
"""The link over which INFaaS's models are loaded in the simulation whose gain is checked."""

SHOWN = (BURSTY, Cell("wandering", 1.1))
"""The cells whose figures are in docs/elastic.md."""


class Ended(NamedTuple):
    """What is kept of a run: all its answers would take gigabytes.

    Attributes:
      utility: utility as a share of the attainable.
      shares: share of the queries by outcome.
      levels: number of answers at each level.
    """

    utility: float
    shares: Mapping[Outcome, float]
    levels: Counter[int]

    @classmethod
    def from_served(cls, served: ServedTrace) -> "Ended":
        """Summarise a run."""
        return cls(served.normalised, {outcome: served.share(outcome) for outcome in Outcome}, served.levels)


Runs = Mapping[tuple[Cell, str], Sequence[Ended]]
"""Runs by cell and policy, a run per seed."""


def virtual(report: Report, setting: Setting, *, seeds: Sequence[int], queries: int) -> Runs:
    """Simulate all policies and fixed levels with both batchings in all cells, several cells at a time.

    Args:
      report: collects rows and checks.
      setting: the measured setting.
      seeds: the seeds in each cell.
      queries: approximate number of queries per run.

    Returns:
      The runs by cell and policy.
    """
    runs: dict[tuple[Cell, str], list[Ended]] = {}
    simulated = functools.partial(_simulate_cell, setting._replace(tests={}), seeds=seeds, queries=queries)
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        for cell, (ended, rows) in track(
            zip(CELLS, pool.map(simulated, CELLS), strict=True), "simulated", total=len(CELLS)
        ):
            runs |= {(cell, name): of_seeds for name, of_seeds in ended.items()}
            report.rows += rows
    _print(setting, runs)
    _check_equal_batching(report, setting, runs)
    _check(report, setting, runs)
    fragile(report, seeds=seeds, queries=queries)
    _infaas_simulated(report, seeds=seeds, queries=queries)
    return runs


def _simulate_cell(
    setting: Setting, cell: Cell, *, seeds: Sequence[int], queries: int
) -> tuple[dict[str, list[Ended]], list[dict[str, Any]]]:
    """Simulate all policies in a cell; return their runs, and the rows of a result."""
    drawn = [setting.queries(cell, seed=seed, count=queries) for seed in seeds]
    runs, rows, summed_up = {}, [], {}
    for name in setting.contenders:
        served = [setting.simulate(given, name, seed=seed) for seed, given in zip(seeds, drawn, strict=True)]
        runs[name] = [Ended.from_served(run) for run in served]
        rows.append(_policy_row(cell, name, runs[name]))
        if cell in SHOWN and name in setting.policies:
            summed_up[name] = served
    if summed_up:
        rows.append(summary_row(setting, cell, summed_up))
    arrivals = np.array([query.arrival for query in drawn[0]])
    traits = {name: round(float(value), 3) for name, value in burstiness(arrivals / setting.levels.scale).items()}
    return runs, [*rows, {"figure": "trace", **cell._asdict(), **traits}]


def shown(report: Report, setting: Setting, *, queries: int) -> None:
    """Simulate one run of all policies in the cells of `SHOWN`, for figures over time. All batch as `elastic` does."""
    names = [name for name in setting.contenders if name == OURS or name.endswith(BY_WORTH)]
    for cell in track(SHOWN, "simulated"):
        drawn = setting.queries(cell, seed=0, count=queries)
        runs = {name.removesuffix(BY_WORTH): [setting.simulate(drawn, name, seed=0)] for name in names}
        report.rows.append(summary_row(setting, cell, runs))


def summary_row(setting: Setting, cell: Cell, runs: Mapping[str, Sequence[ServedTrace]]) -> dict[str, Any]:
    """Summarise a cell's runs by policy in the row that its figures are drawn from."""
    recorded = []
    for policy, served in runs.items():
        measured = setting.models if is_infaas(policy) else setting.levels
        recorded += [
            Run.from_served(
                run, measured, policy=policy, arrivals=cell.trace, load=cell.load, seed=seed, clock="simulated"
            )
            for seed, run in enumerate(served)
        ]
    return {"figure": "shown", "summary": msgspec.to_builtins(summarise(recorded), str_keys=True)}


def _infaas_simulated(report: Report, *, seeds: Sequence[int], queries: int) -> None:
    """Simulate ViT-S/B/L against ViT-B's levels.

    Rates and accuracies are from the literature: nothing of it was run.
    """
    for link, bandwidth in LINKS.items():
        for by_worth in (False, True):
            gains = {
                load: statistics.mean(
                    simulated_gain(load, bandwidth, seed=seed, count=queries, by_worth=by_worth) for seed in seeds
                )
                for load in BUSY
            }
            rounded = {str(load): round(gain, 3) for load, gain in gains.items()}
            report.row(figure="infaas simulated", link=link, by_worth=by_worth, gains=rounded)
            batching = "as elastic does" if by_worth else "as in the paper"
            rich.print(f"INFaaS with ViT-S/B/L over {link} (simulated), batching {batching}: {rounded}")
            if link == STATED_LINK and not by_worth:
                report.check("gain_vs_infaas_simulated", min(gains.values()), f"x, simulated, {link}", target=1.75)


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and half the width of its 95% interval."""
    if len(values) < 2:
        return values[0], float("nan")
    half = stdtrit(len(values) - 1, 0.975) * statistics.stdev(values) / len(values) ** 0.5
    return statistics.mean(values), float(half)


def _policy_row(cell: Cell, name: str, runs: Sequence[Ended]) -> dict[str, Any]:
    mean, half = mean_interval([run.utility for run in runs])
    levels = sum((run.levels for run in runs), start=Counter[int]())
    return {
        "figure": "virtual",
        **cell._asdict(),
        "policy": name,
        "utility": round(mean, 4),
        "interval": round(half, 4),
        "outcomes": [round(statistics.mean(run.shares[outcome] for run in runs), 4) for outcome in Outcome],
        "levels": {str(level): round(levels[level] / levels.total(), 4) for level in sorted(levels)},
    }


def _print(setting: Setting, runs: Runs) -> None:
    """Print two tables per batching: a row per cell is too wide with all fixed levels."""
    fixed = [name for name in setting.policies if name not in (*POLICIES, INFAAS)]
    for ending, batching in (("", "their own batching"), (BY_WORTH, "equal batching")):
        for title, others in (("policies", [*POLICIES[1:], INFAAS]), ("fixed levels", [*fixed, "pets"])):
            names_shown = (name.removeprefix("level") for name in (OURS, *others))
            table = Table("trace, load", *names_shown, title=f"utility, of the attainable: {title}, {batching}")
            for cell in CELLS:
                columns = [OURS, *(f"{name}{ending}" for name in others)]
                means = {name: statistics.mean(_utilities(runs, cell, name)) for name in columns}
                most = max(means.values())
                marked = [f"[bold]{mean:.3f}[/]" if mean == most else f"{mean:.3f}" for mean in means.values()]
                table.add_row(str(cell), *marked)
            show(table)


def _utilities(runs: Runs, cell: Cell, name: str) -> list[float]:
    return [run.utility for run in runs[cell, name]]


def _ratios(runs: Runs, cell: Cell, name: str) -> list[float]:
    """The utility of `elastic` relative to a policy's, seed by seed."""
    pairs = zip(_utilities(runs, cell, OURS), _utilities(runs, cell, name), strict=True)
    return [ours / theirs for ours, theirs in pairs]


def _best_fixed(setting: Setting, runs: Runs, cell: Cell, ending: str = "") -> str:
    """The fixed level that is best in hindsight, of those whose names end so."""
    return best_fixed({name: statistics.mean(_utilities(runs, cell, name)) for name in setting.contenders}, ending)


def _check_equal_batching(report: Report, setting: Setting, runs: Runs) -> None:
    """Check gains over rivals that batch as `elastic` does."""
    gains = [statistics.mean(_ratios(runs, cell, f"pets{BY_WORTH}")) for cell in EQUALLY_BATCHED]
    report.check("gain_vs_pets_equal_batching", min(gains), "x, least of 1.05x to 1.3x", target=1.1)
    rivals = {cell: _best_fixed(setting, runs, cell, BY_WORTH) for cell in SWINGS_AT_PERIODS}
    gain = statistics.mean(statistics.mean(_ratios(runs, cell, rival)) for cell, rival in rivals.items())
    attainable = statistics.mean(1 / u for cell, rival in rivals.items() for u in _utilities(runs, cell, rival))
    unit = f"x, mean over the periods; {attainable:.3f}x if every query earned what is attainable"
    report.check("gain_vs_best_fixed_swing_equal_batching", gain, unit, target=1.08)


def _check(report: Report, setting: Setting, runs: Runs) -> None:
    """Check utility, and gains over rivals that batch as the paper does."""
    cells = PUBLISHED

    def utilities(cell: Cell, name: str) -> list[float]:
        return _utilities(runs, cell, name)

    def ratios(cell: Cell, name: str) -> list[float]:
        return _ratios(runs, cell, name)

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
    right = statistics.mean(run.shares[Outcome.CORRECT] for run in runs[Cell("wandering", 1.1), OURS])
    report.check("type1_share", right, "of queries, right and in time, 1.1x", target=0.78)
    busy = [Cell("wandering", load) for load in BUSY]
    gain = min(statistics.mean(ratios(cell, "pets")) for cell in busy)
    report.check("gain_vs_pets", gain, f"x, {THEIR_BATCHING}", target=1.2)
    everywhere = min(statistics.mean(ratios(cell, INFAAS)) for cell in cells)
    report.check("gain_vs_infaas_real", everywhere, f"x, measured loads, {THEIR_BATCHING}", target=1.0)
    usual = of_wandering(1.3, 0.8)
    gain = min(statistics.mean(ratios(cell, "paper")) for cell in usual)
    report.check("gain_vs_paper_mode", gain, f"x, {THEIR_BATCHING}", target=1.05)
    profiled = [*of_wandering(1.6, 1.1), SWINGING, Cell("azure conv", 1.1)]
    gain = min(statistics.mean(ratios(cell, "paper_profiled")) for cell in profiled)
    report.check("gain_vs_paper_profiled", gain, f"x, from 1.1x on, {THEIR_BATCHING}", target=1.05)
    best_level = {cell: _best_fixed(setting, runs, cell) for cell in cells}
    rivals = {
        "gain_vs_best_fixed": best_level,
        "gain_vs_slack": dict.fromkeys(cells, "slack"),
        "gain_vs_slackfit": dict.fromkeys(cells, "slackfit"),
    }
    for name, rival in rivals.items():
        unit = f"x, lower 95% bound, {THEIR_BATCHING}"
        report.check(name, min(lower_bound(cell, rival[cell]) for cell in cells), unit, target=0.99)
        report.check(f"{name}_bursty", lower_bound(BURSTY, rival[BURSTY]), unit, target=1.0)
    swing = statistics.mean(ratios(SWINGING, best_level[SWINGING]))
    report.check("gain_vs_best_fixed_swing", swing, f"x, {THEIR_BATCHING}", target=1.05)
    late = max(statistics.mean(run.shares[Outcome.LATE] for run in runs[cell, OURS]) for cell in cells)
    report.check("late_share_virtual", late, "of queries", target=0.001, better="lower")

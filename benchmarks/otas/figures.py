"""The figures of docs/elastic.md, from two cells: those of `jaxinfer elastic report`, a file each."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

from benchmarks.otas.setting import INFAAS, Cell, Setting
from jaxinfer.cli.bench.plots import write_plot
from jaxinfer.evaluation.elastic import plots
from jaxinfer.evaluation.elastic.runs import Run
from jaxinfer.evaluation.elastic.simulator import Served

SHOWN = (Cell("bursty", 0.8), Cell("wandering", 1.1))


def draw_all(setting: Setting, runs: Mapping[tuple[Cell, str], Sequence[Served]], folder: Path) -> None:
    """Write all figures; text stays text, so that files are small."""
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "otas"}):
        write_plot(folder / "levels.svg", plots.draw_levels(setting.levels.profile))
        write_plot(folder / "batches.svg", plots.draw_batches(setting.levels.profile))
        for cell in SHOWN:
            cell_runs, trace = _recorded(setting, cell, runs), cell.trace
            write_plot(folder / f"{trace}-arrivals.svg", plots.draw_arrivals(cell_runs[0]))
            write_plot(folder / f"{trace}-utility.svg", plots.draw_utility(cell_runs))
            write_plot(folder / f"{trace}-outcomes.svg", plots.draw_outcomes(cell_runs))
            write_plot(folder / f"{trace}-chosen.svg", plots.draw_chosen(cell_runs))
            write_plot(folder / f"{trace}-accuracies.svg", plots.draw_accuracies(cell_runs))


def _recorded(setting: Setting, cell: Cell, runs: Mapping[tuple[Cell, str], Sequence[Served]]) -> list[Run]:
    """Convert a cell's runs to those of reports."""
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
    return recorded

"""The figures of docs/elastic.md, from a result: those of `jaxinfer elastic report`, a file each."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.otas.setting import BY_WORTH, INFAAS, OURS
from benchmarks.otas.tables import Rows, cell_of
from benchmarks.otas.virtual import SHOWN
from benchmarks.report import caption
from jaxinfer.elastic.scheduling.profile import ServingProfile
from jaxinfer.evaluation.elastic import plots
from jaxinfer.evaluation.elastic.summaries import CellSummary
from jaxinfer.evaluation.figures import write_figure

MODEL = "examples/elastic_vit"


def draw_all(result: Mapping[str, Any], folder: Path) -> None:
    """Write the figures for which a result has rows: of the setting, and of cells, some of these over time.

    In the figures of cells all policies batch as ours does.
    """
    rows = result["rows"]
    for row in (row for row in rows if row["figure"] == "setting"):
        profile, source = _profile(row), caption(result, f"{MODEL}, measured")
        write_figure(folder / "levels.svg", plots.draw_levels(profile, source))
        write_figure(folder / "batches.svg", plots.draw_batches(profile, source))
        for cell in SHOWN:
            cells = (row for row in rows if row["figure"] == "virtual" and cell_of(row) == cell)
            policies = [
                {**row, "policy": row["policy"].removesuffix(BY_WORTH)}
                for row in cells
                if row["policy"] == OURS or row["policy"].endswith(BY_WORTH)
            ]
            if len(policies) > 1:
                _draw_policies(policies, profile.levels, caption(result, _load(*cell[:2])), folder / cell.trace)
    notes = [row["text"] for row in rows if row["figure"] == "note"]
    for row in (row for row in rows if row["figure"] == "shown"):
        cell = msgspec.convert(row["summary"], CellSummary, strict=False)
        what = ", ".join([_load(cell.arrivals, cell.load), f"one run of {cell.queries:,} queries", *notes])
        for name, draw in plots.OVER_TIME.items():
            write_figure(folder / f"{cell.arrivals}-{name}.svg", draw(cell, caption(result, what)))


def _draw_policies(rows: Rows, levels: Sequence[int], source: str, begin: Path) -> None:
    """Write the figures of a cell that are means of all seeds."""
    outcomes = {row["policy"]: row["outcomes"] for row in rows}
    chosen = {row["policy"]: {int(level): share for level, share in row["levels"].items()} for row in rows}
    del chosen[INFAAS]  # its levels are models
    write_figure(begin.with_name(f"{begin.name}-outcomes.svg"), plots.draw_outcomes(outcomes, source))
    write_figure(begin.with_name(f"{begin.name}-chosen.svg"), plots.draw_chosen(chosen, levels, source))


def _load(arrivals: str, load: float) -> str:
    return f"{MODEL}, {arrivals} arrivals at {load}x the capacity of level 0, simulated with measured times"


def _profile(row: Mapping[str, Any]) -> ServingProfile:
    """The profile in a result's row of the setting."""
    seconds, accuracy = (
        {tuple(key.split()): value for key, value in row[name].items()} for name in ("seconds", "accuracy")
    )
    return ServingProfile(
        levels=tuple(dict.fromkeys(int(level) for level, _ in seconds)),
        sizes=tuple(dict.fromkeys(int(size) for _, size in seconds)),
        seconds={(int(level), int(size)): value for (level, size), value in seconds.items()},
        accuracy={(task, int(level)): value for (task, level), value in accuracy.items()},
    )

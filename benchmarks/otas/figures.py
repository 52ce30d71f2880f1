"""The figures of docs/elastic.md, from a result: those of `jaxinfer elastic report`, a file each."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.report import caption
from jaxinfer.elastic.scheduling.profile import ServingProfile
from jaxinfer.evaluation.elastic import plots
from jaxinfer.evaluation.elastic.summaries import CellSummary
from jaxinfer.evaluation.figures import write_figure

MODEL = "examples/elastic_vit"


def draw_all(result: Mapping[str, Any], folder: Path) -> None:
    """Write all figures of a result that has them: one of the part `virtual`."""
    for row in result["rows"]:
        if row["figure"] == "setting":
            source = caption(result, f"{MODEL}, measured")
            write_figure(folder / "levels.svg", plots.draw_levels(_profile(row), source))
            write_figure(folder / "batches.svg", plots.draw_batches(_profile(row), source))
        elif row["figure"] == "shown":
            cell = msgspec.convert(row["summary"], CellSummary, strict=False)
            load = f"{cell.arrivals} arrivals at {cell.load}x the capacity of level 0"
            what = f"{MODEL}, {load}, simulated with measured times"
            for name, draw in plots.OF_CELLS.items():
                write_figure(folder / f"{cell.arrivals}-{name}.svg", draw(cell, caption(result, what)))


def _profile(row: Mapping[str, Any]) -> ServingProfile:
    """Return the profile in a result's row of the setting."""
    seconds, accuracy = (
        {tuple(key.split()): value for key, value in row[name].items()} for name in ("seconds", "accuracy")
    )
    return ServingProfile(
        levels=tuple(dict.fromkeys(int(level) for level, _ in seconds)),
        sizes=tuple(dict.fromkeys(int(size) for _, size in seconds)),
        seconds={(int(level), int(size)): value for (level, size), value in seconds.items()},
        accuracy={(task, int(level)): value for (task, level), value in accuracy.items()},
    )

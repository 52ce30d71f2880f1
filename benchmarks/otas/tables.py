"""README's tables of elastic serving, from results: `python -m benchmarks.otas.tables FILE...` prints them."""

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.otas.setting import INFAAS, TABLE_II, Cell
from benchmarks.readme import table
from jaxinfer.elastic.scheduling.policies import POLICIES

type Rows = Sequence[Mapping[str, Any]]


def tables(rows: Rows) -> dict[str, str]:
    """By title, in Markdown; those that there are rows for."""
    made = {
        "Simulated": simulated([row for row in rows if row["figure"] == "virtual"]),
        "A fragile task, simulated": fragile([row for row in rows if row["figure"] == "fragile"]),
        "Live": live([row for row in rows if row["figure"] == "live"]),
    }
    return {title: text for title, text in made.items() if text.count("\n") > 1}


def simulated(rows: Rows) -> str:
    """A line a cell: utilities of the policies, and of the best fixed level beside them."""
    cells: dict[Cell, dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for row in rows:
        cells[Cell(row["trace"], row["load"], row.get("mix", TABLE_II))][row["policy"]] = row
    shown, lines = [*POLICIES, INFAAS], []
    for cell, found in cells.items():
        fixed = max((name for name in found if name not in shown), key=lambda name: found[name]["utility"])
        values = {name: found[name]["utility"] for name in (*shown, fixed)}
        texts = {name: f"{value:.3f}" for name, value in values.items()}
        winner = max(values, key=values.__getitem__)
        texts[winner] = f"**{texts[winner]}**"
        texts["elastic"] += f" ± {found['elastic']['interval']:.3f}"
        texts[fixed] += f" ({fixed.removeprefix('level')})"
        lines.append([str(cell), *texts.values()])
    return table(["arrivals, load", *shown, "best fixed level"], lines)


def fragile(rows: Rows) -> str:
    """A line a load."""
    loads: dict[float, dict[str, float]] = defaultdict(dict)
    for row in rows:
        loads[row["load"]][row["policy"]] = row["utility"]
    adapting = [name for name in POLICIES if any(name in found and name != "pets" for found in loads.values())]
    lines = []
    for load, found in loads.items():
        fixed = max(found.keys() - adapting, key=found.__getitem__)
        texts = [f"{found[name]:.3f}" for name in adapting]
        lines.append([f"{load}x", *texts, f"{found[fixed]:.3f} ({fixed.removeprefix('level')})"])
    return table(["load", *adapting, "best fixed level"], lines)


def live(rows: Rows) -> str:
    """A line a cell: utility live, and what was simulated with the run's own batch times."""
    cells: dict[Cell, dict[str, list[Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        cells[Cell(row["trace"], row["load"], row.get("mix", TABLE_II))][row["policy"]].append(row)

    def mean(runs: Rows, name: str) -> str:
        return f"{statistics.mean(run[name] for run in runs):.3f}"

    names = list(next(iter(cells.values()), {}))
    lines = [
        [str(cell), *(f"{mean(found[name], 'utility')} ({mean(found[name], 'simulated')})" for name in names)]
        for cell, found in cells.items()
    ]
    return table(["live (simulated with its batch times)", *names], lines)


def main() -> None:
    rows = [row for file in sys.argv[1:] for row in json.loads(Path(file).read_text())["rows"]]
    for title, text in tables(rows).items():
        print(f"\n{title}\n\n{text}")


if __name__ == "__main__":
    main()

"""The tables of docs/benchmarks/deadlines.md, from results: `python -m benchmarks.otas.tables FILE...` prints them."""

import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.otas.fragile import ADAPTING
from benchmarks.otas.setting import INFAAS, Cell
from benchmarks.pages import rows_of, table
from jaxinfer.elastic.scheduling.policies import POLICIES

type Rows = Sequence[Mapping[str, Any]]


def tables(rows: Rows) -> dict[str, str]:
    """Make the tables that have rows in Markdown, by title."""
    made = {
        "Simulated": simulated([row for row in rows if row["figure"] == "virtual"]),
        "A fragile task, simulated": fragile([row for row in rows if row["figure"] == "fragile"]),
        "Live": live([row for row in rows if row["figure"] == "live"]),
    }
    return {title: text for title, text in made.items() if text.count("\n") > 1}


def cell_of(row: Mapping[str, Any]) -> Cell:
    return Cell(row["trace"], row["load"], row["mix"])


def simulated(rows: Rows) -> str:
    """Make a line per cell: utilities of the policies, and of the best fixed level."""
    cells: dict[Cell, dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for row in rows:
        cells[cell_of(row)][row["policy"]] = row
    shown, lines = [*POLICIES, INFAAS], []
    for cell, utilities in cells.items():
        fixed = max((name for name in utilities if name not in shown), key=lambda name: utilities[name]["utility"])
        values = {name: utilities[name]["utility"] for name in (*shown, fixed)}
        texts = {name: f"{value:.3f}" for name, value in values.items()}
        winner = max(values, key=values.__getitem__)
        texts[winner] = f"**{texts[winner]}**"
        texts["elastic"] += f" ± {utilities['elastic']['interval']:.3f}"
        texts[fixed] += f" ({fixed.removeprefix('level')})"
        lines.append([str(cell), *texts.values()])
    return table(["arrivals, load", *shown, "best fixed level"], lines)


def fragile(rows: Rows) -> str:
    """Make a line per load."""
    loads: dict[float, dict[str, float]] = defaultdict(dict)
    for row in rows:
        loads[row["load"]][row["policy"]] = row["utility"]
    lines = []
    for load, utilities in loads.items():
        fixed = max(utilities.keys() - set(ADAPTING), key=utilities.__getitem__)
        texts = [f"{utilities[name]:.3f}" for name in ADAPTING]
        lines.append([f"{load}x", *texts, f"{utilities[fixed]:.3f} ({fixed.removeprefix('level')})"])
    return table(["load", *ADAPTING, "best fixed level"], lines)


def live(rows: Rows) -> str:
    """Make a line per cell: live utility, and that simulated with the run's own batch times."""
    cells: dict[Cell, dict[str, list[Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        cells[cell_of(row)][row["policy"]].append(row)

    def mean(runs: Rows, name: str) -> str:
        return f"{statistics.mean(run[name] for run in runs):.3f}"

    names = list(next(iter(cells.values()), {}))
    lines = [
        [str(cell), *(f"{mean(policies[name], 'utility')} ({mean(policies[name], 'simulated')})" for name in names)]
        for cell, policies in cells.items()
    ]
    return table(["live (simulated with its batch times)", *names], lines)


def main() -> None:
    for title, text in tables(rows_of(sys.argv[1:])).items():
        print(f"\n{title}\n\n{text}")


if __name__ == "__main__":
    main()

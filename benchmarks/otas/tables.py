"""The tables of docs/benchmarks/deadlines.md, from results: `python -m benchmarks.otas.tables FILE...` prints them."""

import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.otas.fragile import ADAPTING
from benchmarks.otas.setting import BY_WORTH, INFAAS, OURS, Cell, best_fixed
from benchmarks.pages.tables import rows_of, table
from jaxinfer.elastic.scheduling.policies import POLICIES

type Rows = Sequence[Mapping[str, Any]]


def tables(rows: Rows) -> dict[str, str]:
    """Make the tables that have rows in Markdown, by title."""
    made = {
        "Simulated, equal batching": simulated([row for row in rows if row["figure"] == "virtual"], BY_WORTH),
        "Simulated, others batch as in the paper": simulated([row for row in rows if row["figure"] == "virtual"]),
        "A fragile task, simulated": fragile([row for row in rows if row["figure"] == "fragile"]),
        "INFaaS with ViT-S/B/L": infaas([row for row in rows if row["figure"] == "infaas simulated"]),
        "Live": live([row for row in rows if row["figure"] == "live"]),
    }
    return {title: text for title, text in made.items() if text.count("\n") > 1}


def cell_of(row: Mapping[str, Any]) -> Cell:
    return Cell(row["trace"], row["load"], row["mix"])


def simulated(rows: Rows, ending: str = "") -> str:
    """Make a line per cell: utilities of the policies, and of the best fixed level, whose names end so."""
    cells: dict[Cell, dict[str, float]] = defaultdict(dict)
    intervals = {}
    for row in rows:
        cells[cell_of(row)][row["policy"]] = row["utility"]
        if row["policy"] == OURS:
            intervals[cell_of(row)] = row["interval"]
    others, lines = [*POLICIES[1:], INFAAS], []
    for cell, utilities in cells.items():
        fixed = best_fixed(utilities, ending)
        values = [utilities[OURS], *(utilities[f"{name}{ending}"] for name in others), utilities[fixed]]
        texts = [f"**{value:.3f}**" if value == max(values) else f"{value:.3f}" for value in values]
        texts[0] += f" ± {intervals[cell]:.3f}"
        texts[-1] += f" ({_level(fixed)})"
        lines.append([str(cell), *texts])
    return table(["arrivals, load", OURS, *others, "best fixed level"], lines)


def _level(fixed: str) -> str:
    """The level of a policy that has one, as in "-8"."""
    return fixed.removesuffix(BY_WORTH).removeprefix("level").replace("pets", "0")


def fragile(rows: Rows) -> str:
    """Make two lines per load: the others batch as `elastic` does, and as the paper does."""
    loads: dict[float, dict[str, float]] = defaultdict(dict)
    for row in rows:
        loads[row["load"]][row["policy"]] = row["utility"]
    lines = []
    for load, utilities in loads.items():
        for ending, batching in ((BY_WORTH, "equal"), ("", "paper's")):
            fixed = best_fixed(utilities, ending)
            names = [OURS, *(f"{name}{ending}" for name in ADAPTING[1:])]
            texts = [f"{utilities[name]:.3f}" for name in names]
            lines.append([f"{load}x", batching, *texts, f"{utilities[fixed]:.3f} ({_level(fixed)})"])
    return table(["load", "batching", *ADAPTING, "best fixed level"], lines)


def infaas(rows: Rows) -> str:
    """Make a line per link: the gains with both batchings, from the least to the most over the loads."""
    links: dict[str, dict[bool, str]] = defaultdict(dict)
    for row in rows:
        gains = row["gains"].values()
        links[row["link"]][row["by_worth"]] = f"{min(gains):.2f} to {max(gains):.2f}x"
    lines = [[link, gains[True], gains[False]] for link, gains in links.items()]
    return table(["models loaded over", "gain, equal batching", "gain, INFaaS batches as the paper does"], lines)


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

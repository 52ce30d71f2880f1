"""Results of recorded runs as tables."""

import re
import statistics
from collections.abc import Iterable, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from jaxinfer.elastic.scheduling.policies import POLICIES
from jaxinfer.elastic.scheduling.query import Outcome
from jaxinfer.evaluation.elastic.runs import Run

Cell = tuple[str, str, float]
"""Clock, arrivals and load."""

OUTCOMES = {
    Outcome.CORRECT: "right, in time",
    Outcome.WRONG: "wrong, in time",
    Outcome.LATE: "late",
    Outcome.SHED: "shed",
}
HEADINGS = ("policy", "runs", "utility", *(f"{what}, %" for what in OUTCOMES.values()), "mean level")


def by_cell(runs: Iterable[Run]) -> dict[Cell, list[Run]]:
    """Group comparable runs, with policies in the order in which they are always shown."""
    cells: dict[Cell, list[Run]] = {}
    for run in sorted(runs, key=lambda run: (_place(run.header.policy), run.header.seed)):
        cells.setdefault((run.header.clock, run.header.arrivals, run.header.load), []).append(run)
    return dict(sorted(cells.items()))


def _place(policy: str) -> tuple[int, int, str]:
    if match := re.fullmatch(r"level([+-]\d+)", policy):
        return len(POLICIES) + 1, int(match[1]), policy
    return (POLICIES.index(policy) if policy in POLICIES else len(POLICIES)), 0, policy


def title_of(cell: Cell) -> str:
    """Describe a cell in words."""
    clock, arrivals, load = cell
    return f"{arrivals} at {load:.2f}x the capacity of level 0, {'live' if clock == 'wall' else 'simulated'}"


def rows_of(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """Make a row for each policy, as in `HEADINGS`; utility is a share of the upper bound."""
    rows = []
    for policy in dict.fromkeys(run.header.policy for run in runs):
        policy_runs = [run.served for run in runs if run.header.policy == policy]
        levels = [answer.level for served in policy_runs for answer in served.answers if answer.level is not None]
        shares = (100 * statistics.mean(served.share(outcome) for served in policy_runs) for outcome in Outcome)
        rows.append(
            (
                policy,
                str(len(policy_runs)),
                f"{statistics.mean(served.normalised for served in policy_runs):.3f}",
                *(f"{share:.2f}" for share in shares),
                f"{statistics.mean(levels):+.1f}" if levels else "",
            )
        )
    return rows


def terminal_table(cell: Cell, runs: Sequence[Run]) -> Table:
    """Make the table of a cell's runs for a terminal of 80 columns."""
    table = Table(box=SIMPLE_HEAD, title=title_of(cell), title_justify="left", pad_edge=False, padding=(0, 1, 0, 0))
    for place, heading in enumerate(HEADINGS):
        lines = heading.replace(" in time", "\nin time").replace("mean ", "mean\n")
        table.add_column(lines, justify="right" if place else "left", no_wrap=True)
    for row in rows_of(runs):
        table.add_row(*row)
    return table

"""What recorded runs earned, as tables."""

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
    """Runs that can be compared, policies in the order in which they are always shown."""
    found: dict[Cell, list[Run]] = {}
    for run in sorted(runs, key=lambda run: (_place(run.header.policy), run.header.seed)):
        found.setdefault((run.header.clock, run.header.arrivals, run.header.load), []).append(run)
    return dict(sorted(found.items()))


def _place(policy: str) -> tuple[int, int, str]:
    if found := re.fullmatch(r"level([+-]\d+)", policy):
        return len(POLICIES) + 1, int(found[1]), policy
    return (POLICIES.index(policy) if policy in POLICIES else len(POLICIES)), 0, policy


def title_of(cell: Cell) -> str:
    """What a cell is, in words."""
    clock, arrivals, load = cell
    return f"{arrivals} at {load:.2f}x the capacity of level 0, {'live' if clock == 'wall' else 'simulated'}"


def rows_of(runs: Sequence[Run]) -> list[tuple[str, ...]]:
    """A row for each policy, as `HEADINGS` says; utility as a share of all that there was to earn."""
    rows = []
    for policy in dict.fromkeys(run.header.policy for run in runs):
        own = [run.served for run in runs if run.header.policy == policy]
        levels = [answer.level for served in own for answer in served.answers if answer.level is not None]
        shares = (100 * statistics.mean(served.share(outcome) for served in own) for outcome in Outcome)
        rows.append(
            (
                policy,
                str(len(own)),
                f"{statistics.mean(served.normalised for served in own):.3f}",
                *(f"{share:.2f}" for share in shares),
                f"{statistics.mean(levels):+.1f}" if levels else "",
            )
        )
    return rows


def terminal_table(cell: Cell, runs: Sequence[Run]) -> Table:
    """The same for a terminal."""
    table = Table(*HEADINGS, box=SIMPLE_HEAD, title=title_of(cell), title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows_of(runs):
        table.add_row(*row)
    return table

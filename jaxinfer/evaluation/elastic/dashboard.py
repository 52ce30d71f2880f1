"""A live view of a service while queries are served."""

import time
from collections import Counter, deque
from typing import NamedTuple

from rich.console import Group
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table

from jaxinfer.elastic.service import Service

WINDOW = 1.0
"""Seconds over which rates are measured."""
BAR = 16
"""Length of the longest bar in characters."""


class _Snapshot(NamedTuple):
    at: float
    sent: int
    answered: int
    shed: int
    utility: float
    levels: Counter[int]


class Dashboard:
    """Rates over the last second, levels as bars, and totals; drawn whenever rich asks.

    Args:
      service: the service shown.
      title: the panel's title.
      total: number of queries that will be sent.
    """

    def __init__(self, service: Service, title: str, total: int):
        self._service, self._title, self._total, self._sent = service, title, total, 0
        self._past: deque[_Snapshot] = deque([_Snapshot(time.perf_counter(), 0, 0, 0, 0.0, Counter())])

    def watch(self, sent: int) -> None:
        """Set the number of queries sent so far."""
        self._sent = sent

    def __rich__(self) -> Panel:
        statistics = self._service.stats()
        now = _Snapshot(
            time.perf_counter(),
            self._sent,
            statistics.answered,
            statistics.shed,
            statistics.utility,
            Counter(statistics.levels),
        )
        self._past.append(now)
        while len(self._past) > 2 and self._past[1].at < now.at - WINDOW:
            self._past.popleft()
        before = self._past[0]
        seconds = max(now.at - before.at, 1e-9)
        rates, totals = _columns(), _columns()
        for name, new, old in (
            ("queries/s", now.sent, before.sent),
            ("answers/s", now.answered, before.answered),
            ("shed/s", now.shed, before.shed),
            ("utility/s", now.utility, before.utility),
        ):
            rates.add_row(name, f"[bold]{(new - old) / seconds:,.0f}")
        for name, value in (
            ("sent", f"{now.sent:,} of {self._total:,}"),
            ("answered", f"{now.answered:,}"),
            ("late", f"{statistics.late:,}"),
            ("shed", f"{now.shed:,}"),
            ("waiting", f"{self._service.num_requests:,}"),
            ("batches", f"{statistics.batches:,}"),
            ("planning", f"{1e3 * statistics.planning_seconds / max(statistics.batches, 1):.2f} ms"),
            ("fallbacks", f"{statistics.fallbacks:,}"),
        ):
            totals.add_row(name, value)
        figures, progress = _columns(), Table.grid(expand=True)
        figures.add_row(rates, totals, self._levels(now.levels - before.levels))
        progress.add_row(ProgressBar(max(self._total, 1), now.sent))
        return Panel(Group(progress, figures), title=self._title)

    def _levels(self, ran: Counter[int]) -> Table:
        """Draw a bar for each level of the service, over the last second."""
        table, most = _columns(), max(ran.values(), default=1)
        for level in reversed(self._service.levels):
            name = f"{level:+d}" if level else "0"
            table.add_row(name, "█" * round(BAR * ran[level] / most), str(ran[level] or ""))
        return table


def _columns() -> Table:
    """Make a table without lines, where nothing wraps."""
    table = Table.grid(padding=(0, 2))
    for _ in range(3):
        table.add_column(no_wrap=True)
    return table

"""The tables of the experts commands."""

import itertools
from collections.abc import Iterable, Mapping

import numpy as np
from rich.filesize import decimal
from rich.table import Table

from jaxinfer.cli.display import figure, table
from jaxinfer.evaluation.experts.forecast import Forecast, MemoryAdvice
from jaxinfer.experts.execution.profiler import Measured
from jaxinfer.experts.opened import OpenedSystem

ARCHITECTURES = 3
"""Architectures that a table has room for, side by side, in 80 columns."""


def sizes(counts: Iterable[int]) -> str:
    """Format byte counts for people.

    >>> sizes([1000, 2_500_000])
    '1.0 kB, 2.5 MB'
    """
    return ", ".join(map(decimal, counts))


def profile_tables(opened: OpenedSystem, measured: Mapping[tuple[str, str], Measured]) -> list[Table]:
    """Return tables of what architectures cost, a column each."""
    title = "A batch of n takes K n + B"
    return [_profile_table(opened, dict(some), title) for some in itertools.batched(measured.items(), ARCHITECTURES)]


def _profile_table(opened: OpenedSystem, measured: Mapping[tuple[str, str], Measured], title: str) -> Table:
    columns = []
    for (architecture, device), measurement in measured.items():
        profile = measurement.profile
        members = [name for name, expert in opened.experts.items() if expert.architecture.name == architecture]
        columns.append(
            (
                device,
                str(len(members)),
                decimal(opened.graph.experts[members[0]].bytes),
                _ms(profile.k),
                _ms(profile.b),
                f"{measurement.r_squared:.3f}",
                str(profile.max_batch),
                decimal(profile.activation_bytes),
                _ms(profile.load["disk"]),
                _ms(profile.load["host"]),
                _ms(profile.evict),
            )
        )
    rows = (
        "device",
        "experts",
        "weights of each",
        "K ms",
        "B ms",
        "R² of the line",
        "largest batch",
        "memory of a request",
        "load from disk, ms",
        "load from host, ms",
        "copy to host, ms",
    )
    names = [name.replace("-", "\n") for name, _ in measured]  # kind, size and digest below one another
    made = table("architecture", *names, figures=len(measured), title=title)
    for row, *cells in zip(rows, *columns, strict=True):
        made.add_row(row, *cells)
    return made


def usage_table(opened: OpenedSystem, expected: Forecast, top: int) -> Table:
    """Return a table of the most used experts, and which pools have them at the start.

    The share of inputs that reach an expert is the configured one, and the one learned by the end of the trace.
    """
    graph = opened.graph
    title = f"The {min(top, len(graph.experts))} most used of {len(graph.experts)} experts"
    made = table("expert", "architecture", "in pools", "inputs", "learned", "weights", figures=3, title=title)
    for name in graph.by_usage[:top]:
        expert = graph.experts[name]
        pools = ", ".join(str(pool) for pool, names in expected.placed.items() if name in names)
        shares = (f"{usage[name]:.1%}" for usage in (graph.usage, expected.outcome.statistics.usage))
        made.add_row(name, expert.architecture, pools or "-", *shares, decimal(expert.bytes))
    return made


def pool_table(expected: Forecast) -> Table:
    """Return a table of the pools at the start."""
    made = table("pool", "executors", "experts", "used", "left", figures=3, title="Pools at the start")
    experts = expected.scheduler.graph.experts
    for pool in expected.scheduler.manager.pools:
        users = ", ".join(x.config.name for x in expected.scheduler.executors if x.pool is pool)
        names = expected.placed[pool.index]
        used = sum(experts[name].bytes for name in names)
        made.add_row(str(pool.index), users, str(len(names)), decimal(used), decimal(pool.budget - used))
    return made


def window_table(advice: MemoryAdvice) -> Table:
    """Return a table of what the search for memory tried."""
    made = table("inputs that they serve", "experts", "inputs/s", figures=2, title="Room for experts, by simulation")
    for high, some in itertools.groupby(advice.windows, lambda window: window.experts[1]):
        windows = list(some)
        first, last = windows[0], windows[-1]
        between = f"{low} to {high}" if (low := first.experts[0]) < high else str(high)
        made.add_row(f"{first.lower:.0f} to {last.upper:.0f}%", between, figure(last.throughput))
    return made


def mode_table(forecasts: Mapping[str, Forecast], requests: int) -> Table:
    """Return a table that compares policies on one trace."""
    columns = ("inputs/s", "loads", "of disk", "least", "batches", "p50 ms", "p99 ms", "failed")
    made = table("mode", *columns, figures=len(columns), title=f"{requests} inputs on a simulated clock")
    for name, item in forecasts.items():
        outcome = item.outcome
        loads, latencies = outcome.statistics.loads, outcome.latencies
        tail = [_ms(float(value)) for value in np.percentile(latencies, (50, 99))] if latencies else ["-", "-"]
        counts = (loads.total(), loads["disk"], item.bound, outcome.statistics.batches)
        made.add_row(name, figure(outcome.throughput), *map(str, counts), *tail, str(outcome.failed))
    return made


def _ms(seconds: float) -> str:
    return figure(seconds * 1e3, 3)

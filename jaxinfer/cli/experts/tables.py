"""The tables of the experts commands."""

from collections.abc import Iterable, Mapping

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.filesize import decimal
from rich.table import Table

from jaxinfer.evaluation.experts.forecast import Forecast, MemoryAdvice
from jaxinfer.experts.execution.profiler import Measured
from jaxinfer.experts.opened import OpenedSystem
from jaxinfer.experts.scheduling.profile import MIN_R_SQUARED as MIN_R_SQUARED


def sizes(counts: Iterable[int]) -> str:
    """Format byte counts for people.

    >>> sizes([1000, 2_500_000])
    '1.0 kB, 2.5 MB'
    """
    return ", ".join(map(decimal, counts))


def profile_table(opened: OpenedSystem, measured: Mapping[tuple[str, str], Measured]) -> Table:
    """Return a table of what architectures cost; times in milliseconds."""
    columns = ("experts", "weights", "K", "B", "R²", "max batch", "disk", "host", "evict", "a request")
    table = _table("architecture", "device", *columns, title="A batch of n takes K n + B; times in ms", left=2)
    infos = opened.graph.experts.values()
    for (architecture, device), measurement in measured.items():
        profile, members = measurement.profile, [expert for expert in infos if expert.architecture == architecture]
        times = (profile.load["disk"], profile.load["host"], profile.evict)
        table.add_row(
            architecture,
            device,
            str(len(members)),
            decimal(members[0].bytes),
            _ms(profile.k),
            _ms(profile.b),
            f"{measurement.r_squared:.3f}",
            str(profile.max_batch),
            *map(_ms, times),
            decimal(profile.activation_bytes),
        )
    return table


def usage_table(opened: OpenedSystem, expected: Forecast, top: int) -> Table:
    """Return a table of the most used experts, and which pools have them at the start."""
    graph = opened.graph
    title = f"The {min(top, len(graph.experts))} most used of {len(graph.experts)} experts"
    table = _table("expert", "architecture", "in pools", "inputs", "weights", title=title, left=3)
    for name in graph.by_usage[:top]:
        expert = graph.experts[name]
        pools = ", ".join(str(pool) for pool, names in expected.placed.items() if name in names)
        table.add_row(name, expert.architecture, pools or "-", f"{graph.usage[name]:.1%}", decimal(expert.bytes))
    return table


def pool_table(expected: Forecast) -> Table:
    """Return a table of the pools at the start."""
    table = _table("pool", "executors", "experts", "used", "left", title="Pools at the start", left=2)
    experts = expected.scheduler.graph.experts
    for pool in expected.scheduler.manager.pools:
        users = ", ".join(x.config.name for x in expected.scheduler.executors if x.pool is pool)
        names = expected.placed[pool.index]
        used = sum(experts[name].bytes for name in names)
        table.add_row(str(pool.index), users, str(len(names)), decimal(used), decimal(pool.budget - used))
    return table


def window_table(advice: MemoryAdvice) -> Table:
    """Return a table of what the search for memory tried."""
    table = _table("inputs that they serve", "experts", "inputs/s", title="Room for experts, by simulation", left=1)
    for window in advice.choice.windows:
        low, high = window.experts
        between = f"{low} to {high}" if low < high else str(high)
        table.add_row(f"{window.lower:.0f} to {window.upper:.0f}%", between, f"{window.throughput:.4g}")
    return table


def mode_table(forecasts: Mapping[str, Forecast], requests: int) -> Table:
    """Return a table that compares policies on one trace."""
    columns = ("inputs/s", "loads", "from disk", "from host", "at least", "batches", "p50 ms", "p99 ms", "failed")
    table = _table("mode", *columns, title=f"{requests} inputs on a simulated clock", left=1)
    for name, item in forecasts.items():
        outcome = item.outcome
        loads, latencies = outcome.statistics.loads, outcome.latencies
        tail = [_ms(float(value)) for value in np.percentile(latencies, (50, 99))] if latencies else ["-", "-"]
        counts = (loads.total(), loads["disk"], loads["host"], item.bound, outcome.statistics.batches)
        table.add_row(name, f"{outcome.throughput:.4g}", *map(str, counts), *tail, str(outcome.failed))
    return table


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def _table(*columns: str, title: str, left: int) -> Table:
    """Return an empty table whose first `left` columns are text."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place < left else "right", no_wrap=place < left)
    return table

"""The tables of the bench commands."""

from collections.abc import Iterable

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from jaxinfer.cli.bench.results import METRICS, STATISTICS, Distribution, Latency, Throughput, WarmUp

PIPED_WIDTH = 120  # columns of output off a terminal, which rich would squeeze into 80


def print_tables(tables: list[Table], warm_up: WarmUp) -> None:
    """Print the tables and a line about the warm-up."""
    console = Console()
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    for table in tables:
        console.print(table)
    console.print(
        f"Not in the figures: {warm_up.seconds:.1f} s of warm-up. It compiled, or read from the disk cache, "
        f"{len(warm_up.programs)} programs: {warm_up.compile_s:.1f} s in sum, several at a time.",
        highlight=False,
    )


def latency_table(results: list[Latency], prompt_tokens: int) -> Table:
    """Return a table of times in milliseconds and of rates, by batch size."""
    title = f"{prompt_tokens} prompt and {results[0].output_tokens} output tokens a request"
    table = _table("batch", "ms", *STATISTICS, "tokens/s", title=title)
    for result in results:
        _add_distributions(table, result, str(result.batch), last=(f"{result.tokens_per_s:,.1f}",))
    return table


def throughput_tables(result: Throughput) -> list[Table]:
    """Return a table of the whole run's rates, and one of times in milliseconds."""
    title = f"{result.requests} requests, {result.prompt_tokens:,} prompt and {result.output_tokens:,} output tokens"
    rates = _table("seconds", "requests/s", "output tokens/s", "total tokens/s", title=title)
    rates.add_row(
        f"{result.seconds:,.2f}",
        f"{result.requests_per_s:,.2f}",
        f"{result.output_tokens_per_s:,.1f}",
        f"{result.total_tokens_per_s:,.1f}",
    )
    times = _table("ms", *STATISTICS, title="of a request, from queueing")
    _add_distributions(times, result)
    return [rates, times]


def _table(*columns: str, title: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name.startswith("ms") else "right", no_wrap=True)
    return table


def _add_distributions(table: Table, result: Latency | Throughput, *first: str, last: Iterable[str] = ()) -> None:
    """Add a row of milliseconds for each metric that has samples; `first` and `last` frame the first row only."""
    for field, name in METRICS.items():
        if distribution := Distribution.from_samples(getattr(result, field, ())):
            cells = (f"{1e3 * getattr(distribution, statistic):,.2f}" for statistic in STATISTICS)
            table.add_row(*first, name, *cells, *last)
            first, last = ("",) * len(first), ()
    table.add_section()

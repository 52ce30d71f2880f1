"""The tables of the bench commands."""

from collections.abc import Sequence
from textwrap import fill

from rich.table import Table

from jaxinfer.cli.bench.results import METRICS, STATISTICS, Distribution, LatencyResult, Throughput, WarmUp
from jaxinfer.cli.display import figure, say, show, table

HEADING = 12
"""Columns into which the names of metrics are broken."""


def print_tables(tables: Sequence[Table], warm_up: WarmUp) -> None:
    """Print the tables and a line about the warm-up."""
    show(*tables)
    say(
        f"Not included: {warm_up.seconds:.1f} s of warm-up. It compiled, or read from the disk cache, "
        f"{len(warm_up.programs)} programs: {warm_up.compile_s:.1f} s in total, several at a time."
    )


def latency_table(results: list[LatencyResult], prompt_tokens: int) -> Table:
    """Return a table of times in milliseconds and of rates, by batch size."""
    title = f"{prompt_tokens} prompt and {results[0].output_tokens} output tokens a request; times in ms"
    metrics = _sampled(results[0])
    filled = table("batch", "", *_headings(metrics), "tokens/s", figures=len(metrics) + 1, title=title)
    for result in results:
        batch, rate = str(result.batch), figure(result.tokens_per_s)
        for row in _rows(result, metrics):
            filled.add_row(batch, *row, rate)
            batch = rate = ""  # in the first row only
        filled.add_section()
    return filled


def throughput_tables(result: Throughput) -> list[Table]:
    """Return a table of the whole run's rates, and one of times in milliseconds."""
    title = f"{result.requests} requests, {result.prompt_tokens:,} prompt and {result.output_tokens:,} output tokens"
    names = ["seconds", "requests/s", "output tokens/s", "total tokens/s"]
    speeds = result.seconds, result.requests_per_s, result.output_tokens_per_s, result.total_tokens_per_s
    shown = [*map(figure, speeds)]
    if result.idle_share is not None:
        names.append("stages idle")
        shown.append(f"{result.idle_share:.0%}")
    rates = table(*names, figures=len(names), title=title)
    rates.add_row(*shown)
    metrics = _sampled(result)
    times = table("", *_headings(metrics), figures=len(metrics), title="per request, from queueing; times in ms")
    for row in _rows(result, metrics):
        times.add_row(*row)
    return [rates, times]


def _sampled(result: LatencyResult | Throughput) -> list[str]:
    """Return the metrics that have samples."""
    return [field for field in METRICS if getattr(result, field, ())]


def _headings(metrics: Sequence[str]) -> list[str]:
    return [fill(METRICS[field], HEADING, break_on_hyphens=False) for field in metrics]


def _rows(result: LatencyResult | Throughput, metrics: Sequence[str]) -> list[list[str]]:
    """Return a row for each statistic: its name, and milliseconds by metric."""
    summaries = [Distribution.from_samples(getattr(result, field)) for field in metrics]
    return [[name, *(figure(1e3 * getattr(summary, name)) for summary in summaries)] for name in STATISTICS]

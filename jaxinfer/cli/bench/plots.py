"""The plots of a run, drawn without pyplot, so without a display."""

import io
from pathlib import Path

from matplotlib.figure import Figure

from jaxinfer.cli.bench.files import write_file
from jaxinfer.cli.bench.results import METRICS, Latency, Throughput


def write_plot(file: Path, figure: Figure) -> None:
    """Write a figure in the format of the file's suffix."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format=file.suffix[1:], dpi=150)
    write_file(file, drawn.getvalue())


def draw_latency(results: list[Latency]) -> Figure:
    """Draw cumulative distributions: a panel per metric, a line per batch size."""
    shown = [field for field in METRICS if getattr(results[0], field)]
    figure = Figure(figsize=(4 * len(shown), 3.5), layout="constrained")
    for axes, field in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        for result in results:
            axes.ecdf([1e3 * value for value in getattr(result, field)], label=f"batch {result.batch}")
        axes.set(title=METRICS[field], xlabel="ms", ylabel="fraction of samples", xlim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()
    return figure


def draw_throughput(result: Throughput) -> Figure:
    """Draw the output tokens over time and, beside it, cumulative distributions of the requests' times."""
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    over_time, fractions = figure.subplots(1, 2)
    seconds, tokens = zip((0.0, 0), *result.timeline, strict=True)
    over_time.step(seconds, tokens, where="post")
    over_time.set(title=f"{result.output_tokens_per_s:,.0f} tokens/s", xlabel="s", ylabel="output tokens")
    for field in ("first_token_s", "end_to_end_s"):
        fractions.ecdf(getattr(result, field), label=METRICS[field])
    fractions.set(title="requests", xlabel="s from queueing", ylabel="fraction of requests", xlim=(0, None))
    fractions.legend()
    for axes in (over_time, fractions):
        axes.grid(alpha=0.3)
        axes.locator_params(axis="x", nbins=6)
    return figure

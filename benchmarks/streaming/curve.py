"""Tokens a second by batch."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from benchmarks.report import Report
from benchmarks.streaming.ours import CAP, decode_seconds, run_ours
from benchmarks.streaming.settings import Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def curve(report: Report, settings: Settings) -> None:
    """Tokens a second by batch, from disk (the paper's figure 9a)."""
    model = settings.large_model()
    for batch in (1, 4) if settings.quick else (1, 2, 4, 8, 16, 32):
        found = run_ours(model, 4 * CAP, batch=batch, passes=3)
        tokens_per_s = batch / decode_seconds(found)
        report.row(figure="curve", batch=batch, tokens_per_s=round(tokens_per_s, 3), peak=found["peak"])


def draw_curve(rows: Iterable[Mapping[str, Any]]) -> "Figure":
    """Draw what `curve` has put into a report."""
    from matplotlib.figure import Figure  # of the extra `bench`

    points = [(row["batch"], row["tokens_per_s"]) for row in rows if row["figure"] == "curve"]
    figure = Figure(figsize=(4.5, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*points, strict=True), marker="o")
    axes.set(title="8 GiB of layers from disk", xlabel="sequences", ylabel="tokens/s", xscale="log", yscale="log")
    axes.grid(alpha=0.3)
    return figure

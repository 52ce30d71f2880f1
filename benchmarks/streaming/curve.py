"""Tokens a second by batch, until computing takes longer than fetching."""

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from benchmarks.report import Report
from benchmarks.streaming.ours import CAP, decode_seconds, run_ours
from benchmarks.streaming.settings import Settings

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BATCHES, QUICK_BATCHES = (1, 4, 16, 64, 128, 256, 512), (1, 64, 512)
"""Batch sizes up to the largest that fits the cap with its cache."""
SIZES = {"prompt": 2, "passes": 4, "context": 16, "page_size": 8, "prefix_caching": False}
"""Sizes by which the cache is small, and all sequences are admitted at once.

There is a spare page for each beside the one it needs, and none waits for another's prompt that begins alike.
"""
PAST = 2.0
"""Ratio of computing to fetching where the curve ends."""


def curve(report: Report, settings: Settings) -> None:
    """Measure tokens a second by batch, from disk (the paper's figure 9a), past the knee."""
    model = settings.large_model()
    ratios: dict[int, float] = {}
    for batch in QUICK_BATCHES if settings.quick else BATCHES:
        result = run_ours(model, 4 * CAP, batch=batch, **SIZES)
        passes = len(result["seconds"]) - 1
        fetch, compute = result["fetch_seconds"] / passes, result["compute_seconds"] / passes
        report.row(
            figure="curve",
            batch=batch,
            tokens_per_s=round(batch / decode_seconds(result), 3),
            fetch=round(fetch, 3),
            compute=round(compute, 3),
            peak=result["peak"],
        )
        ratios[batch] = compute / fetch
        if compute >= PAST * fetch:
            break
    if found_knee := knee(ratios):
        report.row(figure="knee", batch=round(found_knee))


def knee(ratios: Mapping[int, float]) -> float | None:
    """Interpolate the batch at which computing takes as long as fetching; None if it never does.

    Between two batches their ratio, given by batch, is taken to be a power of the batch.
    """
    for (batch, below), (more, above) in itertools.pairwise(ratios.items()):
        if below < 1 <= above:
            return batch * (more / batch) ** (math.log(1 / below) / math.log(above / below))
    return None


def draw_curve(rows: Iterable[Mapping[str, Any]]) -> "Figure":
    """Draw the curve from a report's rows."""
    from matplotlib.figure import Figure  # in the extra `bench`

    rows = list(rows)
    points = [(row["batch"], row["tokens_per_s"]) for row in rows if row["figure"] == "curve"]
    figure = Figure(figsize=(4.5, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*points, strict=True), marker="o")
    for batch in (row["batch"] for row in rows if row["figure"] == "knee"):
        axes.axvline(batch, color="gray", linestyle="--", label=f"compute = fetch at {batch}")
        axes.legend()
    axes.set(title="8 GiB of layers from disk", xlabel="sequences", ylabel="tokens/s", xscale="log", yscale="log")
    axes.grid(alpha=0.3)
    return figure

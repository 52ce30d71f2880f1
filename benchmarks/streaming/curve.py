"""Tokens a second by batch, until computing takes longer than fetching."""

import itertools
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
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
MARKERS = {"accelerate": "s", "llama.cpp": "^"}
"""Markers of the peers, which have a point each."""
BATCH_TICKS, RATE_TICKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512), (0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64)
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


def draw_curves(results: Sequence[Mapping[str, Any]]) -> "Figure":
    """Draw the curves of results, a panel each, with the bound and the peers where those were measured."""
    from matplotlib.figure import Figure  # in the extra `bench`

    from jaxinfer.evaluation.figures import BLACK, GREY, colours_of, finish, legend_outside, line_style, plain_ticks

    figure = Figure(figsize=(4.5 * len(results) + 0.5, 4), layout="constrained")
    panels = figure.subplots(1, len(results), squeeze=False, sharey=True, sharex=True)[0]
    colours = colours_of(("jaxinfer", "accelerate", "llama.cpp"))
    for axes, result in zip(panels, results, strict=True):
        figures: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
        for row in result["rows"]:
            figures[row["figure"]].append(row)
        curve = figures["curve"]
        bound = [(row["batch"], row["batch"] / max(row["fetch"], row["compute"])) for row in curve if "fetch" in row]
        if bound:
            axes.plot(
                *zip(*bound, strict=True), color=BLACK, linestyle=":", zorder=4, label="sequences / max(fetch, compute)"
            )
        points = [(row["batch"], row["tokens_per_s"]) for row in curve]
        axes.plot(
            *zip(*points, strict=True), marker="o", label="jaxinfer", **line_style("jaxinfer", colours["jaxinfer"])
        )
        peers: dict[tuple[str, int], list[float]] = defaultdict(list)
        for row in figures["peer"]:
            peers[row["engine"], row["batch"]].append(row["seconds_a_pass"])
        for (engine, batch), seconds in peers.items():
            rate = batch / statistics.median(seconds)
            axes.scatter(batch, rate, color=colours[engine], marker=MARKERS[engine], s=50, zorder=4, label=engine)
        for row in figures["knee"]:
            axes.axvline(row["batch"], color=GREY, linestyle="--", label=f"compute = fetch at {row['batch']}")
        axes.set(xlabel="sequences", xscale="log", yscale="log", title=_machine(result))
        plain_ticks(axes.xaxis, BATCH_TICKS)
        axes.tick_params(axis="x", labelsize="small")
        plain_ticks(axes.yaxis, RATE_TICKS)
    panels[0].set_ylabel("tokens/s")
    figure.suptitle("Each fetch of the layers serves all sequences", fontsize="medium")
    legend_outside(figure, *panels)
    sources = ", ".join(f"{result['date']}, commit {result['commit'][:10]}" for result in results)
    return finish(figure, f"Random Llama, 64 layers of 128 MiB in float32 (8 GiB), from disk; {sources}")


def _machine(result: Mapping[str, Any]) -> str:
    """Name a result's processor, without its instruction sets: a panel's title."""
    where = result["machine"]
    return f"{where['cpu']}, {where['cores']} cores"

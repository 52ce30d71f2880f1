"""The paper's figures, drawn with what the planner predicts."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.report import caption
from jaxinfer.evaluation.figures import BLUE, GREEN, LIGHT_GREY, ORANGE, OURS, PINK, finish, legend_outside, plain_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SYSTEMS = {
    "fastertransformer": ("FasterTransformer", BLUE),
    "deepspeed-fp16": ("DeepSpeed FP16", GREEN),
    "deepspeed-int8": ("DeepSpeed INT8", PINK),
    "pytorch-moe": ("PyTorch", BLUE),
    "deepspeed-moe": ("DeepSpeed", GREEN),
}
TITLES = {
    "fig6": "Fig. 6: prompt of 128 tokens and 8 more",
    "fig7": "Fig. 7 and 11: a token of each request, mixtures",
}
MS = (10, 20, 50, 100, 200, 500)
RATIOS = {
    "8": "Fig. 8: throughput",
    "10b": "Fig. 10b: throughput of 530B",
    "13": "Fig. 13: prompts",
}


def draw(result: Mapping[str, Any]) -> "Figure":
    """Draw all figures: bars were measured, marks are predicted."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 11), layout="constrained")
    upper, middle, lower = figure.subfigures(3, 1, height_ratios=(1.25, 1.1, 1), squeeze=False)[:, 0]
    for part, name in ((upper, "fig6"), (middle, "fig7")):
        axes = part.subplots()
        _bars(axes, [row for row in result["rows"] if row["figure"] == name])
        axes.set_title(TITLES[name])
        legend_outside(part, axes)
    ratios = [row for row in result["rows"] if row["figure"] == "ratio"]
    for axes, (number, title) in zip(lower.subplots(1, 3), RATIOS.items(), strict=True):
        _ratios(axes, [row for row in ratios if row["of"] == number])
        axes.set_title(title)
    return finish(figure, caption(result, "Bars: measured by the authors of DeepSpeed Inference. Marks: predicted"))


def _bars(axes: "Axes", rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw a figure's systems next to each other for every model and batch."""
    systems = [system for system in SYSTEMS if any(row["system"] == system for row in rows)]
    names = list(dict.fromkeys(row["name"] for row in rows))
    width = 0.8 / len(systems)
    for index, system in enumerate(systems):
        mine = {row["name"]: row for row in rows if row["system"] == system}
        places = [number + (index - (len(systems) - 1) / 2) * width for number in range(len(names))]
        label, colour = SYSTEMS[system]
        axes.bar(places, [mine[name]["measured_ms"] for name in names], width, color=colour, alpha=0.45, label=label)
        predicted = [mine[name]["predicted_ms"] for name in names]
        axes.plot(places, predicted, linestyle="", marker="_", markersize=11, markeredgewidth=2.2, color=OURS)
    axes.plot([], [], linestyle="", marker="_", markersize=11, markeredgewidth=2.2, color=OURS, label="predicted")
    axes.set_yscale("log")
    plain_ticks(axes.yaxis, MS)
    axes.set_ylabel("ms")
    axes.set_xticks(range(len(names)), [name.replace(", ", "\n") for name in names], fontsize=6, rotation=45)


def _ratios(axes: "Axes", rows: Sequence[Mapping[str, Any]]) -> None:
    names = [row["name"].replace(": ", ":\n").replace(", ", ",\n") for row in rows]
    axes.barh(names, [row["measured"] for row in rows], color=LIGHT_GREY, height=0.6)
    axes.plot([row["predicted"] for row in rows], names, "|", color=OURS, markersize=22, markeredgewidth=2.5)
    axes.axvline(1.0, color=ORANGE, linewidth=0.8)
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=6)
    axes.set_xlabel("times the baseline")

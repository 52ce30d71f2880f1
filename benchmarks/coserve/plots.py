"""The plots of docs/experts.md, from rows."""

from collections.abc import Iterable
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.coserve.tables import NAMES, Rows, compared, figure_rows
from jaxinfer.cli.bench.plots import write_plot

PAPERS_CHOICES = ((35, 25.4), (34, 26.7))
"""The number of experts that the paper's search chose for boards A and B, and their images a second (section 5.4)."""


def draw_all(rows: Rows, folder: Path) -> None:
    """Write all plots that have rows; text stays text, so that files are small."""
    folder.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "coserve"}):
        if compared(rows):
            write_plot(folder / "throughput.svg", draw_compared(compared(rows)))
            write_plot(folder / "ablation.svg", draw_ablation(figure_rows(rows, "ablation")))
            sweeps = draw_sweeps(
                figure_rows(rows, "executors"), figure_rows(rows, "memory"), figure_rows(rows, "search")
            )
            write_plot(folder / "sweeps.svg", sweeps)
        if figure_rows(rows, "rates"):
            write_plot(folder / "rates.svg", draw_rates(figure_rows(rows, "rates"), figure_rows(rows, "live rate")))


def draw_compared(rows: Rows) -> Figure:
    """Draw throughput and switches by task: the paper's figures 13 and 14."""
    machines = list(dict.fromkeys(row["machine"] for row in rows))
    figure = Figure(figsize=(10, 3 * len(machines)), layout="constrained")
    for (left, right), machine in zip(figure.subplots(len(machines), 2, squeeze=False), machines, strict=True):
        here = [row for row in rows if row["machine"] == machine]
        draw_bars(left, here, "img_per_s", f"{machine}: images a second")
        draw_bars(right, here, "switches", f"{machine}: expert switches")
        right.set_yscale("log")
        left.legend(fontsize="x-small")
    return figure


def draw_ablation(rows: Rows) -> Figure:
    """Draw throughput and switches by CoServe's parts: the paper's figures 15 and 16."""
    figure = Figure(figsize=(10, 3), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_bars(left, rows, "img_per_s", "images a second")
    draw_bars(right, rows, "switches", "expert switches")
    right.set_yscale("log")
    left.legend(fontsize="x-small")
    return figure


def draw_bars(axes: Axes, rows: Rows, field: str, title: str) -> None:
    """Draw a group of bars per task, a bar per system."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    systems = [name for name in NAMES if any(row["system"] == name for row in rows)]
    width = 0.8 / len(systems)
    for place, name in enumerate(systems):
        values = {row["task"]: row[field] for row in rows if row["system"] == name}
        shown = [index + (place - (len(systems) - 1) / 2) * width for index in range(len(tasks))]
        axes.bar(shown, [values[task] for task in tasks], width, label=NAMES[name])
    axes.set_xticks(range(len(tasks)), tasks)
    axes.set_title(title)
    axes.grid(axis="y", alpha=0.3)


def draw_sweeps(executors: Rows, memory: Rows, searches: Rows) -> Figure:
    """Draw throughput by executors, and by experts in memory with the search's choice: figures 17 and 18."""
    figure = Figure(figsize=(10, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for place, task in enumerate(dict.fromkeys(row["task"] for row in memory)):
        color = f"C{place}"
        for cpus, style in ((1, "-"), (0, ":")):
            those = [row for row in executors if (row["task"], row["cpus"]) == (task, cpus)]
            points = [(row["gpus"], row["img_per_s"]) for row in those]
            draw_line(left, points, color, style, task if cpus else None)
        points = [(row["experts"], row["img_per_s"]) for row in memory if row["task"] == task]
        draw_line(right, points, color, "-", task)
        chosen = [(row["experts"], row["img_per_s"]) for row in searches if row["task"] == task]
        right.scatter(*zip(*chosen, strict=True), color=color, marker="x", zorder=3)
    right.scatter(*zip(*PAPERS_CHOICES, strict=True), color="black", marker="*", label="the paper's choices")
    left.set(title="dotted: without the CPU executor", xlabel="GPU executors", ylabel="images/s")
    right.set(title="crosses: chosen by the decay window", xlabel="ResNet101 experts on the GPU", ylabel="images/s")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    return figure


def draw_rates(rows: Rows, live: Rows) -> Figure:
    """Draw the seconds within which 99% of the inputs are judged, by their rate."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for place, mode in enumerate(dict.fromkeys(row["mode"] for row in rows)):
        points = [(row["rate"], row["p99"]) for row in rows if row["mode"] == mode]
        draw_line(axes, points, f"C{place}", "-", NAMES[mode])
        measured = [(row["rate"], row["p99"]) for row in live if row["mode"] == mode]
        if measured:
            axes.scatter(*zip(*measured, strict=True), color=f"C{place}", marker="*", s=90, label="the same, for real")
    axes.set(xscale="log", yscale="log", xlabel="inputs a second (Poisson)", ylabel="s", title="99% judged within")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure


def draw_line(axes: Axes, points: Iterable[tuple[float, float]], color: str, style: str, label: str | None) -> None:
    axes.plot(*zip(*points, strict=True), color=color, linestyle=style, marker=".", label=label)

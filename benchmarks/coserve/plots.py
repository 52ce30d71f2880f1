"""The plots of docs/experts.md, from a result."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.coserve.tables import NAMES, Rows, compared, figure_rows
from benchmarks.report import caption
from jaxinfer.evaluation.figures import (
    BLACK,
    SEQUENCE,
    bar_style,
    colours_of,
    finish,
    legend_outside,
    line_style,
    plain_ticks,
    write_figure,
)

PAPERS_CHOICES = ((35, 25.4), (34, 26.7))
"""The number of experts that the paper's search chose for boards A and B, and their images a second (section 5.4)."""
SIMULATED = (
    "Simulated: the paper's machines (NUMA: the GPU has memory of its own; UMA: it shares the host's) and tasks (A, B: "
    "boards; 1, 2: 2,500 and 3,500 images), costs fitted to its totals"
)
MEASURED = "38 experts of ResNet-101's size, room for 8, a burst of inputs 4 ms apart, two CPU cores; medians of 3 runs"
RATES = "Lines simulated, stars real: 38 experts of ResNet-101's size, read from disk; Poisson arrivals"


def draw_all(result: Mapping[str, Any], folder: Path) -> None:
    """Write all plots for which a result has rows."""
    rows = result["rows"]
    if compared(rows):
        simulated = f"{SIMULATED}; {result['date']}, commit {result['commit'][:10]}"
        write_figure(folder / "throughput.svg", draw_compared(compared(rows), simulated))
        write_figure(folder / "ablation.svg", draw_ablation(figure_rows(rows, "ablation"), simulated))
        executors, memory, searches = (figure_rows(rows, name) for name in ("executors", "memory", "search"))
        write_figure(folder / "sweeps.svg", draw_sweeps(executors, memory, searches, simulated))
    if figure_rows(rows, "real"):
        drawn = draw_measured(figure_rows(rows, "real"), caption(result, MEASURED))
        write_figure(folder / "measured.svg", drawn)
    if figure_rows(rows, "rates"):
        drawn = draw_rates(figure_rows(rows, "rates"), figure_rows(rows, "live rate"), caption(result, RATES))
        write_figure(folder / "rates.svg", drawn)


def draw_compared(rows: Rows, caption: str) -> Figure:
    """Draw throughput and switches by task: the paper's figures 13 and 14."""
    machines = list(dict.fromkeys(row["machine"] for row in rows))
    figure = Figure(figsize=(10, 0.3 + 2.8 * len(machines)), layout="constrained")
    for (left, right), machine in zip(figure.subplots(len(machines), 2, squeeze=False), machines, strict=True):
        _draw_both(left, right, [row for row in rows if row["machine"] == machine], f"{machine}: ")
    legend_outside(figure, *figure.axes)
    return finish(figure, caption)


def draw_measured(rows: Rows, caption: str) -> Figure:
    """Draw the throughput of real systems: where loading takes most of the time, and where computing does."""
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    colours = colours_of(NAMES.values())
    titles = {"load-bound": "slowed disk (a load takes 10 executions)", "disk as it is": "the machine's own disk"}
    for axes, (loading, title) in zip(figure.subplots(1, 2), titles.items(), strict=True):
        those = [row for row in reversed(rows) if row["loading"] == loading]
        for row in those:
            name = NAMES[row["mode"]]
            axes.bar_label(axes.barh(name, row["throughput"], **bar_style(name, colours[name])), fmt="%.3g", padding=3)
        axes.set(title=f"{those[0]['pixels']} pixels, {title}", xlabel="inputs a second (more is better)")
        axes.set_xlim(0, 1.15 * max(row["throughput"] for row in those))
    return finish(figure, caption)


def draw_ablation(rows: Rows, caption: str) -> Figure:
    """Draw throughput and switches by CoServe's parts: the paper's figures 15 and 16."""
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_both(left, right, rows, "NUMA: ")
    legend_outside(figure, *figure.axes)
    return finish(figure, caption)


def _draw_both(left: Axes, right: Axes, rows: Rows, prefix: str) -> None:
    draw_bars(left, rows, "img_per_s", f"{prefix}images a second (more is better)")
    draw_bars(right, rows, "switches", f"{prefix}expert switches (fewer is better)")
    right.set_yscale("log")
    right.set_ylim(bottom=10)  # bars of the least values stay visible
    plain_ticks(right.yaxis, (10, 20, 50, 100, 200, 500, 1000, 2000))


def draw_bars(axes: Axes, rows: Rows, field: str, title: str) -> None:
    """Draw a group of bars per task, a bar per system."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    systems = [name for name in NAMES if any(row["system"] == name for row in rows)]
    colours, width = colours_of(NAMES[name] for name in systems), 0.85 / len(systems)
    for place, system in enumerate(systems):
        values = {row["task"]: row[field] for row in rows if row["system"] == system}
        shown = [index + (place - (len(systems) - 1) / 2) * width for index in range(len(tasks))]
        name = NAMES[system]
        axes.bar(shown, [values[task] for task in tasks], width, label=name, **bar_style(name, colours[name]))
    axes.set_xticks(range(len(tasks)), tasks)
    axes.set_title(title)


def draw_sweeps(executors: Rows, memory: Rows, searches: Rows, caption: str) -> Figure:
    """Draw throughput by executors, and by experts in memory with the search's choice: figures 17 and 18."""
    figure = Figure(figsize=(10, 3.7), layout="constrained")
    left, right = figure.subplots(1, 2)
    for task, color in zip(dict.fromkeys(row["task"] for row in memory), SEQUENCE, strict=False):
        for cpus, style in ((1, "-"), (0, ":")):
            those = [row for row in executors if (row["task"], row["cpus"]) == (task, cpus)]
            points = [(row["gpus"], row["img_per_s"]) for row in those]
            left.plot(*zip(*points, strict=True), color=color, linestyle=style, marker=".")
        points = sorted((row["experts"], row["img_per_s"]) for row in memory if row["task"] == task)
        right.plot(*zip(*points, strict=True), color=color, marker=".", label=f"task {task}")
        chosen = [(row["experts"], row["img_per_s"]) for row in searches if row["task"] == task]
        right.scatter(*zip(*chosen, strict=True), color=color, marker="x", zorder=3)
    left.plot([], [], color=BLACK, label="with a CPU executor")
    left.plot([], [], color=BLACK, linestyle=":", label="without it")
    right.scatter([], [], color=BLACK, marker="x", label="our search's choices")
    right.scatter(*zip(*PAPERS_CHOICES, strict=True), color=BLACK, marker="*", s=60, label="the paper's choices")
    left.set(title="More GPU executors help up to four", xlabel="GPU executors", ylabel="images/s")
    right.set(title="Experts in memory help, then crowd out batches", xlabel="ResNet101 experts on the GPU")
    for axes in (left, right):
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    legend_outside(figure, right, left)
    return finish(figure, caption)


def draw_rates(rows: Rows, live: Rows, caption: str) -> Figure:
    """Draw the seconds within which 99% of the inputs are judged, by their rate."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes, modes = figure.subplots(), list(dict.fromkeys(row["mode"] for row in rows))
    colours = colours_of(NAMES[mode] for mode in modes)
    for mode in modes:
        name = NAMES[mode]
        points = [(row["rate"], row["p99"]) for row in rows if row["mode"] == mode]
        axes.plot(*zip(*points, strict=True), marker=".", label=name, **line_style(name, colours[name]))
        measured = [(row["rate"], row["p99"]) for row in live if row["mode"] == mode]
        if measured:
            label = f"{name}, for real"
            axes.scatter(*zip(*measured, strict=True), color=BLACK, marker="*", s=90, label=label, zorder=4)
    axes.set(xscale="log", yscale="log", xlabel="inputs a second", ylabel="s", title="Seconds until 99% are judged")
    plain_ticks(axes.xaxis, (1, 2, 5, 10, 20, 50))
    plain_ticks(axes.yaxis, (0.25, 0.5, 1, 2, 5, 10, 20, 50, 100))
    legend_outside(figure, axes)
    return finish(figure, caption)

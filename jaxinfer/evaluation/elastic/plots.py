"""The figures of OTAS's evaluation (section V), drawn from recorded runs."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxinfer.elastic.scheduling.profile import ServingProfile
from jaxinfer.elastic.scheduling.query import Outcome
from jaxinfer.evaluation.elastic.runs import Run, batches_of
from jaxinfer.evaluation.elastic.tables import OUTCOMES

POINTS = 300
QUANTILES = np.linspace(0, 1, 101)
"""Points of a line: a report should be small."""


def draw_levels(profile: ServingProfile) -> Figure:
    """Draw each task's accuracy, and throughput, by level (Fig. 4)."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for task in profile.tasks:
        left.plot(profile.levels, [100 * profile.right(task, n) for n in profile.levels], marker=".", label=task)
    left.set(title="accuracy by level (Fig. 4a)", xlabel="level", ylabel="%")
    _legend(left)
    right.plot(profile.levels, [profile.capacity(n) for n in profile.levels], marker=".", color="tab:gray")
    right.set(title="throughput by level (Fig. 4b)", xlabel="level", ylabel="queries/s", ylim=(0, None))
    return _grid(figure)


def draw_batches(profile: ServingProfile) -> Figure:
    """Draw throughput by batch size, at the lowest, the plain and the highest level (Fig. 7)."""
    figure = Figure(figsize=(4.5, 3.2), layout="constrained")
    axes = figure.subplots()
    for level in sorted({profile.levels[0], 0, profile.levels[-1]}):
        rates = [size / profile.seconds[level, size] for size in profile.sizes]
        axes.plot(profile.sizes, rates, marker=".", label=f"level {level:+d}" if level else "level 0")
    axes.set(title="throughput by batch size (Fig. 7)", xlabel="batch size", ylabel="queries/s", ylim=(0, None))
    axes.set_xscale("log", base=2)
    _legend(axes)
    return _grid(figure)


def draw_arrivals(run: Run) -> Figure:
    """Draw queries a second over time (Fig. 8)."""
    figure = Figure(figsize=(9, 2.4), layout="constrained")
    axes = figure.subplots()
    arrivals = np.array([answer.query.arrival for answer in run.served.answers])
    edges = np.linspace(0, arrivals.max(), 101)
    axes.step(edges[1:], np.histogram(arrivals, edges)[0] / np.diff(edges), color="tab:gray", where="pre")
    axes.axhline(run.header.capacity, color="tab:red", linewidth=1, label="capacity at level 0")
    axes.set(title="arrivals (Fig. 8)", xlabel="s", ylabel="queries/s", ylim=(0, None))
    _legend(axes)
    return _grid(figure)


def draw_utility(runs: Sequence[Run]) -> Figure:
    """Draw cumulative utility over time: of systems (Fig. 9), and with fixed levels (Fig. 10)."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    fixed = [run for run in runs if run.header.policy.startswith(("level", "elastic", "pets"))]
    for axes, chosen, title in zip(
        figure.subplots(1, 2),
        (_systems(runs), fixed),
        ("of systems (Fig. 9)", "with fixed levels (Fig. 10)"),
        strict=True,
    ):
        for run in _first_seeds(chosen):
            answers = sorted(run.served.answers, key=lambda answer: answer.ended)
            shown = np.unique(np.linspace(0, len(answers) - 1, POINTS).astype(int))
            ended, earned = np.array([(answer.ended, answer.utility) for answer in answers]).T
            axes.plot(ended[shown], np.cumsum(earned)[shown], label=run.header.policy, **_style(run))
        axes.set(title=f"utility {title}", xlabel="s", ylabel="utility", ylim=(0, None))
        _legend(axes)
    return _grid(figure)


def draw_accuracies(runs: Sequence[Run]) -> Figure:
    """Draw the accuracy of batches as cumulative distributions (Fig. 11)."""
    figure = Figure(figsize=(4.5, 3.2), layout="constrained")
    axes = figure.subplots()
    for run in _first_seeds(runs):
        batches = batches_of(run.served.answers).values()
        shares = [np.mean([answer.outcome is Outcome.CORRECT for answer in batch]) for batch in batches]
        if shares:
            axes.plot(np.quantile(shares, QUANTILES), QUANTILES, label=run.header.policy, **_style(run))
    axes.set(title="accuracy of batches (Fig. 11)", xlabel="right and in time", ylabel="share of batches")
    _legend(axes)
    return _grid(figure)


def draw_chosen(runs: Sequence[Run]) -> Figure:
    """Draw the share of queries at each level (Fig. 12)."""
    figure = Figure(figsize=(4.5, 3.2), layout="constrained")
    axes, chosen = figure.subplots(), [run for run in _first_seeds(_systems(runs)) if run.header.policy != "pets"]
    levels = chosen[0].profile.levels if chosen else ()
    chosen = [run for run in chosen if run.profile.levels == levels]  # INFaaS's are models
    width = 0.8 / max(len(chosen), 1)
    for place, run in enumerate(chosen):
        counts = run.served.levels
        shares = [counts[level] / max(counts.total(), 1) for level in levels]
        axes.bar(np.arange(len(levels)) + (place + 0.5) * width - 0.4, shares, width, label=run.header.policy)
    axes.set_xticks(range(len(levels)), [f"{level:+d}" if level else "0" for level in levels])
    axes.set(title="levels chosen (Fig. 12)", xlabel="level", ylabel="share of answers")
    _legend(axes)
    return _grid(figure)


def draw_outcomes(runs: Sequence[Run]) -> Figure:
    """Draw the queries' outcomes by policy, over all seeds (Fig. 13)."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    axes, names = figure.subplots(), list(dict.fromkeys(run.header.policy for run in runs))
    bottom = np.zeros(len(names))
    for outcome, label in OUTCOMES.items():
        shares = [np.mean([run.served.share(outcome) for run in runs if run.header.policy == name]) for name in names]
        axes.bar(names, shares, bottom=bottom, label=f"type {outcome.value}: {label}")
        bottom += shares
    axes.set(title="how queries ended (Fig. 13)", ylabel="share of queries")
    axes.tick_params(axis="x", labelrotation=30)
    _legend(axes)
    return _grid(figure)


def _first_seeds(runs: Iterable[Run]) -> list[Run]:
    """Return one run of each policy."""
    first: dict[str, Run] = {}
    for run in runs:
        first.setdefault(run.header.policy, run)
    return list(first.values())


def _systems(runs: Iterable[Run]) -> list[Run]:
    """Return the runs without a fixed level; PetS is a system with a fixed level."""
    return [run for run in runs if not run.header.policy.startswith("level")]


def _style(run: Run) -> dict[str, Any]:
    is_ours = run.header.policy == "elastic"
    return {"linewidth": 2.2 if is_ours else 1.1, "zorder": 3 if is_ours else 2}


def _legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="x-small")


def _grid(figure: Figure) -> Figure:
    for axes in figure.axes:
        if isinstance(axes, Axes):
            axes.grid(alpha=0.3)
    return figure

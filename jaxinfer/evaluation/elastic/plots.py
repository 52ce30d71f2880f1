"""The figures of OTAS's evaluation (section V), drawn from a profile and from summaries of recorded runs."""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure

from jaxinfer.elastic.scheduling.profile import ServingProfile
from jaxinfer.evaluation.elastic.summaries import QUANTILES, TIMES, CellSummary
from jaxinfer.evaluation.elastic.tables import OUTCOMES
from jaxinfer.evaluation.figures import (
    BLACK,
    LIGHT_GREY,
    SEQUENCE,
    bar_style,
    colours_of,
    finish,
    fixed_level,
    legend_outside,
    line_style,
    plain_ticks,
)

OURS = "elastic"
OUTCOME_COLOURS = ("#35978f", "#a6dbd3", "#dfc27d", "#8c510a")
"""Colours of right, wrong, late and shed queries: no policy's."""


def draw_levels(profile: ServingProfile, caption: str = "") -> Figure:
    """Draw each task's accuracy, and throughput, by level (Fig. 4)."""
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for task, colour in zip(profile.tasks, _cycle(len(profile.tasks)), strict=True):
        accuracies = [100 * profile.accuracy_at(task, level) for level in profile.levels]
        left.plot(profile.levels, accuracies, marker=".", label=task, color=colour)
    left.set(title="Accuracy: lost where tokens merge (level < 0)", xlabel="level", ylabel="%")
    right.plot(profile.levels, [profile.capacity(n) for n in profile.levels], marker=".", color=BLACK)
    right.set(title="Throughput: gained where tokens merge", xlabel="level", ylabel="queries/s", ylim=(0, None))
    for axes in (left, right):
        axes.set_xticks(profile.levels, [_signed(level) for level in profile.levels])
    legend_outside(figure, left, title="task")
    return finish(figure, caption)


def draw_batches(profile: ServingProfile, caption: str = "") -> Figure:
    """Draw throughput by batch size, at the lowest, the plain and the highest level (Fig. 7)."""
    figure = Figure(figsize=(4.5, 3.2), layout="constrained")
    axes = figure.subplots()
    levels = sorted({profile.levels[0], 0, profile.levels[-1]})
    for level, colour, marker in zip(levels, SEQUENCE, "^os", strict=False):
        rates = [size / profile.seconds[level, size] for size in profile.sizes]
        axes.plot(profile.sizes, rates, color=colour, marker=marker, label=f"level {_signed(level)}")
    axes.set(title="Throughput by batch size", xlabel="batch size", ylabel="queries/s", ylim=(0, None))
    axes.set_xscale("log", base=2)
    plain_ticks(axes.xaxis, profile.sizes)
    legend_outside(figure, axes)
    return finish(figure, caption)


def draw_arrivals(cell: CellSummary, caption: str = "") -> Figure:
    """Draw queries a second over time (Fig. 8)."""
    figure = Figure(figsize=(9, 2.4), layout="constrained")
    axes = figure.subplots()
    edges = np.linspace(0, cell.rates_until, len(cell.rates) + 1)
    axes.stairs(cell.rates, edges, fill=True, color=LIGHT_GREY, label="arrivals")
    axes.axhline(cell.capacity, color=BLACK, linestyle="--", linewidth=1, label="capacity at level 0")
    axes.set(title="Queries that arrive, against what level 0 can serve", xlabel="s", ylabel="queries/s")
    axes.set_ylim(0)
    legend_outside(figure, axes)
    return finish(figure, caption)


def draw_utility(cell: CellSummary, caption: str = "") -> Figure:
    """Draw utility earned so far, less what `elastic` earned: by systems (Fig. 9), and by fixed levels (Fig. 10).

    Without `elastic` among the policies, the first takes its place. Points are percent of all that there was to earn.
    """
    reference = OURS if OURS in cell.policies else next(iter(cell.policies))
    base = np.array(cell.policies[reference].earned)
    times, colours = np.linspace(0, cell.seconds, TIMES), colours_of(cell.policies)
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    fixed = [name for name in cell.policies if name == reference or name == "pets" or fixed_level(name) is not None]
    for axes, names in ((left, _systems(cell)), (right, fixed)):
        for name in names:
            earned = np.array(cell.policies[name].earned)
            label = f"{name} {100 * earned[-1]:.1f}"
            axes.plot(times, 100 * (earned - base), label=label, **line_style(name, colours[name]))
        axes.set_xlabel("s")
    left.set(title=f"Systems, less {reference}", ylabel="points of utility")
    right.set_title(f"Fixed levels, less {reference}")
    legend_outside(figure, left, right, title="earned in the end, %")
    return finish(figure, caption)


def draw_accuracies(cell: CellSummary, caption: str = "") -> Figure:
    """Draw the accuracy of batches as cumulative distributions (Fig. 11): a panel per policy, with `elastic` in each.

    Fixed levels share two panels: merging, and prompts.
    """
    drawn = {name: policy.batch_accuracy for name, policy in cell.policies.items() if policy.batch_accuracy}
    panels = {name: [name] for name in _systems(cell) if name in drawn and name != OURS}
    panels["levels below 0"] = [name for name in drawn if (fixed_level(name) or 0) < 0]
    panels["levels above 0"] = [name for name in drawn if (fixed_level(name) or 0) > 0]
    panels = {title: names for title, names in panels.items() if names} or {OURS: []}
    columns = min(4, len(panels))
    rows, colours = -(-len(panels) // columns), colours_of(cell.policies)
    figure = Figure(figsize=(9, 0.9 + 1.9 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    for axes, (title, names) in zip(grid.flat, panels.items(), strict=False):
        for name in [*([OURS] if OURS in drawn else []), *names]:
            axes.plot(drawn[name], QUANTILES, label=name, **line_style(name, colours[name]))
        axes.set_title(title, fontsize="medium")
        axes.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
    figure.supylabel("share of batches", fontsize="medium")
    figure.suptitle("Share of a batch that is right and in time: further right is better", fontsize="medium")
    legend_outside(figure, *grid.flat[: len(panels)])
    return finish(figure, caption)


def draw_chosen(chosen: Mapping[str, Mapping[int, float]], levels: Sequence[int], caption: str = "") -> Figure:
    """Draw the share of answers at each level (Fig. 12), of the policies that choose among the levels."""
    chosen = {
        name: shares for name, shares in chosen.items() if fixed_level(name) is None and name != "pets" and shares
    }
    figure, colours = Figure(figsize=(9, 3.2), layout="constrained"), colours_of(chosen)
    axes, width = figure.subplots(), 0.8 / max(len(chosen), 1)
    for place, (name, shares) in enumerate(chosen.items()):
        middles = np.arange(len(levels)) + (place + 0.5) * width - 0.4
        heights = [100 * shares.get(level, 0.0) for level in levels]
        axes.bar(middles, heights, width, label=name, **bar_style(name, colours[name]))
    axes.set_xticks(range(len(levels)), [_signed(level) for level in levels])
    axes.set(title="Levels that policies chose", xlabel="level", ylabel="% of answers")
    legend_outside(figure, axes)
    return finish(figure, caption)


def draw_outcomes(outcomes: Mapping[str, Sequence[float]], caption: str = "") -> Figure:
    """Draw the shares of queries by `Outcome`, by policy (Fig. 13)."""
    figure = Figure(figsize=(9, 1.4 + 0.2 * len(outcomes)), layout="constrained")
    axes, names = figure.subplots(), list(outcomes)
    begin = np.zeros(len(names))
    for place, (label, colour) in enumerate(zip(OUTCOMES.values(), OUTCOME_COLOURS, strict=True)):
        shares = np.array([100 * policy[place] for policy in outcomes.values()])
        axes.barh(names, shares, left=begin, label=label, color=colour, edgecolor="white", linewidth=0.5)
        begin += shares
    axes.invert_yaxis()
    axes.margins(y=0.01)
    for tick in axes.get_yticklabels():
        tick.set_fontweight("bold" if tick.get_text() == OURS else "normal")
    axes.set(title="How queries ended", xlabel="% of queries", xlim=(0, 100))
    legend_outside(figure, axes)
    return finish(figure, caption)


def _systems(cell: CellSummary) -> list[str]:
    """The policies without a fixed level; PetS is a system with a fixed level."""
    return [name for name in cell.policies if fixed_level(name) is None]


def _cycle(count: int) -> Iterable[str]:
    return (SEQUENCE[place % len(SEQUENCE)] for place in range(count))


def _signed(level: int) -> str:
    return f"{level:+d}" if level else "0"


OVER_TIME = {"arrivals": draw_arrivals, "utility": draw_utility, "accuracies": draw_accuracies}
"""The figures of one run of each policy, by the names of their files."""

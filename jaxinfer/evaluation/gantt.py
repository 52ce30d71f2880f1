"""Gantt charts of a pipeline's schedules, planned or recorded: as a figure, and in a terminal.

Stages are rows, time goes to the right, and schedules stand one under the other with the same time axis, as in Figs. 2
and 3 of DeepSpeed Inference: the colour says which token a job makes, the label which micro-batch it is of.
"""

import dataclasses
import math
import string
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions
from rich.text import Text

from jaxinfer.sharding.schedules import Job, Schedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STYLES = ("white on blue", "black on yellow", "black on green", "black on magenta", "black on cyan", "black on white")
"""Styles of tokens' jobs in a terminal, in turn; as many as there are colours in figures."""
WIDEST = 14.0
"""Inches of the widest figure."""


def heading(name: str, schedule: Schedule) -> str:
    """A schedule's name with its length and the share of it that stages wait."""
    return f"{name}: {schedule.length:.4g} units, {schedule.idle_share:.1%} idle"


def draw_schedules(schedules: Mapping[str, Schedule], caption: str = "") -> "Figure":
    """Draw schedules by name. Needs matplotlib, which the extra `bench` has.

    Raises ValueError without a schedule, and for schedules without a job.
    """
    from matplotlib.figure import Figure

    from jaxinfer.evaluation.figures import finish, legend_outside

    longest = _longest(schedules)
    width = min(WIDEST, 2.5 + 0.3 * longest)
    heights = [0.55 + 0.22 * schedule.stages for schedule in schedules.values()]
    figure = Figure(figsize=(width, 0.5 + sum(heights)), layout="constrained")
    panels = figure.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (name, schedule) in zip(panels, schedules.items(), strict=True):
        _draw(axes, schedule, inches_per_unit=(width - 2.3) / longest)
        axes.set_title(heading(name, schedule), loc="left", fontsize="medium")
    panels[-1].set(xlabel="time, in units", xlim=(0, longest))
    legend_outside(figure, *panels)
    finish(figure, caption)
    for axes in panels:
        axes.grid(False)
        axes.spines["left"].set_visible(False)
    return figure


def _draw(axes: "Axes", schedule: Schedule, inches_per_unit: float) -> None:
    from matplotlib.colors import to_rgb

    from jaxinfer.evaluation.figures import SEQUENCE

    height, small = 0.86, 0.09  # of a row; inches of a letter
    label_of, row = _labels(schedule), {"linewidth": 0.6, "edgecolor": "white"}
    blocks: dict[tuple[int, int | None], list[tuple[float, float]]] = {}
    for stage, start, duration, job in _slots(schedule):
        blocks.setdefault((stage, None), []).append((start, duration))
        if job is None:
            continue
        place = job.token % len(SEQUENCE)
        blocks.setdefault((stage, place), []).append((start, job.units))
        if len(label := label_of(job)) * small < job.units * inches_per_unit:
            dark = sum(to_rgb(SEQUENCE[place])) < 1.5
            middle = start + job.units / 2, stage
            axes.text(*middle, label, ha="center", va="center", fontsize=7, color="white" if dark else "black")
    names = _tokens_by_place(schedule, len(SEQUENCE))
    for (stage, place), spans in blocks.items():  # a stage's idle ticks before, and so below, its jobs
        colour, label = ("#e4e4e4", "idle") if place is None else (SEQUENCE[place], names[place])
        axes.broken_barh(spans, (stage - height / 2, height), facecolor=colour, label=label, **row)
    axes.set_yticks(range(schedule.stages), [f"stage {stage}" for stage in range(schedule.stages)])
    axes.set_ylim(schedule.stages - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)


def _slots(schedule: Schedule) -> Iterator[tuple[int, float, float, Job | None]]:
    """Yield the stage, start, duration of the tick and job of each slot."""
    start = 0.0
    for tick, duration in zip(schedule.ticks, schedule.durations, strict=True):
        for stage, job in enumerate(tick):
            yield stage, start, duration, job
        start += duration


def _jobs(schedule: Schedule) -> list[Job]:
    return [job for tick in schedule.ticks for job in tick if job]


def _labels(schedule: Schedule) -> Callable[[Job], str]:
    """Return what says a job's label: its micro-batch, where prompts have several chunks also the chunk."""
    jobs = _jobs(schedule)
    if not any(job.chunk for job in jobs):
        return lambda job: str(job.micro_batch)
    if not any(job.micro_batch for job in jobs):
        return lambda job: str(job.chunk)
    return lambda job: f"{job.micro_batch}.{job.chunk}"


def _letters(schedule: Schedule) -> Callable[[Job], str]:
    """Return what says a job's label with a letter for its token, where there are several."""
    label_of, tokens = _labels(schedule), {job.token for job in _jobs(schedule)}
    return label_of if len(tokens) == 1 else lambda job: label_of(job) + string.ascii_lowercase[job.token % 26]


def _tokens_by_place(schedule: Schedule, colours: int) -> dict[int, str]:
    """The name of each colour, by its place: the tokens that have it."""
    tokens = sorted({job.token for job in _jobs(schedule)})
    return {
        place: "token " + ", ".join([str(token) for token in alike[:3]] + ["..."] * (len(alike) > 3))
        for place in range(colours)
        if (alike := [token for token in tokens if token % colours == place])
    }


def _longest(schedules: Mapping[str, Schedule]) -> float:
    if not schedules or not all(_jobs(schedule) for schedule in schedules.values()):
        raise ValueError("A Gantt chart needs at least one schedule, and each at least one job.")
    return max(schedule.length for schedule in schedules.values())


@dataclasses.dataclass(frozen=True)
class TerminalGantt:
    """Schedules by name, for a console of rich's; without colours, letters say which token a job makes.

    Jobs are as wide as their labels need. A schedule that is longer than the console is wide is cut, and a line says
    so.
    """

    schedules: Mapping[str, Schedule]

    def __post_init__(self) -> None:
        _longest(self.schedules)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        margin = max(len(f"stage {schedule.stages - 1} ") for schedule in self.schedules.values())
        room = max(1, options.max_width - margin)
        scale = self._columns_per_unit(room)
        for name, schedule in self.schedules.items():
            yield _line(Text(heading(name, schedule), style="bold"))
            for stage, row in enumerate(_rows(schedule, scale)):
                yield _line(Text(f"stage {stage}".ljust(margin)).append_text(row[:room]))
            if _column(schedule.length, scale) > room:
                yield _line(Text(f"... cut after {room / scale:.4g} of {schedule.length:.4g} units", style="dim"))
        yield _line(Text("time".ljust(margin) + _ruler(min(room, _column(_longest(self.schedules), scale)), scale)))
        yield Text("0a: micro-batch (or chunk) 0, token a (the first, of the prompt); dots: idle")

    def _columns_per_unit(self, room: int) -> float:
        """Return how many columns a unit has: so many that each label fits, a gap more where there is room."""
        tight, roomy = 0.0, 0.0
        for schedule in self.schedules.values():
            shortest, label_of = min(filter(None, schedule.durations)), _letters(schedule)
            label = max(len(label_of(job)) for job in _jobs(schedule))
            tight, roomy = max(tight, label / shortest), max(roomy, (label + 1) / shortest)
        whole = max(1.0, room // _longest(self.schedules))  # with which jobs that are equally long look it
        return min(roomy, max(tight, whole))


def _line(text: Text) -> Text:
    text.no_wrap, text.overflow = True, "crop"
    return text


def _column(units: float, scale: float) -> int:
    return math.floor(units * scale + 1e-6)  # sums of units are rounded


def _rows(schedule: Schedule, scale: float) -> list[Text]:
    """A line for each stage: its jobs, and dots while it waits."""
    rows, label_of = [Text() for _ in range(schedule.stages)], _letters(schedule)
    for stage, start, duration, job in _slots(schedule):
        begin, end = _column(start, scale), _column(start + duration, scale)
        if job is not None:
            label, done = label_of(job), _column(start + job.units, scale)
            block = label + "-" * (done - begin - len(label) - 1)
            rows[stage].append(block[: done - begin], STYLES[job.token % len(STYLES)])
            rows[stage].append(" " * (done - begin - len(block)))
            begin = done
        waiting = "." * max(1, end - begin - 1) + " "
        rows[stage].append(waiting[: end - begin], "dim")
    return rows


def _ruler(columns: int, scale: float) -> str:
    """The time in units, at each multiple of 1, 2, 5, 10, ... that leaves room for it."""
    steps = (mantissa * 10**exponent for exponent in range(20) for mantissa in (1, 2, 5))
    step = next(step for step in steps if step * scale >= 6)
    line = ""
    for mark in range(0, math.ceil(columns / scale), step):
        line = line.ljust(_column(mark, scale)) + str(mark)
    return line

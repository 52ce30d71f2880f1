"""Style of all figures: a fixed colour for each policy and system, legends outside, captions, files.

Colours are those of Okabe and Ito, told apart by the colour-blind; ours is the most visible, fixed levels are grey.
"""

import io
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from jaxinfer.disk_cache.files import write_atomically

OURS, BLUE, GREEN, ORANGE = "#d55e00", "#0072b2", "#009e73", "#e69f00"
SKY, PINK, PURPLE = "#56b4e9", "#cc79a7", "#7570b3"
BLACK, GREY, LIGHT_GREY = "#222222", "#777777", "#b0b0b0"
SEQUENCE = (BLUE, ORANGE, GREEN, PINK, SKY, BLACK)
"""Colours of what is neither a policy nor a system, such as tasks and batch sizes."""

COLOURS = {
    # Policies of elastic tokens.
    "elastic": OURS,
    "paper": BLUE,
    "paper_profiled": SKY,
    "slack": GREEN,
    "slackfit": ORANGE,
    "rate": PURPLE,
    "infaas": PINK,
    "pets": BLACK,
    # Systems of experts; a baseline that groups requests has its baseline's colour.
    "ours": OURS,
    "CoServe": BLUE,
    "CoServe Casual": PINK,
    "Samba-CoE": SKY,
    "Samba-CoE, grouping": SKY,
    "Samba-CoE FIFO": GREEN,
    "Samba-CoE Parallel": ORANGE,
    "Parallel, grouping": ORANGE,
    "None": "#d0d0d0",
    "EM": "#a0a0a0",
    "EM+RA": "#606060",
    # Engines.
    "jaxinfer": OURS,
    "accelerate": BLUE,
    "llama.cpp": GREEN,
}
DASHED = ("pets", "Samba-CoE, grouping", "Parallel, grouping")
"""Names whose lines are dashed and whose bars are hatched: they share a colour, or are a fixed level."""
CAPTION_CHARACTERS = 15
"""Characters of a caption that fit an inch."""
_LIGHTEST, _DARKEST = 0.8, 0.35
"""Grey shades of the lowest and of the highest fixed level."""


def fixed_level(name: str) -> int | None:
    """The level that a policy's name such as "level-8" fixes, or None."""
    match = re.fullmatch(r"level([+-]\d+)", name)
    return int(match[1]) if match else None


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """Each policy's or system's colour; fixed levels get greys, the lowest the lightest.

    Raises KeyError for a name without a colour.
    """
    names = list(names)
    levels = sorted(level for name in names if (level := fixed_level(name)) is not None)
    step = (_LIGHTEST - _DARKEST) / max(len(levels) - 1, 1)
    greys = {f"level{level:+d}": str(round(_LIGHTEST - step * place, 3)) for place, level in enumerate(levels)}
    return {name: greys[name] if name in greys else COLOURS[name] for name in names}


def line_style(name: str, colour: str) -> dict[str, Any]:
    """The style of a policy's or system's line: ours is thick, and in front."""
    ours = colour == OURS
    return {
        "color": colour,
        "linewidth": 2.4 if ours else 1.3,
        "zorder": 3 if ours else 2,
        "linestyle": "--" if name in DASHED else "-",
    }


def bar_style(name: str, colour: str) -> dict[str, Any]:
    """The style of a policy's or system's bars."""
    return {"color": colour, "edgecolor": "white", "hatch": "////" if name in DASHED else None}


def legend_outside(figure: Figure, *axes: Axes, title: str | None = None) -> None:
    """Put the figure's legend right of it, each name of the axes' once."""
    handles: dict[str, Any] = {}
    for each in axes:
        for handle, label in zip(*each.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        handles.values(), handles.keys(), loc="outside right upper", fontsize="small", frameon=False, title=title
    )


def plain_ticks(axis: Axis, values: Sequence[float]) -> None:
    """Put ticks at these values of a logarithmic axis, written as plain numbers."""
    axis.set_major_locator(FixedLocator(values))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_locator(NullLocator())


def finish(figure: Figure, caption: str = "") -> Figure:
    """Draw grids, and a small caption below: the machine, the model, the load, the date and the commit."""
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_fontsize("medium")
    if caption:
        lines = textwrap.fill(caption, int(CAPTION_CHARACTERS * figure.get_figwidth()))
        figure.supxlabel(lines, x=0.01, ha="left", fontsize="x-small", color=GREY)
    return figure


def render(figure: Figure, suffix: str) -> bytes:
    """Render a figure as svg or png, the same bytes each time; the text of an svg stays text."""
    drawn = io.BytesIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "jaxinfer"}):
        metadata = {"Date": None} if suffix == "svg" else {}
        figure.savefig(drawn, format=suffix, dpi=150, metadata=metadata)
    return drawn.getvalue()


def write_figure(file: Path, figure: Figure) -> None:
    """Write a figure in the format of the file's suffix."""
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, render(figure, file.suffix[1:]))

"""Output that several subcommands share: tables, and whatever else rich can print."""

import math

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

WIDTH = 80
"""Columns that every table fits into. Narrower terminals break its lines, where rich would cut figures."""
PIPED_WIDTH = 120
"""Columns of output off a terminal."""


def table(*columns: str, figures: int = 0, title: str = "") -> Table:
    """Return an empty table whose last `figures` columns are right-aligned and never broken.

    Other columns are folded into what those leave, so nothing is cut.
    """
    empty = Table(title=title or None, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for left, column in zip(range(len(columns), 0, -1), columns, strict=True):
        if left > figures:
            empty.add_column(column, overflow="fold")
        else:
            empty.add_column(column, justify="right", no_wrap=True)
    return empty


def figure(value: float, digits: int = 4) -> str:
    """Format a number with as many significant digits, and without an exponent.

    >>> figure(1234.56), figure(12345.6), figure(0.0123456), figure(0.4, 3)
    ('1,235', '12,346', '0.01235', '0.400')
    """
    if not value:
        return "0"
    magnitude = math.floor(math.log10(abs(float(f"{value:.{digits - 1}e}"))))  # of the rounded value
    return f"{value:,.{max(0, digits - 1 - magnitude)}f}"


def kept_tokens(token_bytes: float) -> str:
    """Say how many tokens of the KV cache a tier keeps.

    >>> kept_tokens(1 << 20)
    '1 GiB of --host-kv or --disk-kv-limit keeps 1,024 tokens of the KV cache.'
    """
    return f"1 GiB of --host-kv or --disk-kv-limit keeps {int((1 << 30) / token_bytes):,} tokens of the KV cache."


def show(*shown: RenderableType) -> None:
    """Print tables and the like."""
    console = Console()
    console.width = max(console.width, WIDTH) if console.is_terminal else PIPED_WIDTH
    for each in shown:
        console.print(each)


def say(paragraph: str) -> None:
    """Print a paragraph, in a terminal with no words broken."""
    if Console().is_terminal:
        show(Text(paragraph))
    else:
        print(paragraph)

"""Markdown tables of the rows of results."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

OURS = "jaxinfer"
Result = dict[str, Any]
"""The content written by `Report.save`."""


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def rows_of(files: Iterable[str | Path]) -> list[dict[str, Any]]:
    """Read the rows of results, one file after the other."""
    return [row for file in files for row in json.loads(Path(file).read_text())["rows"]]


def best(cells: Sequence[float | None], choose: Callable[[Iterable[float]], float], places: int) -> list[str]:
    """Format figures; the best in bold, a missing one empty."""
    winner = choose(cell for cell in cells if cell is not None)
    texts = ["" if cell is None else f"{cell:.{places}f}" for cell in cells]
    return [f"**{text}**" if cell == winner else text for cell, text in zip(cells, texts, strict=True)]


def engine_name(engine: str) -> str:
    return f"**{engine}**" if engine == OURS else engine

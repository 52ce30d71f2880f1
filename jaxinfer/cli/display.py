"""Output that several subcommands share: tables, and a progress bar."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Table

PIPED_WIDTH = 120  # columns of output off a terminal, which rich would squeeze into 80


def show(*tables: Table) -> None:
    """Print tables."""
    console = Console()
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    for table in tables:
        console.print(table)


@contextmanager
def show_progress() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function that shows a task, how much of it is done, and the total on stderr, if that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)

"""A progress bar on stderr that does not disturb the measurement."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

SECONDS_PER_REFRESH = 0.5


@contextmanager
def progress_bar(description: str, total: int) -> Iterator[tuple[Progress, TaskID]]:
    """Yield a bar that is drawn only on request: a refresh thread would compete with the engine's host code."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, auto_refresh=False, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(description, total=total)
        bar.refresh()
        yield bar, task


def throttled(bar: Progress, task: TaskID, requests: int) -> Callable[[int, int], None]:
    """Return a callback that draws the output tokens so far, too rarely to affect the measurement."""
    drawn = time.perf_counter()

    def show(finished: int, tokens: int) -> None:
        nonlocal drawn
        if (now := time.perf_counter()) - drawn > SECONDS_PER_REFRESH:
            drawn = now
            bar.update(task, description=f"{finished} of {requests} requests, tokens", completed=tokens, refresh=True)

    return show

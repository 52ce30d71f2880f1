"""Long work says what it does: one line on stderr, once it has taken a while.

Whatever may take seconds runs in `with long_work("compiling programs", total=6) as work`, and tells `work` how far it
is. Users choose by the argument `progress` of `LLM`, `Service`, ... who hears of it, or turn the line off for a whole
process by `JAXINFER_PROGRESS=0`.
"""

import contextlib
import functools
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar

Progress = Callable[[str, int, int], None]
"""Callback with what is done, how much of it, and the total, which is 0 where it is not known."""

ProgressOption = bool | Progress | None
"""True: a line on stderr, False: none, or a callback; None: what the caller has chosen, else a line."""

DELAY = 0.5
"""Seconds that work takes before its line is shown in a terminal, where it goes again: imports came before it."""

LOG_DELAY = 2.0
"""Seconds that work takes before its line is written elsewhere, where it stays."""

INTERVAL = 30.0
"""Seconds between two lines of the same work where stderr is no terminal, so that a log stays readable."""

_BAR_WIDTH = 16

_chosen: ContextVar[ProgressOption] = ContextVar("progress", default=None)


class LongWork:
    """Work that tells how far it is: what is done, how much of it, the total, and since when it runs."""

    def __init__(self, what: str, total: int | None, in_bytes: bool, tell: Progress | None):
        self.what, self.done, self.total, self.in_bytes = what, 0, total, in_bytes
        self.since = time.monotonic()
        self._tell = tell
        self._told()

    def advance(self, steps: int = 1) -> None:
        """Count steps that are done."""
        self.update(done=self.done + steps)

    def update(self, *, what: str | None = None, done: int | None = None, total: int | None = None) -> None:
        """Change what is said; None leaves it."""
        self.what = self.what if what is None else what
        self.done = self.done if done is None else done
        self.total = self.total if total is None else total
        self._told()

    def _told(self) -> None:
        if self._tell is not None:
            self._tell(self.what, self.done, self.total or 0)

    @property
    def how_far(self) -> str:
        """How much is done, as `3 of 6` or `1.2 GB of 8.5 GB, 310.0 MB/s`; empty where the total is not known."""
        if not self.total:
            return ""
        if not self.in_bytes:
            return f"{self.done} of {self.total}"
        from rich.filesize import decimal

        rate = int(self.done / max(time.monotonic() - self.since, 1e-3))
        return f"{decimal(self.done)} of {decimal(self.total)}, {decimal(rate)}/s"

    def line(self, width: int | None = None) -> str:
        """Return `what: how far, seconds`; of what is too long for the width, the end is left out."""
        rest = f"{self.how_far and ': '}{self.how_far}, {time.monotonic() - self.since:.0f} s"
        room = len(self.what) if width is None else max(width - len(rest), 4)
        return (self.what if len(self.what) <= room else f"{self.what[: room - 3]}...") + rest


@contextlib.contextmanager
def showing(progress: ProgressOption) -> Iterator[None]:
    """Choose who hears of long work that this thread or task begins meanwhile."""
    if not (progress is None or isinstance(progress, bool) or callable(progress)):
        raise ValueError(f"progress must be True, False, a function of (what, done, total) or None, got {progress!r}.")
    before = _chosen.set(current_progress() if progress is None else progress)
    try:
        yield
    finally:
        _chosen.reset(before)


def current_progress() -> ProgressOption:
    """Return who hears of long work that begins now: work that goes on in another thread passes it to `showing`."""
    return _chosen.get()


@contextlib.contextmanager
def long_work(what: str, *, total: int | None = None, in_bytes: bool = False) -> Iterator[LongWork]:
    """Show what runs inside, if it takes long.

    Args:
      what: the work, such as "compiling programs"; on a line, it is followed by how far it is.
      total: the number of steps; None: not known.
      in_bytes: whether steps are bytes, and written as such.

    Yields the work, which is told of steps that are done, by any thread.
    """
    choice = _chosen.get()
    work = LongWork(what, total, in_bytes, choice if callable(choice) else None)
    shown = not callable(choice) and (choice is True or (choice is None and os.environ.get("JAXINFER_PROGRESS") != "0"))
    if not shown:
        yield work
        return
    with _line.show(work):
        yield work


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Take the line away while something else is printed."""
    with _line.hide():
        yield


class _Line:
    """The line on stderr. Of works that run at once it shows the one that began last, as that is what the others do.

    A thread looks at them while there are any: work that waits for a compiler or a disk cannot show itself.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._works: weakref.WeakSet[LongWork] = weakref.WeakSet()  # Ctrl-C may come before one is taken out
        self._bar: Bar | None = None
        self._away = 0
        self._written: tuple[LongWork, float] | None = None  # off a terminal: the last line's work, and when
        self._watching: threading.Thread | None = None
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()  # told of the end of all works

    @functools.cached_property
    def _console(self) -> "Console":
        # Imported when first needed: `import jaxinfer` should not wait for it.
        from rich.console import Console

        return Console(stderr=True)

    @contextlib.contextmanager
    def show(self, work: LongWork) -> Iterator[None]:
        with self._lock:
            self._works.add(work)
            if self._watching is None:
                self._watching = threading.Thread(target=self._watch, name="jaxinfer-progress", daemon=True)
                self._watching.start()
        try:
            yield
        finally:
            with self._lock:
                self._works.discard(work)
                if self._bar is not None:
                    self._refresh()
                if not self._works:
                    self._ended.put(None)

    @contextlib.contextmanager
    def hide(self) -> Iterator[None]:
        with self._lock:
            self._away += 1
            self._refresh()
        try:
            yield
        finally:
            with self._lock:
                self._away -= 1

    def _watch(self) -> None:
        while True:
            with contextlib.suppress(queue.Empty):
                self._ended.get(timeout=0.25)
            with self._lock:
                if not self._works:
                    self._watching = None
                    return
                self._refresh()

    def _refresh(self) -> None:
        """Show the newest work that has taken long, or nothing."""
        now = time.monotonic()
        delay = DELAY if self._console.is_terminal else LOG_DELAY
        late = [work for work in self._works if now - work.since > delay]
        work = max(late, key=lambda work: work.since) if late and not self._away else None
        if work is None:
            if self._bar is not None:
                self._bar.stop()
                self._bar = None
        elif self._console.is_terminal:
            self._draw(work)
        else:
            self._write(work, now)

    def _draw(self, work: LongWork) -> None:
        if self._bar is None:
            self._bar = _bar(self._console)
            self._bar.add_task("", total=None)
        (task,) = self._bar.task_ids
        line = work.line(self._console.width - _BAR_WIDTH - 4)
        self._bar.update(task, description=line, completed=work.done, total=work.total or None)
        self._bar.start()
        self._bar.refresh()

    def _write(self, work: LongWork, now: float) -> None:
        if self._written is None or self._written[0] is not work or now - self._written[1] > INTERVAL:
            self._written = work, now
            print(f"jaxinfer: {work.line()}", file=sys.stderr, flush=True)


def _bar(console: "Console") -> "Bar":
    from rich.progress import BarColumn, SpinnerColumn, TextColumn
    from rich.progress import Progress as Bar
    from rich.table import Column

    return Bar(
        SpinnerColumn(),
        BarColumn(bar_width=_BAR_WIDTH),
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
        console=console,
        transient=True,
        auto_refresh=False,  # the thread that watches draws it, rarely: what is measured may run meanwhile
        redirect_stdout=False,  # what is printed to stdout stays there
        redirect_stderr=False,
    )


_line = _Line()


def _after_fork() -> None:
    """Begin anew in a process that was forked: the thread is not there, and may have held the lock."""
    global _line
    _line = _Line()


os.register_at_fork(after_in_child=_after_fork)

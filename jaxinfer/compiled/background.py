"""Compiling in the background what a live service does not have yet, one program at a time."""

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

from jaxinfer.compiled.interruptible import start
from jaxinfer.compiled.threads import close_at_exit
from jaxinfer.progress import showing

log = logging.getLogger("jaxinfer.compiled")


class StoppedError(RuntimeError):
    """No more programs are compiled, since their owner is being closed."""


class Turns:
    """Turns of those who compile: who waits for a program goes first, and nobody begins one after the end."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # entered itself, not by way of `_changed`: see `futures`
        self._changed = threading.Condition(self._lock)
        self._waiting, self._stopped = 0, False

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        """Have no program compiled in the background meanwhile, but for one that has begun."""
        with self._lock:
            self._waiting += 1
        try:
            yield
        finally:
            with self._lock:
                self._waiting -= 1
                self._changed.notify_all()

    def last(self) -> bool:
        """Wait until nobody waits for a program; return False after the end."""
        with self._lock:
            self._changed.wait_for(lambda: self._stopped or not self._waiting)
        return not self._stopped

    def pause(self, seconds: float) -> None:
        """Wait, but not beyond the end."""
        with self._lock:
            self._changed.wait_for(lambda: self._stopped, seconds)

    def check(self) -> None:
        """Raise StoppedError after the end."""
        if self._stopped:
            raise StoppedError("no more programs are compiled: their owner is being closed.")

    def stop(self) -> None:
        """End: programs that are being compiled are the last ones."""
        with self._lock:
            self._stopped = True
            self._changed.notify_all()


class Step(NamedTuple):
    """A program that is missing.

    Attributes:
      compile: compiles it, without holding any of the owner's memory.
      failure: what follows if it cannot be compiled or used, for a warning that goes on with the error.
    """

    compile: Callable[[], None]
    failure: str


def compile_in_background[Key](
    turns: Turns,
    next_step: Callable[[set[Key]], tuple[Key, Step] | None],
    take: Callable[[Key], None] = lambda key: None,
    *,
    delay: float = 0.0,
) -> None:
    """Compile all that is missing, in a thread that holds up neither an interrupt nor its owner's end.

    Args:
      turns: whose turn it is.
      next_step: returns the next program, of those not in the set; None at the end. It holds its owner weakly, or none
        of its memory.
      take: takes a compiled program into use, and holds its owner weakly. Programs that it refuses are not used.
      delay: seconds before the first one begins.
    """

    def run() -> None:
        tried = set[Key]()
        turns.pause(delay)
        with showing(False), contextlib.suppress(StoppedError):
            while turns.last() and (step := next_step(tried)) is not None:
                key, (compile_it, failure) = step
                tried.add(key)
                try:
                    compile_it()
                    turns.check()
                    take(key)
                except Exception as error:
                    turns.check()
                    log.warning("%s: %s", failure, (str(error) or type(error).__name__).splitlines()[0])

    close_at_exit(turns, Turns.stop)
    with contextlib.suppress(RuntimeError):  # the process is ending
        start(run)

"""The end of everything that users hold."""

import abc
import threading
from typing import Self


def check_timeout(timeout: float | None) -> float | None:
    """Return seconds to wait as Python's locks take them, which have a limit. Raises ValueError for anything else."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0:  # nor NaN
        raise ValueError(f"timeout must be a number of seconds, at least 0, or None, got {timeout!r}.")
    return min(timeout, threading.TIMEOUT_MAX)


class Closeable(abc.ABC):
    """Something that users hold and close, by `close` or a `with` block, which lets requests end unless it raised.

    Dropped unclosed it gives its memory back too; the end of the process closes it; in a forked process its calls are
    errors, and `close` does nothing.
    """

    @abc.abstractmethod
    def close(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """End, and free all memory of devices and of the host; may be called again, and from any thread.

        Args:
          drain: whether requests come to their end first. Otherwise, and after `timeout`, they end with ClosedError.
          timeout: maximum seconds to wait.

        Raises ValueError for another timeout, before anything ends.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(drain=kind is None)

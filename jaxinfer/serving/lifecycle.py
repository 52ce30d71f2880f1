"""The end of everything that users hold."""

import abc
from typing import Self


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
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(drain=kind is None)

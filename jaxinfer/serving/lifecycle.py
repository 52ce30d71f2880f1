"""How all ends that users hold."""

import abc
from typing import Self


class Closeable(abc.ABC):
    """What users hold: ends by `close`, or with its `with` block, which lets requests end unless by an error.

    Dropped unclosed it gives its memory back too; the end of the process closes it; in a process that was forked its
    calls are errors, and `close` does nothing.
    """

    @abc.abstractmethod
    def close(self, *, drain: bool = True, timeout: float | None = None) -> None:
        """End, and give all memory back, of devices and of the host; may be called again, and from any thread.

        Args:
          drain: let what was asked come to its end before. Otherwise, and after `timeout`, it ends with ClosedError.
          timeout: seconds to wait at most.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(drain=kind is None)

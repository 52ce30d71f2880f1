"""Which process made something: a forked child has its parent's memory, but not its threads, and so no working XLA."""

import os


class Origin:
    """The process in which something was made that only works there.

    Args:
      what: was made, as the subject of an error: "This LLM".
    """

    def __init__(self, what: str):
        self._what, self._pid = what, os.getpid()

    @property
    def forked(self) -> bool:
        """Whether this process is not that one, but was forked from it."""
        return os.getpid() != self._pid

    def check(self, error: type[Exception] = RuntimeError) -> None:
        """Raise an error, of this type, in a process that was forked."""
        if self.forked:
            raise error(
                f"{self._what} was made in process {self._pid}, of which this one, {os.getpid()}, was forked: its "
                "threads, and XLA's, have stayed there. Make another one here, in a process that was started by "
                'multiprocessing.get_context("spawn").'
            )

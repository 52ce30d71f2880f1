"""Origin of an object: a forked child has its parent's memory, but not its threads, and so no working XLA."""

import os


class Origin:
    """The process that made an object which only works there.

    Args:
      what: the object, as the subject of an error: "This LLM".
    """

    def __init__(self, what: str):
        self._what, self._pid = what, os.getpid()

    @property
    def forked(self) -> bool:
        """Whether this process was forked from that one."""
        return os.getpid() != self._pid

    def check(self, error: type[Exception] = RuntimeError) -> None:
        """Raise an error of this type in a forked process."""
        if self.forked:
            raise error(
                f"{self._what} was made in process {self._pid}, of which this one, {os.getpid()}, was forked: its "
                "threads, and XLA's, have stayed there. Make another one here, in a process that was started by "
                'multiprocessing.get_context("spawn").'
            )

"""How work that takes long says how far it is."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is, and the total."""


def no_progress(what: str, done: int, total: int) -> None:
    """For callers who do not ask."""

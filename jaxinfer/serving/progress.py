"""How work that takes long says how far it is."""

import logging
from collections.abc import Callable

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is, and the total."""


def no_progress(what: str, done: int, total: int) -> None:
    """For callers who do not ask."""


def log_progress(what: str, done: int, total: int) -> None:
    """To the log."""
    log.info("%s: %d of %d", what, done, total)

"""Reporting the progress of long work."""

import logging
from collections.abc import Callable

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Callback with the current step's name, the amount done, and the total."""


def no_progress(what: str, done: int, total: int) -> None:
    """Ignore progress, for callers who do not ask for it."""


def log_progress(what: str, done: int, total: int) -> None:
    """Log progress."""
    log.info("%s: %d of %d", what, done, total)

"""The duty of an owner of threads at the end of the process."""

import atexit
import logging
import weakref
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

_owners: weakref.WeakKeyDictionary[Any, Callable[[Any], object]] = weakref.WeakKeyDictionary()


def close_at_exit[Owner](owner: Owner, close: Callable[[Owner], object]) -> None:
    """Close an owner of threads before the interpreter is taken down: a thread that still ran could crash it.

    Does not keep the owner alive, as long as `close` does not.
    """
    _owners[owner] = close


@atexit.register
def _close_all() -> None:
    for owner, close in reversed(list(_owners.items())):  # later owners may use earlier ones
        try:
            close(owner)
        except Exception as error:
            log.warning("%s", error)

"""Duties of an owner of threads: towards callers who wait, and at the end of the process."""

import atexit
import logging
import weakref
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
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


def begin_future(future: Future[Any]) -> bool:
    """Protect a future from cancellation; return False if its caller has cancelled it, or given it an outcome."""
    if future.done() and not future.cancelled():
        return False
    try:
        return future.set_running_or_notify_cancel()
    except RuntimeError:  # its caller was faster
        return False


def end_future[Outcome](future: Future[Outcome], outcome: Outcome | Exception, what: str) -> None:
    """End a future that waits or runs, unless its caller has ended it. Errors of its callbacks are logged only.

    what: what the future belongs to, for the log.
    """
    try:
        if not future.running() and not begin_future(future):
            return
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
    except InvalidStateError:  # its caller was faster
        return
    except BaseException as error:  # `Future` itself keeps those that are an Exception
        log.error("A callback of %s has failed.", what, exc_info=error)

"""Calls that Ctrl-C cannot stop, such as of XLA's compiler, made so that it stops their caller."""

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future


class _Calls:
    """How many calls run, and whether a caller has left one."""

    def __init__(self) -> None:
        self.lock, self.running, self.left = threading.Lock(), 0, False


_calls = _Calls()


def interruptible[Result](call: Callable[[], Result]) -> Result:
    """The result of a call in a thread of its own, which goes on by itself if the caller is interrupted.

    A process that ends before such a call does ends as by SIGINT: it cannot wait, and code that still ran while it is
    taken down would crash it.
    """
    future: Future[Result] = Future()

    def run() -> None:
        with _calls.lock:
            _calls.running += 1
        try:
            result = call()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
        finally:
            with _calls.lock:
                _calls.running -= 1

    threading.Thread(target=run, name="jaxinfer-call", daemon=True).start()
    with leaving():
        return future.result()


@contextlib.contextmanager
def leaving() -> Iterator[None]:
    """Within this context an interrupt leaves calls behind."""
    try:
        yield
    except BaseException as error:
        _calls.left |= not isinstance(error, Exception)
        raise


@atexit.register
def _end() -> None:
    if _calls.left and _calls.running:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)

"""Interruptible waits for calls that Ctrl-C cannot stop, such as XLA's compiler: Ctrl-C stops the caller instead."""

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future


class _Calls:
    """The number of running calls, and whether a caller has left one."""

    def __init__(self) -> None:
        self.lock, self.running, self.left = threading.Lock(), 0, False


_calls = _Calls()


def start[Result](call: Callable[[], Result]) -> Future[Result]:
    """Begin a call in a thread that holds up neither an interrupt nor the end of the process."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            result = call()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
        finally:
            with _calls.lock:
                _calls.running -= 1

    with _calls.lock:
        _calls.running += 1
    threading.Thread(target=run, name="jaxinfer-call", daemon=True).start()
    return future


def results[Result](futures: Iterable[Future[Result]]) -> list[Result]:
    """Return the results of started calls. If the caller is interrupted, the calls go on by themselves.

    A process that ends while such a call runs ends as if by SIGINT: it cannot wait for the call, and code that still
    runs while the process is taken down would crash it.
    """
    try:
        return [future.result() for future in futures]
    except BaseException as error:
        _calls.left |= not isinstance(error, Exception)
        raise


def interruptible[Result](call: Callable[[], Result]) -> Result:
    """Run a call and return its result; Ctrl-C stops the wait."""
    return results([start(call)])[0]


@atexit.register
def _end() -> None:
    if _calls.left and _calls.running:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)

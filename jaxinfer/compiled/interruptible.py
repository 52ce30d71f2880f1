"""Interruptible waits for calls that Ctrl-C cannot stop, such as XLA's compiler: Ctrl-C stops the caller instead.

A process that ends while such a call runs waits for it, since code that still runs while the process is taken down
would crash it. One that Ctrl-C ends does not wait: it ends as if by SIGINT.
"""

import atexit
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable

from jaxinfer.futures import INTERVAL, InterruptibleFuture


class _Calls:
    """The number of running calls, and whether a caller has left one."""

    def __init__(self) -> None:
        self.lock, self.running, self.left = threading.Lock(), 0, False
        self.ended = threading.Condition(self.lock)


_calls = _Calls()


def start[Result](function: Callable[[], Result]) -> InterruptibleFuture[Result]:
    """Begin a call in a thread that holds up neither an interrupt nor the end of the process.

    Raises RuntimeError if no thread can begin, as when the process is ending.
    """
    future = InterruptibleFuture(function)

    def run() -> None:
        try:
            future.run()
        finally:
            with _calls.lock:
                _calls.running -= 1
                _calls.ended.notify_all()

    with _calls.lock:
        _calls.running += 1
    try:
        threading.Thread(target=run, name="jaxinfer-call", daemon=True).start()
    except RuntimeError:
        with _calls.lock:
            _calls.running -= 1
        raise
    return future


def results[Result](
    futures: Iterable[InterruptibleFuture[Result]], check: Callable[[], None] = lambda: None
) -> list[Result]:
    """The results of started calls. If the caller is interrupted, the calls go on by themselves.

    check: called while this waits; what it raises interrupts the caller, too.
    """

    def result(future: InterruptibleFuture[Result]) -> Result:
        while not future.wait(INTERVAL):
            check()
        return future.result()

    try:
        return [result(future) for future in futures]
    except BaseException as error:
        _calls.left |= not isinstance(error, Exception)
        raise


def interruptible[Result](function: Callable[[], Result]) -> Result:
    """Run a call and return its result; Ctrl-C stops the wait."""
    return results([start(function)])[0]


def run_all[Argument](
    function: Callable[[Argument], None],
    arguments: Iterable[Argument],
    workers: int,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Make a call for each argument, several at a time. After an error or Ctrl-C, no more of them begin.

    check: as in `results`.
    """
    remaining = list(arguments)[::-1]

    def run() -> None:
        try:
            while remaining:
                try:
                    argument = remaining.pop()
                except IndexError:  # another worker has taken the last one
                    return
                function(argument)
        except BaseException:
            remaining.clear()
            raise

    try:
        results([start(run) for _ in range(min(len(remaining), workers))], check)
    finally:
        remaining.clear()


@atexit.register
def _end() -> None:
    interrupted = _calls.left or isinstance(getattr(sys, "last_exc", None), KeyboardInterrupt)
    try:
        with _calls.lock:
            if not interrupted:
                _calls.ended.wait_for(lambda: not _calls.running)
    except KeyboardInterrupt:
        pass
    if _calls.running:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


def _after_fork() -> None:
    """Begin anew in a process that was forked: no call runs there."""
    global _calls
    _calls = _Calls()


os.register_at_fork(after_in_child=_after_fork)

"""The process of the command line: `jaxinfer`, or `python -m jaxinfer`. Ctrl-C ends it soon, whenever it comes.

By itself Python raises KeyboardInterrupt wherever it is. In a callback of the garbage collector (JAX has one) or in a
`__del__`, that is printed and lost; in an extension module that is being imported, it may abort the process.
"""

import atexit
import os
import signal
import sys
import threading
from contextlib import suppress
from importlib.machinery import ExtensionFileLoader
from types import FrameType

STATUS = 128 + signal.SIGINT
"""The exit status after Ctrl-C, as shells give it; typer has it too."""

_AGAIN = 0.02
"""Seconds after which an interrupt that could not be raised comes again."""

_MOST = 1.0
"""Seconds that the end of the process may take, once a command has been interrupted and has cleaned up."""


def main() -> None:
    """Run the command line."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not ignored, as in a shell's background
        signal.signal(signal.SIGINT, _interrupt)
        signal.signal(signal.SIGALRM, _interrupt)
        sys.unraisablehook = _unraisable
    interrupted = threading.Event()
    atexit.register(_end_if, interrupted)  # first, so that it runs last
    try:
        from jaxinfer.cli import app

        app(prog_name="jaxinfer")
    except (KeyboardInterrupt, SystemExit) as error:
        if isinstance(error, SystemExit) and error.code != STATUS:
            raise
        interrupted.set()
        watchdog = threading.Timer(_MOST, os._exit, (STATUS,))
        watchdog.daemon = True
        watchdog.start()
        sys.last_exc = KeyboardInterrupt()  # so that nothing waits for what still compiles
        print("\ninterrupted" if sys.stderr.isatty() else "interrupted", file=sys.stderr, flush=True)  # after ^C
        sys.exit(STATUS)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    if _importing_extension(frame):
        _come_again()
    else:
        raise KeyboardInterrupt


def _importing_extension(frame: FrameType | None) -> bool:
    file = ExtensionFileLoader.exec_module.__code__.co_filename
    while frame is not None:
        if frame.f_code.co_filename == file and isinstance(frame.f_locals.get("self"), ExtensionFileLoader):
            return True
        frame = frame.f_back
    return False


def _unraisable(lost: "sys.UnraisableHookArgs") -> None:
    if issubclass(lost.exc_type, KeyboardInterrupt):
        _come_again()
    else:
        sys.__unraisablehook__(lost)


def _come_again() -> None:
    signal.setitimer(signal.ITIMER_REAL, _AGAIN)


def _end_if(interrupted: threading.Event) -> None:
    """End as if by SIGINT before Python and XLA are taken down, which threads that still run could make an abort."""
    if interrupted.is_set():
        with suppress(OSError):  # nobody reads it any more
            sys.stdout.flush()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    main()

"""`Sandbox`: a process that works for this one within limits."""

import contextlib
import json
import os
import select
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from jaxinfer.sandbox.program import MEMORY_BYTES

SECONDS = 5.0
"""Seconds that a call may take."""
START_SECONDS = 120.0
"""Seconds that the start of the process may take: far more than it does on a busy machine."""
_ROOT = Path(__file__).parents[2]


class TooSlowError(ValueError):
    """A call takes longer than it may."""


class Sandbox:
    """Calls a function in a process of its own, which starts with the first call and ends if one takes too long.

    Args:
      function: the name of a function that `program.find` knows.
      what: what it works on, as the subject of an error.
      seconds: how long a call may take.
      memory_bytes: the bytes that the process may take beyond those it starts with.
    """

    def __init__(self, function: str, what: str, *, seconds: float = SECONDS, memory_bytes: int = MEMORY_BYTES):
        self._function, self._what, self._seconds, self._memory_bytes = function, what, seconds, memory_bytes
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._end: Callable[[], object] = lambda: None
        self._answered = True  # whether the process has answered the last call
        self._closed, self._owner = False, os.getpid()

    def call(self, **arguments: Any) -> Any:
        """Call the function. Arguments and result are JSON.

        Raises ValueError as the function does, and if it takes too much memory; TooSlowError; RuntimeError after
        `close`.
        """
        if self._owner != os.getpid():
            self._begin_after_fork()
        request = json.dumps(arguments).encode() + b"\n"
        with self._lock:
            try:
                self._check_open()
                self._answered = False
                reply = json.loads(_exchange(self._running(), request, self._seconds))
                self._answered = True
            except Exception as error:
                self._stop()
                self._check_open()
                if isinstance(error, TimeoutError):
                    raise TooSlowError(f"{self._what} takes more than {self._seconds:g} s.") from None
                raise ValueError(f"{self._what} cannot be used: {error}.") from error
            finally:
                if not self._answered:  # the next call would take the answer for its own
                    self._stop()
        if reply.get("error") == "MemoryError":
            raise ValueError(f"{self._what} takes more than {decimal(self._memory_bytes)}.")
        if "error" in reply:
            raise ValueError(reply["error"])
        return reply["result"]

    def close(self) -> None:
        """End the process, and the call that it works on. A process that was forked leaves it to the other."""
        if self._owner != os.getpid():
            return
        self._closed = True
        if (process := self._process) is not None:
            process.kill()
        with self._lock:  # no other thread reads a pipe that is closed, whose number may mean another file then
            self._stop()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("This sandbox is closed.")

    def _begin_after_fork(self) -> None:
        """Leave the process, and a lock that another thread may have held, to the process that this one comes from."""
        self._lock, self._process, self._end = threading.Lock(), None, lambda: None
        self._owner = os.getpid()

    def _running(self) -> "subprocess.Popen[bytes]":
        """The process, started if there is none."""
        if self._process is not None and self._process.poll() is None:
            return self._process
        self._stop()
        path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        self._process = process = subprocess.Popen(
            [sys.executable, "-P", "-m", "jaxinfer.sandbox.program", self._function, str(self._memory_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # where a library that runs out of memory says so
            cwd=_ROOT,  # nothing of the current folder is executed
            env=os.environ | {"PYTHONPATH": path},
            bufsize=0,
            start_new_session=True,  # Ctrl-C is for its owner
        )
        self._end = weakref.finalize(self, _end_process, process, os.getpid())
        self._check_open()  # `close` may have found no process
        _exchange(process, b"{}\n", START_SECONDS)  # which it cannot take, and says so
        return process

    def _stop(self) -> None:
        self._end()
        self._process = None


def _exchange(process: "subprocess.Popen[bytes]", request: bytes, seconds: float) -> bytes:
    """Send a line, and wait for the line that answers it. Raises TimeoutError, and OSError if the process ends."""
    assert process.stdin is not None
    assert process.stdout is not None
    until, unsent, received = time.monotonic() + seconds, memoryview(request), bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdin, selectors.EVENT_WRITE)
        selector.register(process.stdout, selectors.EVENT_READ)
        while not received.endswith(b"\n"):
            ready = {key.fileobj for key, _ in selector.select(max(0.0, until - time.monotonic()))}
            if not ready:
                raise TimeoutError
            if process.stdout in ready:
                part = os.read(process.stdout.fileno(), 1 << 20)
                if not part:
                    raise OSError("its process has ended")
                received += part
            elif process.stdin in ready:
                unsent = unsent[os.write(process.stdin.fileno(), unsent[: select.PIPE_BUF]) :]  # which does not block
                if not unsent:
                    selector.unregister(process.stdin)
    return bytes(received)


def _end_process(process: "subprocess.Popen[bytes]", owner: int) -> None:
    """End a process, but not that of the process that this one was forked from."""
    if os.getpid() != owner:
        return
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):
                pipe.close()

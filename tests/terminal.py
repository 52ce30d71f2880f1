"""Commands in a pseudo-terminal of 80 x 24, with what they show, when, and how they end."""

import dataclasses
import fcntl
import os
import pathlib
import pty
import re
import resource
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence

import pyte

COLUMNS, ROWS = 80, 24

IN_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Makes the terminal one where Ctrl-C is a key. A `preexec_fn` would fork, which JAX warns of in this process."""


@dataclasses.dataclass(frozen=True)
class Played:
    """A command that has ended.

    Attributes:
      written: all bytes that it sent to the terminal, as text.
      status: its exit status, as a shell gives it.
      silence: the longest time in seconds between two outputs, or before the first, or after the last.
      seconds: how long it ran.
      ending: seconds from the interrupt, or else the last output, to its end.
    """

    written: str
    status: int
    silence: float
    seconds: float
    ending: float

    @property
    def lines(self) -> list[str]:
        """The lines that are on the terminal in the end, with those that have left it at the top."""
        screen = pyte.HistoryScreen(COLUMNS, ROWS, history=100_000)
        pyte.Stream(screen).feed(self.written)
        above = ["".join(line[column].data for column in range(COLUMNS)) for line in screen.history.top]
        return [line.rstrip() for line in (*above, *screen.display) if line.strip()]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)


def play(
    command: Sequence[str | os.PathLike[str]],
    *,
    cwd: pathlib.Path,
    environment: Mapping[str, str],
    interrupt_when: Callable[[str], bool] | None = None,
    by_signal: bool = False,
    keys: Sequence[tuple[str, str]] = (),
    timeout: float = 900,
) -> Played:
    """Run a command in a terminal until it ends.

    Args:
      interrupt_when: presses Ctrl-C once, as soon as this is true of what was written.
      by_signal: sends the signal alone, so that no ^C is shown.
      keys: pairs of a pattern and keys that are typed when the pattern has appeared (after the pair before).
      timeout: seconds after which the test fails.
    """
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", IN_TERMINAL, *command],
        cwd=cwd,
        env={**environment, "TERM": "xterm-256color"},
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
    )
    os.close(slave)
    start = last = time.monotonic()
    silence, interrupted, written, waiting, typed_from = 0.0, None, "", list(keys), 0
    while True:
        ready = select.select([master], [], [], 0.05)[0]
        now = time.monotonic()
        if now - start > timeout:
            os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(f"{command} has not ended after {timeout} s:\n{written[-3000:]}")
        if ready:
            try:
                part = os.read(master, 65536).decode(errors="replace")
            except OSError:  # nobody has the other end any more
                break
            if not part:
                break
            written += part
            silence, last = max(silence, now - last), now
        elif process.poll() is not None:
            break
        if interrupt_when is not None and interrupted is None and interrupt_when(written):
            process.send_signal(signal.SIGINT) if by_signal else os.write(master, b"\x03")
            interrupted = time.monotonic()
        if waiting and (found := re.search(waiting[0][0], written[typed_from:])):
            typed_from += found.end()
            os.write(master, waiting.pop(0)[1].encode())
    status = process.wait(timeout)
    end = time.monotonic()
    os.close(master)
    assert interrupt_when is None or interrupted is not None, f"{command} ended before it was interrupted:\n{written}"
    return Played(
        written=written,
        status=status if status >= 0 else 128 - status,
        silence=max(silence, end - last),
        seconds=end - start,
        ending=end - (interrupted or last),
    )


def slowdown() -> float:
    """Return how many times slower than alone a process runs on this machine now: its wall time over its CPU time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import jax"], check=True)
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return max(1.0, wall / (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime))


class Limits:
    """Limits in seconds of a quiet machine, held on a busy one by how slow it is before and after."""

    def __init__(self) -> None:
        self._before = slowdown()

    def hold(self, what: str, seconds: float, limit: float, played: Played) -> None:
        """Assert that something took no longer than its limit."""
        if seconds > limit * self._before:
            factor = 1.5 * max(self._before, slowdown())  # a moment may be busier than those that were measured
            assert seconds < limit * factor, f"{what}: {seconds:.1f} s, at most {limit} x {factor:.1f}:\n{played.text}"

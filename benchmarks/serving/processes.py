"""The processes of servers: their start, their CPU time and their end."""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import psutil

from benchmarks.report import ROOT
from benchmarks.serving.load import Load
from benchmarks.workers import EngineError

START_SECONDS = 600.0


class CpuTime(NamedTuple):
    """CPU seconds of a process and its children: of the main thread, which has the event loop, and of all."""

    main: float
    total: float

    def __sub__(self, other: tuple[float, ...]) -> "CpuTime":
        return CpuTime(self.main - other[0], self.total - other[1])


class Process:
    """A process that ends with the context."""

    def __init__(self, name: str, command: Sequence[str | Path], *, output: Any = subprocess.PIPE, **environment: str):
        self.name, self.started = name, time.perf_counter()
        env = {**os.environ, **environment}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, text=True, cwd=ROOT, env=env)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def cpu(self) -> CpuTime:
        """The CPU time so far."""
        process = psutil.Process(self.process.pid)
        each = [process, *process.children(recursive=True)]
        main = next(t for t in process.threads() if t.id == process.pid)
        total = sum(times.user + times.system for times in (p.cpu_times() for p in each))
        return CpuTime(main.user_time + main.system_time, total)

    def failed(self) -> EngineError:
        """The error of a process that has ended by itself."""
        return EngineError(f"{self.name} ended with status {self.process.wait()}; its own message is above.")

    def stop(self) -> str:
        """End the process by SIGTERM; return what it has printed since its last answer."""
        self.process.terminate()
        try:
            out, _ = self.process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, _ = self.process.communicate()
        return out or ""


class Server(Process):
    """A process that listens on a port.

    Args:
      name: the server, in errors.
      command: its command, with "{port}" in place of the port.
      ready: the path that answers 200 once requests are taken.
      port: the port; None: any.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        *,
        ready: str = "/ready",
        port: int | None = None,
        **environment: str,
    ):
        self.port, self._ready = port or free_port(), ready
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - a pipe that nobody reads would fill
        command = [str(part).format(port=self.port) for part in command]
        super().__init__(name, command, output=self._output, **environment)

    def stop(self) -> str:
        """End the process by SIGTERM; return what it has printed."""
        super().stop()
        with self._output:
            self._output.seek(0)
            return self._output.read()

    def __exit__(self, *_: object) -> None:
        if not self._output.closed:
            self.stop()

    def wait(self) -> float:
        """Wait until the server takes requests; return the seconds from its start. Raises EngineError."""
        while (seconds := time.perf_counter() - self.started) < START_SECONDS:
            if self.process.poll() is not None:
                raise self.failed()
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{self._ready}", timeout=5):
                    return time.perf_counter() - self.started
            except (urllib.error.URLError, OSError):
                time.sleep(0.02)
        raise EngineError(f"{self.name} took no requests within {seconds:.0f} s.")


class Bare(Process):
    """The process of an `AsyncLLM` without HTTP. Raises EngineError if it ends."""

    def wait(self) -> None:
        """Wait until it takes loads."""
        self._answer()

    def run(self, load: Load) -> dict[str, Any]:
        """Run a load; return the answer of `run_async.py`."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(load._asdict()) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        if line := self.process.stdout.readline():
            return json.loads(line)
        raise self.failed()


def async_command(model: Path, load: Load, port: str, *, mock: str = "nothing", step_ms: float = 0.0) -> list[str]:
    """The command of `run_async.py`."""
    arguments = (str(model), str(load.streams), mock, str(step_ms), port)
    return [sys.executable, "-m", "benchmarks.serving.run_async", *arguments]


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]

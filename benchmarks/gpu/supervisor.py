"""The parent of a run: one worker for each stage, another one behind an item that ends it. Imports no JAX.

A fault on a GPU can end a process (a failed check aborts), leave it useless (an illegal address) or stop it (a hang).
So this process never touches the GPU. It kills a worker whose item or stage takes too long, reports what was lost, and
starts the next worker behind that item.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu.settings import LOST_CONTEXT, Progress, Settings
from benchmarks.gpu.stages import Stage

MAX_FAULTS = 7
"""Workers of one stage that may die before the rest of it is left out."""
POLL_SECONDS = 0.1
NO_TIME = "no time left; see --minutes"
ROOT = Path(__file__).parents[2]


def run(stages: Mapping[str, Stage], seconds: float, settings: Settings, *, patience: float) -> Iterator[str]:
    """Run the stages within `seconds`, and yield the name of each when it has ended.

    The time is divided by share; what a stage leaves goes to the later ones.

    Args:
      patience: factor by which the limits of items are multiplied.
    """
    end, left = time.monotonic() + seconds, dict(stages)
    for name, stage in stages.items():
        start = time.monotonic()
        total = sum(stage.share for stage in left.values())
        del left[name]
        stage_end = start + max(0.0, end - start) * stage.share / total
        _Run(name, stage, settings, stage_end, patience).run()
        settings.rows.row(part="settings", took=name, seconds=round(time.monotonic() - start, 1))
        yield name


class _Fault(NamedTuple):
    """An item that a worker did not finish, and why.

    item: None: the worker had not begun any. reason: "": the worker has reported it.
    """

    item: int | None
    reason: str


class _Run:
    """One stage, until its items are done or its time is over."""

    def __init__(self, name: str, stage: Stage, settings: Settings, end: float, patience: float):
        self._name, self._stage, self._settings, self._end = name, stage, settings, end
        self._patience = patience
        self._titles: Sequence[str] = ()
        self._log = Path(settings.folder) / "log.txt"

    def run(self) -> None:
        """Start workers until all items are done or reported as absent."""
        if time.monotonic() > self._end:
            return self._report("all items", NO_TIME)
        first = 0
        for _ in range(MAX_FAULTS):
            if (fault := self._work(first)) is None:
                return
            if fault.item is None:
                what = self._titles[first] if self._titles else "the start of a worker"
                self._report(what, fault.reason)
                return self._leave_out(first + 1, fault.reason)
            if fault.reason:
                self._report(self._titles[fault.item], fault.reason)
            first = fault.item + 1
            if fault.reason == NO_TIME or first == len(self._titles):
                return self._leave_out(first, NO_TIME)
        self._leave_out(first, f"{MAX_FAULTS} workers of this stage have died")

    def _report(self, what: str, reason: str) -> None:
        print(f"{self._name}: {what}: {reason}", flush=True)
        self._settings.rows.row(part=self._name, what=what, absent=reason)

    def _leave_out(self, first: int, reason: str) -> None:
        for title in self._titles[first:]:
            self._settings.rows.row(part=self._name, what=title, absent=reason)

    def _work(self, first: int) -> _Fault | None:
        """Run one worker; return the item that it did not finish, or None if it finished all."""
        self._settings.progress.unlink(missing_ok=True)
        current, limit = None, self._patience * self._stage.first
        with self._worker(first) as process:
            begun = time.monotonic()
            while True:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_SECONDS)
                if (progress := self._progress()) is not None and progress.current != current:
                    current = progress.current
                    if current > first:
                        begun, limit = time.monotonic(), self._patience * self._stage.later
                if (status := process.returncode) is not None:
                    return None if status == 0 else _Fault(current, _cause(status))
                if time.monotonic() > self._end:
                    return _Fault(current, NO_TIME)
                if time.monotonic() > begun + limit:
                    return _Fault(current, f"no result within {limit:g} s")

    def _progress(self) -> Progress | None:
        progress = Progress.read(self._settings.progress)
        if progress is not None and not self._titles:
            self._titles = progress.titles
            self._settings.rows.row(part="plan", stage=self._name, items=self._titles)
        return progress

    @contextlib.contextmanager
    def _worker(self, first: int) -> Iterator[subprocess.Popen[bytes]]:
        """Start a worker with a process group of its own, which ends with the context, peers included."""
        command = [sys.executable, "-m", "benchmarks.gpu.worker", self._name, str(first), self._settings.dumps()]
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=_environment(self._settings, self._stage),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            yield process
        finally:
            _kill(process)


def _environment(settings: Settings, stage: Stage) -> dict[str, str]:
    """Return what a worker's JAX must find when it is imported."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "JAXINFER_CACHE": f"{settings.work}/cache"}
    env.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # a peer uses the same GPU
    if settings.dry:
        env["JAX_PLATFORMS"] = "cpu"
        env["JAXINFER_CPU_LIBRARY"] = "0"  # no kernels in C++, which take a minute to compile
        env["NPROC"] = "64"  # XLA:CPU threads, in which the threads of an interpreted kernel wait for each other
    if not stage.timed:
        env["XLA_FLAGS"] = f"{env.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0"
    return env


def _cause(status: int) -> str:
    """Say how a worker has ended; "": it has said so itself."""
    if status == LOST_CONTEXT:
        return ""
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    return f"the worker {how}; see log.txt"


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a worker and its children. A process that waits for the driver may not end: it is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(5)

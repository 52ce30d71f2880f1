"""Processes under an enforced memory limit, which includes the interpreter and pages of files."""

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/sys/fs/cgroup")


class NoCgroupError(SystemExit):
    """Cgroups that this process may not make. Ends the command unless it is caught."""


class Finished(NamedTuple):
    """A process that has ended: its exit status, its output, and its peak memory in bytes."""

    status: int
    stdout: str
    stderr: str
    peak: int


def run_capped(command: Sequence[str | Path], limit: int, *, env: dict[str, str] | None = None) -> Finished:
    """Run a command in a cgroup of its own, of version 1 or 2, without swap.

    Raises NoCgroupError if this process may not make one.
    """
    group, names = _group()
    try:
        (group / names["limit"]).write_text(str(limit))
        enter = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', group / "cgroup.procs"]
        done = subprocess.run(list(map(str, [*enter, *command])), capture_output=True, text=True, env=env)
        return Finished(done.returncode, done.stdout, done.stderr, int((group / names["peak"]).read_text()))
    finally:
        group.rmdir()


def _group() -> tuple[Path, dict[str, str]]:
    """Make a cgroup inside this process's own; return it with the names of its files."""
    version_1 = (ROOT / "memory").is_dir()
    lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own_path = next((path for _, controllers, path in lines if version_1 == ("memory" in controllers.split(","))), "/")
    top = ROOT / "memory" if version_1 else ROOT
    names = {"limit": "memory.max", "peak": "memory.peak"}
    if version_1:
        names = {"limit": "memory.limit_in_bytes", "peak": "memory.max_usage_in_bytes"}
    for parent in (top / own_path.lstrip("/"), top):
        group = parent / f"jaxinfer-benchmark-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        if (group / names["limit"]).exists():
            return group, names
        group.rmdir()
    raise NoCgroupError("No memory cgroup can be made here; run as root, where a cgroup's memory may be limited.")


def was_killed(status: int) -> bool:
    """Check whether the limit was too low."""
    return status in (-signal.SIGKILL, -signal.SIGBUS, -signal.SIGSEGV, 137)

"""The processor of this machine."""

import functools
import os
import platform
from pathlib import Path


def cpu_model() -> str:
    """The name of this machine's CPU."""
    return cpu_fields().get("model name") or platform.processor() or platform.machine()


@functools.cache
def cpu_fields() -> dict[str, str]:
    """The fields of a core in /proc/cpuinfo; none where there is no such file."""
    if not (info := Path("/proc/cpuinfo")).exists():
        return {}
    pairs = (line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs}


def usable_cores() -> int:
    """The number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

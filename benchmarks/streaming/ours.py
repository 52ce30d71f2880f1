"""Our own runs, each in a process under a memory limit that begins with none of the model in memory."""

import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT
from benchmarks.streaming.cgroup import run_capped
from benchmarks.workers import EngineError

CAP = 1 << 30
PROMPT, PASSES, CONTEXT = 16, 4, 64


def run_ours(model: Path, cap: int = CAP, **options: Any) -> dict[str, Any]:
    """Run `run_jaxinfer.py` with changed options; return its output and the peak of memory."""
    settings = {"weights": "disk", "prompt": PROMPT, "passes": PASSES, "context": CONTEXT, **options}
    command = [sys.executable, "-m", "benchmarks.streaming.run_jaxinfer", model, json.dumps(settings)]
    drop_pages(model)
    done = run_capped(command, cap, env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"})
    if done.status:
        raise EngineError(f"jaxinfer ended with status {done.status} under {cap} bytes:\n{done.stderr[-2000:]}")
    return {**json.loads(done.stdout.splitlines()[-1]), "peak": done.peak}


def drop_pages(path: Path) -> None:
    """Drop a path's pages from the kernel's cache: pages that another cgroup has read would cost a process nothing."""
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            handle = os.open(file, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def decode_seconds(result: dict[str, Any]) -> float:
    """Compute the seconds of a pass over one token of each sequence."""
    return statistics.median(result["seconds"][1:])


def rounded(result: dict[str, Any]) -> dict[str, Any]:
    """Round the fields of a run for a row."""
    return {
        "seconds_a_pass": round(decode_seconds(result), 3),
        "gb_per_s": {tier: round(value / 1e9, 3) for tier, value in result["bandwidth"].items()},
        "overlap": round(result["overlap"], 3),
        "peak": result["peak"],
    }

"""Streamed from disk under a memory limit, against what the disk itself gives."""

import itertools
import json
import os
import shutil
import statistics
import subprocess
from pathlib import Path

from benchmarks.report import Report
from benchmarks.streaming.ours import rounded, run_ours
from benchmarks.streaming.settings import Settings
from benchmarks.workers import EngineError
from jaxinfer.models.loading import open_model
from jaxinfer.streaming.layer_folders import layer_folder


def disk(report: Report, settings: Settings) -> None:
    """Streamed from disk under 1 GiB, in turn with fio in the best of its ways, each for about as long."""
    if shutil.which("fio") is None:
        raise EngineError("fio is missing: `apt-get install fio`.")
    model = settings.large_model()
    opened = open_model(model)
    model_bytes, folder = opened.bytes_per_device(), layer_folder(opened)
    sizes, jobs = (("8m",), (4,)) if settings.quick else (("1m", "4m", "16m"), (1, 4, 8))
    tried = {way: fio(folder, *way, seconds=4) for way in itertools.product(sizes, jobs, (False, True))}
    way = max(tried, key=tried.__getitem__)
    report.row(figure="fio", way=way, gb_per_s=round(tried[way] / 1e9, 3))
    raw, ours, cores, peaks = [], [], [], []
    for _ in range(settings.rounds):
        raw.append(fio(folder, *way, seconds=12))
        found = run_ours(model, batch=1)
        ours.append(found["bandwidth"]["disk"])
        cores.append(found["reader_cpu_seconds"] / found["fetch_seconds"])
        peaks.append(found["peak"])
        report.row(figure="disk", fio_gb_per_s=round(raw[-1] / 1e9, 3), **rounded(found))
    raw.append(fio(folder, *way, seconds=12))
    of_raw = statistics.median(ours) / statistics.median(raw)
    streamed = sum(file.stat().st_size for file in folder.glob("*.bin"))
    report.row(
        figure="limit", what="a pass as fast as fio reads", seconds_a_pass=round(streamed / statistics.median(raw), 3)
    )
    report.check("cap_ratio", model_bytes / max(peaks), "x of the peak of memory", target=7)
    report.check("disk_of_raw_bandwidth", of_raw, "of fio", target=0.9)
    report.check("disk_cores", statistics.median(cores), "cores", target=0.3, better="lower")


def fio(folder: Path, size: str, jobs: int, huge_pages: bool, seconds: int) -> float:
    """Bytes a second that fio reads from the layer files, past the page cache, each job other files.

    huge_pages: ask for such for its buffers, which fio itself cannot without reserving some; glibc can.
    """
    files = sorted(file.name for file in folder.glob("*.bin"))
    command = ["fio", "--readonly", "--rw=read", "--direct=1", f"--bs={size}", "--ioengine=psync", "--time_based"]
    command += [f"--runtime={seconds}", "--group_reporting", "--output-format=json"]
    for job in range(jobs):
        command += [f"--name={job}", f"--filename={':'.join(files[job::jobs])}"]
    env = {**os.environ, "GLIBC_TUNABLES": f"glibc.malloc.hugetlb={int(huge_pages)}"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder, env=env)
    return sum(job["read"]["bw_bytes"] for job in json.loads(done.stdout)["jobs"])

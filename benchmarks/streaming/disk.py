"""Layers streamed from disk under a memory limit, against the disk's own speed."""

import itertools
import json
import os
import shutil
import statistics
import subprocess
from pathlib import Path
from typing import NamedTuple

from benchmarks.report import Report
from benchmarks.streaming.ours import rounded, run_ours
from benchmarks.streaming.settings import Settings
from benchmarks.workers import EngineError
from jaxinfer.models.files.loading import open_model
from jaxinfer.streaming.layer_folders import layer_folder


class Way(NamedTuple):
    """A way in which fio reads.

    Attributes:
      block: size of a read, as fio writes sizes.
      jobs: number of concurrent jobs, each of other files.
      huge_pages: whether buffers are aligned huge pages, as ours are. A disk takes requests of a limited
        number of pieces of memory, so it reads more slowly into others.
    """

    block: str
    jobs: int
    huge_pages: bool


WAYS = tuple(itertools.starmap(Way, itertools.product(("1m", "8m", "16m"), (1, 4), (False, True))))
QUICK_WAYS = (Way("8m", 4, huge_pages=False), Way("8m", 4, huge_pages=True))  # blocks and threads are ours


def disk(report: Report, settings: Settings) -> None:
    """Measure streaming from disk under 1 GiB, in turn with fio in the best of its ways.

    The ceiling is the better of two medians, of that way's samples in a sweep through all ways and of those that take
    turns with our runs. All are as long, and as many, as the measured parts of our runs.
    """
    if shutil.which("fio") is None:
        raise EngineError("fio is missing: `apt-get install fio`.")
    model = settings.large_model()
    opened = open_model(model)
    folder = layer_folder(opened)
    seconds = max(1, round(sum(run_ours(model, batch=1)["seconds"][1:])))
    way, swept = sweep(report, settings, folder, seconds)
    paired, runs = [], []
    for _ in range(settings.rounds):
        paired.append(fio(folder, way, seconds))
        runs.append(run_ours(model, batch=1))
        report.row(figure="disk", fio_gb_per_s=round(paired[-1] / 1e9, 3), **rounded(runs[-1]))
    medians = {"sweep": statistics.median(swept), "paired": statistics.median(paired)}
    ceiling, ours = max(medians.values()), [ours_run["bandwidth"]["disk"] for ours_run in runs]
    streamed = sum(file.stat().st_size for file in folder.glob("*.bin"))
    report.row(
        figure="ceiling",
        **way._asdict(),
        seconds=seconds,
        samples=settings.rounds,
        **{f"{kind}_gb_per_s": round(value / 1e9, 3) for kind, value in medians.items()},
        gb_per_s=round(ceiling / 1e9, 3),
        our_gb_per_s=round(statistics.median(ours) / 1e9, 3),
        seconds_a_pass=round(streamed / ceiling, 3),
    )
    invalid = "the ceiling was not reached by fio" if min(ours) > max(*swept, *paired) else ""
    cores = statistics.median(each["reader_cpu_seconds"] / each["fetch_seconds"] for each in runs)
    cap_ratio = opened.bytes_per_device() / max(each["peak"] for each in runs)
    report.check("cap_ratio", cap_ratio, "x of the peak of memory", target=7)
    report.check("disk_of_fio", statistics.median(ours) / ceiling, "of fio", target=0.9, invalid=invalid)
    report.check("disk_cores", cores, "cores", target=0.3, better="lower")


def sweep(report: Report, settings: Settings, folder: Path, seconds: int) -> tuple[Way, list[float]]:
    """Find the way of fio with the best median, and its samples, in rounds in which all ways take turns."""
    samples: dict[Way, list[float]] = {way: [] for way in (QUICK_WAYS if settings.quick else WAYS)}
    for _ in range(settings.rounds):
        for way, speeds in samples.items():
            speeds.append(fio(folder, way, seconds))
    for way, speeds in samples.items():
        gb_per_s = [round(value / 1e9, 3) for value in speeds]
        report.row(figure="fio", **way._asdict(), seconds=seconds, gb_per_s=gb_per_s)
    return max(samples.items(), key=lambda item: statistics.median(item[1]))


def fio(folder: Path, way: Way, seconds: int) -> float:
    """Measure the bytes a second that fio reads from the layer files, past the page cache."""
    files = sorted(file.name for file in folder.glob("*.bin"))
    command = ["fio", "--readonly", "--rw=read", "--direct=1", f"--bs={way.block}", "--ioengine=psync", "--time_based"]
    command += [f"--runtime={seconds}", "--group_reporting", "--output-format=json"]
    env = dict(os.environ)
    if way.huge_pages:  # fio's own option for them needs reserved ones; glibc's does not
        command.append("--iomem_align=2m")
        env["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    for job in range(way.jobs):
        command += [f"--name={job}", f"--filename={':'.join(files[job :: way.jobs])}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder, env=env)
    return sum(job["read"]["bw_bytes"] for job in json.loads(done.stdout)["jobs"])

"""A model eight times larger than the memory that it may take: layers streamed from disk and from the host's memory.

    python -m benchmarks.streaming [--quick] [--only disk,peers] [--json benchmarks/results/KIND/streaming.json]

The model is a random Llama of 64 layers of 128 MiB in float32 (8 GiB) and an embedding of 8,192 rows (64 MiB). Memory
caps are those of the kernel (cgroups, version 1 or 2): they count the interpreter and pages of files. Every process
begins with none of its files in memory. Needs root, `fio` for the disk's own speed, and `make peers`; 25 GiB of disk.
"""

import argparse
import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.report import ROOT, Report
from benchmarks.streaming.cgroup import Finished, NoCgroupError, run_capped, was_killed
from benchmarks.streaming.models import QUICK, write_gguf, write_hf
from benchmarks.workers import EngineError, find_peers
from jaxinfer.cli.bench.plots import write_plot
from jaxinfer.compiled import cache_folder
from jaxinfer.models.conversion import convert
from jaxinfer.models.loading import open_model
from jaxinfer.streaming.layer_folders import layer_folder, write_layer_files

CAP = 1 << 30
PEER_CAPS = [CAP, CAP * 3 // 2, 2 * CAP, 3 * CAP, 4 * CAP, 6 * CAP]
PROMPT, PASSES = 16, 4
CONTEXT = 64
THREADS = str(os.cpu_count())
PEERS = ROOT / "benchmarks/peers"


class Run:
    """What all parts share.

    Attributes:
      report: collects figures.
      folder: where models are written.
      quick: 8 layers instead of 64, once each.
      cap: the lowest at which all engines run, of those in `PEER_CAPS`.
      curve: tokens a second by batch.
    """

    def __init__(self, report: Report, folder: Path, *, quick: bool, python: Path | None):
        self.report, self.folder, self.quick, self._python = report, folder, quick, python
        self.hf, self.model, self.gguf = folder / "hf", folder / "model", folder / "f32.gguf"
        self.rounds = 1 if quick else 3
        self.cap = CAP
        self.curve: list[tuple[int, float]] = []

    @property
    def python(self) -> Path:
        """The peers' interpreter. Raises EngineError if there is none."""
        return find_peers(self._python)

    def ours(self, cap: int = CAP, **options: Any) -> dict[str, Any]:
        """Our run on the model, and its peak of memory."""
        settings = {"weights": "disk", "prompt": PROMPT, "passes": PASSES, "context": CONTEXT, **options}
        command = [sys.executable, "-m", "benchmarks.streaming.run_jaxinfer", self.model, json.dumps(settings)]
        drop_pages(self.model)
        done = run_capped(command, cap, env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"})
        if done.status:
            raise EngineError(f"jaxinfer ended with status {done.status} under {cap} bytes:\n{done.stderr[-2000:]}")
        return {**json.loads(done.stdout.splitlines()[-1]), "peak": done.peak}

    def accelerate(self, batch: int) -> dict[str, Any]:
        """Its run, under the lowest cap that it survives."""
        with tempfile.TemporaryDirectory(dir=self.folder) as offload:
            while True:
                arguments = [offload, THREADS, batch, PROMPT, PASSES]
                done = self.peer("run_accelerate.py", self.hf, *arguments)
                if not was_killed(done.status):
                    return read_peer(done)
                self.cap = PEER_CAPS[PEER_CAPS.index(self.cap) + 1]

    def llama_cpp(self) -> dict[str, Any]:
        """Its run on a file that is mapped into memory."""
        return read_peer(self.peer("run_llama_cpp_mmap.py", self.gguf, THREADS, 1, PROMPT, PASSES))

    def peer(self, script: str, model: Path, *arguments: Any) -> Finished:
        """A peer's process, after its files have left memory."""
        drop_pages(model)
        return run_capped([self.python, PEERS / script, model, *map(str, arguments)], self.cap)


def read_peer(done: Finished) -> dict[str, Any]:
    if done.status:
        raise EngineError(f"a peer ended with status {done.status}:\n{done.stderr[-2000:]}")
    return {**json.loads(done.stdout.splitlines()[-1]), "peak": done.peak}


def drop_pages(path: Path) -> None:
    """Have the kernel forget what it holds of some files: what another cgroup has read would cost a process nothing."""
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            handle = os.open(file, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def decode_seconds(result: dict[str, Any]) -> float:
    """Of a pass over one token of each sequence."""
    return statistics.median(result["seconds"][1:])


def fio(folder: Path, size: str, jobs: int, seconds: int) -> float:
    """Bytes a second that fio reads from the layer files, past the page cache, each job other files."""
    files = sorted(file.name for file in folder.glob("*.bin"))
    command = ["fio", "--readonly", "--rw=read", "--direct=1", f"--bs={size}", "--ioengine=psync", "--time_based"]
    command += [f"--runtime={seconds}", "--group_reporting", "--output-format=json"]
    for job in range(jobs):
        command += [f"--name={job}", f"--filename={':'.join(files[job::jobs])}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=folder)
    return sum(job["read"]["bw_bytes"] for job in json.loads(done.stdout)["jobs"])


def disk(run: Run) -> None:
    """Streamed from disk under 1 GiB, in turn with fio in the best of its ways, each for about as long."""
    if shutil.which("fio") is None:
        raise EngineError("fio is missing: `apt-get install fio`.")
    model_bytes, folder = open_model(run.model).bytes_per_device(), layer_folder(open_model(run.model))
    sizes, jobs = (("8m",), (4,)) if run.quick else (("1m", "4m", "16m"), (1, 4, 8))
    tried = {way: fio(folder, *way, seconds=4) for way in itertools.product(sizes, jobs)}
    way = max(tried, key=tried.__getitem__)
    run.report.row(figure="fio", way=way, gb_per_s=round(tried[way] / 1e9, 3))
    raw, ours, cores, peaks = [], [], [], []
    for _ in range(run.rounds):
        raw.append(fio(folder, *way, seconds=12))
        found = run.ours(batch=1)
        ours.append(found["bandwidth"]["disk"])
        cores.append(found["reader_cpu_seconds"] / found["fetch_seconds"])
        peaks.append(found["peak"])
        run.report.row(figure="disk", fio_gb_per_s=round(raw[-1] / 1e9, 3), **rounded(found))
    raw.append(fio(folder, *way, seconds=12))
    of_raw = statistics.median(ours) / statistics.median(raw)
    streamed = sum(file.stat().st_size for file in folder.glob("*.bin"))
    run.report.row(
        figure="limit", what="a pass as fast as fio reads", seconds_a_pass=round(streamed / statistics.median(raw), 3)
    )
    run.report.check("cap_ratio", model_bytes / max(peaks), "x of the peak of memory", target=7)
    run.report.check("disk_of_raw_bandwidth", of_raw, "of fio", target=0.9)
    run.report.check("disk_cores", statistics.median(cores), "cores", target=0.3, better="lower")


def host(run: Run) -> None:
    """Streamed from the host's memory to a device that may have 1 GiB, which holds two layers and the cache."""
    model_bytes = open_model(run.model).bytes_per_device()
    options = {"weights": "host", "device_memory": CAP, "prefetch": 1, "count_layers": True}
    found = run.ours(cap=model_bytes + CAP, batch=1, **options)
    on_device = found["layer_bytes_on_device"]
    run.report.row(figure="host", layer_bytes_on_device=on_device, **rounded(found))


def overlap(run: Run) -> None:
    """With as many tokens a pass as make computing a layer take about as long as fetching it."""
    sizes = (64, 128) if run.quick else (32, 64, 96)
    serial = {tokens: of_tokens(run, tokens, prefetch=0) for tokens in sizes}
    tokens = min(sizes, key=lambda tokens: abs(math.log(serial[tokens]["compute"] / serial[tokens]["fetch"])))
    overlaps, gains = [], []
    for _ in range(run.rounds):
        alone, ahead = of_tokens(run, tokens, prefetch=0), of_tokens(run, tokens, prefetch=1)
        overlaps.append(ahead["overlap"])
        gains.append(max(alone["fetch"], alone["compute"]) / ahead["layer"])
        run.report.row(figure="overlap", tokens=tokens, prefetch=0, **alone)
        run.report.row(figure="overlap", tokens=tokens, prefetch=1, **ahead)
    run.report.check("overlap_depth1", statistics.median(overlaps), "of the shorter one", target=0.85)
    run.report.check("throughput_of_model", statistics.median(gains), "of 1 / max(fetch, compute)", target=0.9)


def of_tokens(run: Run, tokens: int, *, prefetch: int) -> dict[str, float]:
    """Seconds a layer, over the second and third pass of so many prompt tokens each."""
    sizes = {"batch": tokens // 16, "prompt": 48, "passes": 1, "chunk_size": 16, "token_budget": tokens}
    found = run.ours(4 * CAP, prefetch=prefetch, **sizes)
    layers, fetches = found["layers"], round(found["bytes"]["disk"] / found["layer_bytes"])
    return {
        "fetch": round(found["fetch_seconds"] / fetches, 5),
        "compute": round(found["compute_seconds"] / layers, 5),
        "layer": round(sum(found["seconds"][1:]) / layers, 5),
        "overlap": round(found["overlap"], 4),
    }


def peers(run: Run) -> None:
    """Against accelerate in turn, and llama.cpp, whose file has no room on the disk beside the others' formats."""
    ours: dict[int, list[float]] = {1: [], 8: []}
    theirs: dict[int, list[float]] = {1: [], 8: []}
    for _ in range(run.rounds):
        for batch in ours:
            peer = run.accelerate(batch)
            mine = run.ours(cap=run.cap, batch=batch)
            ours[batch].append(decode_seconds(mine))
            theirs[batch].append(decode_seconds(peer))
            compare(run, "accelerate", batch, peer, mine)
    for batch in ours:
        gain = statistics.median(theirs[batch]) / statistics.median(ours[batch])
        run.report.check(f"vs_accelerate_b{batch}", gain, "x its tokens/s", target=2)
    shutil.rmtree(run.model)
    write_gguf(run.hf, run.gguf, run.python)
    found = [run.llama_cpp() for _ in range(run.rounds)]
    run.gguf.unlink()
    make_ours(run)
    for peer in found:
        mine = run.ours(cap=run.cap, batch=1)
        ours[1].append(decode_seconds(mine))
        compare(run, "llama.cpp", 1, peer, mine)
    gain = statistics.median(map(decode_seconds, found)) / statistics.median(ours[1])
    run.report.check("vs_llamacpp", gain, "x its tokens/s", target=1)


def compare(run: Run, engine: str, batch: int, peer: dict[str, Any], mine: dict[str, Any]) -> None:
    """Print a pair of runs."""
    run.report.row(
        figure="peer",
        engine=engine,
        version=peer["version"],
        batch=batch,
        cap=run.cap,
        same_tokens=mine["tokens"] == peer["tokens"],
        seconds_a_pass=round(decode_seconds(peer), 3),
        our_seconds_a_pass=round(decode_seconds(mine), 3),
    )


def curve(run: Run) -> None:
    """Tokens a second by batch, from disk (the paper's figure 9a)."""
    for batch in (1, 4) if run.quick else (1, 2, 4, 8, 16, 32):
        found = run.ours(4 * CAP, batch=batch, passes=3)
        tokens_per_s = batch / decode_seconds(found)
        run.curve.append((batch, tokens_per_s))
        run.report.row(figure="curve", batch=batch, tokens_per_s=round(tokens_per_s, 3), peak=found["peak"])


def draw_curve(points: list[tuple[int, float]]) -> Figure:
    figure = Figure(figsize=(4.5, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(*zip(*points, strict=True), marker="o")
    axes.set(title="8 GiB of layers from disk", xlabel="sequences", ylabel="tokens/s", xscale="log", yscale="log")
    axes.grid(alpha=0.3)
    return figure


def rounded(found: dict[str, Any]) -> dict[str, Any]:
    """What a row says of one of our runs."""
    return {
        "seconds_a_pass": round(decode_seconds(found), 3),
        "gb_per_s": {tier: round(value / 1e9, 3) for tier, value in found["bandwidth"].items()},
        "overlap": round(found["overlap"], 3),
        "peak": found["peak"],
    }


def make_ours(run: Run) -> None:
    """The model directory and its layer files."""
    convert(run.hf, run.model)
    write_layer_files(open_model(run.model))


PARTS: dict[str, Callable[[Run], None]] = {
    "disk": disk,
    "host": host,
    "overlap": overlap,
    "curve": curve,
    "peers": peers,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.streaming", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="8 layers instead of 64, one round")
    parser.add_argument("--only", type=lambda text: text.split(","), metavar="PART,...", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--work-dir", type=Path, default=cache_folder() / "benchmarks" / "streaming")
    parser.add_argument("--peer-python", type=Path, help="interpreter with the peers (default: make peers)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the batch curve into this .png or .svg file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
    args = parser.parse_args()
    report = Report()
    report.print_header()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.work_dir) as folder:
        run = Run(report, Path(folder), quick=args.quick, python=args.peer_python)
        write_hf(run.hf, QUICK if args.quick else None)
        make_ours(run)
        for name in args.only or PARTS:
            start = time.monotonic()
            try:
                PARTS[name](run)
            except (EngineError, NoCgroupError) as error:
                print(f"{name}: {error}", flush=True)
            report.row(figure="part", part=name, seconds=round(time.monotonic() - start))
            report.save(args.json)
            print(f"{name} took {time.monotonic() - start:.0f} s", flush=True)
    if args.plot and run.curve:
        write_plot(args.plot, draw_curve(run.curve))
    report.finish(args.json)


if __name__ == "__main__":
    main()

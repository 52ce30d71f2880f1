"""A model eight times larger than the memory it may take: layers streamed from disk and from the host's memory.

    python -m benchmarks.streaming [--quick] [--only disk,peers] [--json benchmarks/results/KIND/streaming.json]

The large model is a random Llama of 64 layers of 128 MiB in float32 (8 GiB) and an embedding of 8,192 rows (64 MiB); it
takes 25 GiB of disk, and is written once a part needs it. Memory caps are the kernel's (cgroups, version 1 or 2): they
count the interpreter and pages of files, and need root. Every process begins with none of its files in memory. `disk`
needs `fio` for the disk's own speed, `peers` needs `make peers`. The JSON is rewritten after every part, and holds no
part of an earlier run: parts to be compared are measured by one command, at one commit.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.report import ROOT, Report, commit
from benchmarks.streaming.cgroup import NoCgroupError
from benchmarks.streaming.curve import curve, draw_curves
from benchmarks.streaming.disk import disk
from benchmarks.streaming.host import host
from benchmarks.streaming.overlap import overlap
from benchmarks.streaming.peers import peers
from benchmarks.streaming.plan_error import plan_error
from benchmarks.streaming.residents import residents
from benchmarks.streaming.settings import Settings
from benchmarks.streaming.speculation import speculation
from benchmarks.streaming.summary import summary
from benchmarks.workers import EngineError, parts_reader
from jaxinfer.compiled import cache_folder

PARTS: dict[str, Callable[[Report, Settings], None]] = {
    "disk": disk,
    "host": host,
    "overlap": overlap,
    "curve": curve,
    "peers": peers,
    "plan_error": plan_error,
    "residents": residents,
    "speculation": speculation,
}
read_parts = parts_reader(PARTS)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.streaming", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="8 layers instead of 64, one round")
    parser.add_argument("--only", type=read_parts, metavar="PART,...", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--work-dir", type=Path, default=cache_folder() / "benchmarks" / "streaming")
    parser.add_argument("--demo", type=Path, default=ROOT / "examples/demo_model")
    parser.add_argument("--peer-python", type=Path, help="interpreter with the peers (default: make peers)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the batch curve into this .png or .svg file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
    args = parser.parse_args()
    report = Report()
    report.print_header()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.work_dir) as folder:
        settings = Settings(
            quick=args.quick, folder=Path(folder), demo=args.demo.resolve(), peer_python=args.peer_python
        )
        failed = [error for name in args.only or PARTS if (error := run_part(name, report, settings, args.json))]
    if args.plot and any(row["figure"] == "curve" for row in report.rows):
        from jaxinfer.evaluation.figures import write_figure  # matplotlib is in the extra `bench`

        write_figure(args.plot, draw_curves([report.result()]))
    report.finish(args.json)
    print(*summary(report.rows), sep="\n")
    if failed:
        raise SystemExit("\n".join(failed))


def run_part(name: str, report: Report, settings: Settings, json_file: Path | None) -> str:
    """Run one part and save its result. Returns why it could not run; then it has no figures."""
    start, absent = time.monotonic(), ""
    try:
        PARTS[name](report, settings)
    except (EngineError, NoCgroupError) as error:
        absent = f"{name}: {error}"
        print(absent, flush=True)
    seconds = round(time.monotonic() - start)
    absence = {"absent": absent} if absent else {}
    report.row(figure="part", part=name, seconds=seconds, commit=commit(), **absence)
    report.save(json_file)
    print(f"{name} took {seconds} s", flush=True)
    return absent


if __name__ == "__main__":
    main()

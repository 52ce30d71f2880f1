"""The engine under many requests: its throughput against peers in the same run, and the gain of its own parts.

    python -m benchmarks.engine [--quick] [--only throughput,prefix] [--json benchmarks/results/KIND/engine.json]

`throughput` gives every engine the same requests at once, with prompts and outputs of mixed lengths, on the model of
`peers/make_model.py`. Each engine schedules them in its two best ways, which are found by a race at an eighth of the
lengths and remembered for the next run (`ways.py`); ours has only one. The other parts run our engine alone, some of
them on the demo model, because only a trained model's text is predictable. The JSON is rewritten after every part.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from benchmarks.engine.compile_misses import compile_misses
from benchmarks.engine.host import host
from benchmarks.engine.prefix import prefix
from benchmarks.engine.queues import queues
from benchmarks.engine.settings import Settings
from benchmarks.engine.speculation import speculation
from benchmarks.engine.step_gap import step_gap
from benchmarks.engine.throughput import throughput_float32, throughput_int8
from benchmarks.engine.ways import Memory
from benchmarks.report import Report, check_that_no_part_is_lost
from benchmarks.workers import add_options, parts_reader, run_parts
from jaxinfer.compiled import cache_folder

WAYS = cache_folder() / "benchmarks" / "ways.json"
PARTS: dict[str, Callable[[Report, Settings], None]] = {
    "throughput": throughput_float32,
    "throughput_int8": throughput_int8,
    "prefix": prefix,
    "speculation": speculation,
    "step_gap": step_gap,
    "compile_misses": compile_misses,
    "queues": queues,
    "host": host,
}
read_parts = parts_reader(PARTS)


def positive(text: str) -> int:
    """Parse a number of at least one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="16 requests instead of 64, fewer prompts, no int8")
    parser.add_argument("--rounds", type=positive, default=1, help="of every engine's throughput (default: 1)")
    parser.add_argument("--only", type=read_parts, metavar="PART,...", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--search", action="store_true", help="try all ways of the peers, as if none were remembered")
    parser.add_argument("--ways", type=Path, metavar="FILE", default=WAYS, help=f"remembers the ways (default: {WAYS})")
    add_options(parser)
    args = parser.parse_args()
    if not args.demo.exists():
        raise SystemExit(f"No model directory at {args.demo}: give one as --demo.")
    settings = Settings(
        quick=args.quick,
        rounds=args.rounds,
        folder=args.work_dir,
        demo=args.demo,
        peer_python=args.peer_python,
        threads=args.threads,
        search=args.search,
        memory=Memory(args.ways),
    )
    names = args.only or [part for part in PARTS if not (args.quick and part == "throughput_int8")]
    check_that_no_part_is_lost(args.json, names)
    report = Report()
    report.print_header()
    print(
        f"the peers' ways: {'searched for anew, then remembered' if args.search else 'remembered'} in {args.ways}",
        flush=True,
    )
    report.row(figure="settings", quick=args.quick, rounds=args.rounds, search=args.search, peer_threads=args.threads)
    run_parts(PARTS, names, report, settings, args.json)


if __name__ == "__main__":
    main()

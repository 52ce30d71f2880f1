"""The engine under many requests: its throughput against peers in the same run, and what its own parts gain.

    python -m benchmarks.engine [--quick] [--only throughput,prefix] [--json benchmarks/results/engine.json]

`throughput` gives every engine the same requests at once, with prompts and outputs of mixed lengths, on the model of
`peers/make_model.py`. Each engine schedules them in its fastest way, which is found before the timed rounds on the same
requests at half their lengths; ours has only one. The other parts run our engine alone, some of them on the demo model,
because only a trained model's text is predictable.
"""

import argparse
from collections.abc import Callable

from benchmarks.engine.compile_misses import compile_misses
from benchmarks.engine.prefix import prefix
from benchmarks.engine.settings import Settings
from benchmarks.engine.speculation import speculation
from benchmarks.engine.step_gap import step_gap
from benchmarks.engine.throughput import throughput_float32, throughput_int8
from benchmarks.report import Report
from benchmarks.workers import add_options

PARTS: dict[str, Callable[[Report, Settings], None]] = {
    "throughput": throughput_float32,
    "throughput_int8": throughput_int8,
    "prefix": prefix,
    "speculation": speculation,
    "step_gap": step_gap,
    "compile_misses": compile_misses,
}


def read_parts(text: str) -> list[str]:
    """The parts named in `--only`."""
    names = text.split(",")
    if unknown := set(names) - PARTS.keys():
        raise argparse.ArgumentTypeError(f"unknown {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one round instead of three, of 16 requests, not in int8")
    parser.add_argument("--only", type=read_parts, metavar="PART,...", help=f"of {', '.join(PARTS)}")
    add_options(parser)
    args = parser.parse_args()
    if not args.demo.exists():
        raise SystemExit(f"No model directory at {args.demo}: give one as --demo.")
    settings = Settings(args.quick, args.work_dir, args.demo, args.peer_python, args.threads)
    report = Report()
    for name in args.only or [part for part in PARTS if not (args.quick and part == "throughput_int8")]:
        PARTS[name](report, settings)
    report.finish(args.json)


if __name__ == "__main__":
    main()

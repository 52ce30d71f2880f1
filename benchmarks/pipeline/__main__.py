"""Stages of a pipeline, measured.

    python -m benchmarks.pipeline [--part NAME ...] [--json benchmarks/results/KIND/pipeline.json]

Parts: `idle` has the idle slots of schedules and of the compiled ring against closed forms, and what hybrid scheduling
gains at the paper's setting; `devices` has tokens per second of two CPU devices of a thread each; `families` has the
tokens of every family of decoders in two and in four stages. The JSON is rewritten after every part; `python -m
benchmarks.figures` draws the ticks that rings recorded.
"""

import argparse
from pathlib import Path

from benchmarks.report import run_parts

PARTS = ("idle", "devices", "families")
"""The modules that measure, each by its `run`."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="measure this part alone; may be repeated")
    parser.add_argument("--rounds", type=int, default=7, help="rounds in which all take turns")
    parser.add_argument("--every-golden", action="store_true", help="families: all goldens, not one of each family")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
    args = parser.parse_args()
    run_parts("benchmarks.pipeline", args.part or PARTS, args)


if __name__ == "__main__":
    main()

"""How far off the simulator is, against the real engine on this machine; and how fast it plans.

    python -m benchmarks.planner [--quick] [--only accuracy,speed,peer] [--json benchmarks/results/KIND/planner.json]

`accuracy` predicts latencies in 23 cells, then runs each three times: models and batches, lengths, arrivals, shared
prefixes, a host tier; 7 cells are near saturation. The record of costs, by which it predicts, comes from other traffic
of the same lengths. `speed` ranks 1,000 configurations of a fleet and simulates the best 20. `peer` predicts
public throughputs with AISimulate too, where it is installed. The JSON is rewritten after each part.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from benchmarks.planner.accuracy import accuracy
from benchmarks.planner.peer import peer
from benchmarks.planner.settings import Settings
from benchmarks.planner.speed import speed
from benchmarks.report import Report, check_that_no_part_is_lost
from benchmarks.workers import parts_reader, run_parts
from jaxinfer.compiled import cache_folder

PARTS: dict[str, Callable[[Report, Settings], None]] = {"accuracy": accuracy, "speed": speed, "peer": peer}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planner",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="a smoke test: few cells, short runs")
    parser.add_argument("--only", type=parts_reader(PARTS), metavar="PART,...", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
    parser.add_argument(
        "--aisimulate-python",
        type=Path,
        default=Settings._field_defaults["aisimulate_python"],
        help="interpreter with AISimulate (make aisimulate)",
    )
    parser.add_argument("--work-dir", type=Path, default=cache_folder() / "benchmarks" / "planner")
    args = parser.parse_args()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    settings, names = Settings(args.quick, args.work_dir, args.aisimulate_python), args.only or list(PARTS)
    check_that_no_part_is_lost(args.json, names)
    report = Report()
    report.print_header()
    report.row(figure="settings", quick=args.quick)
    run_parts(PARTS, names, report, settings, args.json)


if __name__ == "__main__":
    main()

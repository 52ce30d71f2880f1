"""OTAS (arXiv:2401.05031): elastic tokens under load.

    python -m benchmarks.otas [--quick] [--part planning|virtual] [--json FILE]

The tasks of examples/elastic_vit in the paper's mix of queries (Table II), at loads that are multiples of what this
machine serves at level 0. Deadlines are the paper's, as many times shorter as a batch here is faster than there.

- `planning`: the planner against trying everything, and how long it takes.
- `virtual`: all policies on a simulated clock, with measured latencies and answers; means of several seeds.
"""

import argparse
import time
from pathlib import Path

from benchmarks.otas.planning import planning
from benchmarks.otas.setting import measure, open_service
from benchmarks.otas.virtual import virtual
from benchmarks.report import Report


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.otas", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("planning", "virtual")
    parser.add_argument("--quick", action="store_true", help="two seeds, short traces")
    parser.add_argument("--part", choices=[*parts, "all"], default="all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
    args = parser.parse_args()
    report = Report()
    report.print_header()
    for part in parts if args.part == "all" else [args.part]:
        start = time.monotonic()
        if part == "planning":
            planning(report)
        else:
            setting = measure(open_service())
            report.row(
                figure="setting",
                capacity=round(setting.capacity, 1),
                latency_scale=round(setting.scale, 4),
                seconds={f"{n} {b}": round(s, 5) for (n, b), s in setting.profile.seconds.items()},
            )
            virtual(report, setting, seeds=2 if args.quick else 5, queries=5_000 if args.quick else 20_000)
        report.row(figure="part", part=part, seconds=round(time.monotonic() - start))
        report.save(args.json)
    report.finish(args.json)


if __name__ == "__main__":
    main()

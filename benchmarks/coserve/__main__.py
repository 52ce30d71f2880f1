"""CoServe (arXiv:2503.02354): the paper's evaluation, simulated and with real experts.

    python -m benchmarks.coserve [--quick] [--part simulated|drift|bursts|latency|real] [--json FILE]

The simulated part runs the paper's tasks through the scheduler that real executors use, on a simulated clock. The part
`drift` does so with inputs whose popularity changes, and `bursts` with bursts under eight conditions; each takes about
a minute. The real part runs systems of 38 models of ResNet-101's size on this machine, each in its own process, for
about an hour on two cores; `latency` does so below saturation, for 20 minutes. Finished runs are
kept in the folder, so that they can be interrupted.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.coserve import bursts, drift
from benchmarks.coserve.real import LOAD_BOUND, measure, measure_latency, measure_modes
from benchmarks.coserve.simulated import Simulation
from benchmarks.coserve.tables import print_tables
from benchmarks.report import Report


def simulated(report: Report, args: argparse.Namespace) -> None:
    Simulation(report, quick=args.quick).run_all()


def drifting(report: Report, args: argparse.Namespace) -> None:
    drift.measure(report, quick=args.quick)


def bursting(report: Report, args: argparse.Namespace) -> None:
    bursts.measure(report, quick=args.quick)


def latency(report: Report, args: argparse.Namespace) -> None:
    measure_latency(report, args.folder, quick=args.quick, rounds=1 if args.quick else args.rounds)


def real(report: Report, args: argparse.Namespace) -> None:
    rounds = 1 if args.quick else args.rounds
    if args.modes:
        measure_modes(report, args.folder, args.modes, quick=args.quick, rounds=rounds)
    else:
        measure(report, args.folder, quick=args.quick, rounds=rounds, ratios=args.ratios)


PARTS: dict[str, Callable[[Report, argparse.Namespace], None]] = {
    "simulated": simulated,
    "drift": drifting,
    "bursts": bursting,
    "latency": latency,
    "real": real,
}
"""The functions that add each part to the report."""


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.coserve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one seed, two tasks, fewer points")
    parser.add_argument("--part", choices=[*PARTS, "all"], default="all")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="draw the figures into this folder")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/jaxinfer-coserve"), help="of real experts: 28 GB")
    parser.add_argument("--rounds", type=int, default=3, help="of all real systems in turn (default: %(default)s)")
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=LOAD_BOUND.modes,
        metavar="MODE",
        help=f"real systems of these modes alone, at a ratio of 10: {', '.join(LOAD_BOUND.modes)}",
    )
    parser.add_argument(
        "--ratios",
        type=float,
        nargs="*",
        default=[20.0, 40.0],
        help="of loading to execution, beside 10 (default: 20 40)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
    args = parser.parse_args()
    if args.modes and args.part != "real":
        parser.error("--modes are of the real part: add --part real.")
    report = Report()
    report.print_header()
    for name in PARTS if args.part == "all" else [args.part]:
        start = time.monotonic()
        PARTS[name](report, args)
        print_tables(report.rows)
        report.row(figure="part", part=name, seconds=round(time.monotonic() - start))
        report.save(args.json)
    if args.plots is not None:
        from benchmarks.coserve.plots import draw_all  # matplotlib is in the extra `bench`

        draw_all(report.result(), args.plots)
    report.finish(args.json)


if __name__ == "__main__":
    main()

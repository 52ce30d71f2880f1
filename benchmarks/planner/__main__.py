"""How far off the simulator is, against the real engine on this machine; and how fast it plans.

    python -m benchmarks.planner [--quick] [--only figures,accuracy,speed,peer] [--json FILE]

`figures` predicts DeepSpeed's own points. `accuracy` predicts latencies in 23 cells, then runs each three times: models
and batches, lengths, arrivals, shared prefixes, a host tier; 7 cells are near saturation. The record of costs, by which
it predicts, comes from other traffic of the same lengths. `speed` ranks 1,000 configurations of a fleet and simulates
the best 20. `peer` predicts public throughputs with AISimulate too, where it is installed. The JSON is rewritten after
each part.
"""

from collections.abc import Callable
from pathlib import Path

from benchmarks.deepspeed_figures.points import share_within_tolerance
from benchmarks.planner.accuracy import accuracy
from benchmarks.planner.peer import peer
from benchmarks.planner.settings import Settings
from benchmarks.planner.speed import speed
from benchmarks.report import Report
from benchmarks.workers import part_parser, run_chosen_parts


def figures(report: Report, settings: Settings) -> None:
    """Check the paper's points, of which `benchmarks.deepspeed_figures` reports each."""
    report.check("figures_within_tolerance", share_within_tolerance(), "of DeepSpeed's points", target=1)


PARTS: dict[str, Callable[[Report, Settings], None]] = {
    "figures": figures,
    "accuracy": accuracy,
    "speed": speed,
    "peer": peer,
}


def main() -> None:
    parser = part_parser("planner", PARTS, __doc__, quick="few cells, short runs")
    parser.add_argument(
        "--aisimulate-python",
        type=Path,
        default=Settings._field_defaults["aisimulate_python"],
        help="interpreter with AISimulate (make aisimulate)",
    )
    args = parser.parse_args()
    run_chosen_parts(PARTS, args, Settings(args.quick, args.work_dir, args.aisimulate_python))


if __name__ == "__main__":
    main()

"""Several models in one server: its goodput next to swapped processes, and what a switch costs.

    python -m benchmarks.serving_models [--quick] [--only switch,goodput] [--json FILE]

`switch` times a request for a model that sleeps, in a process with room for one of three. `goodput` sends requests of
64 tokens for 16 more to the three, which have room for one and a half, drawn at random, and to a server for each that
is started and stopped. `two_models` sends bursts to two models in turn, which have the memory of 1.3 of one. `images`
compares experts and elastic tasks over HTTP with the same in one process. The JSON is rewritten after every part.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

from benchmarks.report import ROOT, Report, check_that_no_part_is_lost
from benchmarks.serving.settings import Settings as ServingSettings
from benchmarks.serving_models.goodput import goodput
from benchmarks.serving_models.settings import Settings
from benchmarks.serving_models.switch import switch
from benchmarks.serving_models.two_models import two_models
from benchmarks.serving_models.vision import FULL, QUICK, elastic_over_http, experts_over_http
from benchmarks.workers import add_options, parts_reader, run_parts


def images(report: Report, settings: Settings) -> None:
    """Measure `experts_over_http` and `elastic_over_http`."""
    folder, load = settings.serving.folder / "images", QUICK if settings.serving.quick else FULL
    for name, measure in (("experts_over_http", experts_over_http), ("elastic_over_http", elastic_over_http)):
        row = measure(folder, load)
        report.row(figure=name, **row)
        report.check(name, row["ratio"], "x", target=0.95)


PARTS: dict[str, Callable[[Report, Settings], None]] = {
    "switch": switch,
    "goodput": goodput,
    "two_models": two_models,
    "images": images,
}
read_parts = parts_reader(PARTS)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving_models",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="a smoke test: the demo models, one round")
    parser.add_argument("--seconds", type=float, default=120.0, help="of each load (default: 120)")
    parser.add_argument("--only", type=read_parts, metavar="PART,...", help=f"of {', '.join(PARTS)}")
    add_options(parser)
    args = parser.parse_args()
    serving = ServingSettings(
        quick=args.quick,
        rounds=1,
        folder=args.work_dir,
        demo=args.demo,
        peer_python=args.peer_python,
        vllm_python=Path(ROOT / ".venv-vllm/bin/python"),
        threads=args.threads,
    )
    settings = Settings(serving, args.seconds)
    names = args.only or list(PARTS)
    check_that_no_part_is_lost(args.json, names)
    report = Report()
    report.print_header()
    report.row(figure="settings", quick=args.quick, seconds=args.seconds, peer_threads=args.threads)
    run_parts(PARTS, names, report, settings, args.json)


if __name__ == "__main__":
    main()

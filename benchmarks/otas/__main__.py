"""OTAS (arXiv:2401.05031): elastic tokens under load.

    python -m benchmarks.otas [--quick] [--part planning,virtual,shown,live] [--replay FILE] [--json FILE] ...

The tasks of examples/elastic_vit in the paper's mix of queries (Table II), at loads that are multiples of this
machine's capacity at level 0. Deadlines are the paper's, as many times shorter as a batch is faster here.

- `planning`: the planner against trying everything, and its speed.
- `virtual`: all policies on a simulated clock, with measured latencies and answers; means of several seeds. The others
  run twice: with the paper's batching, and with that of `elastic` (`NAME, by worth`). In addition to the paper's mix:
  equal utility, some far deadlines, loads that swing, and a fragile task with the paper's accuracies.
- `shown`: one run of each policy in the two cells whose figures are in docs/elastic.md; `virtual` has them, too.
- `live`: two loads with real images on the wall clock, for 40 minutes, beside the same simulated; and a slow spell.

`--replay` takes the latencies and accuracies of an earlier result, so that nothing is compiled: compiling takes most of
the time. `--quick` replays the committed one, and leaves `live` out.

XLA has one thread (NPROC=1), so that clients and the controller have a core of their own: if they shared one, the
sharing would be measured.
"""

import argparse
import os
import sys
import time
from pathlib import Path

from benchmarks.otas.live import live
from benchmarks.otas.planning import planning
from benchmarks.otas.replay import RECORDED, read, replayed
from benchmarks.otas.setting import Setting, measure_setting
from benchmarks.otas.virtual import shown, virtual
from benchmarks.report import Report


def _setting(report: Report, file: Path | None) -> Setting:
    """Measure the setting, or take that of an earlier result, and report it."""
    if file is None:
        setting, source = measure_setting(), {}
    else:
        result = read(file)
        setting, source = replayed(result), {name: result[name] for name in ("machine", "commit", "date")}
    report.rows.append(setting.row() | ({"replayed": source} if source else {}))
    return setting


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.otas", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("planning", "virtual", "shown", "live")
    parser.add_argument("--quick", action="store_true", help="replay the committed result; two seeds, short traces")
    parser.add_argument(
        "--part", metavar="PARTS", help="some of the parts (default: planning,virtual and, unless replayed, live)"
    )
    parser.add_argument("--replay", type=Path, metavar="FILE", help="take the setting of this result; no live part")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds of the simulations")
    parser.add_argument("--seed", type=int, default=0, help="the first random seed of the simulations")
    parser.add_argument("--live-seconds", type=float, default=45.0, help="of each live run")
    parser.add_argument("--figures", type=Path, metavar="FOLDER", help="draw the figures of docs/elastic.md there")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
    args = parser.parse_args()
    if args.quick:
        args.replay = args.replay or RECORDED
    chosen = (args.part or ("planning,virtual" if args.replay else "planning,virtual,live")).split(",")
    if args.replay and "live" in chosen:
        parser.error("--part live measures this machine: it does not go with --replay or --quick.")
    if unknown := set(chosen) - set(parts):
        parser.error(f"--part: unknown {', '.join(sorted(unknown))}; known: {', '.join(parts)}.")
    if os.environ.get("NPROC") != "1":
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.otas", *sys.argv[1:]], os.environ | {"NPROC": "1"})
    report, setting = Report(), None
    report.print_header()
    for part in chosen:
        start = time.monotonic()
        if part == "planning":
            planning(report)
        else:
            setting = setting or _setting(report, args.replay)
            queries, seeds = (3_000, 2) if args.quick else (15_000, args.seeds)
            if part == "virtual":
                virtual(report, setting, seeds=range(args.seed, args.seed + seeds), queries=queries)
            elif part == "shown":
                shown(report, setting, queries=queries)
            else:
                live(report, setting, seeds=3, seconds=args.live_seconds, save=lambda: report.save(args.json))
        report.row(figure="part", part=part, seconds=round(time.monotonic() - start))
        report.save(args.json)
    if args.figures is not None:
        from benchmarks.otas.figures import draw_all  # matplotlib is in the extra `bench`

        draw_all(report.result(), args.figures)
    report.finish(args.json)


if __name__ == "__main__":
    main()

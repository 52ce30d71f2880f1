"""Our kernels and our generation against the limits of a GPU.

    python -m benchmarks.gpu [--minutes N] [--only STAGE,...] [--out FOLDER] [--dry-run]

Every stage runs in a process of its own, which starts again behind an item that ends it or takes too long. Every figure
is on the disk before the next one is measured. The stages share the time, and the report lists what was left out.
`--dry-run` runs all of the code on a CPU, with tiny shapes and interpreted kernels; its timings are meaningless.
"""

import argparse
import shlex
import signal
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu import rendering, supervisor
from benchmarks.gpu.settings import FAULTS, Settings
from benchmarks.gpu.stages import ALWAYS, STAGES

MINUTES, DRY_MINUTES = 7.5, 60.0
DRY_PATIENCE = 6.0
"""Factor of the limits of a dry run's items: interpreted kernels are slow to compile, on few cores."""


def read_stages(text: str) -> list[str]:
    """Parse the names of `--only`."""
    names = text.split(",")
    if unknown := set(names) - STAGES.keys():
        raise argparse.ArgumentTypeError(f"unknown {', '.join(sorted(unknown))}; there are {', '.join(STAGES)}")
    return names


def read_fault(text: str) -> tuple[str, str]:
    """Parse a fault of `--fault`: numerics.1=abort."""
    item, _, kind = text.partition("=")
    stage, _, number = item.partition(".")
    if stage not in STAGES or not number.isdecimal() or kind not in FAULTS:
        kinds = ", ".join(FAULTS)
        raise argparse.ArgumentTypeError(f"expected STAGE.NUMBER=KIND, with {kinds} as the kind")
    return item, kind


def options() -> argparse.Namespace:
    """Read the options of the command line, with the defaults that depend on others."""
    results = Path(__file__).parents[1] / "results" / "gpu"
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dry-run", action="store_true", help="run all code on a CPU, with tiny shapes")
    parser.add_argument("--only", type=read_stages, metavar="STAGE,...", help=f"any of {', '.join(STAGES)}")
    parser.add_argument("--minutes", type=float, help=f"time limit (default: {MINUTES}; {DRY_MINUTES} with --dry-run)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help=f"for the results (default: {results})")
    parser.add_argument(
        "--peer-python", type=Path, default=Path(sys.executable), help="interpreter with torch and transformers"
    )
    parser.add_argument(
        "--patience", type=float, metavar="FACTOR", help=f"of items' limits (default: 1; {DRY_PATIENCE} with --dry-run)"
    )
    parser.add_argument(
        "--fault",
        type=read_fault,
        action="append",
        default=[],
        metavar="STAGE.NUMBER=KIND",
        help=f"break this item on purpose: {', '.join(FAULTS)}",
    )
    args = parser.parse_args()
    args.minutes = args.minutes or (DRY_MINUTES if args.dry_run else MINUTES)
    args.patience = args.patience or (DRY_PATIENCE if args.dry_run else 1.0)
    args.only = args.only or [name for name, stage in STAGES.items() if stage.selected]
    args.out = args.out or (Path(tempfile.mkdtemp(prefix="gpu-dry-run-")) if args.dry_run else results)
    return args


def main() -> None:
    """Run the stages and write the report, also after Ctrl-C or SIGTERM."""
    args = options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        settings = Settings(
            folder=str(args.out.resolve()),
            work=work,
            dry=args.dry_run,
            peer_python=str(args.peer_python),
            faults=dict(args.fault),
        )
        try:
            _run(args, settings)
        finally:
            page = rendering.render(args.out)
            print(f"\n{rendering.checks_table(settings.rows.read())}\n\nWrote {page}")


def _run(args: argparse.Namespace, settings: Settings) -> None:
    for name in ("rows.jsonl", "log.txt"):
        (args.out / name).unlink(missing_ok=True)
    settings.rows.row(part="settings", command=shlex.join(sys.argv[1:]), minutes=args.minutes)
    stages = {name: stage for name, stage in STAGES.items() if name in {*args.only, *ALWAYS}}
    for name in supervisor.run(stages, 60 * args.minutes, settings, patience=args.patience):
        if name == "machine" and not args.dry_run:
            _require_kernels(settings)


def _require_kernels(settings: Settings) -> None:
    """Exit if the GPU has answered, and cannot run the kernels."""
    for row in settings.rows.read():
        if row["part"] == "machine" and row.get("kernels") is False:
            device = row["machine"]["device"]
            raise SystemExit(f"{device} cannot run the kernels; they need compute capability 9.0. On a CPU: --dry-run")


if __name__ == "__main__":
    main()

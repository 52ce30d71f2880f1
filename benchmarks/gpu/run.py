"""One run of the benchmark, part after part."""

import contextlib
import json
import shlex
import sys
import time
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import rich

from benchmarks.gpu import autotune, cases, ceilings, end_to_end, kernels, numerics, rendering, streaming
from benchmarks.gpu.clock import clocks
from benchmarks.gpu.peer import Peer
from benchmarks.gpu.timing import DRY, FULL, QUICK
from benchmarks.report import ROOT, Report
from jaxinfer.pallas_kernels.dispatch import kernels_available
from jaxinfer.pallas_kernels.mosaic import tuning
from jaxinfer.pallas_kernels.mosaic.interpreter import interpreted
from jaxinfer.pallas_kernels.target import target_gpu


class _SavedReport(Report):
    """Report that also appends every row to a file at once, so that a run that is cut off keeps its measurements.

    Args:
      path: JSON lines; replaced.
    """

    def __init__(self, versions: Mapping[str, str], path: Path):
        super().__init__(versions)
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")

    def row(self, **fields: Any) -> None:
        """Add a row, and append it to the file."""
        super().row(**fields)
        with self._path.open("a") as file:
            file.write(json.dumps(fields) + "\n")


def run(args: Namespace) -> None:
    """Measure what the options select; write the JSON, and the report and plots next to it."""
    if not (args.dry_run or kernels_available()):
        kind = jax.devices()[0].device_kind
        raise SystemExit(f"{kind} cannot run the kernels; they need compute capability 9.0. On a CPU: --dry-run")
    dry = interpreted(detect_races=False) if args.dry_run else contextlib.nullcontext()
    peer = Peer(args.peer_python)
    with dry, contextlib.closing(peer):
        report = _measure(args, peer)
    report.finish(args.json)
    rich.print(f"Wrote {rendering.render(args.json)}")


def _measure(args: Namespace, peer: Peer) -> Report:
    begun = time.monotonic()
    effort = DRY if args.dry_run else QUICK if args.quick else FULL
    tables = args.json.parent if args.dry_run else ROOT / "pallas_kernels" / "tuned"
    timed = list(cases.tiny_timed() if args.dry_run else cases.timed(quick=args.quick))
    report = _SavedReport({"peer": peer.version}, args.json.with_suffix(".rows.jsonl"))
    report.row(part="settings", command=shlex.join(sys.argv[1:]), minutes=args.minutes, rounds=effort.rounds)
    limits = ceilings.measure(report, effort)
    for name, clock in clocks({part: args.time_weights[part] for part in args.only}, 60 * args.minutes):
        start = time.monotonic()
        match name:
            case "numerics":
                numerics.measure(report, clock, cases.tiny() if args.dry_run else cases.checked())
            case "autotune":
                table = tables / tuning.table_name(target_gpu().name)
                autotune.measure(report, limits, clock, timed[:1] if args.dry_run else timed, effort, table)
            case "kernels":
                kernels.measure(report, limits, clock, peer, timed, effort)
            case "end_to_end":
                end_to_end.measure(report, limits, clock, peer, effort, quick=args.quick)
            case "streaming":
                streaming.measure(report, limits, dry=args.dry_run)
        report.row(part="settings", took=name, seconds=round(time.monotonic() - start, 1))
        report.save(args.json)
    report.row(part="settings", took="all", seconds=round(time.monotonic() - begun, 1))
    return report

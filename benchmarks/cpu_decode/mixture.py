"""A mixture of 64 experts top-2 at batch 1, against a dense model of its active size: that of `benchmarks.moe`."""

import argparse

from benchmarks.moe.models import CHOSEN, EXPERTS, beside_dense, make_own
from benchmarks.report import Report


def run(report: Report, args: argparse.Namespace) -> None:
    """Time decode steps of both in turns."""
    folder = args.work_dir.with_name("moe") / "dense"
    make_own(folder)
    rows = beside_dense(folder, 1, "active", args.rounds, args.threads)
    for row in rows:
        report.row(figure="mixture", model=row["engine"], experts=EXPERTS, per_token=CHOSEN, step_ms=row["ms"])
    mixture, dense = (row["ms"] for row in rows)
    report.check("moe_b1_vs_dense_active", mixture / dense, "x", target=1.15, better="lower")

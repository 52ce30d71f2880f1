"""Checks of what was read a second, as shares of the best read bandwidth of the whole run; made after all parts.

A shared memory may be twice as fast for a short spell, and then no share is met by what was measured in other hours.
Rows say besides, as `in_turn`, what share was reached of what memory gave in turn with the rounds: the mean of the
medians just before and just after each.
"""

import argparse

from benchmarks.report import Report

TARGETS = {
    "decode_fp32_b1_of_read_bandwidth": 0.85,
    "decode_fp32_b1_of_step_bandwidth": 0.85,
    "decode_int8_b1_of_step_bandwidth": 0.80,
    "decode_int4_b1_of_step_bandwidth": 0.70,
    "decode_8k_of_bandwidth": 0.75,
    "products_fp32_of_bandwidth": 0.90,
    "products_int8_of_bandwidth": 0.90,
    "products_int4_of_bandwidth": 0.90,
}
"""The least shares, by the name of a check, which is the `check` of the row that has its `gb_per_s`."""


def run(report: Report, args: argparse.Namespace) -> None:
    """Check every row that has a check."""
    measured = [row["gb_per_s"] for row in report.rows if row["figure"] == "read bandwidth"]
    for row in report.rows:
        if "check" in row:
            report.check(row["check"], row["gb_per_s"] / max(measured), "", target=TARGETS[row["check"]])

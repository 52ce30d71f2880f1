"""The paper's figures, as the planner predicts them, next to what was measured. Runs no model.

    python -m benchmarks.deepspeed_figures [--fit] [--plot FILE] [--json benchmarks/results/KIND/deepspeed_figures.json]

It prints the error of each point of Figs. 6 and 7, and its error by constants that were fitted to all other points;
then the ratios of Figs. 8, 10b and 13, the paper's headlines, and public measurements of today's systems.
"""

import argparse
from pathlib import Path
from typing import Any

import rich
from rich.table import Table

from benchmarks.deepspeed_figures import headlines, public, ratios, systems
from benchmarks.deepspeed_figures.fits import left_out
from benchmarks.deepspeed_figures.plots import draw
from benchmarks.deepspeed_figures.points import TOLERANCES, Point, points, share_within_tolerance
from benchmarks.report import Report
from jaxinfer.evaluation.figures import write_figure
from jaxinfer.sharding.planner import Catalogue

MOST_FITTED = 6
HEADLINE_TOLERANCE = 0.10


def point_row(point: Point, error: float, without: float) -> dict[str, Any]:
    """Make the row of a point. without: its error by a fit to the other points."""
    return {
        "figure": point.figure,
        "system": point.system,
        "name": point.label,
        "model": point.model,
        "devices": point.ways.size,
        "batch": point.batch,
        "measured_ms": round(1e3 * point.seconds, 1),
        "predicted_ms": round(1e3 * point.seconds * (1 + error), 1),
        "error": round(error, 4),
        "left_out": round(without, 4),
    }


def point_rows() -> list[dict[str, Any]]:
    """Predict all points, with the constants that the planner has, and with those of fits without each point."""
    made = []
    for name, system in Catalogue.read().systems.items():
        there = points(name)
        pairs = zip(there, left_out(system, there), strict=True)
        made += [point_row(point, point.error(system), without) for point, without in pairs]
    return made


def add_checks(report: Report) -> None:
    """Check the errors of DeepSpeed's points, and the headlines."""
    rows = [row for row in report.rows if row["figure"] in ("fig6", "fig7")]
    for name, tolerance in TOLERANCES.items():
        worst = max(abs(row["error"]) for row in rows if row["system"] == name)
        report.check(f"{name}_error", worst, "", target=tolerance, better="lower")
    report.check("figures_within_tolerance", share_within_tolerance(), "of DeepSpeed's points", target=1)
    fitted = max(len(system.fitted) for system in Catalogue.read().systems.values())
    report.check("fitted_constants", fitted, "a system", target=MOST_FITTED, better="lower")
    for row in report.rows:
        if row["figure"] == "headline" and row["name"] != "zero_share_of_peak":
            error = abs(row["predicted"] / row["measured"] - 1)
            report.check(f"{row['name']}_error", error, "", target=HEADLINE_TOLERANCE, better="lower")
    share = headlines.predicted()["zero_share_of_peak"]
    report.check("zero_share_of_peak", share, "of the peak", target=headlines.measured()["zero_share_of_peak"])


def show(rows: list[dict[str, Any]]) -> None:
    """Print the rows of all figures."""
    table = Table("figure", "of", "measured", "predicted", "error", "left out")
    for row in rows:
        unit = "_ms" if "measured_ms" in row else ""
        of = f"{row['system']}, {row['name']}" if unit else row["name"]
        measured, predicted = row[f"measured{unit}"], row[f"predicted{unit}"]
        without = f"{row['left_out']:+.1%}" if unit else ""
        figure = row.get("of", row["figure"])
        table.add_row(figure, of, f"{measured:,}", f"{predicted:,}", f"{predicted / measured - 1:+.1%}", without)
    rich.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="fit the planner's constants again before, and keep them")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the figures into this .svg or .png file")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
    args = parser.parse_args()
    if args.fit:
        systems.write(systems.fit_all())
        Catalogue.read.cache_clear()
    report = Report()
    report.print_header()
    report.rows += point_rows()
    report.rows += ratios.rows()
    predicted = headlines.predicted()
    for name, measured in headlines.measured().items():
        report.row(figure="headline", name=name, measured=measured, predicted=round(predicted[name], 4))
    report.rows += public.rows()
    show(report.rows)
    add_checks(report)
    if args.plot:
        write_figure(args.plot, draw(report.result()))
    report.finish(args.json)


if __name__ == "__main__":
    main()

"""Sections about what the planner and the simulator predict."""

import statistics
from typing import Any

from benchmarks.pages.checks import PLANNER_CHECKS, SIMULATOR_CHECKS, checks_table
from benchmarks.pages.tables import Result, table

HEADLINES = {
    "trillion_ms": "a token of the trillion-parameter mixture, ms",
    "trillion_tb_per_s": "its bandwidth, TB/s",
    "trillion_share": "share of the peak bandwidth",
    "mixture_speedup": "largest speed-up of mixtures over PyTorch",
    "int8_speedup": "largest speed-up of INT8 over FasterTransformer",
    "zero_share_of_peak": "50B in DRAM on an A6000, share of the peak (Fig. 9b)",
}
"""Names of the paper's headlines in the table."""


def planner_section(result: Result) -> list[str]:
    """Write the errors of each system and each point, the ratios, the public points, and the checks."""
    points = [row for row in result["rows"] if "left_out" in row]
    systems = list(dict.fromkeys(row["system"] for row in points))
    return [
        "Nothing was run: the planner predicts each of the paper's points. Errors of a system's points, by the "
        "planner's constants, and (left out) by constants that were fitted to all points but the one.",
        table(
            ["system", "points", "mean", "largest", "left out: mean", "largest", "of"],
            [_errors_of([row for row in points if row["system"] == system]) for system in systems],
        ),
        "Each point of Figs. 6, 7 and 11 in milliseconds: measured, predicted, its error, and its error when left out.",
        *(_points_table([row for row in points if row["figure"] == figure]) for figure in ("fig6", "fig7")),
        "The ratios of Figs. 8, 10b and 13, to which nothing is fitted; and the paper's headlines, most of which "
        "follow from the points above.",
        _predicted_table([row for row in result["rows"] if row["figure"] in ("ratio", "headline")]),
        "Public measurements of today's systems, with the constants of 2022. None of them is fitted; what is predicted "
        "for DeepEP is the time of the wire alone.",
        _predicted_table([row for row in result["rows"] if row["figure"] == "public"]),
        checks_table(result, PLANNER_CHECKS),
    ]


def _errors_of(rows: list[dict[str, Any]]) -> list[str]:
    errors, without = ([abs(row[name]) for row in rows] for name in ("error", "left_out"))
    worst = rows[without.index(max(without))]["name"]
    figures = [statistics.mean(errors), max(errors), statistics.mean(without), max(without)]
    return [rows[0]["system"], str(len(rows)), *(f"{100 * figure:.1f}%" for figure in figures), worst]


def _points_table(rows: list[dict[str, Any]]) -> str:
    """Write a line for each model and batch, and a column for each system."""
    systems = list(dict.fromkeys(row["system"] for row in rows))
    cells = {
        (row["name"], row["system"]): f"{row['measured_ms']:g}, {row['predicted_ms']:g}, {row['error']:+.1%}, "
        f"{row['left_out']:+.1%}"
        for row in rows
    }
    names = dict.fromkeys(row["name"] for row in rows)
    return table(["point", *systems], [[name, *(cells[name, system] for system in systems)] for name in names])


def _predicted_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        [
            f"Fig. {row['of']}" if row["figure"] == "ratio" else row.get("of", "text"),
            f"{HEADLINES.get(row['name'], row['name'])}{', ' + row['unit'] if 'unit' in row else ''}",
            *(f"{row[name]:,g}" for name in ("measured", "predicted")),
            f"{row['predicted'] / row['measured'] - 1:+.0%}",
        ]
        for row in rows
    ]
    return table(["source", "figure", "measured", "predicted", "error"], lines)


def simulator_section(result: Result) -> list[str]:
    """Write each cell's latencies, measured and predicted, the worst cells, and the checks."""
    rows = [row for row in result["rows"] if row["figure"] == "cell"]
    metrics = {"e2e_ms": "end to end", "ttft_ms": "TTFT", "tpot_ms": "TPOT"}
    lines = [
        [
            row["engine"],
            row["cell"],
            *(f"{row[name]:,.3g}, {row[f'predicted_{name}']:,.3g}, {row[f'error_{name}']:+.0%}" for name in metrics),
        ]
        for row in rows
    ]
    worst = [row for row in result["rows"] if row["figure"] == "worst"]
    return [
        "The real engine on this machine, and what its simulation predicted before. Means over the requests of a cell, "
        "in milliseconds: measured (the median of three runs), predicted, error.",
        table(["engine", "cell", *metrics.values()], lines),
        "The largest errors:",
        table(["of", "error", "cell"], [[row["metric"], f"{row['error']:+.0%}", row["cell"]] for row in worst]),
        *_peer_paragraphs(result),
        checks_table(result, SIMULATOR_CHECKS),
    ]


def _peer_paragraphs(result: Result) -> list[str]:
    """Write AISimulate's predictions of public points next to the planner's, if it ran."""
    rows = [row for row in result["rows"] if row["figure"] == "peer"]
    if not rows:
        return []
    (total,) = (row for row in result["rows"] if row["figure"] == "peer_errors")
    lines = [
        [row["name"], f"{row['measured']:,}"]
        + [f"{row[who]:,}, {row[who] / row['measured'] - 1:+.0%}" for who in ("aisimulate", "jaxinfer")]
        for row in rows
    ]
    return [
        "AISimulate, which has measured each kernel on H200s, and jaxinfer's planner, which knows the datasheet and "
        "constants of 2022, on throughputs that NVIDIA published for TensorRT-LLM. Median errors: "
        f"{total['aisimulate']:.0%} and {total['jaxinfer']:.0%}.",
        table(["point", "tokens/s", "AISimulate", "jaxinfer"], lines),
    ]

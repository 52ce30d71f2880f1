"""The tables of docs/benchmarks/experts.md, and those of docs/experts.md, from results.

`python -m benchmarks.coserve.tables FILE...` prints them.
"""

import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.coserve.bursts import COMPARED
from benchmarks.pages.tables import rows_of, table

BASELINES = ("samba", "fifo", "parallel")
"""The paper's baselines: none groups requests by expert."""
GROUPING = ("samba_grouping", "parallel_grouping")
"""The baselines with a habit of servers that swap models: requests for one expert are collected and run in batches."""
QUANTILES = ("p50_ms", "p99_ms", "p99.9_ms", "max_ms")
Rows = Sequence[Mapping[str, Any]]
NAMES = {
    "samba": "Samba-CoE",
    "fifo": "Samba-CoE FIFO",
    "parallel": "Samba-CoE Parallel",
    "samba_grouping": "Samba-CoE, grouping",
    "parallel_grouping": "Parallel, grouping",
    "none": "None",
    "em": "EM",
    "em_ra": "EM+RA",
    "casual": "CoServe Casual",
    "paper": "CoServe",
    "best": "ours",
}

BURST_NAMES = NAMES | {"lru": "ours, with LRU"}

EVICTS_BY = {
    "as configured": "the configured usage (`learns_usage = false`)",
    "learned": "learned usage (`best`)",
    "lru": 'last use (`evict = "lru"`)',
    "paper": "the configured usage (`paper`)",
}
"""The names of the policies in the table of drifting popularity."""


def print_tables(rows: Rows) -> None:
    """Print all tables that have rows."""
    for title, text in tables(rows).items():
        if text.count("\n") > 1:
            print(f"\n{title}\n\n{text}")


def tables(rows: Rows) -> dict[str, str]:
    """Make the tables in Markdown, by title."""

    return {
        "Images per second / expert switches": by_task(compared(rows), "machine"),
        "Without CoServe's parts (NUMA)": by_task(figure_rows(rows, "ablation")),
        "GPU executors (NUMA), images per second": lines(
            figure_rows(rows, "executors"), ("task", "cpus"), "gpus", lambda row: f"{row['img_per_s']:.1f}"
        ),
        "Experts in memory (NUMA), images per second": lines(
            figure_rows(rows, "memory"), ("task",), "experts", lambda row: f"{row['img_per_s']:.1f}"
        ),
        "Choice of the decay window": lines(
            figure_rows(rows, "search"),
            ("task", "choose"),
            "seed",
            lambda row: f"{row['window'][0]}-{row['window'][1]}: {row['experts']}, {row['img_per_s']:.1f} img/s",
        ),
        "Milliseconds of a decision": table(
            ["policy", "call", "p50 ms", "p99 ms", "p99.9 ms", "max ms"],
            [
                [row["system"], row["call"], *(f"{row[name]:.3f}" for name in QUANTILES)]
                for row in figure_rows(rows, "decisions")
            ],
        ),
        "Sensitivity": lines(figure_rows(rows, "variant"), ("system",), "what", both),
        "Each flag": lines(
            figure_rows(rows, "flag"),
            ("flag",),
            ("how", "task"),
            lambda row: f"{row['gain'] - 1:+.1%}, {row['switches']:.0f}",
        ),
        "Loads from disk / seconds until 99% of the inputs are judged (simulated)": lines(
            [{**row, "evicts by": EVICTS_BY[row["policy"]]} for row in figure_rows(rows, "drift")],
            ("evicts by",),
            "popularity",
            lambda row: f"{row['disk_loads']:.0f} / {row['p99']:.2f}",
        ),
        "Inputs per second of a burst (simulated)": table(
            ["burst", *(BURST_NAMES[name] for name in COMPARED)],
            [[row["burst"], *(f"{row[name]:.3g}" for name in COMPARED)] for row in figure_rows(rows, "burst")],
        ),
        "Real systems on this machine": table(
            ["loading", "pixels", "inputs", "system", "inputs/s", "simulated", "loads from disk + host", "memory"],
            [
                [
                    row["loading"],
                    str(row["pixels"]),
                    str(row["requests"]),
                    NAMES[row["mode"]],
                    spread(row),
                    f"{row['predicted_throughput']:.3g}",
                    f"{row['loads_disk']:.0f} + {row['loads_host']:.0f}",
                    f"{row['resident_gb']:.1f} GB",
                ]
                for row in figure_rows(rows, "real")
            ],
        ),
        "Seconds until 50% / 99% of the inputs are judged, below saturation": table(
            ["pixels", "inputs/s", "system", "50%", "99%", "99%, simulated", "loads from disk"],
            [
                [
                    str(row["pixels"]),
                    f"{row['rate']:g}",
                    NAMES[row["mode"]],
                    *(of_rounds(row[name]) for name in ("p50", "p99", "predicted_p99")),
                    f"{row['loads_disk']:.0f}",
                ]
                for row in figure_rows(rows, "latency")
            ],
        ),
        "Seconds until 50% / 99% of the inputs are judged, by inputs a second (simulated)": lines(
            [{**row, "system": row["mode"]} for row in figure_rows(rows, "rates")],
            ("rate",),
            "system",
            lambda row: f"{row['p50']:.2f} / {row['p99']:.2f}",
        ),
        "Highest rate with 99% within 3 s (simulated), inputs a second": table(
            ["system", "inputs/s"],
            [[NAMES[row["mode"]], f"{row['rate']:.1f}"] for row in figure_rows(rows, "highest rate")],
        ),
        "The same live, seconds": table(
            ["inputs/s", "50%", "99%", "99%, simulated"],
            [
                [f"{row[name]:.3g}" for name in ("rate", "p50", "p99", "predicted_p99")]
                for row in figure_rows(rows, "live rate")
            ],
        ),
        "Our policy": lines(
            figure_rows(rows, "ours"),
            ("machine", "what"),
            "task",
            lambda row: f"{both(row)}, {row['disk_loads']:.0f} of {row['bound']:.0f}",
        ),
    }


def spread(row: Mapping[str, Any]) -> str:
    """Format the median of the rounds, with the minimum and maximum."""
    rates = [f"{row['requests'] / seconds:.3g}" for seconds in sorted(row["seconds"], reverse=True)]
    return f"{row['throughput']:.3g}" + (f" ({rates[0]} to {rates[-1]})" if len(rates) > 1 else "")


def of_rounds(values: Sequence[float]) -> str:
    """Format the median of the rounds' values, with the minimum and maximum."""
    low, high = min(values), max(values)
    return f"{statistics.median(values):.2f}" + (f" ({low:.2f} to {high:.2f})" if len(values) > 1 else "")


def both(row: Mapping[str, Any]) -> str:
    return f"{row['img_per_s']:.1f} / {row['switches']:.0f}"


def by_task(rows: Rows, *groups: str) -> str:
    """Make a table with a line per system and a column per task."""
    return lines(rows, (*groups, "system"), "task", both)


def lines(rows: Rows, keys: Iterable[str], column: str | tuple[str, ...], cell: Any) -> str:
    """Make a table with a line per value of `keys` and a column per value of `column`."""
    keys, names = tuple(keys), (column,) if isinstance(column, str) else column

    def at(row: Mapping[str, Any], fields: Iterable[str]) -> tuple[str, ...]:
        return tuple(NAMES[row[field]] if field == "system" else str(row[field]) for field in fields)

    columns = list(dict.fromkeys(at(row, names) for row in rows))
    cells = {(at(row, keys), at(row, names)): cell(row) for row in rows}
    heads = dict.fromkeys(at(row, keys) for row in rows)
    body = [[*head, *(cells.get((head, name), "") for name in columns)] for head in heads]
    return table([*keys, *(" ".join(name) for name in columns)], body)


def compared(rows: Rows) -> Rows:
    """Select all systems in the paper's layout."""
    return [
        *figure_rows(rows, "compare"),
        *(row for row in figure_rows(rows, "ours") if row["what"] == "the paper's layout"),
    ]


def figure_rows(rows: Rows, figure: str) -> Rows:
    return [row for row in rows if row["figure"] == figure]


if __name__ == "__main__":
    print_tables(rows_of(sys.argv[1:]))

"""Sentences on rows of the streaming benchmark: printed after it, and in docs/benchmarks."""

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

Row = Mapping[str, Any]


def summary(rows: Iterable[Row]) -> list[str]:
    """Write a sentence or two for each measured part."""
    figures: dict[str, list[Row]] = {}
    for row in rows:
        figures.setdefault(row["figure"], []).append(row)
    said = {"disk": passes, "host": host, "ceiling": ceiling, "overlapped": overlapped}
    texts = [say(figures[figure]) for figure, say in said.items() if figure in figures]
    if "curve" in figures:
        texts.append(curve(figures["curve"], figures.get("knee", [])))
    return texts


def passes(rows: list[Row]) -> str:
    return f"A pass from disk takes {statistics.median(row['seconds_a_pass'] for row in rows):.1f} s at batch 1."


def host(rows: list[Row]) -> str:
    cap = "memory capped at the model's size plus 2 GiB, 1 GiB for the device"
    return f"A pass from the host's memory takes {rows[0]['seconds_a_pass']:.1f} s ({cap})."


def ceiling(rows: list[Row]) -> str:
    """Describe our and fio's bandwidth, and how fio's was measured."""
    (row,) = rows
    huge = "huge pages" if row["huge_pages"] else "no huge pages"
    return (
        f"jaxinfer reads {row['our_gb_per_s']:.2f} GB/s, `fio` {row['gb_per_s']:.2f}. `fio`'s figure is the better of "
        f"two medians of {row['samples']} samples of {row['seconds']} s, like ours: of a sweep "
        f"({row['sweep_gb_per_s']:.2f}), and in turn with ours ({row['paired_gb_per_s']:.2f}). Its fastest setting has "
        f"blocks of {row['block']}, {row['jobs']} at once, {huge}."
    )


def overlapped(rows: list[Row]) -> str:
    """Describe each point, in milliseconds a layer."""
    texts = []
    for row in rows:
        fetch, compute, serial, ahead = (f"{1e3 * row[n]:.0f}" for n in ("fetch", "compute", "serial", "ahead"))
        texts.append(
            f"With {row['tokens']} tokens per pass, a layer takes {fetch} ms to fetch and {compute} ms to compute: "
            f"{serial} ms one after the other, {ahead} ms with one layer ahead. This hides {row['hidden']:.0%} of the "
            f"shorter one and reaches {row['throughput']:.2f}x of the limit by max(fetch, compute)."
        )
    return " ".join(texts)


def curve(rows: list[Row], knees: list[Row]) -> str:
    """Describe both ends, and the knee if it was reached."""
    first, last = (f"{row['tokens_per_s']:.3g} at {row['batch']}" for row in (rows[0], rows[-1]))
    knee = f"computing takes as long as fetching at {knees[0]['batch']}" if knees else "fetching always takes longer"
    return f"Tokens per second go from {first} to {last} sequences; {knee}."

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
    cap = "under a cap of the model and 2 GiB, with 1 GiB for the device"
    return f"A pass from the host's memory, {cap}, takes {rows[0]['seconds_a_pass']:.1f} s."


def ceiling(rows: list[Row]) -> str:
    """Describe our and fio's bandwidth, and how fio's was measured."""
    (row,) = rows
    huge = "huge pages" if row["huge_pages"] else "no huge pages"
    return (
        f"Ours reads {row['our_gb_per_s']:.2f} GB/s, `fio` {row['gb_per_s']:.2f}: the better of its sweep's median "
        f"({row['sweep_gb_per_s']:.2f}) and of that in turn with ours ({row['paired_gb_per_s']:.2f}), each of "
        f"{row['samples']} samples of {row['seconds']} s, as long and as many as ours; its best way is blocks of "
        f"{row['block']}, {row['jobs']} at once, {huge}."
    )


def overlapped(rows: list[Row]) -> str:
    """Describe each point, in milliseconds a layer."""
    texts = []
    for row in rows:
        fetch, compute, serial, ahead = (f"{1e3 * row[n]:.0f}" for n in ("fetch", "compute", "serial", "ahead"))
        texts.append(
            f"With {row['tokens']} tokens a pass a layer takes {fetch} ms to fetch and {compute} to compute, {serial} "
            f"one after the other, {ahead} with one layer ahead: {row['hidden']:.0%} of the shorter is hidden, "
            f"{row['throughput']:.2f}x of what max(fetch, compute) allows."
        )
    return " ".join(texts)


def curve(rows: list[Row], knees: list[Row]) -> str:
    """Describe both ends, and the knee if it was reached."""
    first, last = (f"{row['tokens_per_s']:.3g} at {row['batch']}" for row in (rows[0], rows[-1]))
    knee = f"computing takes as long as fetching at {knees[0]['batch']}" if knees else "fetching takes longest in all"
    return f"Tokens a second by sequences go from {first} to {last}; {knee}."

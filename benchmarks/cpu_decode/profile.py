"""Where the time of a decode step goes: the operations of XLA's programs by their time on the CPU's threads.

    python -m benchmarks.cpu_decode.profile MODEL_DIR [--dtype int8] [--batch 8] [--context 352]

Milliseconds a step of each kind of operation, all threads together, and of the step itself. An operation whose work is
divided over threads counts on each of them; what calls others counts without them.
"""

import argparse
import gzip
import json
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import rich
from rich.table import Table

from benchmarks.workers import OUR_SCRIPT, Engines, workers

STEPS = 32
SHOWN = 24


class Event(NamedTuple):
    """What a thread does: its name, and when it starts and ends, in microseconds."""

    thread: tuple[int, int]
    name: str
    start: float
    end: float


def kind_of(name: str) -> str:
    """An operation's name without its number: `fusion.12.clone` is `fusion`."""
    return re.sub(r"(\.\d+|\.clone|\.remat\d*)+$", "", name)


def own_times(events: Iterable[Event]) -> dict[str, tuple[float, int]]:
    """The microseconds of every kind without those of what it calls, and how often it is called."""
    times: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    stacks: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in sorted(events, key=lambda event: (event.start, -event.end)):
        stack = stacks[event.thread]
        while stack and stack[-1].end <= event.start:
            stack.pop()
        if stack:
            times[kind_of(stack[-1].name)][0] -= event.end - event.start
        stack.append(event)
        entry = times[kind_of(event.name)]
        entry[0] += event.end - event.start
        entry[1] += 1
    return {name: (microseconds, int(calls)) for name, (microseconds, calls) in times.items()}


def read_trace(folder: Path) -> list[Event]:
    """Read the operations of XLA's programs from what `jax.profiler.trace` has written."""
    (file,) = folder.glob("plugins/profile/*/*.trace.json.gz")
    entries: list[dict[str, Any]] = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    return [
        Event((entry["pid"], entry["tid"]), entry["name"], entry["ts"], entry["ts"] + entry["dur"])
        for entry in entries
        if entry.get("ph") == "X" and "hlo_op" in entry.get("args", {})
    ]


def profile(folder: Path, dtype: str, batch: int, context: int) -> tuple[float, list[Event]]:
    """The milliseconds of a step without the profiler, and the operations of `STEPS` steps with it."""
    engines: Engines = {("jaxinfer", dtype): (OUR_SCRIPT, folder.name, str(batch), str(context + 8 * STEPS))}
    request = {"batch": batch, "context": context, "steps": STEPS}
    with workers(dtype, folder.parent, Path(sys.executable), 0, engines) as (worker,):
        worker.ask(do="decode", **request)
        milliseconds = 1e3 * worker.ask(do="decode", **request)["seconds"]
        with tempfile.TemporaryDirectory() as trace:
            worker.ask(do="trace", folder=trace, **request)
            return milliseconds, read_trace(Path(trace))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a model directory")
    parser.add_argument("--dtype", default="float32", help="float32, bfloat16, int8 or int4")
    parser.add_argument("--batch", type=int, default=1, help="sequences")
    parser.add_argument("--context", type=int, default=352, help="tokens before the first step")
    args = parser.parse_args()
    milliseconds, events = profile(args.model, args.dtype, args.batch, args.context)
    title = f"{args.dtype}, batch {args.batch}: a step of {milliseconds:.2f} ms"
    table = Table("operation", "ms a step, all threads", "calls a step", title=title)
    times = own_times(events)
    for name, (microseconds, calls) in sorted(times.items(), key=lambda item: -item[1][0])[:SHOWN]:
        table.add_row(name, f"{microseconds / 1e3 / STEPS:.3f}", f"{calls / STEPS:.1f}")
    table.add_row("all", f"{sum(value for value, _ in times.values()) / 1e3 / STEPS:.3f}", "")
    rich.print(table)


if __name__ == "__main__":
    main()

"""Tile sizes by trying them: writes the table that the operations of this device then use.

A case is traced once to learn which operation asks for tile sizes, and under which key. Then one field after another
takes each of its values while the others stay at the best found so far. What the kernel refuses, or the GPU cannot
hold, is passed over; the operation's own choice is one of those tried, and stays unless another is clearly faster.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax

from benchmarks.gpu.cases import Case
from benchmarks.gpu.ceilings import Ceilings
from benchmarks.gpu.clock import Clock
from benchmarks.gpu.timing import Arguments, Effort, Plan, Repeated, compile_all, take_turns
from benchmarks.report import Report
from pallas_kernels import tuning
from pallas_kernels.tuning import Trial

Tiles = dict[str, int]

SEARCHED: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "small_batch_linear": {"split": (2, 1, 4, 8), "stages": (4, 2, 3, 6, 8), "tile_k": (128, 64, 256)},
    "decode_attention": {"splits": (4, 1, 2, 8), "stages": (3, 2, 4, 6)},
    "prefill_attention": {"tile_kv": (128, 64), "stages": (2, 3, 4), "consumers": (2, 1)},
    "quantized_matmul": {"rows": (64, 32, 128), "outputs": (128, 64), "stages": (4, 2, 3, 6)},
    "grouped_matmul": {"rows": (16, 8, 32, 64, 128), "outputs": (64, 128), "stages": (5, 3, 4, 6)},
}
"""The values of each field of an operation's tiles. The search begins with the first of each, and has all in turn."""
CLEARLY = 0.98
"""Tiles must take at most this part of the time of the operation's own choice to be written down."""


def measure(
    report: Report, ceilings: Ceilings, clock: Clock, cases: Iterable[Case], effort: Effort, table: Path
) -> None:
    """Tune every key that the cases ask for, as long as there is time, and write the table after each."""
    wanted = {key: case for case in cases for key in keys(case)}
    done = 0
    for key in clock.affordable(wanted):
        found = _search(wanted[key], key, ceilings, effort, report)
        if found is not None:
            write(table, key, found)
        done += 1
    for operation, key in list(wanted)[done:]:
        report.row(part="autotune", op=operation, key=key, absent="no time left; see --minutes")


def keys(case: Case) -> list[tuple[str, str]]:
    """The operations, and their keys, whose tiles this case asks for; of those that are searched."""
    trial = Trial()
    with trial.active():
        jax.eval_shape(case.call, *case.shapes)
    return [key for key in dict.fromkeys(trial.lookups) if key[0] in SEARCHED]


def _search(case: Case, key: tuple[str, str], ceilings: Ceilings, effort: Effort, report: Report) -> Tiles | None:
    """The best tiles, or None if the operation's own choice is as good."""
    operation, name = key
    fields = SEARCHED[operation]
    plan = Plan.of(case, ceilings.seconds(case.bytes, case.flops, case.operands), effort)
    arguments = Arguments.make(case, plan)
    best: Tiles = {field: values[0] for field, values in fields.items()}
    own, least, tried = float("inf"), float("inf"), 0
    for field, values in fields.items():
        candidates = [best | {field: value} for value in values[: 2 if effort.dry else None]]
        programs = _programs(case, plan, operation, candidates)
        times = take_turns({at: program.round(arguments, effort) for at, program in programs.items()}, effort.rounds)
        own = min(own, times.pop("own").seconds)
        for at, timing in times.items():
            tried += 1
            if timing.seconds < least:
                least, best = timing.seconds, candidates[int(at)]
    report.row(
        part="autotune",
        op=operation,
        key=name,
        case=case.name,
        tried=tried,
        own_us=round(1e6 * own, 3),
        best_us=round(1e6 * least, 3) if tried else None,
        tiles=best if tried else None,
    )
    print(f"autotune: {operation} {name}: {1e6 * own:.2f} us, {1e6 * least:.2f} us with {best}", flush=True)
    return best if least < CLEARLY * own else None


def _programs(case: Case, plan: Plan, operation: str, candidates: list[Tiles]) -> dict[str, Repeated]:
    """Those that compile, by their place among the candidates; and "own", of the operation's own choice."""
    programs: dict[str, Repeated] = {}
    with Trial().active():
        programs["own"] = Repeated(case, plan, case.call)
    for at, tiles in enumerate(candidates):
        with Trial(operation, tiles).active():
            try:
                program = Repeated(case, plan, case.call)
            except Exception:  # whatever Mosaic says to tiles that it cannot lower
                continue
        if program.has_kernel:
            programs[str(at)] = program
    failed = compile_all(list(programs.values()))
    return {name: program for name, program in programs.items() if program not in failed}


def write(table: Path, key: tuple[str, str], tiles: Tiles) -> None:
    """Put tiles into the table; a reader never finds half of it."""
    operation, name = key
    content = json.loads(table.read_text()) if table.exists() else {}
    content.setdefault(operation, {})[name] = tiles
    content = {op: dict(sorted(content[op].items())) for op in sorted(content)}
    table.parent.mkdir(parents=True, exist_ok=True)
    temporary = table.with_name(f".{table.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(table)
    tuning._table.cache_clear()

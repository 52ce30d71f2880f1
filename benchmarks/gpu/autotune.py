"""Autotuning of tile sizes: writes the table that the operations then use on this device.

A case is traced once to find which operation looks up tile sizes, and under which key. Then a coordinate search tries
every value of one field after another, with the others at the best found so far. Candidates that the kernel does not
support, or that exceed the GPU's resources, are skipped. The heuristic's choice is measured too, and stays unless
another is clearly faster.
"""

import functools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

import jax

from benchmarks.gpu import cases
from benchmarks.gpu.ceilings import Ceilings
from benchmarks.gpu.items import Context, Item
from benchmarks.gpu.rows import Rows
from benchmarks.gpu.timing import Arguments, Effort, Plan, Repeated, compile_all, interleave
from benchmarks.kernel_cases import Case
from benchmarks.report import ROOT
from jaxinfer.disk_cache import write_atomically
from jaxinfer.pallas_kernels.mosaic import tuning
from jaxinfer.pallas_kernels.mosaic.tuning import Trial
from jaxinfer.pallas_kernels.target import target_gpu

Tiles = dict[str, int]

SEARCHED: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "small_batch_linear": {"split": (2, 1, 4, 8), "stages": (4, 2, 3, 6, 8), "tile_k": (128, 64, 256)},
    "decode_attention": {"splits": (4, 1, 2, 8), "stages": (3, 2, 4, 6)},
    "prefill_attention": {"tile_kv": (128, 64), "stages": (2, 3, 4), "consumers": (2, 1)},
    "quantized_matmul": {"rows": (64, 32, 128), "outputs": (128, 64), "stages": (4, 2, 3, 6)},
    "grouped_matmul": {"rows": (16, 8, 32, 64, 128), "outputs": (64, 128), "stages": (5, 3, 4, 6)},
}
"""The candidate values of each field of an operation's tiles. The search starts with the first value of each field."""
MAX_TIME_RATIO = 0.98
"""Tiles are written to the table only if they take at most this fraction of the time of the heuristic's choice."""


def items(context: Context) -> list[Item]:
    """List the keys that the timed cases look up."""
    folder = context.folder if context.dry else ROOT / "pallas_kernels" / "tuned"
    table = folder / tuning.table_name(target_gpu().name)
    timed = list(cases.tiny_timed())[:1] if context.dry else cases.timed()
    return [
        Item(f"{key[0]} {key[1]}", functools.partial(measure, context.rows, case, key, context.effort, table))
        for key, case in cases_of_keys(timed).items()
    ]


def cases_of_keys(cases: Iterable[Case]) -> dict[tuple[str, str], Case]:
    """Return every key that cases look up, with the last case that does."""
    return {key: case for case in cases for key in keys(case)}


def measure(rows: Rows, case: Case, key: tuple[str, str], effort: Effort, table: Path) -> None:
    """Tune a key, and write the table if tiles were found that are better than the heuristic's choice."""
    tiles = _search(case, key, Ceilings.from_rows(rows.read()), effort, rows)
    if tiles is not None:
        write(table, key, tiles)


def keys(case: Case) -> list[tuple[str, str]]:
    """List the (operation, key) pairs that this case looks up, for operations that are tuned."""
    trial = Trial()
    with trial.active():
        jax.eval_shape(case.call, *case.args)
    return [key for key in dict.fromkeys(trial.lookups) if key[0] in SEARCHED]


def _search(case: Case, key: tuple[str, str], ceilings: Ceilings, effort: Effort, rows: Rows) -> Tiles | None:
    """Search for the best tiles; return None if the heuristic's choice is as good."""
    operation, key_name = key
    fields = SEARCHED[operation]
    plan = Plan.from_case(case, ceilings.seconds(case.bytes, case.flops, case.operands), effort)
    arguments = Arguments.make(case, plan)
    best: Tiles = {field: values[0] for field, values in fields.items()}
    heuristic_time, best_time, tried = float("inf"), float("inf"), 0
    for field, values in fields.items():
        candidates = [best | {field: value} for value in values[: 2 if effort.dry else None]]
        programs = _programs(case, plan, operation, candidates)
        rounds = {name: program.round(arguments, effort) for name, program in programs.items()}
        times = interleave(rounds, effort.rounds)
        heuristic_time = min(heuristic_time, times.pop("heuristic").seconds)
        for index, timing in times.items():
            tried += 1
            if timing.seconds < best_time:
                best_time, best = timing.seconds, candidates[int(index)]
    rows.row(
        part="autotune",
        op=operation,
        key=key_name,
        case=case.name,
        tried=tried,
        heuristic_us=round(1e6 * heuristic_time, 3),
        best_us=round(1e6 * best_time, 3) if tried else None,
        tiles=best if tried else None,
    )
    return best if best_time < MAX_TIME_RATIO * heuristic_time else None


def _programs(case: Case, plan: Plan, operation: str, candidates: list[Tiles]) -> dict[str, Repeated]:
    """Prepare the programs that compile, by candidate index; and "heuristic", with the heuristic's tiles."""
    programs: dict[str, Repeated] = {}
    with Trial().active():
        programs["heuristic"] = Repeated(case, plan, case.call)
    for index, tiles in enumerate(candidates):
        with Trial(operation, tiles).active():
            try:
                program = Repeated(case, plan, case.call)
            except Exception:  # any error of Mosaic for tiles that it cannot lower
                continue
        if program.has_kernel:
            programs[str(index)] = program
    failed = compile_all(list(programs.values()))
    return {name: program for name, program in programs.items() if program not in failed}


def write(table: Path, key: tuple[str, str], tiles: Tiles) -> None:
    """Put tiles into the table, replacing the file atomically."""
    operation, key_name = key
    content = json.loads(table.read_text()) if table.exists() else {}
    content.setdefault(operation, {})[key_name] = tiles
    content = {op: dict(sorted(content[op].items())) for op in sorted(content)}
    table.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(table, (json.dumps(content, indent=1) + "\n").encode())
    tuning._table.cache_clear()

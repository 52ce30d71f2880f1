"""Resource usage of every kernel on an H200, compiled without a GPU: registers, shared memory, occupancy, instructions.

    python -m benchmarks.kernel_table [--op NAME ...] [--json FILE] [--write]

Compiles the cases of `kernel_cases.py`, with the tile sizes that would be chosen on a GPU. Needs the extra `aot`, but
no GPU. `--write` updates the table in docs/kernels.md; `tests/kernels/test_lowering.py` checks `LIMITS`.
"""

import argparse
import dataclasses
import json
import math
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import rich
from rich.table import Table

from benchmarks.kernel_cases import Case, every_case
from jaxinfer.compiled import compiler_options
from jaxinfer.compiled.target import Kernel, Target, TargetReport, compile_for

TARGET = Target.load("h200")
BYTES_PER_SECOND = 4.8e12  # memory bandwidth, from the data sheet
FLOPS_PER_SECOND = {"bfloat16": 989e12, "int8": 1978e12}  # from the data sheet
_REGISTERS, _THREADS, _BLOCKS = 65_536, 2048, 32  # limits of an SM
_RESERVED_BYTES = 1024  # shared memory per block

PAGE = Path(__file__).parents[1] / "docs/kernels.md"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limit:
    """Limits that an operation must meet in every case.

    Attributes:
      per_sm: minimum occupancy, in thread blocks per SM.
      features: SASS instructions that its kernels must contain (`jaxinfer.compiled.dumps.FEATURES`).
    """

    per_sm: int
    features: frozenset[str] = frozenset()


LIMITS = {
    "norm_linear": Limit(per_sm=2, features=frozenset({"UTMALDG"})),
    "linear_residual": Limit(per_sm=2, features=frozenset({"UTMALDG"})),
    "small_batch_linear": Limit(per_sm=2, features=frozenset({"UTMALDG"})),
    "quantize_rows": Limit(per_sm=2),
    "norm_quantize": Limit(per_sm=2),
    "quantized_matmul": Limit(per_sm=2, features=frozenset({"UTMALDG", "IMMA"})),
    "decode_attention": Limit(per_sm=1, features=frozenset({"UTMALDG"})),
    "paged_attention": Limit(per_sm=1, features=frozenset({"UTMALDG", "HGMMA"})),
    "attention": Limit(per_sm=1, features=frozenset({"UTMALDG", "HGMMA"})),
    "delta_rule_step": Limit(per_sm=3),
    "gated_delta_rule": Limit(per_sm=1, features=frozenset({"UTMALDG", "HMMA"})),
    "top_k_gating": Limit(per_sm=2),
    "permute": Limit(per_sm=16, features=frozenset({"LDG.128"})),
    "grouped_matmul": Limit(per_sm=2, features=frozenset({"UTMALDG", "HGMMA"})),
    "unpermute": Limit(per_sm=16, features=frozenset({"LDG.128"})),
    "merge_tokens": Limit(per_sm=3, features=frozenset({"UTMALDG", "HMMA"})),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One Mosaic kernel of one case.

    Attributes:
      op, case: the operation, and the shape. min_us: the roofline time for its bytes and FLOPs, from the data sheet.
      launches: the case's Mosaic kernels, and XLA's.
      per_sm: occupancy in thread blocks per SM, limited by registers, shared memory and threads.
      waves: thread blocks / (SMs * occupancy).
    """

    op: str
    case: str
    min_us: float
    launches: tuple[int, int]
    kernel: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    grid: int
    cluster: int
    threads: int
    per_sm: int
    waves: float
    features: tuple[str, ...]


def compile_case(case: Case) -> TargetReport:
    """Compile the case as a separate program, with the compiler options of the engine's programs."""
    options = compiler_options("gpu", rows=case.rows, dtype=np.dtype(jnp.bfloat16))
    donated = () if case.state is None else (case.state,)
    return compile_for(TARGET, case.call, case.args, donate=donated, options=options, resources=True)


def rows_of(case: Case) -> list[Row]:
    """Make a row for every Mosaic kernel of the case, in execution order."""
    report = compile_case(case)
    ours = [kernel for kernel in report.kernels if kernel.kind == "mosaic"]
    return [_row(case, kernel, (len(ours), len(report.kernels) - len(ours))) for kernel in ours]


def _row(case: Case, kernel: Kernel, launches: tuple[int, int]) -> Row:
    assert kernel.resources is not None  # requested in `compile_case`
    per_sm = blocks_per_sm(kernel.resources.registers, kernel.shared_bytes, kernel.threads)
    return Row(
        op=case.op,
        case=case.name,
        min_us=1e6 * max(case.bytes / BYTES_PER_SECOND, case.flops / FLOPS_PER_SECOND[case.operands]),
        launches=launches,
        kernel=kernel.name,
        registers=kernel.resources.registers,
        spill_bytes=kernel.resources.spill_bytes,
        shared_bytes=kernel.shared_bytes,
        grid=kernel.grid,
        cluster=kernel.cluster,
        threads=kernel.threads,
        per_sm=per_sm,
        waves=kernel.grid / (TARGET.gpu.sms * per_sm),
        features=kernel.resources.features,
    )


def blocks_per_sm(registers: int, shared_bytes: int, threads: int) -> int:
    """Count the thread blocks of a kernel that an SM runs at once.

    Registers are allocated to warps in units of 256, separately in each quarter of an SM.
    """
    warps = math.ceil(threads / 32)
    registers_per_warp = math.ceil(registers * 32 / 256) * 256
    by_registers = 4 * (_REGISTERS // 4 // registers_per_warp) // warps
    by_shared = (TARGET.gpu.shared_bytes + _RESERVED_BYTES) // (shared_bytes + _RESERVED_BYTES)
    return min(by_registers, by_shared, _THREADS // threads, _BLOCKS)


_COLUMNS = (
    "operation", "shape", "min us", "kernels", "registers", "spills", "shared KiB", "blocks", "cluster", "blocks/SM",
    "waves", "SASS",
)  # fmt: skip


def _cells(row: Row) -> list[str]:
    ours, others = row.launches
    return [
        row.op if ours == 1 else f"{row.op}: {row.kernel}",
        row.case,
        f"{row.min_us:.2f}",
        f"{ours} + {others}" if others else str(ours),
        str(row.registers),
        str(row.spill_bytes),
        f"{row.shared_bytes / 1024:.1f}",
        str(row.grid),
        str(row.cluster),
        str(row.per_sm),
        f"{row.waves:.2f}",
        " ".join(row.features),
    ]


def markdown(rows: list[Row]) -> str:
    """Format the table of docs/kernels.md."""
    lines = ["| " + " | ".join(_COLUMNS) + " |", "|" + "---|" * len(_COLUMNS)]
    return "\n".join(lines + ["| " + " | ".join(_cells(row)) + " |" for row in rows]) + "\n"


def put_into_page(module: str, table: str) -> None:
    """Replace the table in docs/kernels.md that this module writes."""
    marked = re.compile(rf"(<!-- python -m {re.escape(module)} --write -->\n).*?(<!-- end -->)", re.DOTALL)
    text, count = marked.subn(lambda match: match[1] + table + match[2], PAGE.read_text())
    if count != 1:
        raise SystemExit(f"{PAGE} has {count} places for the table of {module}, not one.")
    PAGE.write_text(text)


def main() -> None:
    """Compile the cases, print their table, and write it where the options say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", action="append", choices=LIMITS, default=[], help="only this operation")
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--write", action="store_true", help="put the table into docs/kernels.md")
    options = parser.parse_args()
    if options.write and options.op:
        parser.error("--write takes the whole table, without --op")
    rows: list[Row] = []
    for case in every_case():
        if case.op in (options.op or LIMITS):
            print(case.title, flush=True)
            rows += rows_of(case)
    table = Table(*_COLUMNS)
    for row in rows:
        table.add_row(*_cells(row))
    rich.print(table)
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(row) for row in rows], indent=1) + "\n")
    if options.write:
        put_into_page("benchmarks.kernel_table", markdown(rows))


if __name__ == "__main__":
    main()

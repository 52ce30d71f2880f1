"""Every kernel at every shape of the kernel table: lowered for CUDA, and compiled for an H200 (marker `aot`)."""

import importlib
import json
from pathlib import Path

import jax
import pytest

from benchmarks.kernel_cases import every_case
from benchmarks.kernel_table import LIMITS, Row, blocks_per_sm, markdown, rows_of
from jaxinfer import pallas_kernels
from jaxinfer.compiled.target import Target
from jaxinfer.pallas_kernels.dispatch import Operation
from jaxinfer.pallas_kernels.mosaic.tuning import Trial, tables
from jaxinfer.pallas_kernels.target import targeting

H200 = Target.load("h200").gpu
CASES = list(every_case())
# Their own tests lower some shapes, and with the marker `aot` every case is compiled.
SLOW = (
    "decode_attention",
    "gated_delta_rule",
    "linear_residual",
    "norm_linear",
    "paged_attention",
    "small_batch_linear",
)


def traced(case):
    with targeting(H200):
        return jax.jit(case.call).trace(*case.args)


def check_lowering(cases):
    """With the tiles of a tuned table or the heuristic: checks layouts, shared memory and sizes of TMA copies."""
    for case in cases:
        with targeting(H200):
            module = str(traced(case).lower(lowering_platforms=("cuda",)).compiler_ir())
        assert module.count("@mosaic_gpu_v2") == case.kernels, case.title


@pytest.mark.parametrize("op", [op for op in LIMITS if op not in SLOW])
def test_lowers_for_cuda(op):
    """The first and the last case of each operation, which are the smallest and the largest."""
    cases = [case for case in CASES if case.op == op]
    check_lowering(cases[:: max(len(cases) - 1, 1)])


@pytest.mark.slow
@pytest.mark.parametrize("op", LIMITS)
def test_other_cases_lower_for_cuda(op):
    cases = [case for case in CASES if case.op == op]
    check_lowering(cases if op in SLOW else cases[1:-1])


@pytest.mark.slow
def test_every_tuned_entry_belongs_to_a_case():
    """So that all shipped tile sizes are lowered above."""
    shipped = [json.loads(table.read_text()) for table in tables().iterdir()] if tables().is_dir() else []
    entries = {(op, key) for table in shipped for op, keys in table.items() for key in keys}
    trial = Trial()
    if entries:
        with trial.active():
            for case in CASES:
                if entries <= set(trial.lookups):
                    break
                traced(case)
    assert entries <= set(trial.lookups)


@pytest.mark.aot
@pytest.mark.parametrize("op", LIMITS)
def test_stays_within_its_limits(op):
    for case in [case for case in CASES if case.op == op]:
        rows = rows_of(case)
        assert len(rows) == case.kernels, case.title
        for row in rows:
            limit = LIMITS.get(row.kernel, LIMITS[op])  # of the operation that a kernel is named after
            assert row.launches == (case.kernels, case.others), row
            assert row.spill_bytes == 0, row
            assert row.per_sm >= limit.per_sm, row
            assert limit.features <= set(row.features), row


def operations_with_a_kernel():
    """Return the names of the operations of all rooms that a Mosaic kernel implements."""
    files = sorted(Path(pallas_kernels.__file__).parent.glob("*/api.py"))
    rooms = [importlib.import_module(f"{pallas_kernels.__name__}.{file.parent.name}.api") for file in files]
    operations = [value for room in rooms for value in vars(room).values() if isinstance(value, Operation)]
    return {operation.name for operation in operations if any(x.name == "mosaic" for x in operation.implementations)}


def test_every_operation_with_a_kernel_has_cases_and_limits():
    assert {case.op for case in CASES} == operations_with_a_kernel()
    assert set(LIMITS) == operations_with_a_kernel()
    assert len({case.title for case in CASES}) == len(CASES)


@pytest.mark.parametrize(
    ("registers", "shared_bytes", "threads", "blocks"),
    [
        (64, 100_000, 128, 2),  # shared memory: 228 KiB / (98 + 1)
        (64, 232_448, 128, 1),
        (255, 0, 128, 2),  # registers: 4 warps of 8192 each; a quarter of an SM fits 2
        (168, 0, 384, 1),  # registers: 12 warps of 5376 each, three per quarter
        (16, 0, 128, 16),  # threads: 2048 / 128
        (16, 0, 32, 32),
    ],
)
def test_blocks_per_sm(registers, shared_bytes, threads, blocks):
    assert blocks_per_sm(registers, shared_bytes, threads) == blocks


def test_markdown():
    row = Row(
        op="linear", case="1 x 8", min_us=1.234, launches=(2, 1), kernel="first", registers=40, spill_bytes=0,
        shared_bytes=2048, grid=264, cluster=2, threads=128, per_sm=4, waves=0.5, features=("HMMA", "LDSM"),
    )  # fmt: skip
    head, rule, line = markdown([row]).splitlines()
    assert line == "| linear: first | 1 x 8 | 1.23 | 2 + 1 | 40 | 0 | 2.0 | 264 | 2 | 4 | 0.50 | HMMA LDSM |"
    assert head.count("|") == rule.count("|") == line.count("|")

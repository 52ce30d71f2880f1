"""The GPU benchmark without a GPU: its references, its calculations, and a dry run."""

import collections
import importlib
import itertools
import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from benchmarks.gpu import autotune, cases, end_to_end, numerics, rendering, timing
from benchmarks.gpu.ceilings import Ceilings
from benchmarks.gpu.items import Context
from benchmarks.gpu.peer import AbsentError, Peer
from benchmarks.gpu.rows import Rows
from benchmarks.gpu.stages import STAGES
from benchmarks.gpu.timing import DRY, Arguments, Effort, Plan, Repeated
from benchmarks.gpu.verdicts import checks
from benchmarks.kernel_cases import Case, Heads, decoding, encoding, normed
from benchmarks.kernel_support import refusal
from benchmarks.kernel_table import LIMITS
from jaxinfer.compiled.target import Target, compile_for
from jaxinfer.models.presets import PRESETS
from jaxinfer.pallas_kernels import KVPages
from jaxinfer.pallas_kernels.dispatch import Operation, without_kernels
from jaxinfer.pallas_kernels.implementation import mosaic, reference
from jaxinfer.pallas_kernels.mosaic.interpreter import interpreted
from jaxinfer.pallas_kernels.mosaic.tuning import tuned
from jaxinfer.pallas_kernels.target import targeting

TINY = {case.title: case for case in cases.tiny()}
OFTEN = {title.partition(":")[0]: title for title in reversed(TINY)}.values()
"""A case of each operation."""


@pytest.mark.parametrize(
    "title", [pytest.param(title, marks=[] if title in OFTEN else pytest.mark.slow) for title in TINY]
)
def test_fallbacks_match_the_references(title):
    case = TINY[title]
    args = case.make(jax.random.key(1))
    assert numerics.error_of(case, args, numerics.expected_of(case, args)) <= case.tolerance


@pytest.mark.slow
@pytest.mark.parametrize("target", ["h100-sxm", "h200"])
def test_checked_cases_run_their_kernels(target):
    """What a kernel does not support would be compared with itself: only cases that are known to have none."""
    with targeting(Target.load(target).gpu):
        refused = {case.title for case in cases.checked() if refusal(case) is not None}
    assert refused == {case.title for case in cases.checked() if not case.kernels}
    assert {case.op for case in cases.checked() if case.kernels} == set(LIMITS)


@pytest.mark.slow
def test_checked_cases_have_pages_of_all_sizes_and_norms_of_heads():
    sizes, norms = set(), set()
    for case in cases.checked():
        for pages in (x for x in case.args if isinstance(x, KVPages)):
            sizes.add((case.op, pages.k.shape[1]))
            norms |= {case.op} if "norms of heads" in case.name else set()
    assert sizes == {(op, size) for op in ("decode_attention", "paged_attention") for size in (16, 32, 64)}
    assert norms == {"decode_attention"}


def test_checked_cases_come_in_turns_by_operation():
    first = [case.op for case in numerics.in_turns(cases.checked())][: len({case.op for case in cases.checked()})]
    assert len(set(first)) == len(first)


def test_errors_are_relative_and_never_hidden_by_nan():
    expected = np.array([3.0, 4.0])
    assert numerics.error(expected + np.array([0.0, 0.5]), expected) == pytest.approx(0.1)
    assert numerics.error(np.array([3.0, np.nan]), expected) == np.inf
    assert numerics.error(np.array([1, 2, 3, 4]), np.array([1, 2, 3, 5])) == 0.25


def test_timed_cases_have_arguments_of_their_shapes():
    """Traced only: the arrays would not fit into memory."""
    every = list(cases.timed())
    for case in {case.op: case for case in every}.values():
        assert case.bytes > 0
        assert jax.tree.leaves(jax.eval_shape(case.call, *case.args))
    assert {"norm_linear", "linear_residual", "decode_attention", "grouped_matmul"} <= {case.op for case in every}
    assert every[0].name.startswith("llama3-8b")
    assert every[0].rows == 1


def test_full_rows_are_as_long_as_bytes_and_flops_count():
    _, _, table, positions, _, _ = decoding(3, 2, 112, Heads(1, 1, 64), rotary=0, full=True).make(jax.random.key(0))
    assert table.reshape(-1).tolist() == list(range(21))
    assert positions.tolist() == 3 * [[110, 111]]
    _, _, _, positions, lengths = encoding(3, 197, 1, 8, full=True).make(jax.random.key(0))
    assert positions.tolist() == 3 * [list(range(197))]
    assert lengths.tolist() == [197, 197, 197]


def test_a_linear_layer_may_follow_a_norm_alone():
    case = normed("qkv", 2, 64, 128, "bfloat16")
    assert numerics.errors(case)[1] <= case.tolerance


# Timing


def _case(**changes):
    def make(key):
        x, w = jax.random.split(key)
        return jax.random.normal(x, (4,)), jax.random.normal(w, (1 << 18,))  # 1 MiB

    def reference(x, w):
        return x * w[:4], w + x[0]

    fields = {"op": "f", "name": "n", "make": make, "call": reference, "reference": reference, "state": 1}
    return Case(traffic=lambda _args: 1 << 20, tolerance=1e-6, **(fields | changes))


def test_large_arguments_rotate_and_small_ones_do_not():
    plan = Plan.from_case(_case(), 1e-6, Effort(rounds=1, calls=8))
    assert plan == Plan(calls=8, sets=8, large=(False, True), loops=625)  # 5 ms
    assert Plan.from_case(_case(make=lambda key: _case().make(key)[1:]), 1e-6, Effort(rounds=1, calls=600)).calls == 512
    assert Plan.from_case(_case(make=lambda key: _case().make(key)[:1]), 1e-4, Effort(rounds=1)) == Plan(
        10, 1, (False,), 5
    )
    args = _case().args
    assert plan.join(*plan.split(args), args) == args


def test_the_state_of_each_set_goes_from_call_to_call():
    case, plan = _case(), Plan(calls=5, sets=2, large=(False, True), loops=3)
    arguments = Arguments.make(case, plan)
    before = [float(leaves[0][0]) for leaves in arguments.large]
    added = [float(leaves[0][0]) for leaves in arguments.small]
    program = Repeated(case, plan, case.call)
    program.compile()
    program.round(arguments, DRY)()
    expected = [before[0] + 3 * sum(added[0::2]), before[1] + 3 * sum(added[1::2])]
    assert [float(leaves[0][0]) for leaves in arguments.large] == pytest.approx(expected)


@pytest.mark.aot
@pytest.mark.parametrize("op", ["small_batch_linear", "norm_linear", "decode_attention"])
def test_on_a_gpu_a_program_is_the_calls_and_a_loop(op):
    """One CUDA graph, one kernel per call, the loop's counter, and no copies of the rotating arguments."""
    case = next(case for case in cases.timed() if case.op == op and "gpt-j-6b" in case.name)
    plan = Plan(calls=3, sets=2, large=Plan.from_case(case, 1e-5, DRY).large, loops=5)
    report = compiled_for_a_gpu(case, plan)
    kinds = collections.Counter(kernel.kind for kernel in report.kernels)
    assert kinds.pop("mosaic") == plan.calls
    assert kinds.total() <= 4  # of the counter and the first results
    assert report.graphs == 1
    assert report.aliased == sum(plan.large) * plan.sets


@pytest.mark.aot
def test_on_a_gpu_products_with_the_same_weights_are_not_merged():
    """XLA would read the weights once for all of them."""
    case = next(case for case in cases.timed() if case.title.endswith("llama3-8b head, bfloat16, 1 row"))
    with without_kernels():
        report = compiled_for_a_gpu(case, Plan(calls=3, sets=1, large=Plan.from_case(case, 1e-3, DRY).large, loops=5))
    assert sum("dot" in kernel.name for kernel in report.kernels) == 3


def compiled_for_a_gpu(case, plan):
    """The report of a program, compiled for an H200."""
    program, args = timing.repeated(case, plan, case.call)
    options = timing.serial_options("gpu", rows=case.rows, dtype=case.weight_dtype)
    return compile_for(Target.load("h200"), program, args, donate=(1,), options=options)


def test_a_median_and_a_spread():
    times = iter([3.0, 1.0, 2.0])
    timing_of = timing.interleave({"a": lambda: next(times)}, 3)["a"]
    assert (timing_of.seconds, timing_of.spread) == (2.0, 1.0)


# Tiles


def test_tuning_finds_the_tiles_that_run_and_writes_them(tmp_path, monkeypatch):
    monkeypatch.setitem(autotune.SEARCHED, "f", {"a": (1, 2), "b": (3, 4)})
    tried = []

    def kernel(x, w):
        tiles = tuned("f", "key") or {"a": 9, "b": 9}
        tried.append((tiles["a"], tiles["b"]))
        if tiles["b"] == 4:
            raise ValueError("4 does not fit")
        return x * w[:4]

    case = _case(call=lambda x, w: Operation("f", mosaic(kernel), reference(lambda x, w: x))(x, w), state=None)
    table = tmp_path / "table.json"
    rows = Rows(tmp_path / "rows.jsonl")
    for what in ("read", "copy", "bfloat16", "int8"):
        rows.row(part="rates", what=what, rate=1e-3)
    monkeypatch.setattr(autotune, "MAX_TIME_RATIO", float("inf"))
    with interpreted():
        assert autotune.keys(case) == [("f", "key")]
        assert list(autotune.cases_of_keys([case, case])) == [("f", "key")]
        autotune.measure(rows, case, ("f", "key"), DRY, table)
    assert {(1, 3), (2, 3), (9, 9)} <= set(tried)
    (row,) = [row for row in rows.read() if row["part"] == "autotune"]
    assert row["tried"] == 3
    written = json.loads(table.read_text())["f"]["key"]
    assert written["b"] == 3
    autotune.write(table, ("f", "another"), {"a": 1})
    assert json.loads(table.read_text())["f"] == {"another": {"a": 1}, "key": written}


# End to end


def test_peers_get_the_sizes_of_our_models():
    for name in end_to_end.MODELS:
        architecture, sizes = end_to_end.transformers_config(PRESETS[name])
        assert sizes["vocab_size"] == PRESETS[name].vocab
        assert architecture == {"llama3-8b": "Llama", "gpt-j-6b": "GPTJ", "gpt2-1.5b": "GPT2"}[name]


def test_every_model_format_and_batch_is_measured_once():
    every = end_to_end.setups(dry=False)
    compared = [(setup.model, setup.fmt, setup.batch) for setup in every if setup.part == "end to end"]
    models, formats, batches = end_to_end.MODELS, end_to_end.FORMATS, end_to_end.BATCHES
    assert sorted(compared) == sorted(itertools.product(models, formats, batches))
    assert len({setup.title for setup in every}) == len(every)


@pytest.mark.parametrize("stage", [name for name, stage in STAGES.items() if stage.selected])
def test_items_of_a_real_run_have_titles_of_their_own(stage, tmp_path):
    """Verdicts count them. Nothing is measured."""
    context = Context(Rows(tmp_path / "rows.jsonl"), tmp_path, dry=False, peer_python=Path("python"))
    with targeting(Target.load("h100-sxm").gpu):
        titles = [item.title for item in importlib.import_module(f"benchmarks.gpu.{stage}").items(context)]
    assert titles
    assert len(set(titles)) == len(titles)


def test_ceilings_that_were_not_measured_are_named():
    with pytest.raises(LookupError, match="ceilings of bfloat16, copy, int8 were not measured"):
        Ceilings.from_rows([{"part": "rates", "what": "read", "rate": 3.1}])


@pytest.mark.parametrize("says", ["", '{"version": "1", "ways": []}\\n'])
def test_a_peer_that_ends_is_absent(tmp_path, says):
    """It passes the look at its packages; then it ends, at once or when it is asked."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\ntest $1 = -c && exit\nprintf '{says}'\nexit 3\n")
    python.chmod(0o755)
    peer = Peer(python)
    for _ in range(2):
        with pytest.raises(AbsentError, match="ended with status"):
            peer.prepare("linear")


def test_the_page_is_drawn_from_the_rows_alone(tmp_path):
    rows = Rows(tmp_path / "rows.jsonl")
    rows.row(part="settings", command="--minutes 3")
    fields = {"commit": "c", "date": "2026-01-31", "versions": {"jax": "0.11.2"}}
    rows.row(part="machine", machine={"device": "NVIDIA H200"}, kernels=True, **fields)
    rows.row(part="kernels", op="f", case="n", way="jaxinfer", us=1.0, of_ceiling=0.9, spread=0.1)
    rows.row(part="kernels", op="f", case="n", way="torch", absent="no torch")
    rows.check("f_vs_xla", 0.5, "x", target=1.0)
    page = rendering.render(tmp_path).read_text()
    assert "# GPU benchmark: NVIDIA H200" in page
    assert "| f_vs_xla | 0.5 x | ≥ 1 | **missed** |" in page
    assert "kernels, f, n, torch: no torch" in page
    assert (tmp_path / "kernels.png").exists()


def test_a_page_without_a_machine_says_so(tmp_path):
    Rows(tmp_path / "rows.jsonl").row(part="settings", command="")
    assert "# GPU benchmark: unknown device" in rendering.render(tmp_path).read_text()


@pytest.mark.interpreted
def test_a_dry_run_reaches_every_part(tmp_path):
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry-run", "--out", str(tmp_path), "--only", ",".join(STAGES)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    page, rows = (tmp_path / "report.md").read_text(), Rows(tmp_path / "rows.jsonl").read()
    for image in tmp_path.glob("*.png"):
        assert f"({image.name})" in page
    assert {row["stage"] for row in rows if row["part"] == "items"} == STAGES.keys()
    (worst,) = [check for check in checks(rows) if check.name == "worst_error_of_tolerance"]
    assert worst.verdict == "met"
    ways = {row["way"] for row in rows if row["part"] == "end to end" and "ms_per_step" in row}
    assert {"jaxinfer", "XLA"} <= ways

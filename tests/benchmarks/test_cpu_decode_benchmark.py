"""The CPU benchmark without other engines: what a step reads, ratios, bandwidth, workers, profiles, the page."""

import argparse
import dataclasses
import importlib
import json
import math
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from flax import nnx

from benchmarks import bandwidth, pages
from benchmarks.bandwidth import ReadBandwidth
from benchmarks.cpu_decode import __main__ as command
from benchmarks.cpu_decode import peers, products, shares
from benchmarks.cpu_decode.peers import Times, add_checks, engines_here, figures_of, read_rows
from benchmarks.cpu_decode.profile import STEPS, Event, kind_of, own_times, profile
from benchmarks.cpu_decode.step_bytes import kv_bytes, matrix_bytes, weight_bytes, weight_format
from benchmarks.cpu_decode.steps import timed_steps
from benchmarks.peers import worker
from benchmarks.random_models import save_random
from benchmarks.report import Report
from benchmarks.workers import ENGINES, IK_ENGINES, INT4_ENGINES, OWN_MODEL, PEERS
from jaxinfer.models import Decoder, DecoderConfig
from jaxinfer.models import config as c
from jaxinfer.models.presets import preset

DTYPES = ("float32", "bfloat16", "int8", "int4")
B1, B8 = "decode batch 1", "decode batch 8"


def small(*, tied: bool = False, windows=(None,)) -> DecoderConfig:
    return DecoderConfig(
        vocab=96,
        embed=128,
        layers=2,
        context=64,
        pattern=(
            c.LayerConfig(
                mixer=c.AttentionConfig(
                    q_heads=4,
                    kv_heads=2,
                    head_dim=32,
                    positions=c.PositionsConfig(kind=c.PositionKind.ROTARY, rotary_dim=32),
                ),
                mlp=c.MlpConfig(hidden=256, activation=c.Activation.SILU, gated=True),
            ),
        ),
        norm=c.NormConfig(kind=c.NormKind.RMS),
        tied=tied,
    ).with_windows(windows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_step_reads_all_that_is_stored_but_an_embedding_that_is_no_head(dtype, tied):
    weights = nnx.split(nnx.eval_shape(lambda: Decoder(small(tied=tied), weight_format(dtype), rngs=nnx.Rngs(0))))[1]
    flat = {".".join(map(str, path)): leaf.get_value() for path, leaf in nnx.to_flat_state(weights)}
    stored = {name: leaf.size * leaf.dtype.itemsize for name, leaf in flat.items()}
    read = sum(size for name, size in stored.items() if tied or not name.startswith("embed."))
    assert weight_bytes(small(tied=tied), dtype) == read
    if dtype == "float32":
        assert matrix_bytes(small(tied=tied)) == read - 5 * 128 * 4  # without norms


def test_keys_and_values_of_all_layers_are_read_but_windows_bound_them():
    token = 2 * 2 * 32 * 4  # keys and values of a layer
    assert kv_bytes(small(), "int8", 50) == 50 * token  # in 16 bits
    assert kv_bytes(small(), "float32", 50) == 2 * kv_bytes(small(), "bfloat16", 50) == 2 * 50 * token
    assert kv_bytes(small(windows=(16, None)), "float32", 50) == (16 + 50) * token


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "int4"])
def test_the_products_read_the_matrices_of_a_step(dtype, monkeypatch):
    monkeypatch.setattr(products, "preset", lambda name: small())
    monkeypatch.setattr(bandwidth, "WIDTH", 256)
    result = products.measure("small", dtype, rows=1, rounds=1)
    assert result["in_turn"] > 0
    assert max(result["bandwidth"].values()) > 0
    assert result["bytes"] == weight_bytes(small(), dtype) - 5 * 128 * 4  # norms
    assert result["step_ms"] > 0


# Bandwidth


@pytest.fixture
def small_array(monkeypatch):
    monkeypatch.setattr(bandwidth, "WIDTH", 256)


def test_the_loop_reads_every_word_with_any_number_of_threads():
    loop = bandwidth.read_loop()
    if loop is None:
        pytest.skip("no C++ compiler")
    words, total = np.arange(1, 1004, dtype=np.uint64), np.zeros(1, np.uint64)
    for threads in (1, 3):
        total[:] = 0
        seconds = loop(words.ctypes.data, words.size, threads, total.ctypes.data)
        assert total[0] == words.sum()
        assert 0 < seconds < 60


def test_the_best_of_all_measurements_and_ways_is_kept(small_array):
    measured = ReadBandwidth()
    measured.ways = {"xla": 1e6}
    assert 0 < measured.measure() < 1e6
    measured.include({"xla": 5.0, "loop": 2e6})
    assert measured.best == measured.row()["gb_per_s"] == measured.row()["loop_gb_per_s"] == 2e6
    assert measured.row()["xla_gb_per_s"] == 1e6


@pytest.mark.parametrize("broken", ["absent", "failing"])
def test_without_a_compiler_xla_alone_measures(broken, small_array, monkeypatch, capsys):
    monkeypatch.setattr(bandwidth, "COMPILERS", ("no-such-compiler",) if broken == "absent" else ("false",))
    monkeypatch.setattr(bandwidth, "read_loop", bandwidth.read_loop.__wrapped__)
    measured = ReadBandwidth()
    assert measured.measure() > 0
    assert list(measured.ways) == ["xla"]
    assert ("so XLA alone measures" in capsys.readouterr().out) == (broken == "failing")


# Ratios and checks


def timed(figure, dtype, **ms):
    return [{"figure": figure, "dtype": dtype, "engine": name, "ms": value} for name, value in ms.items()]


ROWS = [
    *timed("prefill 512", "float32", jaxinfer=1000, transformers=900),
    *timed("prefill 512", "int8", jaxinfer=500, ctranslate2=600),
    *timed(B1, "float32", jaxinfer=30, ctranslate2=45, transformers=60),
    *timed(B8, "float32", jaxinfer=100, transformers=150),
    *timed(B1, "int8", jaxinfer=10, ctranslate2=30, other=9),
    *timed(B8, "int8", jaxinfer=40, ctranslate2=60),
    *timed(B1, "int4", jaxinfer=8, **{"llama.cpp q4_0": 12, "llama.cpp q4_K": 10}),
    *timed(B8, "int4", jaxinfer=40, **{"llama.cpp q4_0": 50, "llama.cpp q4_K": 30}),
]


def test_checks_compare_with_the_best_peer_of_each_cell():
    report = Report()
    report.rows = [*ROWS, *timed("decode batch 1", "bfloat16", jaxinfer=1)]
    add_checks(report)
    values = {check.name: (round(check.value, 3), check.met) for check in report.checks}
    assert values == {
        "decode_fp32_b1_vs_best_peer": (1.5, True),
        "decode_fp32_b1_vs_hf": (2.0, True),
        "decode_fp32_b8_vs_best_peer": (1.5, True),
        "decode_int8_b1_vs_best_peer": (0.9, False),
        "decode_int8_b1_vs_ctranslate2": (3.0, True),
        "decode_int8_b8_vs_best_peer": (1.5, True),
        "decode_int4_b1_vs_best_peer": (1.25, True),
        "worst_decode_cell_vs_best_peer": (0.75, False),
        "prefill_vs_best_peer": (0.9, True),
        "prefill_int8_vs_best_peer": (1.2, True),
    }
    assert len(Times(report.rows).cells()) == 6  # bfloat16 has no peer here


def test_what_was_read_is_checked_against_the_best_bandwidth_of_all_parts():
    report = Report()
    report.rows = [*ROWS]
    read_rows(report, OWN_MODEL, 400)
    for rate in (40.0, 50.0, 45.0):
        report.row(figure="read bandwidth", gb_per_s=rate)
    report.row(figure="products", gb_per_s=46.0, check="products_int8_of_bandwidth")
    shares.run(report, argparse.Namespace())
    values = {check.name: (check.value, check.met) for check in report.checks}
    read = matrix_bytes(preset(OWN_MODEL)) / 30e6
    assert values.pop("decode_fp32_b1_of_read_bandwidth") == (pytest.approx(read / 50, rel=1e-3), False)
    assert values == {"products_int8_of_bandwidth": (0.92, True)}
    steps = {row["dtype"]: row["gb_per_s"] for row in report.rows if row["figure"] == "whole step"}
    assert steps.keys() == {"float32", "int8", "int4"}
    assert steps["float32"] > read


@pytest.mark.parametrize("features", [["avx2"], ["avx512_bf16"], ["amx_bf16"]])
def test_bfloat16_is_decoded_where_the_cpu_has_it(features, monkeypatch):
    monkeypatch.setattr(peers, "machine", lambda: {"features": features})
    assert (B1 in figures_of("bfloat16", 352, 16)) == (features != ["avx2"])
    assert list(figures_of("int4", 352, 16)) == [B1, B8]


def test_an_engine_whose_package_is_absent_is_left_out_and_said(monkeypatch, capsys):
    monkeypatch.setattr(peers, "missing_modules", lambda python, modules: list(modules))
    assert engines_here(Path("python")).keys() == ENGINES.keys() | INT4_ENGINES.keys()
    assert "ik_llama.cpp is left out" in capsys.readouterr().out
    monkeypatch.setattr(peers, "missing_modules", lambda python, modules: [])
    assert engines_here(Path("python")).keys() > IK_ENGINES.keys()


def test_parts_are_chosen():
    def parts(**options):
        return command.parts_of(argparse.Namespace(**{"model": OWN_MODEL, "quick": False, "part": None} | options))

    assert parts() == command.PARTS
    assert parts(quick=True) == command.QUICK
    assert parts(quick=True, part=["steps"]) == ("steps",)
    assert parts(model="qwen3-0.6b") == ("peers",)
    with pytest.raises(SystemExit, match=r"--model qwen3-0\.6b is for the part peers"):
        parts(model="qwen3-0.6b", part=["steps"])


# Workers


@pytest.fixture
def peer_modules(monkeypatch):
    monkeypatch.syspath_prepend(PEERS)


def test_a_remembered_prompt_is_not_computed(model_dir, peer_modules):
    runner = importlib.import_module("run_jaxinfer")
    engine, prompt = (
        runner.Jaxinfer(model_dir, "float32", 1, 128, prefix_caching=True),
        list(range(100, 164)),
    )
    engine.llm  # noqa: B018  (loads)
    engine.remember(prompt)
    assert 0 < engine.decode([prompt], 4) < 60
    (sequence,) = engine.running
    assert sequence.num_cached_tokens == 63  # all but the last, from which the first step decodes
    engine.engine.scheduler.check_integrity()
    with pytest.raises(RuntimeError, match=r"ended after 128 of \d+ tokens: length"):
        engine.decode([prompt], 128)


@pytest.mark.parametrize(("code", "works"), [("", True), ("import os; os.abort()", False)])
def test_weights_are_repacked_where_that_does_not_crash(code, works, tmp_path, peer_modules):
    family = importlib.import_module("llama_family")
    script = tmp_path / "peer.py"
    script.write_text(f"import sys; assert sys.argv[1:] == ['a.gguf', 'int8', '2', {family.PROBE!r}]\n{code}")
    assert family.repacking_works(str(script), "a.gguf", "int8", "2") == works
    assert family.repacking_works(str(script), "a.gguf", "float32", "2")  # has one layout


def test_all_rounds_but_the_first_are_timed_each_between_two_measurements_of_the_bandwidth():
    class Worker:
        asked, seconds = [], iter((9.0, 0.003, 0.001, 0.002))

        def ask(self, **request):
            self.asked.append(request["do"])
            return {"seconds": next(self.seconds)} if request["do"] == "decode" else {}

    class Bandwidth(ReadBandwidth):
        rates = iter((30.0, 32.0, 32.0, 40.0))

        def measure(self):
            Worker.asked.append("bandwidth")
            return next(self.rates)

    assert timed_steps(cast(Any, Worker()), 100, 16, 3, Bandwidth()) == ([3, 1, 2], [31, 32, 36])
    assert Worker.asked == ["remember", "decode", *["bandwidth", "decode"] * 3, "bandwidth"]


# Profiles


def test_operations_count_without_what_they_call_on_their_thread():
    assert [kind_of(name) for name in ("fusion.12", "dot.3.clone", "call", "add.1.2")] == [
        "fusion",
        "dot",
        "call",
        "add",
    ]
    first, second = (1, 1), (1, 2)
    events = [
        Event(first, "dot.1", 2, 5),
        Event(first, "call.4", 0, 10),
        Event(first, "dot.2", 5, 6),
        Event(second, "dot.1", 3, 4),
        Event(first, "call.5", 10, 11),
    ]
    assert own_times(events) == {"call": (7, 2), "dot": (5, 3)}


@pytest.mark.slow
def test_a_profile_has_the_operations_of_a_step(tmp_path):
    config = dataclasses.replace(small(), vocab=worker.VOCAB, context=16 + 8 * STEPS)
    save_random(tmp_path / "model", config)
    milliseconds, events = profile(tmp_path / "model", "float32", batch=1, context=16)
    assert 0 < milliseconds < math.inf
    times = own_times(events)
    assert sum(calls for _, calls in times.values()) >= STEPS
    assert all(time > 0 for time, calls in times.values())


# Page


def test_the_page_has_what_steps_read_and_which_kernels_ran(tmp_path):
    rows = [
        {"figure": "CPU kernels", "library": "0123456789ab", "level": "avx512_vnni"},
        {"figure": "whole step", "model": "a", "dtype": "int8", "context": 368, "step_ms": 50.0, "gb": 1.25},
        {"figure": "whole step", "model": "b", "dtype": "int8", "context": 9, "step_ms": 1.0, "gb_per_s": 25.0}
        | {"in_turn": 0.9},
        {"figure": "products", "model": "a", "dtype": "int8", "rows": 1, "step_ms": 40.0, "gb_per_s": 28.0},
        {"figure": "read bandwidth", "gb_per_s": 30.0},
        {"figure": "read bandwidth", "gb_per_s": 31.25},
    ]
    machine = {"cpu": "AMD EPYC", "cores": 2, "features": ["avx2"], "memory_gib": 23.5, "platform": "cpu"}
    folder = tmp_path / "amd"
    folder.mkdir()
    result = {"machine": machine, "commit": "a" * 40, "date": "2026-01-31", "versions": {"jax": "0.11.2"}, "checks": []}
    (folder / "cpu_decode.json").write_text(json.dumps(result | {"rows": rows}))
    text = pages.render(tmp_path, ["cpu_decode"])
    assert "without other engines. CPU kernels: compiled for avx512_vnni." in " ".join(text.split())
    assert "of 31.25 GB/s" in " ".join(text.split())
    assert "| a | int8 | decode step | 368 | 50.0 | 25.0 | 0.80 |  |" in text
    assert "| b | int8 | decode step | 9 | 1.0 | 25.0 | 0.80 | 0.90 |" in text
    assert "| a | int8 | products, 1 row |  | 40.0 | 28.0 | 0.90 |  |" in text

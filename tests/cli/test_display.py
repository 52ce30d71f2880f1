"""Tables in a terminal of 80 columns: every figure is there, whole."""

import dataclasses
import importlib
import io
import re

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from jaxinfer.cli import display
from jaxinfer.cli.bench.results import STATISTICS, Distribution, LatencyResult, Throughput, WarmUp
from jaxinfer.cli.bench.tables import latency_table, print_tables, throughput_tables
from jaxinfer.compiled.dumps import Buffer, Collective, Resources
from jaxinfer.compiled.target import Kernel, TargetReport
from jaxinfer.pallas_kernels.choices import Call
from jaxinfer.pallas_kernels.implementation import Implementation

inspect, tune = (importlib.import_module(f"jaxinfer.cli.{name}") for name in ("inspect", "tune"))
"""The modules, whose names in the package are the commands'."""


def shown(*tables, width=80):
    """What a terminal of a width shows of tables."""
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    for table in tables:
        console.print(table)
    text = console.file.getvalue()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    return text


SLOW = [12345.678 + n for n in range(3)], [1234.5678, 2.0, 0.0009], [0.123456, 9.99996], [0.00001, 67.891]


def latency(batch):
    times = dict(zip(("end_to_end_s", "first_token_s", "per_output_token_s", "inter_token_s"), SLOW, strict=True))
    return LatencyResult(batch=batch, output_tokens=1000, total_output_tokens=98_765_432, **times)


def test_no_figure_of_latencies_is_cut():
    results = [latency(1), latency(4096)]
    text = shown(latency_table(results, 32_000))
    for times in SLOW:
        summary = Distribution.from_samples(times)
        for name in STATISTICS:
            assert text.split().count(display.figure(1e3 * getattr(summary, name))) >= len(results)
    assert display.figure(results[0].tokens_per_s) in text
    assert len(re.findall(r"^ ?(?:1|4096)? +mean ", text, re.MULTILINE)) == 2


def test_no_figure_of_throughput_is_cut():
    end_to_end, first, per_token, _ = SLOW
    result = Throughput(
        seconds=123456.7,
        prompt_tokens=98_765_432,
        output_tokens=12_345_678,
        end_to_end_s=end_to_end,
        first_token_s=first,
        per_output_token_s=per_token,
        timeline=[],
        idle_share=0.125,
    )
    text = shown(*throughput_tables(result))
    assert "12%" in text.split()
    for figure in (result.seconds, result.requests_per_s, result.output_tokens_per_s, result.total_tokens_per_s):
        assert display.figure(figure) in text.split()
    for times in (end_to_end, first, per_token):
        assert display.figure(1e3 * max(times)) in text.split()


def test_metrics_without_samples_are_left_out():
    result = LatencyResult(batch=1, output_tokens=1, end_to_end_s=[0.5], first_token_s=[0.25], total_output_tokens=1)
    text = shown(latency_table([result], 8))
    assert "output token" not in text.replace("output tokens", "")
    assert text.split().count("500.0") == text.split().count("250.0") == len(STATISTICS)


KERNEL = Kernel(
    name="decode_attention_with_a_long_name_kernel",
    instruction="custom-call.1",
    scope="layers.1/attention/decode_attention/scores",
    kind="mosaic",
    grid=1_234_567,
    threads=1024,
    shared_bytes=233_472,
    in_graph=True,
    in_loop=True,
    condition="",
    resources=Resources(registers=255, spill_bytes=12_345, instructions={"HGMMA.64x128x16.F32": 8, "LDGSTS.E": 2}),
)
EXCHANGE = Collective(
    kind="collective-permute",
    dtype="bf16",
    shape=(128, 32_768, 8192),
    participants=16,
    trips=12_345,
    conditions=("sample",),
    op_name="jit(step)/layers.1/attention/output/projection",
)
REPORT = TargetReport(
    target="h200",
    kernels=(dataclasses.replace(KERNEL, scope="layers.0/attention/scores"), KERNEL),
    graphs=1,
    host_launches=(),
    argument_bytes=1 << 40,
    output_bytes=1,
    alias_bytes=1 << 39,
    temp_bytes=1 << 38,
    temporaries=(Buffer(name="fusion.1", shape="bf16[128,32768,8192]", bytes=68_719_476_736),),
    collectives=(EXCHANGE,),
    donated=1234,
    aliased=1234,
    compile_seconds=1234.5,
)


def test_a_ticks_exchanges_are_told_from_those_of_a_step():
    places = ("first_stage/cond", "last_stage/cond", "last_stage/cond/branch_1_fun/sample/cond")
    first, last, asked = (f"jit(step)/shard_map/while/body/{place}" for place in places)
    ring = [
        dataclasses.replace(EXCHANGE, in_loop=True, conditions=(first,), op_name=f"{first}/branch_1_fun/psum"),
        dataclasses.replace(EXCHANGE, in_loop=True, conditions=(last, asked), op_name=f"{asked}/branch_1_fun/pmax"),
        dataclasses.replace(EXCHANGE, conditions=(), op_name="jit(step)/shard_map/psum"),
    ]
    report = dataclasses.replace(REPORT, collectives=tuple(ring))
    text = shown(*inspect.report_tables(report, "a model", registers=False, turn="tick"), width=200)
    assert " in a greedy tick, " in text
    assert re.findall(r"collective-permute +(.+?) +bf16", text) == [
        "first_stage/psum",
        "last_stage/sample/pmax, if asked",
        "psum, once a step",
    ]


@pytest.mark.parametrize("registers", [False, True])
def test_no_figure_of_a_gpus_programs_is_cut(registers):
    words = shown(*inspect.report_tables(REPORT, "a model", registers)).split()
    assert {"1,234,567", "1,024", "233,472"} <= {*words}
    assert {"16", "12345", f"{round(EXCHANGE.trips * EXCHANGE.wire_bytes):,}", "68,719,476,736"} <= {*words}
    assert {"1.1", "549.8", "1234.5"} <= {*words}
    assert ({"255", "12,345"} <= {*words}) == registers


def test_no_figure_of_tuning_is_cut():
    names = ("reference", "composed", "mosaic_tensor_cores")
    array = jax.ShapeDtypeStruct((8192, 1, 65_536), jnp.bfloat16)
    implementations = tuple(Implementation(name=name, call=print) for name in names)
    call = Call("decode_attention", implementations, (array,) * 6 + (None,), {"window": None, "scale": 0.125}, tuple)
    seconds = dict(zip(names, (1.2345678, 0.0001235, 0.98), strict=True))
    words = shown(tune.times_table([(call, seconds)])).split()
    assert {"1,234,568", "123.5", "980,000"} <= {*words}
    assert "None" not in words


def test_narrow_terminals_break_lines_and_lose_nothing(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    print_tables([latency_table([latency(1)], 8)], WarmUp(seconds=1.0, compile_s=2.0, programs={"decode": 2.0}))
    text = capsys.readouterr().out
    assert "…" not in text
    assert "12,345,678" in text or "12,346,678" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (9.99996, "10.00"),
        (9999.6, "10,000"),
        (1234567, "1,234,567"),
        (0.00012345, "0.0001234"),
        (-3.5, "-3.500"),
        (99.999, "100.0"),
    ],
)
def test_figures_have_four_digits(value, text):
    assert display.figure(value) == text

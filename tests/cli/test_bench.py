"""`jaxinfer bench` as a user runs it, and its measurements from Python."""

import importlib.util
import json
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from jaxinfer.cli import app
from jaxinfer.cli.bench.measure import measure_latency, measure_throughput
from jaxinfer.cli.bench.results import Distribution
from jaxinfer.cli.bench.workload import BenchRequest, random_prompts, spread_lengths
from jaxinfer.cli.display import figure
from jaxinfer.generation import LLM
from jaxinfer.models.files.conversion import convert
from tests.generation.conftest import PLAIN
from tests.models.goldens import DIRECTORY as GOLDENS

TOKENS = ("--prompt-tokens", 12, "--output-tokens", 6)
LATENCY = ("--batch", "1,2", *TOKENS, "--rounds", 3, "--warmup", 1)
THROUGHPUT = ("--requests", 5, "--max-batch", 1, *TOKENS, "--spread", 0.25)


def run(*arguments, code=0):
    done = CliRunner().invoke(app, ["bench", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done


def check_distribution(found, samples):
    assert found["samples"] == samples
    order = [found[name] for name in ("min", "p50", "p90", "p95", "p99", "max")]
    assert order == sorted(order)
    assert 0 < found["min"] <= found["mean"] <= found["max"]


@pytest.mark.slow
def test_latency(model_dir, tmp_path):
    file = tmp_path / "latency.json"
    file.write_text("of an earlier run")
    done = run("latency", model_dir, *LATENCY, "--json", file)
    report = json.loads(file.read_text())
    assert list(tmp_path.iterdir()) == [file]

    assert list(report) == ["command", "model", "versions", "machine", "settings", "warm_up", "metrics"]
    assert report["command"] == "bench latency"
    assert report["model"]["directory"] == str(model_dir)
    assert report["settings"] | {"batch": "1,2", "rounds": 3, "context": 128, "seed": 0} == report["settings"]
    assert report["machine"]["platform"] == "cpu"
    decoding = {f"decode: batch={batch}, speculative=0, pages=8" for batch in (1, 2)}
    assert decoding | {"admit: count=2", "prefill: chunks=1, batch=0, pages=8"} <= set(report["warm_up"]["programs"])
    for batch, metrics in zip((1, 2), report["metrics"]["batches"], strict=True):
        assert metrics["batch"] == batch
        assert metrics["output_tokens"] == 3 * batch * 6
        assert metrics["output_tokens_per_s"] == pytest.approx(metrics["output_tokens"] / metrics["seconds"])
        check_distribution(metrics["end_to_end_s"], 3)
        check_distribution(metrics["first_token_s"], 3 * batch)
        check_distribution(metrics["per_output_token_s"], 3 * batch)
        check_distribution(metrics["inter_token_s"], 3 * batch * 5)
        assert metrics["end_to_end_s"]["mean"] == pytest.approx(metrics["seconds"] / 3)
        assert metrics["first_token_s"]["max"] < metrics["end_to_end_s"]["max"]
        assert figure(1e3 * metrics["inter_token_s"]["p99"]) in done.stdout
        assert figure(metrics["output_tokens_per_s"]) in done.stdout
    assert f"{len(report['warm_up']['programs'])} programs" in " ".join(done.stdout.split())  # the line may wrap
    assert done.stderr == f"Wrote {file}\n"


def test_throughput(model_dir, tmp_path):
    files = tmp_path / "throughput.json", tmp_path / "plot.png"
    plot = ("--plot", files[1]) if importlib.util.find_spec("matplotlib") else ()
    done = run("throughput", model_dir, *THROUGHPUT, "--json", files[0], *plot)
    report = json.loads(files[0].read_text())
    assert report["command"] == "bench throughput"
    assert report["settings"] | {"requests": 5, "max_batch": 1, "spread": 0.25} == report["settings"]
    metrics = report["metrics"]
    rng = np.random.default_rng(0)
    prompts = random_prompts(rng, 257, spread_lengths(rng, 12, 0.25, 5))
    assert metrics["prompt_tokens"] == sum(map(len, prompts))
    assert metrics["output_tokens"] == sum(spread_lengths(rng, 6, 0.25, 5))
    tokens = metrics["prompt_tokens"] + metrics["output_tokens"]
    assert metrics["requests"] == 5
    for rate, count in (("requests", 5), ("output_tokens", metrics["output_tokens"]), ("total_tokens", tokens)):
        assert metrics[f"{rate}_per_s"] == pytest.approx(count / metrics["seconds"])
    for name in ("end_to_end_s", "first_token_s", "per_output_token_s"):
        check_distribution(metrics[name], 5)
    assert metrics["end_to_end_s"]["max"] <= metrics["seconds"]
    assert figure(metrics["total_tokens_per_s"]) in done.stdout
    if plot:
        assert files[1].read_bytes().startswith(b"\x89PNG")
        assert {*tmp_path.iterdir()} == {*files}


def test_prompts_come_from_a_file(model_dir, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one and two"}\n{"token_ids": [5, 17, 3]}\n{"prompt": "left out"}\n')
    options = ("--prompts-file", file, "--requests", 2, "--output-tokens", 1, "--spread", 0, "--max-batch", 1)
    run("throughput", model_dir, *options, "--json", tmp_path / "out.json")
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["settings"]["prompt_tokens"] is None
    assert report["metrics"]["prompt_tokens"] == len("one and two") + 3
    assert report["metrics"]["output_tokens"] == 2
    assert report["metrics"]["per_output_token_s"] is None


@pytest.mark.slow
def test_a_plot_of_latencies(model_dir, tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra `bench`")
    file = tmp_path / "plot.svg"
    run("latency", model_dir, "--batch", 1, *TOKENS, "--rounds", 2, "--warmup", 1, "--plot", file)
    assert file.read_bytes().startswith(b"<?xml")
    assert list(tmp_path.iterdir()) == [file]


def test_distribution():
    found = Distribution.from_samples([float(value) for value in range(100, -1, -1)])
    assert found == Distribution(samples=101, mean=50, p50=50, p90=90, p95=95, p99=99, min=0, max=100)
    assert Distribution.from_samples([]) is None


def test_lengths_cover_the_whole_range():
    lengths = spread_lengths(np.random.default_rng(0), 8, 0.5, 1000)
    assert set(lengths) == set(range(4, 13))
    assert set(spread_lengths(np.random.default_rng(0), 8, 0, 10)) == {8}
    assert min(spread_lengths(np.random.default_rng(0), 1, 0.9, 100)) == 1


@pytest.mark.slow
def test_timeline_counts_every_token_and_nothing_compiles_meanwhile(model_dir):
    requests = [BenchRequest([1, 2, 3], 20), BenchRequest([4] * 16, 3), BenchRequest([5], 1)]
    seen = []
    with LLM(model_dir, **PLAIN) as llm:
        result, warm_up = measure_throughput(llm, requests, progress=lambda *reached: seen.append(reached))
        assert len(list(llm.engine.executor.programs)) == len(warm_up.programs)
    assert warm_up.compile_s == pytest.approx(sum(warm_up.programs.values()))
    assert seen[-1] == (3, 24)
    seconds, tokens = zip(*result.timeline, strict=True)
    assert list(seconds) == sorted(seconds)
    assert list(tokens) == sorted(tokens) == [reached for _, reached in seen]
    assert seconds[-1] <= result.seconds < warm_up.seconds


def test_a_batch_that_exceeds_the_cache_is_refused(llm):
    with pytest.raises(ValueError, match="batch of 2 requests of 80 tokens does not fit in the cache of 8 pages of 16"):
        measure_latency(llm, [1, 2], prompt_tokens=60, output_tokens=20, rounds=1)


@pytest.mark.parametrize(
    ("command", "options", "message"),
    [
        ("latency", ("--batch", "4,0"), "--batch must be integers >= 1 separated by commas, got '4,0'."),
        ("latency", ("--batch", "a"), "--batch must be integers >= 1 separated by commas, got 'a'."),
        ("latency", (), "128 prompt and 64 output tokens exceed the context of 128"),
        ("latency", (*TOKENS, "--context", 17), "12 prompt and 6 output tokens exceed the context of 17"),
        ("latency", (*TOKENS, "--context", 129), "--context must be in [2, 128] for this model, got 129."),
        ("latency", (*TOKENS, "--quantize", "int3"), "quantize='int3' is not implemented"),
        ("latency", ("--json", "none/out.json"), "--json none/out.json: none is not a directory"),
        ("latency", ("--json", "file/out.json"), "--json file/out.json: file is not a directory"),
        ("latency", ("--json", "."), "--json . is a directory"),
        ("latency", ("--plot", "out.pdf"), "--plot out.pdf must end in .png or .svg."),
        ("throughput", ("--spread", 1), "--spread must be in [0, 1), got 1.0."),
        ("throughput", ("--spread", "nan"), "--spread must be in [0, 1), got nan."),
        ("throughput", ("--prompt-tokens", 90, "--output-tokens", 60), "Request 1: "),
        ("throughput", ("--prompts-file", "p", "--prompt-tokens", 4), "--prompt-tokens 4 contradicts --prompts-file p"),
        ("throughput", ("--prompts-file", "missing"), "missing"),
        (
            "throughput",
            ("--prompts-file", "lines", "--requests", 3),
            "--requests 3 is more than the 2 prompts in lines",
        ),
        ("throughput", ("--prompts-file", "lines"), "lines:2: the prompt is empty."),
        ("throughput", ("--prompts-file", "ids.jsonl"), "ids.jsonl:1: Token ids [999] of the prompt are outside"),
    ],
)
def test_refusals_come_before_the_run(model_dir, tmp_path, monkeypatch, command, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "lines").write_text("first\n\n")
    (tmp_path / "ids.jsonl").write_text('{"token_ids": [999]}\n')
    done = run(command, model_dir, *options, code=2)
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_encoders_are_refused(tmp_path):
    convert(GOLDENS / "bert_pooled", tmp_path / "model")
    done = run("latency", tmp_path / "model", code=2)
    assert done.stderr == f"error: {tmp_path / 'model'} is an encoder; bench measures decoders.\n"


def test_without_matplotlib_the_extra_is_named(model_dir, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = run("throughput", model_dir, "--plot", "out.svg", code=2)
    assert done.stderr == "error: --plot out.svg needs matplotlib, of the extra bench: pip install matplotlib\n"

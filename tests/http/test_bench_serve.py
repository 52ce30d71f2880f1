"""`jaxinfer bench serve` against a real server on loopback, and against servers that fail."""

import asyncio
import gzip
import importlib.util
import json
import socket
import threading

import numpy as np
import pytest
from typer.testing import CliRunner

from jaxinfer.cli import app
from jaxinfer.cli.bench.serve import make_load
from jaxinfer.evaluation.serving.arrivals import TracedRequest, at_rate, poisson, read_arrivals
from jaxinfer.evaluation.serving.client import CompletionClient, LoadRequest, RequestRecord
from jaxinfer.evaluation.serving.figures import Objective, summarise
from jaxinfer.evaluation.serving.load import run_closed
from jaxinfer.evaluation.traces import write_trace

pytest.importorskip("uvicorn")

EVENT = b'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n'
LAST = b'data: {"choices": [{"text": "bc", "finish_reason": "length"}]}\n\n'


@pytest.fixture(scope="module")
def url(async_llm):
    """A server of the model on a loopback port."""
    import uvicorn

    from jaxinfer import http

    listening = socket.create_server(("127.0.0.1", 0))
    limits = http.Limits(api_keys=("secret",))
    server = uvicorn.Server(uvicorn.Config(http.app(async_llm, limits=limits), log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    server.should_exit = True
    thread.join()


def run(*arguments, code=0):
    done = CliRunner().invoke(app, ["bench", "serve", *map(str, arguments)])
    assert done.exit_code == code, done.output
    return done


LENGTHS = ("--prompt-tokens", 3, "--output-tokens", 4)


@pytest.mark.parametrize("arrivals", [(), ("--rate", 100), ("--concurrency", 2)])
def test_a_load(url, tmp_path, monkeypatch, arrivals):
    monkeypatch.setenv("JAXINFER_API_KEY", "secret")
    files = tmp_path / "load.json", tmp_path / "load.svg"
    plot = ("--plot", files[1]) if importlib.util.find_spec("matplotlib") else ()
    slo = ("--slo-ttft", 1e-6, "--slo-tpot", 1e6)
    done = run(f"{url}/v1/", "--requests", 5, *LENGTHS, *arrivals, *slo, "--json", files[0], *plot)
    report = json.loads(files[0].read_text())
    metrics = report["metrics"]
    assert (metrics["requests"], metrics["errors"], metrics["output_tokens"]) == (5, {}, 20)
    assert metrics["prompt_tokens"] > 15
    assert metrics["requests_per_s"] == pytest.approx(5 / metrics["seconds"])
    assert metrics["goodput"] == 0  # no first token is as fast as the objective
    for values in metrics["percentiles"].values():
        assert 0 <= values["p50"] <= values["p90"] <= values["p99"]
    assert 0 < metrics["percentiles"]["ttft_ms"]["p99"] <= metrics["percentiles"]["e2e_ms"]["p99"]
    assert max(map(len, done.stdout.splitlines())) <= 80
    if plot:
        assert files[1].read_bytes().startswith(b"<?xml")


def test_errors_are_counted_by_kind(url, monkeypatch):
    monkeypatch.setenv("JAXINFER_API_KEY", "wrong")
    done = run(url, "--model", "any", "--requests", 2, *LENGTHS, code=2)
    assert "2 failed: HTTP 401" in done.stdout
    assert "No request came to its end" in done.stderr


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("127.0.0.1:1",), "127.0.0.1:1 must begin with http:// or https://"),
        (("http://x", "--rate", 1, "--concurrency", 1), "--concurrency contradicts --rate"),
        (("http://x", "--rate", 0), "--rate must be a finite number > 0, got 0"),
        (("http://x", "--slo-tpot", "nan"), "--slo-tpot must be a finite number > 0, got nan"),
        (("http://127.0.0.1:1",), "/v1/models does not name a model"),
    ],
)
def test_wrong_options(options, problem):
    assert problem in run(*options, code=2).stderr


async def serve_once(content, *, status=b"200 OK"):
    """Answer each request with the same bytes, and close its connection."""

    async def answer(reader, writer):
        await reader.readuntil(b"}}")
        writer.write(b"HTTP/1.1 " + status + b"\r\nConnection: close\r\n\r\n" + content)
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    return await asyncio.start_server(answer, "127.0.0.1", 0)


def record_of(content, **options):
    async def main():
        async with await serve_once(content, **options) as server:
            port = server.sockets[0].getsockname()[1]
            async with CompletionClient(f"http://127.0.0.1:{port}") as client:
                return await run_closed(client, [LoadRequest(prompt="a", output_tokens=3)], 1)

    (record,) = asyncio.run(asyncio.wait_for(main(), 60))
    return record


@pytest.mark.parametrize(
    ("content", "status", "error", "message"),
    [
        (b"busy", b"429 Too Many Requests", "HTTP 429", "busy"),
        (EVENT, b"200 OK", "cut short", "without a finish_reason"),
        (EVENT + b'data: {"error": {"message": "failed"}}\n\n', b"200 OK", "error in stream", "failed"),
        (b"data: []\n\n", b"200 OK", "bad event", "Expected `object`"),
    ],
)
def test_kinds_of_errors(content, status, error, message):
    record = record_of(content, status=status)
    assert record.error == error
    assert message in record.message


def test_tokens_are_those_of_the_usage_or_events():
    usage = b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}\n\n'
    without, with_usage = (record_of(EVENT + LAST + more + b"data: [DONE]\n\n") for more in (b"", usage))
    assert (without.error, without.output_tokens, len(without.events)) == ("", 2, 2)
    assert (with_usage.output_tokens, with_usage.prompt_tokens, len(with_usage.events)) == (3, 7, 2)


def test_figures_are_those_of_vllm():
    good = RequestRecord(arrival=1.0, sent=1.25, events=[2.0, 2.5, 4.0], prompt_tokens=7, output_tokens=5, ended=4.0)
    late = RequestRecord(arrival=1.0, sent=1.0, events=[9.0], prompt_tokens=7, output_tokens=1, ended=9.5)
    failed = RequestRecord(arrival=0.0, error="HTTP 429", ended=0.1)
    summary = summarise([good, late, failed], Objective(ttft_ms=1000.0, tpot_ms=500.0))
    assert (summary.requests, summary.errors, summary.seconds) == (2, {"HTTP 429": 1}, 9.5)
    assert summary.output_tokens_per_s == 6 / 9.5
    assert summary.goodput == 1 / 9.5
    assert {name: values["p50"] for name, values in summary.percentiles.items()} == {
        "ttft_ms": 4500.0,
        "tpot_ms": 500.0,
        "itl_ms": 1000.0,
        "e2e_ms": 5500.0,
    }
    assert summarise([good], Objective()).goodput is None
    assert summarise([good], Objective(tpot_ms=499.0)).goodput == 0
    assert summary.client_lag_ms == pytest.approx(250, rel=0.03)


def test_poisson_arrivals_have_their_rate():
    arrivals = [item.arrival for item in poisson(50, 20_000, np.random.default_rng(0))]
    gaps = np.diff(arrivals)
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.03)


def test_traces(tmp_path):
    gaps, lines = tmp_path / "gaps.txt.gz", tmp_path / "lines.jsonl"
    gaps.write_bytes(gzip.compress(b"# comment\n0\n500\n1500\n"))
    write_trace(lines, [TracedRequest(arrival=0.5, prompt_tokens=2, output_tokens=9)])
    assert [item.arrival for item in read_arrivals(gaps)] == [0.0, 0.5, 2.0]
    assert [item.arrival for item in at_rate(read_arrivals(gaps), 4.0)] == [0.0, 0.125, 0.5]
    (request,) = make_load(np.random.default_rng(0), 1, None, lines, 50, 60, 0.0)
    assert (request.arrival, request.output_tokens, len(request.prompt.split())) == (0.5, 9, 2)
    with pytest.raises(ValueError, match=r"--requests 4 is more than the 3 arrivals in .*gaps"):
        make_load(np.random.default_rng(0), 4, None, gaps, 5, 6, 0.0)
    (tmp_path / "wrong.txt").write_text("0\n1.5\n")
    with pytest.raises(ValueError, match=r"wrong.txt:2: not milliseconds .*'1.5'"):
        read_arrivals(tmp_path / "wrong.txt")
    with pytest.raises(ValueError, match="cannot be read"):
        read_arrivals(tmp_path / "absent.txt")


def test_azure_traces_have_lengths(tmp_path):
    file = tmp_path / "conv.csv"
    head = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
    file.write_text(head + "2023-11-16 18:15:47.1805900,396,0\n")
    first, second = read_arrivals(file)
    assert first == TracedRequest(arrival=0.0, prompt_tokens=374, output_tokens=44)
    assert second == TracedRequest(arrival=0.5, prompt_tokens=396, output_tokens=1)
    for wrong in ("2023-11-16 18:15:45,1,1", "2023-11-16 18:15:47,0,1", "2023-11-16 18:15:47,1", "soon,1,1"):
        file.write_text(f"{head}{wrong}\n")
        with pytest.raises(ValueError, match=r"conv.csv:3: not a request of an Azure LLM trace .*" + wrong):
            read_arrivals(file)
    file.write_text("time,tokens\n")
    with pytest.raises(ValueError, match="its first line must be TIMESTAMP,ContextTokens,GeneratedTokens"):
        read_arrivals(file)

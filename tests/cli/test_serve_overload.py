"""A server under ten times the load that it can bear: who is admitted is served in time, others know at once."""

import asyncio
import contextlib
import dataclasses
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.cli.test_serve import ask, free_port

pytest.importorskip("uvicorn")

MODEL = Path(__file__).parents[2] / "examples/demo_model"
OPTIONS = ["--compile-ahead", "--max-batch", "2", "--max-queue-time", "1.5"]
BODY = {
    "model": MODEL.name,
    "prompt": "def main():\n    ",
    "max_tokens": 64,
    "ignore_eos": True,
    "temperature": 0,
    "stream": True,
}
FIRST_TOKEN_SECONDS, TPOT_RATIO, REFUSAL_SECONDS = 2.0, 3.0, 0.1
SECONDS = 20.0
PRIORITIES = [-1, 0, 0, 1, 1, 1, 1, 1, 1, 1]


@dataclasses.dataclass
class Asked:
    """A request, and when what came."""

    priority: int
    status: int = 0
    message: str = ""
    retry_after: str | None = None
    status_s: float = 0.0
    first_s: float = 0.0
    per_token_s: float = 0.0
    done: bool = False


async def send(port, priority=0):
    asked, began = Asked(priority), time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = json.dumps(BODY | {"priority": priority}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    asked.status = int((await reader.readline()).split()[1])
    asked.status_s = time.perf_counter() - began
    last = None
    async for line in reader:
        if line.startswith(b"data: {"):
            last = time.perf_counter() - began
            asked.first_s = asked.first_s or last
        elif line.startswith(b"data: [DONE]"):
            asked.done = True
        elif line.startswith(b"{"):
            asked.message = json.loads(line)["error"]["message"]
        elif line.startswith(b"retry-after:"):
            asked.retry_after = line.split()[1].decode()
    writer.close()
    if last is not None:
        asked.per_token_s = (last - asked.first_s) / BODY["max_tokens"]
    return asked


async def capacity(port, seconds=5.0):
    """Requests per second of as many clients as there are places."""
    end = time.perf_counter() + seconds

    async def client():
        count = 0
        while time.perf_counter() < end:
            count += (await send(port)).done
        return count

    return sum(await asyncio.gather(client(), client())) / seconds


async def delays():
    """Measure by how much other programs delay this one, until it is cancelled."""
    late = []
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.01)
            late.append(time.perf_counter() - began - 0.01)
    return late


async def overload(port, rate):
    delayed = asyncio.create_task(delays())
    chance, tasks, at = random.Random(0), [], time.perf_counter()
    end = at + SECONDS
    while at < end:
        at += chance.expovariate(rate)
        await asyncio.sleep(max(at - time.perf_counter(), 0))
        tasks.append(asyncio.create_task(send(port, chance.choice(PRIORITIES))))
    asked = await asyncio.gather(*tasks)
    delayed.cancel()
    return asked, float(np.quantile(await delayed, 0.99))


@contextlib.contextmanager
def server():
    port = free_port()
    command = [sys.executable, "-m", "jaxinfer", "serve", str(MODEL), "--port", str(port), *OPTIONS]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            give_up = time.monotonic() + 500
            while process.poll() is None and time.monotonic() < give_up:
                with contextlib.suppress(OSError):
                    ask(port, "/ready")
                    break
                time.sleep(0.2)
            yield port
        finally:
            process.terminate()


@pytest.mark.slow
def test_ten_times_the_load():
    async def main(port):
        alone = [await send(port) for _ in range(10)]
        rate = 10 * await capacity(port)
        return float(np.median([each.per_token_s for each in alone])), rate, *await overload(port, rate)

    with server() as port:
        alone, rate, asked, delay = asyncio.run(main(port))
    admitted = [each for each in asked if each.status == 200]
    refused = [each for each in asked if "would wait" in each.message]
    later = [each for each in asked if each.message and each not in refused]
    print(f"{rate:.0f} requests/s: {len(admitted)} admitted, {len(refused)} refused at once, {len(later)} later")
    for name, values in (
        ("s to first token", [each.first_s for each in admitted]),
        (f"times {1000 * alone:.1f} ms per token", [each.per_token_s / alone for each in admitted]),
        ("s to refusal", [each.status_s for each in refused]),
        ("s of delay by other programs", [delay]),
        ("s to later refusal", [each.status_s for each in later] or [0.0]),
    ):
        print(name, np.quantile(values, [0.5, 0.9, 0.99, 1.0]).round(4))
    served = {p: np.mean([each.status == 200 for each in asked if each.priority == p]) for p in sorted(set(PRIORITIES))}
    print("served by priority", served)

    assert {each.status for each in asked} == {200, 429}
    assert all(int(each.retry_after) >= 1 for each in asked if each.status == 429)
    assert all(each.done for each in admitted)
    in_time = [each.first_s <= FIRST_TOKEN_SECONDS and each.per_token_s <= TPOT_RATIO * alone for each in admitted]
    assert np.mean(in_time) >= 0.99
    assert np.quantile([each.status_s for each in refused], 0.99) <= REFUSAL_SECONDS + 2 * delay  # here and there
    assert len(later) <= len(admitted)  # they gave way to others
    assert all(each.status_s <= FIRST_TOKEN_SECONDS for each in later)
    assert served[-1] > served[0] > served[1]

"""A long mixed load on a server process; JAXINFER_SOAK_SECONDS says how long, twenty minutes unless given."""

import asyncio
import contextlib
import json
import os
import random
import time
from collections import Counter

import psutil
import pytest

from tests.conformance.conftest import serving
from tests.conformance.soaks import mean, sampled

CLIENTS = 24
USER = [{"role": "user", "content": "hi"}]


class Load:
    """Clients of all kinds, each in a connection of its own."""

    def __init__(self, port):
        self.port, self.dice, self.ended = port, random.Random(0), Counter()

    def body(self):
        """A path, a body, and the status that is expected."""
        options = {"max_tokens": self.dice.randrange(1, 60), "seed": self.dice.randrange(100), "n": 1}
        options |= {"stream": self.dice.random() < 0.6}
        prompt = "ab" * self.dice.randrange(1, 60)
        match self.dice.randrange(8):
            case 0:
                return "/v1/embeddings", {"input": [prompt, "c"]}, 200
            case 1 | 2:
                return "/v1/chat/completions", {"messages": USER * self.dice.randrange(1, 9), **options}, 200
            case 3:
                grammar = {"regex": self.dice.choice(["a+b", "[0-9]{1,9}", "(x|yz)+"])}
                return "/v1/completions", {"prompt": prompt, "structured_outputs": grammar, **options}, 200
            case 4:
                return "/v1/completions", {"prompt": [prompt, "x"], "logprobs": 2, "echo": True, **options}, 200
            case 5:
                wrong = [{"temperature": -1}, {"prompt": 1}, {"unknown": 1}, {"structured_outputs": {"regex": "("}}]
                return "/v1/completions", {"prompt": prompt} | self.dice.choice(wrong), 400
        return "/v1/completions", {"prompt": prompt, **options}, 200

    async def ask(self):
        path, body, expected = self.body()
        content = json.dumps({"model": "tiny"} | body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {len(content)}\r\n\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            if self.dice.random() < 0.02:  # half a request
                writer.write(head.encode() + content[:-1])
                await writer.drain()
                self.ended["half"] += 1
                return
            writer.write(head.encode() + content)
            if self.dice.random() < 0.15:
                await reader.read(self.dice.choice([1, 500, 2000]))
                self.ended["left"] += 1
                return
            answer = await asyncio.wait_for(reader.read(), 120)
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        status = int(answer.split(b" ", 2)[1])
        assert status == expected, (path, body, answer[:1000])
        if status == 200 and body.get("stream"):
            assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"), answer[-500:]
            assert b'"error"' not in answer, answer[-500:]
        self.ended[status] += 1

    async def client(self, until):
        while time.monotonic() < until:
            await self.ask()


@pytest.mark.slow
@pytest.mark.soak
def test_a_mixed_load_on_a_server_leaves_nothing_behind(model_that_ends, tmp_path):
    seconds = float(os.environ.get("JAXINFER_SOAK_SECONDS", "1200"))
    options = ["--max-batch", "8", "--compile-ahead", "--max-waiting", "64"]
    with serving(model_that_ends, tmp_path / "log", *options) as server:
        process = psutil.Process(server.process.pid)

        def sample():
            return process.memory_info().rss, process.num_fds(), process.num_threads()

        idle = sample()
        load = Load(server.port)
        samples = asyncio.run(sampled(load.client, CLIENTS, seconds, sample))
        server.until_idle()
        running, waiting = (server.metric(f"jaxinfer_requests_{what}") for what in ("running", "waiting"))
        responses, failed = server.metric("jaxinfer_http_responses_total"), server.get("/metrics")
        left = sample()
    early, late = mean(samples, 0.4 * seconds, 0.5 * seconds), mean(samples, 0.9 * seconds, seconds)
    print(f"{dict(load.ended)}; memory, files, threads: idle {idle}, early {early}, late {late}, after {left}")
    assert min(load.ended[how] for how in (200, 400, "left", "half")) > 0
    assert (running, waiting) == (0, 0)
    assert responses == load.ended.total()
    assert 'outcome="failed"} 0.0' in failed
    assert late[0] <= 1.05 * early[0]
    assert left[1] <= idle[1] + 8  # sandboxes have pipes
    assert late[2] <= early[2] + 4
    assert "Traceback" not in (tmp_path / "log").read_text()

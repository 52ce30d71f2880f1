"""Language models that make room for each other, experts and elastic tasks on one server, for twenty minutes.

JAXINFER_SOAK_SECONDS says for how long, if it is given.
"""

import asyncio
import base64
import io
import json
import os
import random
import re
import time
from collections import Counter

import httpx2
import numpy as np
import psutil
import pytest

from jaxinfer import AsyncLLM
from tests.conformance.conftest import ROOT, free_port, serving
from tests.conformance.soaks import mean, sampled
from tests.tiny import save_tiny

NAMES, CLIENTS = ("a", "b", "c"), 6
REFUSALS = {
    "/v1/completions": {429, 503},
    "/v1/experts/infer": {429},
    "/v1/elastic/query": {408, 429},  # a query that would be late is shed
}
"""The statuses other than 200 that requests may get."""


def image(rng, size):
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (size, size, 3), np.uint8)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


class Load:
    """Clients of all kinds of models."""

    def __init__(self, port):
        self.dice, self.ended, rng = random.Random(0), Counter(), np.random.default_rng(0)
        self.images = [image(rng, size) for size in (16, 32, 64) * 4]
        self.http = httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False)

    def request(self):
        """A path and a body."""
        some = self.dice.sample(self.images, 3)
        match self.dice.randrange(4):
            case 0:
                kind = self.dice.choice(["resistor", "capacitor"])
                return "/v1/experts/infer", {"inputs": [{"kind": kind, "image": each} for each in some]}
            case 1:
                return "/v1/elastic/query", {"task": "digits", "images": some, "latency": 5.0}
        prompt = "ab" * self.dice.randrange(1, 30)
        body = {"model": self.dice.choice(NAMES), "prompt": prompt, "max_tokens": self.dice.randrange(1, 20)}
        return "/v1/completions", body

    async def client(self, until):
        while time.monotonic() < until:
            path, body = self.request()
            answer = await self.http.post(path, json=body)
            assert answer.status_code == 200 or answer.status_code in REFUSALS[path], (path, answer.text[:500])
            self.ended[path, answer.status_code] += 1
            await asyncio.sleep(self.dice.random() * 0.1)

    async def run(self, seconds, sample):
        """Ask for so long; returns samples, as `sampled` does."""
        samples = await sampled(self.client, CLIENTS, seconds, sample)
        for name in NAMES:
            (await self.http.post(f"/unload?model={name}")).raise_for_status()
        await self.http.aclose()
        return samples


def write_config(folder, port):
    """Three models with room for one and a half, and the experts and the vision transformer of the examples."""
    for seed, name in enumerate(NAMES):
        save_tiny(folder / name, seed=seed)
    options = {"max_batch": 4, "token_budget": 32, "chunk_size": 32, "cache_bytes": 1 << 20}
    with AsyncLLM(folder / "a", asleep=True, **options) as llm:
        size = llm.needed.total()
    tables = [f"port = {port}", "device_memory = ROOM"]
    for name in NAMES:
        tables += [f"[models.{name}]", f'path = "{folder / name}"', "on_demand = true"]
        tables += [f"{option} = {value}" for option, value in options.items()]
    tables += ["[experts.board]", f"config = {json.dumps(str(ROOT / 'examples/board/board.toml'))}"]
    tables += ["[elastic.vit]", f"path = {json.dumps(str(ROOT / 'examples/elastic_vit'))}"]
    tables += ["merge_levels = [-8]", "max_batch = 4"]
    return "\n".join(tables), size


def ledger(server):
    """The bytes of each tenant of each owner."""
    lines = re.findall(
        r'^jaxinfer_memory_reserved_bytes{.*owner="(.*?)",tenant="(.*?)"} (\S+)$', server.get("/metrics"), re.M
    )
    return {(owner, tenant): float(size) for owner, tenant, size in lines}


@pytest.mark.slow
@pytest.mark.soak
def test_all_kinds_at_once_leave_nothing_behind(tmp_path):
    seconds, port = float(os.environ.get("JAXINFER_SOAK_SECONDS", "1200")), free_port()
    tables, size = write_config(tmp_path, port)
    (tmp_path / "all.toml").write_text(tables.replace("device_memory = ROOM\n", ""))
    with serving([], tmp_path / "first.log", str(tmp_path / "all.toml"), port=port) as server:
        others = ledger(server)  # of experts and elastic tasks
    (tmp_path / "all.toml").write_text(tables.replace("ROOM", str(int(sum(others.values()) + 1.5 * size))))
    with serving([], tmp_path / "log", str(tmp_path / "all.toml"), port=port) as server:
        process = psutil.Process(server.process.pid)
        load = Load(port)
        samples = asyncio.run(load.run(seconds, lambda: (process.memory_info().rss, process.num_fds())))
        switches, left = server.metric("jaxinfer_model_switches_total"), ledger(server)
        answered = server.metric("jaxinfer_http_responses_total")
        failed = [line for line in server.get("/metrics").splitlines() if 'outcome="failed"' in line]
    early, late = mean(samples, 0.25 * seconds, 0.3 * seconds), mean(samples, 0.9 * seconds, seconds)
    print(f"{dict(load.ended)}; {switches:.0f} switches; memory and files: early {early}, late {late}")
    assert {path for path, status in load.ended if status == 200} == REFUSALS.keys()
    assert answered == load.ended.total() + len(NAMES)
    assert all(line.endswith(" 0.0") for line in failed), failed
    assert switches >= min(100, seconds / 12)
    lent = {key: size - left.get(key, 0.0) for key, size in others.items() if left.get(key) != size}
    assert left.keys() <= others.keys(), "the models hold nothing"
    assert all(owner == "System board" and size > 0 for (owner, _), size in lent.items()), "only experts have lent"
    assert late[0] <= 1.05 * early[0]
    assert late[1] <= early[1] + 8
    assert "Traceback" not in (tmp_path / "log").read_text()

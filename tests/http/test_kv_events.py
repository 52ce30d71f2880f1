"""KV events: what a subscriber makes of them is what the prefix cache has."""

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import signal
import struct
import subprocess
import sys
import time

import msgspec
import numpy as np
import pytest

pytest.importorskip("zmq")
pytest.importorskip("starlette")

import zmq

from jaxinfer import AsyncLLM, MeshConfig, SamplingParams, http
from jaxinfer.http.config import KVEventsConfig, ModelConfig, ServerConfig
from jaxinfer.http.kv_events import END, KVEvents
from jaxinfer.http.limits import Limits
from jaxinfer.http.loading import load_models, served_models
from jaxinfer.http.server import make_app
from tests.cli.test_serve import answers, ask, free_port, until
from tests.generation.conftest import PLAIN, SMALL, SMALL_BYTES
from tests.generation.few_programs import few_programs
from tests.http.asgi import Client
from tests.peft import random_pair, save_adapter
from tests.tiny import CONFIG

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
SHARED = list(range(20, 37))  # two pages and a token


class Subscriber:
    """What a router knows of a server: it reads the events, and asks for those it has missed."""

    def __init__(self, context, endpoint, replay_endpoint=None):
        self.events = context.socket(zmq.SUB)
        self.events.subscribe(b"kv@")
        self.events.connect(endpoint)
        self.replays = None
        if replay_endpoint is not None:
            self.replays = context.socket(zmq.DEALER)
            self.replays.connect(replay_endpoint)
        self.next, self.topics, self.kinds = 0, set(), []
        self.blocks = {}  # hash -> all tokens up to its end, and the adapter

    def read(self, milliseconds=500):
        """Read until nothing comes for a while."""
        while self.events.poll(milliseconds):
            topic, number, batch = self.events.recv_multipart()
            self.topics.add(topic.decode())
            if int.from_bytes(number, "big") > self.next:  # the first ones, before it was connected
                self.catch_up()
            self.take(number, batch)

    def take(self, number, batch):
        number = int.from_bytes(number, "big")
        if number < self.next:
            return
        assert number == self.next, "a batch is missing"
        self.next += 1
        seconds, events, rank = msgspec.msgpack.decode(batch)
        assert (seconds, rank) == (pytest.approx(time.time(), abs=60), 0)
        for event in events:
            self.kinds.append(event[0])
            self.apply(*event)

    def apply(self, kind, hashes=None, *fields):
        if kind == "AllBlocksCleared":
            assert not self.blocks  # they have been removed before, as not all subscribers know this event
        elif kind == "BlockRemoved":
            assert fields == ("CPU",)
            for block in hashes:
                del self.blocks[block]
        else:
            assert kind == "BlockStored"
            parent, tokens, size, lora_id, medium, lora_name = fields
            assert (lora_id, medium, len(tokens)) == (None, "CPU", size * len(hashes))
            before = () if parent is None else self.blocks[parent][0]
            for index, block in enumerate(hashes):
                before = (*before, *tokens[index * size :][:size])
                assert block not in self.blocks
                self.blocks[block] = before, lora_name

    def catch_up(self):
        """Ask for all batches from the next one on."""
        for number, batch in self.replayed(self.next):
            self.take(number, batch)

    def replayed(self, first):
        """All batches that there are from this number on."""
        self.replays.send_multipart([b"", first.to_bytes(8, "big")])
        batches = []
        while (parts := self.replays.recv_multipart())[1] != END:
            batches.append(parts[1:])
        return batches


def cached(llm):
    """The tokens, and the adapter, of each block in the prefix cache."""
    blocks = set()
    for pool in llm.engine.scheduler.pools:
        for node in pool._node_of.values():
            if len(node.tokens) == pool.page_size:
                tokens, parent = node.tokens, node.parent
                while not isinstance(parent, tuple):
                    tokens, parent = parent.tokens + tokens, parent.parent
                blocks.add((tokens, parent[-1]))
    return blocks


@contextlib.contextmanager
def watched(llm, tmp_path, **options):
    """An engine whose events are published, and a subscriber."""
    endpoints = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replays"
    config = KVEventsConfig(endpoint=endpoints[0], replay_endpoint=endpoints[1], **options)
    with KVEvents(config, "tiny", host="127.0.0.1", port=8000) as events, zmq.Context() as context:
        subscriber = Subscriber(context, *endpoints)
        try:
            events.watch(llm)
            yield subscriber
        finally:
            context.destroy(linger=0)


@pytest.fixture(scope="module")
def llm(model_dir):
    with few_programs(), contextlib.closing(AsyncLLM(model_dir, cache_bytes=SMALL_BYTES, **SMALL)) as llm:
        yield llm


async def complete(client, tokens):
    answer = await client.post("/v1/completions", {"prompt": tokens, "max_tokens": 4, "ignore_eos": True})
    usage = (await answer.json())["usage"]
    return usage["prompt_tokens_details"]["cached_tokens"]


def test_a_subscriber_knows_the_cache_after_shared_prefixes_and_evictions(llm, tmp_path, monkeypatch):
    monkeypatch.setenv("POD_IP", "10.0.0.7")
    with watched(llm, tmp_path) as subscriber:
        client = Client(http.app(llm, name="tiny"))

        async def ask_all():
            assert await complete(client, [*SHARED, 1]) == 0
            assert await complete(client, [*SHARED, 2]) >= 16
            for first in range(40, 48):  # more pages than there are
                await complete(client, list(range(first, first + 30)))

        asyncio.run(ask_all())
        subscriber.read()
        subscriber.catch_up()
        assert {"BlockStored", "BlockRemoved"} == {*subscriber.kinds}
        assert {*subscriber.blocks.values()} == cached(llm) != set()
        assert subscriber.topics <= {"kv@10.0.0.7:8000@tiny"}

        with subscriber_that_missed_all(tmp_path) as late:
            late.catch_up()
            assert late.blocks == subscriber.blocks
            assert late.next == subscriber.next > 1


@contextlib.contextmanager
def subscriber_that_missed_all(tmp_path):
    with zmq.Context() as context:
        try:
            yield Subscriber(context, f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replays")
        finally:
            context.destroy(linger=0)


def test_a_step_that_fails_clears_all(llm, tmp_path, monkeypatch):
    with watched(llm, tmp_path) as subscriber:
        llm.submit([*SHARED, 3], PARAMS).result()
        subscriber.read()
        subscriber.catch_up()
        assert subscriber.blocks

        def fail(batch):
            monkeypatch.undo()
            raise RuntimeError("injected")

        monkeypatch.setattr(llm.engine.executor, "launch", fail)
        with pytest.raises(Exception, match="injected"):
            llm.submit([*SHARED, 4], PARAMS).result()
        subscriber.read()
        assert subscriber.kinds[-1] == "AllBlocksCleared"
        assert subscriber.blocks == {} == dict.fromkeys(cached(llm))
        llm.submit([*SHARED, 5], PARAMS).result()
        subscriber.read()
        assert {*subscriber.blocks.values()} == cached(llm) != set()


def test_an_unloaded_model_has_no_blocks(model_dir, tmp_path):
    endpoints = f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replays"
    options = {"cache_bytes": SMALL_BYTES, **SMALL}
    config = ServerConfig(
        models={"tiny": ModelConfig(path=model_dir, options=options)},
        kv_events=KVEventsConfig(endpoint=endpoints[0], replay_endpoint=endpoints[1]),
    )
    with few_programs(), KVEvents(config.kv_events, "tiny", host="127.0.0.1", port=8000) as events:
        models = served_models(config, events)
        client, known = Client(make_app(models, Limits())), []

        async def ask_and_unload():
            with subscriber_that_missed_all(tmp_path) as subscriber:
                for _ in range(2):  # the second one loads it again
                    assert await complete(client, [*SHARED, 1]) == 0
                    await asyncio.to_thread(subscriber.read)
                    subscriber.catch_up()
                    assert {*subscriber.blocks.values()} == cached(models.find("tiny").model.llm) != set()
                    assert (await client.post("/unload", {})).status == 200
                    await asyncio.to_thread(subscriber.read)
                    known.append((subscriber.blocks, subscriber.kinds[-1]))

        try:
            load_models(config, models)
            asyncio.run(ask_and_unload())
        finally:
            models.close(drain=False)
    assert known == [({}, "AllBlocksCleared")] * 2


@pytest.mark.slow
def test_lanes_are_one_cache(model_dir, tmp_path):
    with few_programs(), contextlib.closing(AsyncLLM(model_dir, mesh=MeshConfig(data=2), **PLAIN)) as llm:
        with watched(llm, tmp_path) as subscriber:
            futures = [llm.submit([*SHARED, last], PARAMS) for last in range(8)]
            for future in futures:
                future.result()
            subscriber.read()
            subscriber.catch_up()
        assert len(llm.engine.scheduler.pools) == 2
        assert all(pool._node_of for pool in llm.engine.scheduler.pools)
        assert {*subscriber.blocks.values()} == cached(llm)


def test_hashes_are_those_of_the_tokens(llm, tmp_path):
    """They are the same in each process, and others for another model: a router compares those of many servers."""
    with watched(llm, tmp_path) as subscriber:
        llm.submit(list(range(100, 116)), PARAMS).result()
        subscriber.read()
        subscriber.catch_up()
    known = {tokens: block for block, (tokens, _) in subscriber.blocks.items()}
    assert known[tuple(range(100, 108))] == 14752084500627737405
    digest = hashlib.sha256(b"tiny\0").digest()
    for first in (100, 108):
        digest = hashlib.sha256(digest + struct.pack("<8I", *range(first, first + 8))).digest()
    assert known[tuple(range(100, 116))] == int.from_bytes(digest[:8])


def test_events_as_maps(llm, tmp_path):
    with watched(llm, tmp_path, format="map") as subscriber:
        llm.submit(list(range(60, 76)), PARAMS).result()
        time.sleep(0.2)
        events = [event for _, batch in subscriber.replayed(0) for event in msgspec.msgpack.decode(batch)[1]]
    (stored,) = [event for event in events if event["type"] == "BlockStored"]
    assert [*stored] == [
        *("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name")
    ]
    assert stored["token_ids"] == list(range(60, 76))


@pytest.mark.slow
def test_blocks_of_an_adapter_have_its_name(model_dir, tmp_path):
    shape = CONFIG.layer(0).attention.q_heads * CONFIG.layer(0).attention.head_dim, CONFIG.embed
    pair = random_pair(*shape, 3, np.random.default_rng(0))
    folder = save_adapter(tmp_path / "capitals", {"model.layers.0.self_attn.q_proj": pair})
    with few_programs(), contextlib.closing(AsyncLLM(model_dir, adapters={"capitals": folder}, **PLAIN)) as llm:
        assert llm.engine.adapters is not None
        checked = llm.engine.adapters.register_checked("other", folder)
        with watched(llm, tmp_path) as subscriber:
            for adapter in (None, "capitals", checked):
                llm.submit([*SHARED, 1], dataclasses.replace(PARAMS, adapter=adapter)).result()
            subscriber.read()
            subscriber.catch_up()
    names = {name for _, name in subscriber.blocks.values()}
    assert names == {None, "capitals", "other"}
    assert len(subscriber.blocks) == 3 * len({tokens for tokens, _ in subscriber.blocks.values()})


def test_what_has_no_cache_has_no_events(model_dir, tmp_path):
    with few_programs(), contextlib.closing(AsyncLLM(model_dir, prefix_caching=False, **PLAIN)) as llm:
        message = "^kv_events needs a model that generates, with prefix_caching; leave kv_events out.$"
        with pytest.raises(ValueError, match=message), watched(llm, tmp_path):
            pass
        assert llm.engine.scheduler.pools[0].listener is None


def test_events_go_to_a_router_that_listens(llm, monkeypatch):
    """As in llm-d with one picker: all servers connect to it."""
    monkeypatch.setenv("POD_IP", "fd00::7")
    with zmq.Context() as context, context.socket(zmq.SUB) as router:
        router.subscribe(b"")
        port = router.bind_to_random_port("tcp://127.0.0.1")
        config = KVEventsConfig(endpoint=f"tcp://127.0.0.1:{port}")
        with KVEvents(config, "org/tiny", host="0.0.0.0", port=8000) as events:
            events.watch(llm)
            for first in range(150, 250, 10):  # until the connection is there
                llm.submit(list(range(first, first + 9)), PARAMS).result()
                if router.poll(200):
                    break
            topic, _, batch = router.recv_multipart()
    assert topic == b"kv@[fd00::7]:8000@org/tiny"
    assert msgspec.msgpack.decode(batch)[1][-1][0] == "BlockStored"


def test_an_address_that_is_used_is_one_line(tmp_path):
    config = KVEventsConfig(endpoint=f"ipc://{tmp_path}/none/events")
    with pytest.raises(ValueError, match=r"^kv_events.endpoint ipc://.*/events: .*; choose another address.$"):
        KVEvents(config, "tiny", host="127.0.0.1", port=8000)


@pytest.mark.slow
def test_the_events_of_a_server_say_what_a_request_finds_cached(model_dir, tmp_path, monkeypatch):
    monkeypatch.delenv("POD_IP", raising=False)
    file, endpoints = tmp_path / "serve.toml", [f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replays"]
    port = free_port()
    file.write_text(
        f"""
        port = {port}
        [kv_events]
        endpoint = "{endpoints[0]}"
        replay_endpoint = "{endpoints[1]}"
        [models.tiny]
        path = "{model_dir}"
        page_size = 8
        max_batch = 4
        """
    )
    command = [sys.executable, "-m", "jaxinfer", "serve", str(file)]
    with zmq.Context() as context, subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            until(server, lambda: answers(port, "/ready"))
            subscriber = Subscriber(context, *endpoints)
            cached_tokens = []
            for last in (1, 2, 1):
                prompt = [*range(20, 37), last, *range(50, 60)]
                subscriber.read(300)
                known = {tokens for tokens, _ in subscriber.blocks.values()}
                expected = sum(tuple(prompt[:count]) in known for count in range(8, len(prompt), 8)) * 8
                body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
                usage = json.loads(ask(port, "/v1/completions", body))["usage"]
                cached_tokens.append(usage["prompt_tokens_details"]["cached_tokens"])
                assert expected <= cached_tokens[-1] < expected + 8  # a part of a page may be copied
        finally:
            context.destroy(linger=0)
            server.send_signal(signal.SIGTERM)
        assert "Traceback" not in server.stderr.read()
        assert cached_tokens[0] == 0 < cached_tokens[1] < cached_tokens[2]
        assert subscriber.topics <= {f"kv@127.0.0.1:{port}@tiny"}

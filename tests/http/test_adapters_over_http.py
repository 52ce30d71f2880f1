"""Adapters that clients load and unload: only from the server's folders, and without harm to running requests."""

import asyncio
import json
import os
import shutil
import threading

import numpy as np
import pytest

from jaxinfer import AsyncLLM
from jaxinfer.generation.lora import cache
from tests.generation.conftest import PLAIN
from tests.generation.few_programs import few_programs
from tests.peft import random_pair, save_adapter
from tests.tiny import CONFIG

pytest.importorskip("starlette")

from jaxinfer import http
from tests.http.asgi import Client

BODY = {"prompt": "abc", "temperature": 0, "max_tokens": 8, "ignore_eos": True}
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


def run(main):
    return asyncio.run(asyncio.wait_for(main, 120))


def save(folder, seed, rank=2, inputs=32):
    rng = np.random.default_rng(seed)
    modules = [f"model.layers.{layer}.self_attn.q_proj" for layer in range(CONFIG.layers)]
    return save_adapter(folder, {module: random_pair(32, inputs, rank, rng) for module in modules})


@pytest.fixture(scope="module")
def llm(model_dir):
    """A model with room for two adapters."""
    with few_programs():
        llm = AsyncLLM(model_dir, max_adapters=2, max_lora_rank=4, **PLAIN)
    yield llm
    llm.close()


@pytest.fixture
def places(tmp_path):
    """A folder of adapters, next to things that no client may read."""
    inside = tmp_path / "adapters"
    save(inside / "one", 1)
    save(inside / "deep" / "two", 2)
    save(tmp_path / "secret", 3)
    save(tmp_path / "adapters-too", 4)
    (inside / "link").symlink_to(tmp_path / "secret")
    (inside / "inner").symlink_to(inside / "deep" / "two")
    (inside / "circle").symlink_to(inside / "circle")
    for name in ("weights", "config"):
        shutil.copytree(inside / "one", inside / name)
    for file in ("weights/adapter_model.safetensors", "config/adapter_config.json"):
        (inside / file).unlink()
        (inside / file).symlink_to(tmp_path / "secret" / file.partition("/")[2])
    return inside


@pytest.fixture
def client(llm, places):
    return Client(http.app(llm, name="tiny", adapter_folders=[places]))


async def ask(client, path, body, **options):
    answer = await client.post(path, body, **options)
    return answer.status, await answer.json()


async def text(client, model):
    status, body = await ask(client, "/v1/completions", BODY | {"model": model})
    return body["choices"][0]["text"] if status == 200 else status


async def names(client):
    return [model["id"] for model in (await (await client.get("/v1/models")).json())["data"]]


def test_an_adapter_is_loaded_used_and_unloaded(client, places, llm):
    async def main():
        plain = await text(client, "tiny")
        missing = await text(client, "a")
        loaded = await ask(client, LOAD, {"lora_name": "a", "lora_path": "one"})
        absolute = await ask(client, LOAD, {"lora_name": "b", "lora_path": str(places / "inner"), "model": "tiny"})
        listed = (await (await client.get("/v1/models")).json())["data"]
        texts = [await text(client, name) for name in ("tiny", "a", "b")]
        gone = await ask(client, UNLOAD, {"lora_name": "a"})
        after = [await text(client, name) for name in ("tiny", "a", "b")]
        return plain, missing, loaded, absolute, listed, texts, gone, after, await names(client)

    plain, missing, loaded, absolute, listed, texts, gone, after, left = run(main())
    assert missing == 404
    assert (loaded[0], absolute[0]) == (200, 200)
    assert loaded[1] == listed[1]
    assert (listed[1]["id"], listed[1]["parent"]) == ("a", "tiny")
    assert [model["id"] for model in listed] == ["tiny", "a", "b"]
    assert texts[0] == plain
    assert len(set(texts)) == 3
    assert gone == (200, {"id": "a", "object": "model", "deleted": True})
    assert after == [texts[0], 404, texts[2]]
    assert left == ["tiny", "b"]


def test_a_name_can_mean_another_adapter_later(client, places):
    """Also where the prefix cache still has the prompt of the first one, and the files are at the same place."""
    save(places / "new", 5)

    async def main():
        texts = []
        for seed in (5, 6, 5):
            save(places / "new", seed)
            status, _ = await ask(client, LOAD, {"lora_name": "n", "lora_path": "new", "load_inplace": True})
            assert status == 200
            texts.append(await text(client, "n"))
        return texts

    first, second, third = run(main())
    assert first == third != second


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("../secret", "is in no folder of adapters"),
        ("one/../../secret", "is in no folder of adapters"),
        ("{outside}/secret", "is in no folder of adapters"),
        ("{outside}/none", "is in no folder of adapters"),
        ("/etc", "is in no folder of adapters"),
        ("{outside}/adapters-too", "is in no folder of adapters"),
        ("link", "is in no folder of adapters"),
        ("weights", "is in no folder of adapters"),
        ("config", "is in no folder of adapters"),
        ("circle", "is in no folder of adapters"),
        ("", "is in no folder of adapters"),
        (".", "is in no folder of adapters"),
        ("one\x00", "is in no folder of adapters"),
        ("x/" * 5000, "File name too long"),
        ("none", "none/adapter_config.json: no such file"),
        ("deep", "deep/adapter_config.json: no such file"),
        ("one/adapter_config.json", "no such file"),
    ],
)
def test_adapters_come_from_the_folders_only(client, places, path, message):
    path = path.format(outside=places.parent)

    async def main():
        return *await ask(client, LOAD, {"lora_name": "x", "lora_path": path}), await names(client)

    status, body, listed = run(main())
    error = body["error"]
    assert (status, error["param"], error["type"]) == (400, "lora_path", "invalid_request_error")
    assert message in error["message"]
    assert len(error["message"]) < 300
    assert listed == ["tiny"]
    if not path.startswith("/"):
        assert str(places.parent) not in error["message"]


def damage_weights(folder):
    file = folder / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])


def damage_config(folder):
    (folder / "adapter_config.json").write_text('{"r": ')


def remove_weights(folder):
    (folder / "adapter_model.safetensors").unlink()


def replace_by_a_pipe(folder):
    remove_weights(folder)
    os.mkfifo(folder / "adapter_model.safetensors")


def replace_by_a_folder(folder):
    (folder / "adapter_config.json").unlink()
    (folder / "adapter_config.json").mkdir()


def ask_for_more(folder):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"use_dora": True}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (damage_weights, "bad/adapter_model.safetensors: truncated or corrupt"),
        (damage_config, "bad/adapter_config.json"),
        (remove_weights, "bad/adapter_model.safetensors: no such file"),
        (replace_by_a_pipe, "bad/adapter_model.safetensors: no such file"),
        (replace_by_a_folder, "bad/adapter_config.json: no such file"),
        (ask_for_more, "use_dora=True is not implemented"),
        (lambda folder: save(folder, 1, inputs=16), "use an adapter made for this model"),
        (lambda folder: save(folder, 1, rank=8), "rank 8 is more than the 4 that are reserved"),
    ],
)
def test_an_adapter_that_cannot_be_used_is_refused(client, places, change, message):
    change(save(places / "bad", 1))

    async def main():
        return *await ask(client, LOAD, {"lora_name": "x", "lora_path": "bad"}), await text(client, "x")

    status, body, later = run(main())
    assert (status, body["error"]["param"], later) == (400, "lora_path", 404)
    assert message in body["error"]["message"]
    assert str(places) not in body["error"]["message"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tiny", "'tiny' is the name of another model"),
        ("other", "'other' is the name of another model"),
        ("mine", "an adapter 'mine' has already been loaded"),
        ("", "1 to 256 printable characters"),
        ("a\nb", "1 to 256 printable characters"),
        ("a\x1b[31m", "1 to 256 printable characters"),
        ("a\u202eb", "1 to 256 printable characters"),
        ("x" * 257, "1 to 256 printable characters"),
    ],
)
def test_names_that_adapters_may_not_have(llm, async_llm, places, name, message):
    app = http.app({"tiny": llm, "other": async_llm}, adapter_folders=[places])
    client = Client(app)

    async def main():
        assert (await ask(client, LOAD, {"lora_name": "mine", "lora_path": "one", "model": "tiny"}))[0] == 200
        return await ask(client, LOAD, {"lora_name": name, "lora_path": "one", "model": "tiny"})

    status, body = run(main())
    assert (status, body["error"]["param"]) == (400, "lora_name")
    assert message in body["error"]["message"]


def test_who_may_load_adapters(llm, async_llm, places):
    body = {"lora_name": "a", "lora_path": "one"}

    async def main():
        closed = Client(http.app(llm, name="tiny"))
        full = Client(http.app(async_llm, name="tiny", adapter_folders=[places]))
        limits = http.Limits(api_keys=("k",), admin_keys=("root",))
        keyed = Client(http.app(llm, name="tiny", limits=limits, adapter_folders=[places]))
        key, user = {"Authorization": "Bearer root"}, {"Authorization": "Bearer k"}
        unset = Client(http.app(llm, name="tiny", limits=http.Limits(api_keys=("k",)), adapter_folders=[places]))
        return [
            await ask(closed, LOAD, body),
            await ask(full, LOAD, body),
            await ask(keyed, LOAD, body),
            await ask(keyed, UNLOAD, {"lora_name": "a"}),
            await ask(keyed, LOAD, body, headers=key),
            await ask(keyed, UNLOAD, {"lora_name": "a"}, headers=key),
            await ask(keyed, LOAD, body, headers=user),
            await ask(unset, LOAD, body, headers=user),
            await ask(closed, UNLOAD, {"lora_name": "a"}),
            await ask(closed, UNLOAD, {"lora_name": "tiny"}),
        ]

    answers = run(main())
    assert [status for status, _ in answers] == [403, 400, 401, 401, 200, 200, 403, 403, 404, 404]
    assert answers[6][1]["error"]["code"] == "admin_key_required"
    assert "start the server with --adapter-folder DIR" in answers[0][1]["error"]["message"]
    assert "has no room for adapters: set its max_adapters" in answers[1][1]["error"]["message"]
    assert "has no adapter 'tiny'" in answers[-1][1]["error"]["message"]


def test_running_requests_keep_an_adapter_that_is_unloaded(client, llm, monkeypatch):
    """Three wait and run with it, of which the engine has room for some at once."""

    async def main():
        await ask(client, LOAD, {"lora_name": "a", "lora_path": "one"})
        expected = (await ask(client, "/v1/completions", BODY | {"model": "a", "max_tokens": 90}))[1]
        collect, hold = llm.engine.executor.collect, threading.Event()

        def held(step):
            assert hold.wait(60)
            return collect(step)

        monkeypatch.setattr(llm.engine.executor, "collect", held)
        body = BODY | {"model": "a", "max_tokens": 90, "stream": False}
        running = [asyncio.ensure_future(ask(client, "/v1/completions", body)) for _ in range(6)]
        while llm.num_requests < 6:
            await asyncio.sleep(0.01)
        gone, _ = await ask(client, UNLOAD, {"lora_name": "a"})
        refused = await text(client, "a")
        hold.set()
        return expected, gone, refused, [await answer for answer in running]

    expected, gone, refused, answers = run(main())
    assert (gone, refused) == (200, 404)
    for status, body in answers:
        assert status == 200
        assert body["choices"] == expected["choices"]


def test_the_server_answers_while_an_adapter_is_read(client, monkeypatch):
    reading, go, read = threading.Event(), threading.Event(), cache.read_adapter

    def slow(*arguments, **options):
        reading.set()
        assert go.wait(60)
        return read(*arguments, **options)

    monkeypatch.setattr(cache, "read_adapter", slow)

    async def main():
        body = {"lora_name": "a", "lora_path": "one"}
        loads = [asyncio.ensure_future(ask(client, LOAD, body)) for _ in range(2)]
        await asyncio.to_thread(reading.wait, 60)
        meanwhile = (await client.get("/health")).status, await text(client, "tiny"), await text(client, "a")
        go.set()
        return meanwhile, [(await load)[0] for load in loads]

    (health, answer, early), statuses = run(main())
    assert (health, early, sorted(statuses)) == (200, 404, [200, 400])
    assert isinstance(answer, str)

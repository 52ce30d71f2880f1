"""Several models in less memory than they need together: who has it, who waits, and what fails."""

import asyncio
import gc
import random
import re
import threading
import time
from pathlib import Path

import pytest

from jaxinfer import AsyncLLM, SamplingParams
from jaxinfer.serving import ClosedError
from jaxinfer.serving.budget import host_budget
from jaxinfer.sharding import MeshFile
from tests.generation.conftest import PAGE_BYTES, PLAIN
from tests.generation.few_programs import few_programs
from tests.tiny import save_tiny

pytest.importorskip("starlette")

from jaxinfer.http import served_model
from jaxinfer.http.config import ModelConfig, ServerConfig
from jaxinfer.http.config_file import read_config
from jaxinfer.http.limits import Limits
from jaxinfer.http.loading import load_models
from jaxinfer.http.loading import served_models as models_of
from jaxinfer.http.residency import _worth
from jaxinfer.http.served_model import ServedModel
from jaxinfer.http.served_models import ServedModels
from jaxinfer.http.server import make_app
from tests.http.asgi import Client

NAMES = ("a", "b", "c")
BODY = {"prompt": "abc", "temperature": 0, "max_tokens": 6, "ignore_eos": True}
LONG = BODY | {"max_tokens": 90}


def run(main):
    return asyncio.run(asyncio.wait_for(main, 120))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Three models of one config, with other weights each."""
    folder = tmp_path_factory.mktemp("models")
    return {name: save_tiny(folder / name, seed=seed) for seed, name in enumerate(NAMES)}


@pytest.fixture(scope="module", autouse=True)
def all_have_few_programs():
    """For the whole module: models are loaded in several threads at a time."""
    with few_programs():
        yield


def opened(folder, asleep=False):
    return AsyncLLM(folder, asleep=asleep, max_waiting=64, cache_bytes=32 * PAGE_BYTES, **PLAIN)


@pytest.fixture(scope="module")
def expected(folders):
    """What each model answers by itself, and the bytes it takes."""
    texts = {}
    for name, folder in folders.items():
        llm, params = opened(folder), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
        texts[name], size = llm.submit("abc", params).result().outputs[0].text, llm.reserved.total()
        llm.close()
    assert len(set(texts.values())) == 3
    return texts, size


class Server:
    """A server of three models with room for one and a half."""

    def __init__(self, folders, limits=None, **options):
        self.models = [
            ServedModel(
                name,
                lambda asleep, folder=folder: opened(folder, asleep),
                on_demand=True,
                **options.get(name, {}),
            )
            for name, folder in folders.items()
        ]
        self.a, self.b, self.c = self.models
        self.served = ServedModels(self.models)
        self.client = Client(make_app(self.served, limits or Limits()))

    async def ask(self, name, body=BODY, **options):
        answer = await self.client.post("/v1/completions", body | {"model": name}, **options)
        content = await answer.json()
        return (answer.status, content["error"] if "error" in content else content["choices"][0]["text"])

    async def admin(self, path, method="POST", **options):
        path, _, query = path.partition("?")
        answer = await self.client.ask(method, path, query=query, **options)
        return answer.status, await answer.json()

    async def states(self):
        return [model["state"] for model in (await (await self.client.get("/v1/models")).json())["data"]]


@pytest.fixture
def make(folders, expected, monkeypatch):
    gc.collect()  # what other tests have left gives its memory back
    servers, budget = [], host_budget()
    _, size = expected
    monkeypatch.setattr(budget, "capacity", budget.reserved + int(1.5 * size))

    def make(*arguments, **options):
        servers.append(Server(folders, *arguments, **options))
        return servers[-1]

    yield make
    for server in servers:
        server.served.close(drain=False)


def test_models_are_loaded_on_demand_and_make_room(make, expected):
    texts, _ = expected
    server = make()

    async def main():
        states = [await server.states()]
        for name in "aabca":
            assert await server.ask(name) == (200, texts[name])
            states.append(await server.states())
        return states

    unloaded, loaded, sleeping = "unloaded", "loaded", "sleeping"
    assert run(main()) == [
        [unloaded, unloaded, unloaded],
        [loaded, unloaded, unloaded],
        [loaded, unloaded, unloaded],
        [sleeping, loaded, unloaded],
        [sleeping, sleeping, loaded],
        [loaded, sleeping, sleeping],
    ]
    assert server.served.residency.switches == 4
    assert sum(model.llm.stats().compile_misses for model in server.models[1:]) == 0


def test_what_costs_least_is_taken(make, expected, monkeypatch):
    """Of two models in memory the one that is used more loses nothing, and is awake again at once."""
    (texts, size), server, budget = expected, make(), host_budget()
    monkeypatch.setattr(budget, "capacity", budget.reserved + int(2.3 * size))

    async def main():
        for name in "acccccccc":
            assert await server.ask(name) == (200, texts[name])
        server.a.llm._loaded.lender.weights.bytes_per_second = 1e15
        monkeypatch.setattr(server.c.llm.engine, "cache_seconds", lambda **options: 1.0)
        states = await server.states()
        assert await server.ask("b") == (200, texts["b"])
        return states, await server.states(), await server.ask("c")

    states, after, again = run(main())
    assert states == ["loaded", "unloaded", "loaded"]
    assert after == ["sleeping", "loaded", "loaded"]
    assert again == (200, texts["c"])
    assert 0 < server.a.llm.reserved.total() < size, "it has lost a part"
    assert server.served.residency.switches == 3


def test_a_model_that_is_closed_meanwhile_does_not_harm_the_one_that_wakes_up(make, expected, monkeypatch):
    (texts, size), server, budget = expected, make(), host_budget()
    monkeypatch.setattr(budget, "capacity", budget.reserved + int(2.3 * size))
    woken = []

    def wake_up():
        woken.append("c")
        raise ClosedError("closed")

    async def main():
        for name in "acccccccc":
            assert await server.ask(name) == (200, texts[name])
        server.a.llm._loaded.lender.weights.bytes_per_second = 1e15
        monkeypatch.setattr(server.c.llm.engine, "cache_seconds", lambda **options: 1.0)
        monkeypatch.setattr(server.c.llm, "wake_up", wake_up)
        assert await server.ask("b") == (200, texts["b"])
        return await server.states()

    assert run(main())[1] == "loaded"
    assert woken == ["c"]


def test_random_requests_of_all_models_at_once(make, expected):
    texts, _ = expected
    server, budget, over = make(), host_budget(), []

    async def main():
        rng = random.Random(0)
        names = [rng.choice(NAMES) for _ in range(40)]
        tasks = [asyncio.ensure_future(server.ask(name)) for name in names]
        while not all(task.done() for task in tasks):
            over.append(budget.reserved > budget.capacity)
            await asyncio.sleep(0.001)
        return names, [await task for task in tasks]

    names, answers = run(main())
    assert answers == [(200, texts[name]) for name in names]
    assert not any(over)
    assert server.served.residency.switches < 12  # those of a model run together


def test_the_first_come_first_though_another_is_busy(make):
    """Requests that come for the busy model meanwhile have their next turn after the others."""
    server, ended = make(), []

    async def ask(name, body, label):
        status, _ = await server.ask(name, body)
        ended.append((label, status))

    async def main():
        await server.ask("b")
        await server.ask("a")
        first = asyncio.ensure_future(ask("a", LONG, "long"))
        while not server.a.llm.stats().running:
            await asyncio.sleep(0.001)
        second = asyncio.ensure_future(ask("b", BODY, "b"))
        while server.a.llm.stats().running and not server.a.llm._decider._paused:
            await asyncio.sleep(0.001)
        third = asyncio.ensure_future(ask("a", BODY, "a"))
        await asyncio.gather(first, second, third)

    run(main())
    assert ended == [("long", 200), ("b", 200), ("a", 200)]


def test_a_long_answer_does_not_hold_up_others(make, folders, expected):
    """It is interrupted, and goes on: its text is what it is without an interruption."""
    texts, _ = expected
    server = make()
    server.served.residency._preempt_after = 0.05
    ended = []

    async def ask(name, body, label):
        answer = await server.ask(name, body)
        ended.append(label)
        return answer

    async def main():
        await server.ask("b")
        _, alone = await server.ask("a", LONG)
        collect = server.a.llm.engine.executor.collect
        server.a.llm.engine.executor.collect = lambda step: (time.sleep(0.02), collect(step))[1]  # a slow answer
        long = asyncio.ensure_future(ask("a", LONG, "long"))
        while not server.a.llm.stats().running:
            await asyncio.sleep(0.001)
        other = await ask("b", BODY, "b")
        return alone, other, await long

    alone, other, long = run(main())
    assert ended == ["b", "long"]
    assert other == (200, texts["b"])
    assert long == (200, alone)


def test_interruptions_do_not_eat_up_the_time(make, expected):
    """Many long answers of three models, whose turns are short: each turn after an interruption is twice as long."""
    server = make()
    server.served.residency._preempt_after = 0.001

    async def main():
        answers = await asyncio.gather(*(server.ask(name, LONG) for name in NAMES * 3))
        return answers, server.served.residency.switches

    answers, switches = run(main())
    assert [status for status, _ in answers] == [200] * 9
    assert answers[:3] == answers[3:6] == answers[6:]
    assert switches < 60


def test_a_pinned_model_stays(make, expected, caplog):
    texts, _ = expected
    server = make(a={"pinned": True})

    async def main():
        assert await server.ask("a") == (200, texts["a"])
        refused = await server.client.post("/v1/completions", BODY | {"model": "b"})
        again = await server.ask("a")
        return refused, await refused.json(), again

    refused, body, again = run(main())
    assert (refused.status, body["error"]["code"]) == (503, "loading")
    assert int(refused.headers["retry-after"]) >= 1
    assert "NotLoadedError: the model 'b' needs" in caplog.text
    assert again == (200, texts["a"])


def test_a_request_waits_until_its_deadline(make):
    server = make(Limits(timeout=4.0))

    async def main():
        await server.admin("/wake_up?model=a")
        await server.admin("/sleep?model=a")
        begun = time.monotonic()
        answer = await server.client.post("/v1/completions", BODY | {"model": "a"})
        waited = time.monotonic() - begun
        error, seconds = (await answer.json())["error"], int(answer.headers["retry-after"])
        await server.admin("/wake_up?model=a")
        return answer.status, error["code"], seconds, waited, (await server.ask("a"))[0]

    status, code, seconds, waited, after = run(main())
    assert (status, code, after) == (503, "loading", 200)
    assert seconds >= 1
    assert 4.0 <= waited < 20


def test_a_model_that_fails_harms_no_other(make, expected, monkeypatch, caplog):
    texts, _ = expected
    server, load = make(), {}
    monkeypatch.setattr(served_model, "RETRY_SECONDS", 0.2)

    def fails(asleep):
        raise OSError("the disk is gone")

    load["b"], server.b._load = server.b._load, fails

    async def main():
        first = await server.client.post("/v1/completions", BODY | {"model": "b"})
        error = (await first.json())["error"]
        states, other = await server.states(), await server.ask("a")
        server.b._load = load["b"]
        await asyncio.sleep(0.3)
        return first.status, error, states, other, await server.ask("b")

    status, error, states, other, after = run(main())
    assert (status, error["code"]) == (503, "loading")
    assert error["message"] == "the model 'b' cannot be loaded; the server's log says why."
    assert "the disk is gone" in caplog.text
    assert states == ["unloaded", "failed", "unloaded"]
    assert other == (200, texts["a"])
    assert after == (200, texts["b"])


def test_a_request_waits_for_a_model_that_is_unloaded_as_soon_as_it_has_loaded(make, expected):
    (texts, _), server, unloaded = expected, make(), []
    load = server.a.load

    def load_in_vain(**options):
        llm = load(**options)
        if not unloaded:
            unloaded.append(server.a.unload())
        return llm

    server.a.load = load_in_vain
    assert run(server.ask("a")) == (200, texts["a"])
    assert unloaded


def test_weights_that_cannot_be_read_fail_those_who_wait(make, expected, monkeypatch, caplog):
    texts, _ = expected
    server = make()
    monkeypatch.setattr(served_model, "RETRY_SECONDS", 0.2)

    async def main():
        await server.ask("b")
        await server.ask("a")

        def fails():
            raise OSError("unreadable")

        with monkeypatch.context() as patch:
            patch.setattr(server.b.llm._loaded.lender.weights, "load", fails)
            failed = await asyncio.gather(*(server.ask("b") for _ in range(3)))
        other, states = await server.ask("a"), [await server.states()]
        await asyncio.sleep(0.3)
        after = await server.ask("b")
        return failed, other, after, [*states, await server.states()]

    failed, other, after, states = run(main())
    assert states == [["loaded", "failed", "unloaded"], ["sleeping", "loaded", "unloaded"]]
    assert [status for status, _ in failed] == [503] * 3
    assert "unreadable" in caplog.text
    assert other == (200, texts["a"])
    assert after[0] == 200


def test_an_idle_model_is_unloaded(make, expected):
    texts, _ = expected
    server = make(a={"ttl": 0.2})

    async def main():
        assert await server.ask("a") == (200, texts["a"])
        while await server.states() != ["unloaded"] * 3:
            await asyncio.sleep(0.02)
        return await server.ask("a")

    assert run(main()) == (200, texts["a"])


def test_routes_that_change_models(make, expected):
    _, size = expected
    server = make(Limits(api_keys=("user",), admin_keys=("root",)))
    user, root = {"x-api-key": "user"}, {"x-api-key": "root"}

    async def main():
        refused = [(await server.admin(path, headers=user))[0] for path in ("/sleep", "/wake_up", "/unload")]
        assert await server.admin("/running", "GET", headers=user) == (200, {"running": []})
        assert (await server.admin("/sleep?model=a", headers=root))[0] == 409
        _, woken = await server.admin("/wake_up?model=a", headers=root)
        _, running = await server.admin("/running", "GET", headers=user)
        await server.admin("/wake_up?model=b", headers=root)
        _, made_room = await server.admin("/running", "GET", headers=user)
        _, asleep = await server.admin("/sleep?model=b&level=2", headers=root)
        _, unloaded = await server.admin("/unload?model=b", headers=root)
        wrong = [
            (await server.admin(path, headers=root))[0]
            for path in ("/sleep?model=a&level=3", "/sleep?model=none", "/wake_up", "/unload?model=")
        ]
        return refused, woken, running, made_room, asleep, unloaded, wrong

    refused, woken, running, made_room, asleep, unloaded, wrong = run(main())
    assert refused == [403] * 3
    assert woken == {
        "model": "a",
        "state": "loaded",
        "pinned": False,
        "ttl": None,
        "requests": 0,
        "bytes": {"the host": size},
    }
    assert running == {"running": [woken]}
    assert [(each["model"], each["state"]) for each in made_room["running"]] == [("a", "sleeping"), ("b", "loaded")]
    assert (asleep["state"], asleep["bytes"]) == ("sleeping", {})
    assert unloaded == {"model": "b", "state": "unloaded"}
    assert wrong == [400, 404, 400, 400]


def test_weights_of_a_sleeping_model_make_room(make, expected, monkeypatch):
    """At level 1 a CPU keeps them."""
    texts, size = expected
    server, budget = make(), host_budget()
    monkeypatch.setattr(budget, "capacity", budget.reserved + int(1.2 * size))

    async def main():
        await server.admin("/wake_up?model=a")
        _, asleep = await server.admin("/sleep?model=a&level=1")
        answer = await server.ask("b")
        return asleep, answer, (await server.admin("/running", "GET"))[1]["running"][0]

    asleep, answer, after = run(main())
    assert 0 < asleep["bytes"]["the host"] < size
    assert answer == (200, texts["b"])
    assert 0 < after["bytes"]["the host"] < asleep["bytes"]["the host"], "no more than b needs"


def test_a_client_that_leaves_needs_no_model(make, expected):
    texts, _ = expected
    server = make()

    async def main():
        await server.ask("b")
        await server.ask("a")
        running = asyncio.ensure_future(server.ask("a", LONG))
        while not server.a.llm.stats().running:
            await asyncio.sleep(0.001)
        left = asyncio.Event()
        gone = asyncio.ensure_future(server.client.post("/v1/completions", BODY | {"model": "b"}, left=left))
        while server.b.llm.waiting_since is None:
            await asyncio.sleep(0.001)
        left.set()
        await asyncio.wait([gone, running])
        return await server.ask("a"), server.b.llm.num_requests

    answer, waiting = run(main())
    assert answer == (200, texts["a"])
    assert waiting == 0


def test_an_error_in_the_thread_does_not_end_it(make, expected, monkeypatch, caplog):
    texts, _ = expected
    server = make()

    def unload_idle():
        raise RuntimeError("of this test")

    async def main():
        assert await server.ask("a") == (200, texts["a"])
        return await server.ask("b")

    monkeypatch.setattr(server.served.residency, "_unload_idle", unload_idle)
    assert run(main()) == (200, texts["b"])
    assert "could not be decided" in caplog.text


def test_what_is_worth_least_makes_room(folders):
    now = time.perf_counter()
    llm = opened(folders["a"], True)
    rare, often, slow = (ServedModel(name, lambda _: llm) for name in NAMES)
    for model in (rare, often, slow):
        model.load()
        model.load_seconds = 1.0
        model.use.note()
    often.use.note()
    slow.load_seconds = 10.0
    assert sorted((slow, often, rare), key=lambda each: _worth(each, now)) == [rare, often, slow]
    llm.close()


# The config


def config(folders, **options):
    models = {name: ModelConfig(path=folder, options=PLAIN, on_demand=True) for name, folder in folders.items()}
    return ServerConfig(models=models, **options)


def test_a_folder_of_models(folders, tmp_path):
    (tmp_path / "serve.toml").write_text(
        f"""
model_folder = "{folders["a"].parent}"
device_memory = "1.5GiB"

[models.c]
path = "{folders["c"]}"
pinned = true
ttl = 60
"""
    )
    read = read_config(tmp_path / "serve.toml")
    assert read.device_memory == 3 << 29
    assert [(name, each.on_demand, each.pinned, each.ttl) for name, each in read.models.items()] == [
        ("a", True, False, None),
        ("b", True, False, None),
        ("c", False, True, 60),
    ]
    for text, message in (
        ("model_folder = 'none'", "no such directory"),
        (f"model_folder = '{folders['a'].parent.parent}'", "is no model directory; move it elsewhere"),
        ("device_memory = 'much'", "device_memory"),
        ("device_memory = -1", "device_memory"),
        ("[models.a]\npath = 'a'\nttl = 0", "models.a: ttl must be a number of seconds > 0"),
        ("[models.a]\npath = 'a'\nttl = nan", "models.a: ttl must be a number of seconds > 0"),
        (
            "[models.a]\npath = 'a'\non_demand = true\nweights = 'auto'",
            "on_demand is not implemented with weights='auto'",
        ),
    ):
        (tmp_path / "bad.toml").write_text(text)
        with pytest.raises(ValueError, match=re.escape(message)):
            read_config(tmp_path / "bad.toml")


def test_a_model_larger_than_the_budget_is_refused_at_the_start(folders, monkeypatch):
    monkeypatch.setattr(host_budget(), "capacity", None)
    given = config(folders, device_memory=1000)
    models = models_of(given)
    with pytest.raises(ValueError, match=r"a: its weights take .* kB of each device, and device_memory is 1.0 kB"):
        load_models(given, models)
    models.close(drain=False)


def test_the_same_files_are_loaded_once(folders, tmp_path):
    (tmp_path / "link").symlink_to(folders["a"])
    options = {"a": folders["a"], "same": tmp_path / "link", "b": folders["b"]}
    given = config(options)
    models = models_of(given)
    load_models(given, models)
    assert [model.name for model in models.distinct] == ["a", "b"]
    assert models.find("same").model is models.find("a").model
    models.close(drain=False)
    other = ServerConfig(models={**given.models, "same": ModelConfig(path=tmp_path / "link", options={"context": 64})})
    models = models_of(other)
    with pytest.raises(ValueError, match="same: has the files of 'a', which would be loaded twice"):
        load_models(other, models)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"weights": "host"}, {"mesh": MeshFile(memory={"weights": "host"})}])
def test_streamed_weights_are_loaded_again_after_unload(folders, options):
    given = ServerConfig(models={"a": ModelConfig(path=folders["a"], options=PLAIN | options)})
    models = models_of(given)
    load_models(given, models)
    client = Client(make_app(models, Limits()))

    async def main():
        unloaded = await client.ask("POST", "/unload", query="model=a")
        return unloaded.status, (await client.post("/v1/completions", BODY | {"model": "a"})).status

    assert run(main()) == (200, 200)
    assert not models.find("a").model.llm.can_sleep
    models.close(drain=False)


def test_of_several_models_one_may_fail_at_the_start(folders, tmp_path, caplog):
    given = ServerConfig(
        models={"none": ModelConfig(path=tmp_path / "none"), "a": ModelConfig(path=folders["a"], options=PLAIN)}
    )
    models = models_of(given)
    load_models(given, models)
    client = Client(make_app(models, Limits()))

    async def main():
        ready = (await client.get("/ready")).status
        return ready, (await client.post("/v1/completions", BODY | {"model": "a"})).status

    assert run(main()) == (200, 200)
    assert "none is not served" in caplog.text
    assert models.find("none").model.on_demand  # a later request tries again
    models.close(drain=False)
    alone = ServerConfig(models={"none": ModelConfig(path=Path(tmp_path / "none"))})
    with pytest.raises(ValueError, match="no such directory"):
        load_models(alone, models_of(alone))


@pytest.mark.slow
def test_many_switches_lose_nothing(make, expected):
    """Clients come and go, models are put to sleep and unloaded meanwhile; every request is answered or refused."""
    texts, _ = expected
    server, stop = make(Limits(timeout=30)), threading.Event()

    async def client(seed):
        rng, statuses = random.Random(seed), []
        for _ in range(6):
            name, left = rng.choice(NAMES), asyncio.Event()
            if rng.random() < 0.2:
                asyncio.get_running_loop().call_later(rng.random() * 0.05, left.set)
                await server.client.post("/v1/completions", BODY | {"model": name}, left=left)
                continue
            status, text = await server.ask(name)
            assert status in (200, 503), text
            assert status == 503 or text == texts[name]
            statuses.append(status)
        return statuses

    async def disturb():
        rng = random.Random(99)
        while not stop.is_set():
            path = rng.choice(["/unload", "/wake_up"])
            await server.admin(f"{path}?model={rng.choice(NAMES)}")
            await asyncio.sleep(0.05)

    async def main():
        disturbing = asyncio.ensure_future(disturb())
        statuses = await asyncio.gather(*(client(seed) for seed in range(8)))
        stop.set()
        await disturbing
        return [status for each in statuses for status in each]

    statuses = run(main())
    assert statuses.count(200) > len(statuses) / 2

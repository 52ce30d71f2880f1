"""Several models behind one server, and models that are still being loaded."""

import asyncio
import sys
import threading

import pytest

from jaxinfer import AsyncLLM
from jaxinfer.models.files.conversion import convert
from tests.generation.api.test_embedding import GOLDEN
from tests.generation.conftest import PLAIN
from tests.generation.few_programs import few_programs

pytest.importorskip("starlette")

from jaxinfer import http
from jaxinfer.http.limits import Limits
from jaxinfer.http.served_model import ServedModel
from jaxinfer.http.served_models import ServedModels
from jaxinfer.http.server import make_app
from tests.http.asgi import Client

BODY = {"prompt": "ab", "temperature": 0, "max_tokens": 4, "ignore_eos": True}


def run(main):
    return asyncio.run(asyncio.wait_for(main, 120))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "encoder"
    convert(GOLDEN, folder)
    llm = AsyncLLM(folder, max_batch=2)
    yield llm
    llm.close()


@pytest.fixture
def several(async_llm, encoder):
    return Client(http.app({"tiny": async_llm, "org/encoder": encoder}))


def test_a_request_chooses_its_model(several, async_llm, encoder):
    async def main():
        models = (await (await several.get("/v1/models")).json())["data"]
        one = await (await several.get("/v1/models/org/encoder")).json()
        text = await (await several.post("/v1/completions", BODY | {"model": "tiny"})).json()
        vector = await (await several.post("/v1/embeddings", {"input": [[5, 6]], "model": "org/encoder"})).json()
        return models, one, text, vector, await encoder.embed([[5, 6]])

    models, one, text, vector, expected = run(main())
    assert [model["id"] for model in models] == ["tiny", "org/encoder"]
    assert one == models[1]
    assert one["max_model_len"] == encoder.engine.config.context
    assert text["model"] == "tiny"
    assert text["usage"]["completion_tokens"] == 4
    assert vector["data"][0]["embedding"] == pytest.approx(expected[0].tolist())


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize"])
def test_of_several_models_one_must_be_named(several, path):
    body = {"prompt": "a"} if path != "/v1/embeddings" else {"input": "a"}
    body = {"messages": [{"role": "user", "content": "a"}]} if "chat" in path else body

    async def main():
        answer = await several.post(path, body | {"model": None})
        return answer.status, (await answer.json())["error"]

    status, error = run(main())
    assert (status, error["param"]) == (400, "model")
    missing = "model is missing; models: tiny, org/encoder."
    assert error["message"] == (missing if path == "/tokenize" else "the body: Object missing required field `model`.")


def test_metrics_have_the_model_as_a_label(several, async_llm, encoder):
    async def main():
        await (await several.post("/v1/completions", BODY | {"model": "tiny"})).body()
        await (await several.post("/v1/completions", BODY | {"model": None})).body()
        return (await (await several.get("/metrics")).body()).decode()

    lines = run(main()).splitlines()
    assert len([line for line in lines if line == "# TYPE jaxinfer_requests_running gauge"]) == 1
    assert 'jaxinfer_requests_running{model="tiny"} 0.0' in lines
    assert 'vllm:num_requests_running{model_name="org/encoder"} 0.0' in lines
    assert 'jaxinfer_request_seconds_count{model="tiny"} 1.0' in lines
    assert 'jaxinfer_request_seconds_count{model="org/encoder"} 0.0' in lines
    assert 'jaxinfer_http_responses_total{endpoint="/v1/completions",model="tiny",status="200"} 1.0' in lines
    assert 'jaxinfer_http_responses_total{endpoint="/v1/completions",model="",status="400"} 1.0' in lines


def test_names_must_be_distinct_and_printable(async_llm):
    for name in ("", "a\nb"):
        with pytest.raises(ValueError, match="the name of a model must be printable characters"):
            http.app({name: async_llm})
    with pytest.raises(ValueError, match="app takes a name with one AsyncLLM"):
        http.app({"a": async_llm}, name="b")
    with pytest.raises(ValueError, match="app takes a name with one AsyncLLM"):
        http.app({})


class Loading:
    """A server of two models, of which the second one is loaded when the test says so."""

    def __init__(self, llm):
        self.go = threading.Event()
        self.models = [ServedModel("first", lambda asleep: llm), ServedModel("second", self._load)]
        self.llm, self.app = llm, make_app(ServedModels(self.models), Limits())
        self.models[0].load()

    def _load(self, asleep):
        assert self.go.wait(60)
        return self.llm


def test_requests_are_refused_until_their_model_is_loaded(async_llm):
    server = Loading(async_llm)
    client = Client(server.app)

    async def statuses():
        asked = [await client.get(path) for path in ("/health", "/ready", "/v1/models", "/metrics")]
        asked += [await client.post("/v1/completions", BODY | {"model": name}) for name in ("first", "second", "third")]
        return [answer.status for answer in asked], asked[-2]

    async def main():
        before, refused = await statuses()
        error = (await refused.json())["error"]
        server.go.set()
        await asyncio.to_thread(server.models[1].load)
        return before, refused.headers, error, (await statuses())[0]

    before, headers, error, after = run(main())
    assert before == [200, 503, 200, 200, 200, 503, 404]
    assert after == [200, 200, 200, 200, 200, 200, 404]
    assert int(headers["retry-after"]) >= 1
    assert (error["type"], error["code"]) == ("server_error", "loading")
    assert error["message"] == "the model 'second' is being loaded; try again later."


def test_a_model_that_loads_while_the_server_ends_is_closed(model_dir):
    with few_programs():
        llm = AsyncLLM(model_dir, **PLAIN)
    model = ServedModel("late", lambda asleep: llm)
    model.close(drain=True)
    assert not model.is_running
    model.load()
    assert not llm.is_running


OPENED: list[str] = []
"""Files and folders that this process opened while the list was watched."""

WATCHED = []


def _watch(event, arguments):
    if WATCHED and event in ("open", "os.listdir", "os.scandir", "os.chdir", "glob.glob"):
        OPENED.append(str(arguments[0]))


@pytest.mark.parametrize(
    "name",
    [
        "{model}",
        "../{name}",
        "./{name}",
        "tiny/../../{name}",
        "/etc/passwd",
        "../../../../etc/passwd",
        "file://{model}",
        "hf://org/name",
        "org/name",
        "tiny\x00",
        "tiny/",
        "TINY",
        "%2e%2e/{name}",
        "\ud800" * 3,
        "x" * 100_000,
    ],
)
def test_the_name_of_a_model_is_no_path(client, model_dir, name):
    name = name.format(model=model_dir, name=model_dir.name)
    if not WATCHED:
        sys.addaudithook(_watch)  # it stays until the process ends
    OPENED.clear()
    WATCHED.append(True)

    async def main():
        answers = [await client.post("/v1/completions", BODY | {"model": name})]
        answers.append(await client.get(f"/v1/models/{name}".encode("utf-8", "replace").decode()))
        return [answer.status for answer in answers], await answers[0].json()

    try:
        statuses, body = run(main())
    finally:
        WATCHED.clear()
    assert statuses[1] == 404
    assert statuses[0] == (400 if "\ud800" in name else 404)
    assert len(body["error"]["message"]) < 300
    marks = (model_dir.name, "passwd", "org/name")
    assert not [file for file in OPENED if any(mark in file for mark in marks)]

"""Ids of requests, the access log, and pages of other origins."""

import asyncio
import io
import json
import time

import pytest

pytest.importorskip("starlette")

from jaxinfer import http
from tests.http.asgi import Client

SHORT = {"prompt": "ab", "max_tokens": 4, "ignore_eos": True, "temperature": 0}


def run(main):
    return asyncio.run(asyncio.wait_for(main, 120))


@pytest.fixture
def log():
    return io.StringIO()


@pytest.fixture
def logged(async_llm, log):
    return Client(http.app(async_llm, name="tiny", access_log=log))


def lines(log):
    return [json.loads(line) for line in log.getvalue().splitlines()]


@pytest.mark.parametrize("stream", [False, True])
def test_a_line_for_each_request(logged, log, stream):
    async def main():
        answer = await logged.post("/v1/completions", SHORT | {"stream": stream}, headers={"X-Request-Id": "mine"})
        await answer.body()
        await answer.task
        return answer.headers["x-request-id"]

    assert run(main()) == "mine"
    (line,) = lines(log)
    assert line.pop("time").endswith("+00:00")
    assert 0 < line.pop("seconds") < 100
    assert line == {
        "request_id": "mine",
        "client": "127.0.0.1",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "complete": True,
        "model": "tiny",
        "prompt_tokens": 2,
        "completion_tokens": 4,
    }


def test_what_fails_is_logged_without_what_is_not_known(logged, log, async_llm, monkeypatch):
    step = async_llm.engine.step

    def slow():
        time.sleep(0.3)
        return step()

    monkeypatch.setattr(async_llm.engine, "step", slow)

    async def main():
        left = asyncio.Event()
        await (await logged.post("/v1/completions", {"prompt": []})).task
        await (await logged.get("/nothing")).task
        asking = asyncio.ensure_future(logged.post("/v1/completions", SHORT | {"max_tokens": 100}, left=left))
        while not async_llm.num_requests:
            await asyncio.sleep(1e-3)
        left.set()
        with pytest.raises(OSError, match="has left"):
            await (await asking).task

    run(main())
    assert [(line["status"], line.get("model"), line["complete"]) for line in lines(log)] == [
        (400, None, True),
        (404, None, True),
        (499, "tiny", False),
    ]
    assert all("completion_tokens" not in line for line in lines(log))


def test_embeddings_are_logged_with_their_tokens(logged, log):
    async def main():
        await (await logged.post("/v1/embeddings", {"input": ["ab", "c"]})).task

    run(main())
    (line,) = lines(log)
    assert (line["model"], line["prompt_tokens"], "completion_tokens" in line) == ("tiny", 3, False)


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "tab\there", "\u00e9"])
def test_an_id_that_is_no_id_is_replaced(client, given):
    async def main():
        return (await client.get("/version", headers={"X-Request-Id": given})).headers["x-request-id"]

    made = run(main())
    assert len(made) == 32
    assert made.isalnum()


def test_origins(async_llm):
    limits = http.Limits(api_keys=("secret",), cors_origins=("https://a.example",))
    client = Client(http.app(async_llm, name="tiny", limits=limits))
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}

    async def main():
        preflight = await client.ask("OPTIONS", "/v1/completions", headers={"Origin": "https://a.example", **asked})
        other = await client.ask("OPTIONS", "/v1/completions", headers={"Origin": "https://b.example", **asked})
        key = {"Authorization": "Bearer secret", "Origin": "https://a.example"}
        answer = await client.post("/v1/completions", SHORT | {"stream": True, "max_tokens": 60}, headers=key)
        refused = await client.post("/v1/completions", SHORT, headers={"Origin": "https://a.example"})
        return preflight, other, answer, await answer.events(), refused

    preflight, other, answer, events, refused = run(main())
    allowed = "access-control-allow-origin"
    assert (preflight.status, preflight.headers[allowed]) == (200, "https://a.example")
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    assert (other.status, allowed in other.headers) == (400, False)
    assert (answer.status, answer.headers[allowed]) == (200, "https://a.example")
    assert len(events) > 2
    assert (refused.status, refused.headers[allowed]) == (401, "https://a.example")


def test_without_the_option_no_page_may_ask(client):
    async def main():
        return await client.get("/v1/models", headers={"Origin": "https://a.example"})

    assert not [name for name in run(main()).headers if name.startswith("access-control")]

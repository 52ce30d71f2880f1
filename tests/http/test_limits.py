"""What clients may do, and what the server does when they leave, ask too much, or when a request fails."""

import asyncio
import base64
import contextlib
import json
import threading

import numpy as np
import pytest

from jaxinfer import SamplingParams

pytest.importorskip("starlette")

from jaxinfer import http
from tests.http.asgi import Client

FOREVER = {"prompt": "ab", "max_tokens": 100, "ignore_eos": True, "temperature": 0}


def run(main):
    return asyncio.run(asyncio.wait_for(main, 120))


def client_of(llm, **limits):
    return Client(http.app(llm, name="tiny", limits=http.Limits(**limits)))


async def until(holds):
    while not holds():
        await asyncio.sleep(0.01)


@contextlib.contextmanager
def held(llm, count):
    """Requests that the engine has while the body runs, and that do not end: as many as it takes."""
    executor, hold = llm.engine.executor, threading.Event()
    collect = executor.collect
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "collect", lambda step: (hold.wait(60), collect(step))[1])
        futures = [llm.submit("z", SamplingParams(max_tokens=100, ignore_eos=True)) for _ in range(count)]
        try:
            yield
        finally:
            for future in futures:
                future.cancel()
            hold.set()


def test_keys(async_llm):
    client = client_of(async_llm, api_keys=("secret", "other"))

    async def main():
        asked = [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}]
        asked += [{"Authorization": "Bearer other"}, {"authorization": "bearer secret"}]
        answers = [await client.get("/v1/models", headers=headers) for headers in asked]
        error = (await answers[0].json())["error"]
        return [answer.status for answer in answers], error, (await client.get("/health")).status

    statuses, error, health = run(main())
    assert statuses == [401, 401, 401, 200, 200]
    assert error["code"] == "invalid_api_key"
    assert health == 200


def test_bodies_and_prompts_have_limits(async_llm):
    client = client_of(async_llm, max_body_bytes=100, max_prompts=2)

    async def main():
        large = await client.post("/v1/completions", {"prompt": "a" * 100})
        many = await client.post("/v1/completions", {"prompt": ["a"] * 3})
        return large.status, (await large.json())["error"]["message"], many.status

    assert run(main()) == (413, "the body has more than 100 bytes.", 400)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_gives_its_request_up(client, async_llm, stream):
    async def main():
        left = asyncio.Event()
        asking = asyncio.ensure_future(client.post("/v1/completions", FOREVER | {"n": 2, "stream": stream}, left=left))
        await until(lambda: async_llm.num_requests)
        left.set()
        await until(lambda: not async_llm.num_requests)
        with contextlib.suppress(OSError):
            await (await asking).task

    run(main())
    assert not async_llm.engine.scheduler.sequences


def test_a_request_has_a_time_limit(async_llm):
    client = client_of(async_llm, timeout=1e-3)

    async def main():
        answer = await client.post("/v1/completions", FOREVER)
        return answer.status, (await answer.json())["error"]["code"]

    assert run(main()) == (408, "timeout")


def test_too_many_requests_are_refused_with_when_to_try_again(client, async_llm, monkeypatch):
    loop = async_llm._loop
    monkeypatch.setattr(loop._line, "_max_tickets", 1)
    monkeypatch.setattr(loop._line, "_max_line", 0)

    async def main():
        with held(async_llm, 1):
            answer = await client.post("/v1/completions", FOREVER)
            return answer.status, answer.headers, (await answer.json())["error"]

    status, headers, error = run(main())
    assert (status, error["type"], error["code"]) == (429, "rate_limit_error", "overloaded")
    assert int(headers["retry-after"]) >= 1


@pytest.mark.parametrize("prompt", ["ab", ["ab", "c"]], ids=["one", "two"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_step_that_fails_is_an_error_of_its_requests(client, async_llm, monkeypatch, stream, prompt):
    collect = async_llm.engine.executor.collect
    steps = iter(range(100))

    def fails(step):
        if next(steps) == 3:
            raise RuntimeError("injected")
        return collect(step)

    async def main():
        monkeypatch.setattr(async_llm.engine.executor, "collect", fails)
        answer = await client.post("/v1/completions", FOREVER | {"stream": stream, "prompt": prompt})
        if not stream:
            return answer.status, (await answer.json())["error"]
        *_, error, done = await answer.events()
        assert done == "[DONE]"
        return answer.status, json.loads(error)["error"]

    status, error = run(main())
    assert status == (200 if stream else 500)
    assert "injected" in error["message"]


def test_health_and_models(client):
    async def main():
        statuses = [(await client.get(path)).status for path in ("/health", "/ready", "/version")]
        models = await (await client.get("/v1/models")).json()
        missing = (await client.get("/v1/models/none")).status
        return statuses, models["data"], missing

    statuses, (model,), missing = run(main())
    assert (statuses, missing) == ([200, 200, 200], 404)
    assert (model["id"], model["object"], model["owned_by"]) == ("tiny", "model", "jaxinfer")


def test_metrics_count_requests_and_refusals(client):
    async def main():
        await (await client.post("/v1/completions", FOREVER | {"max_tokens": 4})).body()
        await (await client.post("/v1/completions", {"prompt": []})).body()
        return (await (await client.get("/metrics")).body()).decode()

    text = run(main())
    assert 'jaxinfer_http_responses_total{endpoint="/v1/completions",model="tiny",status="200"} 1.0' in text
    assert 'jaxinfer_http_responses_total{endpoint="/v1/completions",model="tiny",status="400"} 1.0' in text
    assert 'jaxinfer_request_seconds_count{model="tiny"} 1.0' in text


def test_tokens_there_and_back(client, async_llm):
    async def main():
        asked = {"prompt": "abc", "return_token_strs": True}
        tokens = await (await client.post("/tokenize", asked)).json()
        chat = await (await client.post("/tokenize", {"messages": [{"role": "user", "content": "a"}]})).json()
        text = await (await client.post("/detokenize", {"tokens": tokens["tokens"]})).json()
        wrong = [await client.post("/detokenize", {"tokens": [10**6]}), await client.post("/tokenize", {})]
        return tokens, chat, text, [answer.status for answer in wrong]

    tokens, chat, text, wrong = run(main())
    assert tokens["tokens"] == async_llm.tokenizer.encode("abc")
    assert (tokens["count"], tokens["token_strs"], text) == (3, ["a", "b", "c"], {"prompt": "abc"})
    assert chat["tokens"] == async_llm.tokenizer.encode("user:a;assistant:")
    assert wrong == [400, 400]


def test_embeddings(client, async_llm):
    async def main():
        numbers = await (await client.post("/v1/embeddings", {"input": ["ab", "c"]})).json()
        packed = await (await client.post("/v1/embeddings", {"input": "ab", "encoding_format": "base64"})).json()
        short = await (await client.post("/v1/embeddings", {"input": "ab", "dimensions": 4})).json()
        wrong = await client.post("/v1/embeddings", {"input": "ab", "dimensions": 10**6})
        return numbers, packed, short, wrong.status, await async_llm.embed(["ab", "c"])

    numbers, packed, short, wrong, expected = run(main())
    np.testing.assert_allclose([each["embedding"] for each in numbers["data"]], expected, rtol=1e-5)
    assert numbers["usage"] == {"prompt_tokens": 3, "total_tokens": 3}
    raw = np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), "<f4")
    np.testing.assert_allclose(raw, expected[0], rtol=1e-5)
    cut = expected[0, :4] / np.linalg.norm(expected[0, :4])
    np.testing.assert_allclose(short["data"][0]["embedding"], cut, rtol=1e-5)
    assert wrong == 400


def test_the_end_of_the_application_closes_the_model(model_dir, async_llm, monkeypatch):
    closed = []
    monkeypatch.setattr(type(async_llm), "close", lambda self, **options: closed.append(options))
    app = http.app(async_llm)

    async def main():
        async with app.router.lifespan_context(app):
            assert (await Client(app).get("/ready")).status == 200
        return (await Client(app).get("/ready")).status

    assert run(main()) == 503
    assert closed == [{"drain": True}]

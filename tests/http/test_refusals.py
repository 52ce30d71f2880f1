"""Errors name the field that is wrong and stay short; what only some clients send is taken as OpenAI takes it."""

import asyncio
import json

import pytest

pytest.importorskip("starlette")

from starlette.requests import ClientDisconnect

from jaxinfer import http
from tests.http.asgi import Client

GREEDY = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
USER = [{"role": "user", "content": "hi"}]


def run(main):
    return asyncio.run(asyncio.wait_for(main, 120))


def ask(client, path, body):
    async def main():
        answer = await client.post(path, body)
        return answer.status, await answer.json()

    return run(main())


@pytest.mark.parametrize(
    ("path", "body", "param", "code", "message"),
    [
        ("completions", [], None, None, "the body: Expected `object`, got `array`"),
        (
            "completions",
            {"prompt": "a", "stream_options": {"x": 1}},
            "stream_options.x",
            None,
            "stream_options.x is not",
        ),
        ("completions", {"": 1}, "''", None, "'' is not a field"),
        ("completions", {"prompt": ["a", {}]}, "prompt[1]", None, "prompt[1]: Expected"),
        ("completions", {"prompt": ""}, "prompt", None, "The prompt is empty"),
        ("completions", {"prompt": "a" * 200}, "prompt", "context_length_exceeded", "leaves no room"),
        (
            "completions",
            {"prompt": "a", "structured_outputs": {"regex": "("}},
            "structured_outputs",
            None,
            "regex does",
        ),
        ("chat/completions", {"messages": [{"role": 1}]}, "messages", None, "messages[0] must have a role"),
        ("chat/completions", {"messages": USER * 100}, "messages", "context_length_exceeded", "leaves no room"),
        ("chat/completions", {"messages": USER, "chat_template": "no"}, "chat_template", None, "is no template of"),
        ("chat/completions", {"messages": USER, "chat_template": "{{ 1 }}"}, "chat_template", None, "which is code"),
        ("embeddings", {"input": [""]}, "input", None, "The prompt is empty"),
    ],
)
def test_errors_name_the_field(client, path, body, param, code, message):
    status, content = ask(client, f"/v1/{path}", body)
    error = content["error"]
    assert (status, error["param"], error["code"]) == (400, param, code)
    assert message in error["message"]


@pytest.mark.parametrize("body", [{"prompt": "a", "model": "b" * 10**6}, {"prompt": "a", "b" * 10**6: 1}])
def test_errors_do_not_send_megabytes_back(client, body):
    status, content = ask(client, "/v1/completions", body)
    assert status in (400, 404)
    assert len(json.dumps(content)) < 2500


@pytest.mark.parametrize("stream", [False, True])
def test_options_that_leave_no_token_are_the_clients_fault(client, stream):
    body = {"prompt": "a", "structured_outputs": {"regex": "b+"}, "allowed_token_ids": [0], "stream": stream, **GREEDY}
    status, content = ask(client, "/v1/completions", body)
    assert (status, content["error"]["code"]) == (400, "unsatisfiable")


def test_contents_in_parts_are_lines_of_text(client):
    def tokens(content):
        _, answer = ask(client, "/tokenize", {"messages": [{"role": "user", "content": content}]})
        return answer["tokens"]

    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert tokens(parts) == tokens("a\nb")
    whole, joined = (
        ask(client, "/v1/chat/completions", {"messages": [{"role": "user", "content": content}], **GREEDY})[1]
        for content in (parts, "a\nb")
    )
    assert whole["choices"] == joined["choices"]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url", "image_url": {"url": "data:,"}}, "is of type 'image_url'; models here take text alone"),
        ({"type": "text"}, 'must be {"type": "text", "text": ...}'),
        ("a", 'must be {"type": "text", "text": ...}'),
    ],
)
def test_parts_that_are_no_text_are_refused(client, part, message):
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]
    status, content = ask(client, "/v1/chat/completions", {"messages": messages})
    assert (status, content["error"]["param"]) == (400, "messages[0].content[1]")
    assert message in content["error"]["message"]


def test_seeds_have_64_bits(client):
    def text(seed):
        status, answer = ask(client, "/v1/completions", {"prompt": "ab", "seed": seed, "max_tokens": 8})
        assert status == 200
        return answer["choices"][0]["text"]

    assert text(-(2**63)) == text(-(2**63))
    assert text(5) == text(5 + 2**32)
    assert text(5) != text(6)


def test_a_client_that_leaves_while_it_sends_its_body_is_no_error(async_llm, caplog):
    app = http.app(async_llm, name="tiny")
    parts = iter([{"type": "http.request", "body": b'{"prompt"', "more_body": True}, {"type": "http.disconnect"}])

    async def main():
        sent = []

        async def receive():
            return next(parts)

        async def send(message):
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
        await app(scope, receive, send)
        metrics = (await (await Client(app).get("/metrics")).body()).decode()
        return sent, metrics

    sent, metrics = run(main())
    assert sent[0]["status"] == 499
    assert 'endpoint="/v1/completions",model="tiny",status="499"} 1.0' in metrics
    assert ClientDisconnect.__name__ not in caplog.text


def test_the_openapi_document_describes_bodies_and_errors(client):
    """As far as the endpoints take them: jsonschema judges a good body and a bad one as the server does."""
    jsonschema = pytest.importorskip("jsonschema")

    async def main():
        return await (await client.get("/openapi.json")).json()

    document = run(main())
    assert document["paths"]["/v1/models/{model}"]["get"]["parameters"][0]["name"] == "model"
    operation = document["paths"]["/v1/chat/completions"]["post"]
    schema = operation["requestBody"]["content"]["application/json"]["schema"] | {"components": document["components"]}
    jsonschema.validate({"model": "tiny", "messages": USER, **GREEDY}, schema)
    for wrong in ({"model": "tiny", "messages": "hi"}, {"model": "tiny", "messages": USER, "unknown": 1}, {}):
        assert ask(client, "/v1/chat/completions", wrong)[0] == 400
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
    refusal = operation["responses"]["default"]["content"]["application/json"]["schema"]
    jsonschema.validate(ask(client, "/v1/chat/completions", {})[1], refusal | {"components": document["components"]})

"""Bodies with anything in any field: each is answered or refused in the API's form, and none is the server's fault."""

import asyncio
import functools
import json
import random
from collections import Counter

import msgspec
import pytest

pytest.importorskip("starlette")

from jaxinfer import http
from jaxinfer.http.bodies import ChatBody, CompletionBody
from jaxinfer.http.embeddings import EmbeddingBody
from jaxinfer.http.messages.bodies import CountTokensBody, MessagesBody
from jaxinfer.http.responses.bodies import ResponseBody
from jaxinfer.http.tokens import DetokenizeBody, TokenizeBody
from tests.http.asgi import Client

SHORT = {"model": "tiny", "max_tokens": 2, "temperature": 0, "ignore_eos": True}
MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
TOOL = {"name": "f", "input_schema": {"type": "object"}}
CALL = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}}]}
RESULT = {
    "role": "user",
    "content": [{"type": "tool_result", "tool_use_id": "a", "content": [MESSAGES[1]["content"][0]]}],
}
ASKED = {"messages": [*MESSAGES, CALL, RESULT], "tools": [TOOL], "system": [{"type": "text", "text": "s"}]}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer"}}}
FLAT_SCHEMA = {"type": "json_schema", "name": "a", "schema": {"type": "integer"}}
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object"}}
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
    {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "a"},
]
SHORT_RESPONSE = {"model": "tiny", "max_output_tokens": 2, "temperature": 0}
VALID = [
    ("/v1/completions", CompletionBody, {"prompt": "ab", **SHORT}),
    ("/v1/completions", CompletionBody, {"prompt": [[1, 2], [3]], "echo": True, "logprobs": 1, "n": 2, **SHORT}),
    ("/v1/completions", CompletionBody, {"prompt": "a", "stream": True, "stream_options": {}, **SHORT}),
    ("/v1/completions", CompletionBody, {"prompt": "a", "logit_bias": {"5": 1}, "stop": ["a"], "seed": 1, **SHORT}),
    ("/v1/completions", CompletionBody, {"prompt": "a", "structured_outputs": {"regex": "a+"}, **SHORT}),
    ("/v1/chat/completions", ChatBody, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, **SHORT}),
    ("/v1/chat/completions", ChatBody, {"messages": MESSAGES, "response_format": SCHEMA, **SHORT}),
    ("/v1/chat/completions", ChatBody, {"messages": MESSAGES, "chat_template_kwargs": {"a": [1]}, "n": 2, **SHORT}),
    ("/v1/responses", ResponseBody, {"input": ITEMS, "tools": [FUNCTION], "store": False, **SHORT_RESPONSE}),
    ("/v1/responses", ResponseBody, {"input": "a", "text": {"format": FLAT_SCHEMA}, "stream": True, **SHORT_RESPONSE}),
    ("/v1/messages", MessagesBody, {"max_tokens": 2, "thinking": {"type": "disabled"}, "stream": True, **ASKED}),
    (
        "/v1/messages",
        MessagesBody,
        {"max_tokens": 2, "tool_choice": {"type": "auto"}, "stop_sequences": ["a"], **ASKED},
    ),
    ("/v1/messages/count_tokens", CountTokensBody, ASKED),
    ("/v1/embeddings", EmbeddingBody, {"input": ["ab", "c"], "dimensions": 4, "encoding_format": "base64"}),
    ("/tokenize", TokenizeBody, {"prompt": "ab", "return_token_strs": True}),
    ("/tokenize", TokenizeBody, {"messages": MESSAGES}),
    ("/detokenize", DetokenizeBody, {"tokens": [1, 2]}),
]


NO_FIELD = ("the body", "No token can be chosen")
"""How messages begin that are about no field."""


ENDS = b"response.completed", b"response.incomplete", b"response.failed"


def nested(depth, value=None):
    for level in range(depth):
        value = [value] if level % 2 else {"type": value}
    return value


VALUES = [
    *(None, True, False, 0, -1, 1, 3, 1.5, -0.0, 1e30, -1e30, 1e-320, 2**31, 2**32, 2**63, -(2**63), 2**64, 10**400),
    *(
        float("nan"),
        float("inf"),
        "",
        "a",
        "0",
        "-1",
        "é",
        "🙂",
        "\0",
        "\ud800",
        "a" * 5000,
        "%s%n",
        "{{ 1 }}",
        "../..",
    ),
    *([], [None], [[]], [[[]]], [0], [-1], [2**40], [1.5], [True], [""], ["a", 1], [{}], ["a"] * 300, [[1], ["a"]]),
    *(
        {},
        {"": None},
        {"a": 1},
        {"1": 1e300},
        {"-1": 1},
        {"5": "x"},
        {"1": None},
        {"type": "text"},
        {"type": "json_schema"},
    ),
    *({"role": "user"}, [{"role": "user"}], [{"role": 1, "content": {}}], [{"role": "user", "content": nested(50)}]),
    *({"json": {"$ref": "#"}}, {"json": {"type": "nothing"}}, {"regex": "("}, {"regex": "(a{1000}){1000}"}),
    *(
        {"grammar": "start: start"},
        {"choice": []},
        {"json": "{", "regex": "a"},
        {"json": {}, "whitespace_pattern": "("},
    ),
    *(nested(20), nested(200)),
]


def places(value, place=()):
    """The places of all values in a body."""
    yield place
    if isinstance(value, dict | list) and len(place) < 5:
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(part, (*place, key))


def replaced(body, place, value):
    """A body with another value at a place."""
    if not place:
        return value
    first, *rest = place
    copied = dict(body) if isinstance(body, dict) else list(body)
    copied[first] = replaced(copied[first], rest, value) if rest else value
    return copied


def damaged(dice, content):
    """JSON with wrong bytes, missing bytes, or a field twice."""
    at = dice.randrange(len(content))
    match dice.randrange(5):
        case 0:
            return content[:at]
        case 1:
            return content[:at] + dice.choice([b"\xff", b"\0", b"\xed\xa0\x80", b'"', b"{", b"\\u12"]) + content[at:]
        case 2:
            return b'{"model": "no", "n": 7, ' + content[1:]
        case 3:
            return content[:at] + bytes([dice.randrange(256)]) + content[at + 1 :]
    return dice.choice([b"", b"[" * 100_000, b'{"a":' * 100_000, b"null", b"1", b"\xef\xbb\xbf" + content, content * 2])


@functools.cache
def fitting(kind):
    """Each field of a body, with the values that have its type."""
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    return {name: [value for value in VALUES if fits(value, type)] for name, type in fields.items()}


def fits(value, type):
    try:
        msgspec.convert(value, type)
    except (msgspec.ValidationError, ValueError):
        return False
    return True


def fuzzed(dice):
    """A request: its path, and its body as bytes."""
    path, kind, body = dice.choice(VALID)
    chance = dice.random()
    for _ in range(dice.choice([1, 1, 2, 4])):
        if chance < 0.5:
            field, values = dice.choice([*fitting(kind).items()])
            body = body | {field: dice.choice(values or VALUES)}
        else:
            place = dice.choice([*places(body)])
            body = replaced(body, place, dice.choice(VALUES)) if isinstance(body, dict) else body
    content = json.dumps(body).encode()
    return path, damaged(dice, content) if chance > 0.8 else content


async def ask(client, path, content, counts):
    answer = await asyncio.wait_for(client.post(path, content), 60)
    text = await asyncio.wait_for(answer.body(), 60)
    counts[path, answer.status] += 1
    shown = (answer.status, path, content[:1000], text[:1000])
    assert answer.status in (200, 400, 404), shown
    if answer.status != 200:
        error = json.loads(text)["error"]
        if path.startswith("/v1/messages"):
            assert error.keys() == {"message", "type"}, shown
            assert error["type"] in ("invalid_request_error", "not_found_error"), shown
        else:
            assert error.keys() == {"message", "type", "param", "code"}, shown
            assert error["type"] == "invalid_request_error", shown
            assert error["param"] or error["message"].startswith(NO_FIELD), shown
        assert len(text) < 2500, shown
    elif text.startswith(b"event: response.created"):
        assert text.splitlines()[-3].removeprefix(b"event: ") in ENDS, shown
    elif text.startswith(b"event: "):
        assert text.endswith(b'event: message_stop\ndata: {"type":"message_stop"}\n\n'), shown
    elif text.startswith(b"data: "):
        assert text.endswith(b"data: [DONE]\n\n"), shown
    else:
        json.loads(text)


def fuzz(llm, seed, count):
    dice, counts = random.Random(seed), Counter()
    client = Client(http.app(llm, name="tiny", limits=http.Limits(timeout=50.0)))
    requests = [fuzzed(dice) for _ in range(count)]

    async def main():
        line = iter(requests)

        async def worker():
            for path, content in line:
                await ask(client, path, content, counts)

        async with asyncio.TaskGroup() as workers:
            for _ in range(8):
                workers.create_task(worker())
        assert (await client.post("/v1/completions", {"prompt": "ab", **SHORT})).status == 200

    asyncio.run(main())
    assert not llm.num_requests
    return counts


def test_fuzzed_bodies(async_llm):
    counts = fuzz(async_llm, 0, 300)
    assert {status for _, status in counts} == {200, 400, 404}


@pytest.mark.slow
def test_ten_thousand_fuzzed_bodies(async_llm):
    fuzz(async_llm, 1, 10_000)

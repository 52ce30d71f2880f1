"""What a user of the `openai` client does with a server: `openai_python.py URL MODEL`. Fails by an exception.

Its environment is that of `make conformance`.
"""

import base64
import json
import struct
import sys
from typing import Literal

import openai
import pydantic

URL, MODEL = sys.argv[1:]
SHORT = {"model": MODEL, "max_tokens": 8, "temperature": 0}
ON = {"extra_body": {"ignore_eos": True}}
USER = [{"role": "user", "content": "hi"}]
client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=120)


def models():
    assert [each.id for each in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "jaxinfer"


def completions():
    whole = client.completions.create(prompt="ab", **SHORT, **ON)
    assert (whole.choices[0].finish_reason, whole.usage.total_tokens) == ("length", 10)
    pieces = list(
        client.completions.create(prompt="ab", stream=True, stream_options={"include_usage": True}, **SHORT, **ON)
    )
    assert "".join(each.choices[0].text for each in pieces if each.choices) == whole.choices[0].text
    assert pieces[-1].usage.total_tokens == whole.usage.total_tokens
    several = client.completions.create(prompt=["ab", "c"], n=2, **SHORT, **ON)
    assert [each.index for each in several.choices] == [0, 1, 2, 3]
    assert several.choices[0].text == whole.choices[0].text
    tokens = client.completions.create(prompt=[97, 98], **SHORT)
    assert tokens.usage.prompt_tokens == 2


def completion_options():
    echoed = client.completions.create(prompt="ab", echo=True, logprobs=2, **SHORT, **ON).choices[0]
    assert echoed.text.startswith("ab")
    assert len(echoed.logprobs.tokens) == len(echoed.logprobs.token_logprobs) == len(echoed.logprobs.text_offset) == 10
    assert echoed.logprobs.token_logprobs[0] is None
    banned = client.completions.create(prompt="a", logit_bias={str(i): -100 for i in range(200)}, **SHORT, **ON)
    assert banned.choices[0].text
    options = {"seed": -5, "top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.5, "user": "u"}
    drawn = [
        client.completions.create(model=MODEL, prompt="a", max_tokens=8, **options, **ON).choices[0].text
        for _ in range(2)
    ]
    assert drawn[0] == drawn[1]
    stop = client.completions.create(prompt="ab", **SHORT, **ON).choices[0].text[2]
    stopped = client.completions.create(prompt="ab", stop=[stop], **SHORT, **ON).choices[0]
    assert stopped.finish_reason == "stop"
    assert stop not in stopped.text


def chats():
    whole = client.chat.completions.create(messages=USER, model=MODEL)
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == "stop"
    whole = client.chat.completions.create(messages=USER, logprobs=True, top_logprobs=3, **SHORT, **ON)
    assert len(whole.choices[0].logprobs.content) == 8
    assert len(whole.choices[0].logprobs.content[0].top_logprobs) == 3
    pieces = list(client.chat.completions.create(messages=USER, stream=True, **SHORT, **ON))
    text = "".join(each.choices[0].delta.content or "" for each in pieces)
    assert text == whole.choices[0].message.content
    assert pieces[-1].choices[0].finish_reason == "length"
    several = client.chat.completions.create(messages=USER, n=3, model=MODEL, max_completion_tokens=4)
    assert len(several.choices) == 3
    with client.chat.completions.stream(messages=USER, **SHORT, **ON) as stream:
        assert "".join(each.delta for each in stream if each.type == "content.delta") == text
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert client.chat.completions.create(messages=parts, **SHORT, **ON).choices[0].message.content == text


class Answer(pydantic.BaseModel):
    """A form of answers."""

    kind: Literal["yes", "no"]
    count: Literal[1, 2]


def forms():
    long = {"messages": USER, "model": MODEL, "temperature": 0, "max_tokens": 200}
    parsed = client.chat.completions.parse(response_format=Answer, **long)
    assert isinstance(parsed.choices[0].message.parsed, Answer)
    with client.chat.completions.stream(response_format=Answer, **long) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Answer)
    schema = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": {"enum": ["a", 1]}}}
    assert json.loads(client.chat.completions.create(response_format=schema, **long).choices[0].message.content) in (
        "a",
        1,
    )


def embeddings():
    numbers = client.embeddings.create(model=MODEL, input=["ab", "c"], encoding_format="float").data
    packed = client.embeddings.create(model=MODEL, input=["ab", "c"]).data  # as base64, which the client decodes
    assert [len(each.embedding) for each in numbers] == [32, 32]
    for number, one in zip(numbers[0].embedding, packed[0].embedding, strict=True):
        assert abs(number - one) < 1e-6
    raw = client.embeddings.create(model=MODEL, input="ab", dimensions=4, encoding_format="base64").data[0].embedding
    cut = struct.unpack("<4f", base64.b64decode(raw))
    assert abs(sum(each * each for each in cut) - 1) < 1e-5
    assert client.embeddings.create(model=MODEL, input=[[97, 98], [99]]).usage.prompt_tokens == 3


def refused(kind, status, param, call):
    caught = None
    try:
        call()
    except openai.APIStatusError as error:
        caught = error
    assert (type(caught), caught.status_code, caught.param) == (kind, status, param), caught
    assert caught.body.keys() == {"message", "type", "param", "code"}, caught.body


def errors():
    def ask(**options):
        return client.completions.create(**{"model": MODEL, "prompt": "a", **options})

    refused(openai.BadRequestError, 400, "temperature", lambda: ask(temperature=-1))
    refused(openai.BadRequestError, 400, "best_of", lambda: ask(best_of=2))
    refused(openai.BadRequestError, 400, "prompt", lambda: ask(prompt="a" * 2000))
    refused(openai.NotFoundError, 404, "model", lambda: ask(model="none"))
    refused(openai.NotFoundError, 404, "model", lambda: client.models.retrieve("none"))
    refused(openai.APIStatusError, 413, None, lambda: ask(prompt="a" * 200_000))
    refused(openai.BadRequestError, 400, "model", lambda: ask(model=None))
    refused(
        openai.BadRequestError,
        400,
        "tools[0].type",
        lambda: client.chat.completions.create(model=MODEL, messages=USER, tools=[{"type": "web_search"}]),
    )
    try:
        client.with_options(timeout=0.01).completions.create(model=MODEL, prompt="a", max_tokens=900, **ON)
    except openai.APITimeoutError:
        return
    raise AssertionError("a timeout expected")


def leaving():
    stream = client.completions.create(model=MODEL, prompt="a", max_tokens=1000, stream=True, **ON)
    next(iter(stream))
    stream.close()


for check in (models, completions, completion_options, chats, forms, embeddings, errors, leaving):
    check()
    print(check.__name__, flush=True)

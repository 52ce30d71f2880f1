"""Anthropic's Messages API: blocks, calls and their results, thinking, events in order, and errors in its form."""

import itertools
import json

import pytest

from tests.http.test_limits import held
from tests.http.test_tools import CALLS, THINK, run, saying

pytest.importorskip("starlette")

from jaxinfer import http
from jaxinfer.http.bodies import decode
from jaxinfer.http.errors import BadRequestError
from jaxinfer.http.messages.bodies import MessagesBody
from jaxinfer.http.messages.conversation import chat_of
from jaxinfer.http.served_model import ServedModel
from jaxinfer.http.served_models import ServedModels
from jaxinfer.http.server import make_app
from tests.http.asgi import Client
from tests.tiny import byte_tokenizer

USER = [{"role": "user", "content": "hi"}]
BASE = {"messages": USER, "max_tokens": 4, "temperature": 0}
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 5}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"name": "weather", "description": "Tells the weather.", "input_schema": CITY}
NOW = {"name": "now", "input_schema": {"type": "object"}, "type": "custom", "cache_control": {"type": "ephemeral"}}
TOOLS = {"tools": [WEATHER, NOW]}
NO_THINKING = {"logit_bias": {str(byte_tokenizer().encode("<").ids[0]): -100}}
HEADER = "x-anthropic-billing-header: cc_version=2.1.0.abc; cc_entrypoint=cli; cch={};"


@pytest.fixture(scope="module")
def client(agent_llm):
    return Client(http.app(agent_llm, name="tiny"))


@pytest.fixture(scope="module")
def ask(client):
    """Asks for a message, whole and as a stream; returns both."""

    async def asked(body):
        whole = await client.post("/v1/messages", body)
        if whole.status != 200:
            return await whole.json()
        stream = await client.post("/v1/messages", body | {"stream": True})
        return await whole.json(), await events_of(stream)

    return lambda body: run(asked(body))


async def events_of(answer):
    """The events of a stream."""
    events = []
    for block in (await answer.body()).decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def joined(events):
    """The message that the events of a stream make; their order is checked."""
    begin, *middle, delta, stop = events
    assert (begin["type"], delta["type"], stop) == ("message_start", "message_delta", {"type": "message_stop"})
    message, open_block, texts = begin["message"], None, None
    assert (message["content"], message["stop_reason"]) == ([], None)
    for event in middle:
        match event["type"]:
            case "content_block_start":
                assert open_block is None
                assert event["index"] == len(message["content"])
                open_block, texts = event["content_block"], []
                message["content"].append(open_block)
            case "content_block_delta":
                assert event["index"] == len(message["content"]) - 1
                kind, *rest = event["delta"].items()
                assert "id" not in event["delta"]
                texts.append((kind[1], rest[0][1]))
            case "content_block_stop":
                assert event["index"] == len(message["content"]) - 1
                finish(open_block, texts)
                open_block = None
            case other:
                raise AssertionError(other)
    assert open_block is None
    return message | delta["delta"] | {"usage": message["usage"] | delta["usage"]}


def finish(block, texts):
    """Put the deltas of a block together."""
    for kind, group in itertools.groupby(texts, key=lambda each: each[0]):
        text = "".join(text for _, text in group)
        match kind:
            case "text_delta":
                block["text"] += text
            case "thinking_delta":
                block["thinking"] += text
            case "signature_delta":
                block["signature"] += text
            case "input_json_delta":
                assert block["input"] == {}
                block["input"] = json.loads(text)
            case other:
                raise AssertionError(other)


def alike(message):
    """A message without what differs between two of them."""
    content = [{name: value for name, value in block.items() if name != "id"} for block in message["content"]]
    usage = dict(message["usage"])
    usage["input_tokens"] += usage.pop("cache_read_input_tokens")
    return message | {"id": None, "content": content, "usage": usage}


def said(text):
    return {"type": "text", "text": text, "citations": None}


def prompt_tokens(message):
    return message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"]


def test_thinking_text_and_calls(ask):
    whole, events = ask(saying(f"{THINK}I look.{CALLS}", **TOOLS))
    expected = [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        said("I look."),
        {"type": "tool_use", "name": "weather", "input": {"city": "Rome"}, "caller": {"type": "direct"}},
        {"type": "tool_use", "name": "now", "input": {}, "caller": {"type": "direct"}},
    ]
    streamed = joined(events)
    assert alike(whole)["content"] == expected
    assert alike(streamed) == alike(whole)
    assert whole["stop_reason"] == "tool_use"
    assert whole["id"].startswith("msg_")
    ids = [block["id"] for block in (*whole["content"], *streamed["content"]) if block["type"] == "tool_use"]
    assert len(set(ids)) == 4
    assert all(id.startswith("toolu_") for id in ids)
    usage = whole["usage"]
    assert 3 <= usage["output_tokens_details"]["thinking_tokens"] < usage["output_tokens"] / 2


def test_text_comes_in_pieces(ask):
    _, events = ask(saying("A text of some length."))
    deltas = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(deltas) == "A text of some length."
    assert len(deltas) > 3


def test_a_loop_of_calls(client, ask):
    """The second request has the calls and their results, and finds the first one's prompt in the cache."""
    tools = TOOLS | {"thinking": {"type": "adaptive"}, "system": "s" * 200}
    first, _ = ask(saying(f"Hm.</think>I look.{CALLS}", **tools))
    assert [block["type"] for block in first["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    calls = [block for block in first["content"] if block["type"] == "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": calls[0]["id"], "content": [{"type": "text", "text": "Sun."}]},
        {"type": "tool_result", "tool_use_id": calls[1]["id"], "content": "No clock.", "is_error": True},
        {"type": "text", "text": "Well?", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
    ]
    messages = [*USER, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": results}]
    second, events = ask(saying("Yes.</think>It shines.", **tools, messages=messages))
    assert [block.get("text") for block in second["content"]] == [None, "It shines."]
    assert second["stop_reason"] == joined(events)["stop_reason"] == "end_turn"
    assert second["usage"]["cache_read_input_tokens"] >= 200


def chat(**fields):
    return chat_of(decode(json.dumps({"model": "tiny", **BASE, **fields}).encode(), MessagesBody))


def test_the_conversation():
    answer = [
        {"type": "thinking", "thinking": "Hm.", "signature": "x"},
        {"type": "redacted_thinking", "data": "secret"},
        {"type": "text", "text": "I look.", "citations": None},
        {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}, "caller": {"type": "direct"}},
        {"type": "tool_use", "id": "b", "name": "g", "input": {}},
    ]
    results = [
        {"type": "text", "text": "One."},
        {"type": "tool_result", "tool_use_id": "b", "content": "2"},
        {"type": "tool_result", "tool_use_id": "a", "is_error": True, "content": [{"type": "text", "text": "1"}]},
        {"type": "tool_result", "tool_use_id": "c"},
        {"type": "text", "text": "Two."},
    ]
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "user", "content": [{"type": "text", "text": "there"}]},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": results},
    ]
    made = chat(messages=messages, system=[{"type": "text", "text": "s"}, {"type": "text", "text": "t"}])
    assert made.messages == [
        {"role": "system", "content": "s\nt"},
        {"role": "user", "content": "hi\nthere"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
                {"id": "b", "type": "function", "function": {"name": "g", "arguments": {}}},
            ],
        },
        {"role": "tool", "tool_call_id": "b", "content": "2"},
        {"role": "tool", "tool_call_id": "a", "content": "Error: 1"},
        {"role": "tool", "tool_call_id": "c", "content": ""},
        {"role": "user", "content": "One.\nTwo."},
    ]


def test_fields_become_options():
    made = chat(
        top_p=0.5, top_k=3, stop_sequences=["a"], output_config={"effort": "max"}, thinking={"type": "disabled"}
    )
    expected = {"max_tokens": 4, "temperature": 0, "top_p": 0.5, "top_k": 3, "stop": ["a"]}
    assert made.sampling == expected
    assert made.reasoning_effort == "high"
    assert made.template == {"chat_template_kwargs": {"enable_thinking": False}}


def test_a_text_is_continued(ask):
    whole, _ = ask(saying("c", messages=[*USER, {"role": "assistant", "content": "ab"}]))
    assert whole["content"] == [said("c")]
    assert prompt_tokens(whole) == prompt_tokens(ask(saying("c"))[0]) + len("ab")


@pytest.mark.parametrize(
    ("fields", "stop"),
    [
        ({"stop_sequences": ["x", "lo"]}, ("stop_sequence", "lo", "I ")),
        ({"max_tokens": 3}, ("max_tokens", None, "I l")),
        ({}, ("end_turn", None, "I look.")),
    ],
)
def test_stop_reasons(ask, fields, stop):
    whole, events = ask(saying("I look.", **fields))
    for message in (whole, joined(events)):
        assert (message["stop_reason"], message["stop_sequence"], message["content"][0]["text"]) == stop


def test_the_end_of_the_context(ask):
    size = 4096
    whole, _ = ask(BASE | {"messages": [{"role": "user", "content": "a" * (size - 30)}], "max_tokens": 500})
    assert whole["stop_reason"] == "model_context_window_exceeded"
    error = ask(BASE | {"messages": [{"role": "user", "content": "a" * size}]})["error"]
    assert error["message"].startswith("prompt is too long: ")


@pytest.mark.parametrize(
    ("thinking", "blocks"),
    [
        (None, [{"type": "thinking", "thinking": "Hm.", "signature": ""}, said("Yes.")]),
        ({"type": "disabled"}, [said("Yes.")]),
    ],
)
def test_thinking(ask, thinking, blocks):
    whole, events = ask(saying(f"{THINK}Yes.", thinking=thinking))
    assert whole["content"] == joined(events)["content"] == blocks


def test_thinking_that_the_prompt_opens(ask):
    thinking = {"type": "enabled", "budget_tokens": 1024, "display": "omitted"}
    whole, events = ask(saying("Hm.</think>Yes.", thinking=thinking))
    expected = [{"type": "thinking", "thinking": "", "signature": ""}, said("Yes.")]
    assert whole["content"] == joined(events)["content"] == expected
    assert whole["usage"]["output_tokens_details"]["thinking_tokens"] >= 3


@pytest.mark.parametrize("choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool"}])
def test_a_forced_call(ask, choice):
    named = choice | ({"name": "weather"} if choice["type"] == "tool" else {})
    options = {"max_tokens": 300, "seed": 3, "temperature": 1.5, **NO_THINKING}
    whole, events = ask({"messages": USER, "tools": [WEATHER], "tool_choice": named, **options})
    for message in (whole, joined(events)):
        (call,) = message["content"]
        assert call["name"] == "weather"
        assert "city" in call["input"]
        assert message["stop_reason"] == "tool_use"


def test_one_call_at_most(ask):
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    whole, events = ask(saying(CALLS, **TOOLS, tool_choice=choice))
    assert len(whole["content"]) == len(joined(events)["content"]) == 1


def test_no_call(ask):
    whole, _ = ask(saying(CALLS, **TOOLS, tool_choice={"type": "none"}))
    assert whole["content"] == [said(CALLS)]


def test_a_form_of_the_answer(ask):
    schema = {"type": "json_schema", "schema": {"enum": ["a", 1]}}
    whole, _ = ask(BASE | {"max_tokens": 20, "output_config": {"format": schema}, **NO_THINKING})
    assert json.loads(whole["content"][0]["text"]) in ("a", 1)


def test_counted_tokens_are_those_of_the_answer(client, ask):
    prompt = TOOLS | {"messages": USER, "system": "Be short.", "thinking": {"type": "enabled", "budget_tokens": 1024}}

    async def count():
        return await (await client.post("/v1/messages/count_tokens", prompt)).json()

    assert run(count()) == {"input_tokens": prompt_tokens(ask(prompt | {"max_tokens": 1})[0])}


def test_the_billing_header_is_left_out(ask):
    """Two requests whose headers differ have one prompt."""
    rest = "You help with code. " * 10

    def answer(cch):
        blocks = [{"type": "text", "text": HEADER.format(cch)}, {"type": "text", "text": rest}]
        return ask(BASE | {"system": blocks})[0]

    assert prompt_tokens(answer("1f2e3")) < len(rest) + 50
    assert answer("99999")["usage"]["cache_read_input_tokens"] >= len(rest)


def test_no_other_text_is_left_out():
    text = f"Write about {HEADER}\n{HEADER}"
    for system, kept in [
        (f"{HEADER}\nBe short.\n{text}", f"Be short.\n{text}"),
        ([{"type": "text", "text": HEADER}, {"type": "text", "text": text}], text),
        ([{"type": "text", "text": text}, {"type": "text", "text": HEADER}], text),
        (HEADER, None),
        (text, text),
    ]:
        first = chat(system=system).messages[0]
        assert first["content"] == (kept if kept else "hi")
    later = [*USER, {"role": "system", "content": f"{HEADER}\nBe short."}, {"role": "system", "content": HEADER}]
    assert chat(messages=later).messages == [*USER, {"role": "system", "content": "Be short."}]
    body = decode(json.dumps({"model": "tiny", **BASE, "system": HEADER}).encode(), MessagesBody)
    assert chat_of(body, keep_billing_header=True).messages[0]["content"] == HEADER


def test_the_header_may_be_kept(agent_llm):
    served = ServedModel("tiny", lambda asleep: agent_llm)
    served.load()

    async def count(**options):
        client = Client(make_app(ServedModels([served]), http.Limits(), **options))
        body = {"messages": USER, "system": HEADER}
        return (await (await client.post("/v1/messages/count_tokens", body)).json())["input_tokens"]

    async def main():
        return await count(), await count(keep_billing_header=True)

    without, kept = run(main())
    assert kept - without >= len(HEADER)


def image(**fields):
    return {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image", **fields}]}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"best_of": 2}, "best_of"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role"),
        ({"messages": [image(source={})]}, "messages[0].content[1] is of type 'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages[0].content[0] is of type"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0] is of type"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "txt": "a"}]}]}, "messages[0].content[0].txt"),
        (
            {"messages": [*USER, {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f"}]}]},
            "messages[1].content[0]: Object missing required field `input`",
        ),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image"}]}],
                    }
                ]
            },
            "messages[0].content[0].content[0] is of type 'image'",
        ),
        (
            {
                "messages": [
                    *USER,
                    {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {}}]},
                ]
            },
            "messages: the last one calls tools",
        ),
        ({"system": [{"type": "image"}]}, "system[0] is of type 'image'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]}, "web_search_20250305"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "must have a name"),
        ({"tools": [{"name": "a"}]}, "tools[0]: Object missing required field `input_schema`"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        (TOOLS | {"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        (TOOLS | {"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice names 'f'"),
        ({"thinking": {"type": "some"}}, "thinking.type"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"output_config": {"verbosity": "low"}}, "output_config.verbosity"),
        (
            TOOLS
            | {"tool_choice": {"type": "any"}, "output_config": {"format": {"type": "json_schema", "schema": {}}}},
            "tool_choice",
        ),
    ],
)
def test_wrong_fields_are_refused_by_name(ask, fields, named):
    answer = ask(BASE | fields)
    assert answer.keys() == {"type", "error", "request_id"}
    assert answer["type"] == "error"
    assert answer["error"]["type"] == "invalid_request_error"
    assert named in answer["error"]["message"], answer


def test_fields_that_change_nothing(ask):
    fields = {
        "metadata": {"user_id": "u"},
        "service_tier": "auto",
        "cache_control": {"type": "ephemeral"},
        "container": "c",
        "context_management": {"edits": []},
        "speed": "standard",
        "model": "tiny",
    }
    assert alike(ask(BASE | fields)[0]) == alike(ask(BASE)[0])


def test_errors_have_the_form_of_this_api(agent_llm):
    limits = http.Limits(api_keys=("secret",), max_body_bytes=1000)
    client = Client(http.app(agent_llm, name="tiny", limits=limits))
    key = {"x-api-key": "secret", "anthropic-version": "2023-06-01", "anthropic-beta": "a,b"}

    async def main():
        made = []
        for method, path, body, headers in [
            ("POST", "/v1/messages", BASE, {}),
            ("POST", "/v1/messages", BASE | {"model": "none"}, key),
            ("POST", "/v1/messages", BASE | {"system": "a" * 1000}, key),
            ("POST", "/v1/messages/count_tokens", {}, key),
            ("GET", "/v1/messages", b"", key),
        ]:
            answer = await client.ask(method, path, body, headers=headers | {"X-Request-Id": "r1"})
            error = await answer.json()
            assert error["type"] == "error"
            assert error["request_id"] == "r1"
            made.append((answer.status, error["error"]["type"], answer.headers["x-request-id"]))
        whole = await client.post("/v1/messages", BASE, headers=key)
        bearer = await client.post("/v1/messages", BASE, headers={"Authorization": "Bearer secret"})
        return made, whole.status, whole.headers["request-id"] == whole.headers["x-request-id"], bearer.status

    made, *good = run(main())
    assert made == [
        (401, "authentication_error", "r1"),
        (404, "not_found_error", "r1"),
        (413, "request_too_large", "r1"),
        (400, "invalid_request_error", "r1"),
        (405, "invalid_request_error", "r1"),
    ]
    assert good == [200, True, 200]


def test_overload_and_the_end(async_llm, monkeypatch):
    monkeypatch.setattr(async_llm._loop._line, "_max_tickets", 1)
    monkeypatch.setattr(async_llm._loop._line, "_max_line", 0)
    app = http.app(async_llm, name="tiny")

    async def asked():
        answer = await Client(app).post("/v1/messages", BASE)
        return answer.status, (await answer.json())["error"]["type"], int(answer.headers["retry-after"]) > 0

    async def main():
        with held(async_llm, 1):
            refused = await asked()
        app.state.drain.is_on = True
        return refused, await asked()

    assert run(main()) == ((429, "rate_limit_error", True), (503, "overloaded_error", True))


def test_an_error_in_the_midst_of_a_stream(async_llm, monkeypatch):
    collect = async_llm.engine.executor.collect
    steps = iter(range(100))

    def fails(step):
        if next(steps) == 3:
            raise RuntimeError("injected")
        return collect(step)

    async def main():
        monkeypatch.setattr(async_llm.engine.executor, "collect", fails)
        client = Client(http.app(async_llm, name="tiny"))
        body = BASE | {"max_tokens": 50, "logit_bias": {"256": -100}, "stream": True}
        return await events_of(await client.post("/v1/messages", body, headers={"X-Request-Id": "r1"}))

    first, *_, error = run(main())
    assert first["type"] == "message_start"
    assert (error["type"], error["error"]["type"], error["request_id"]) == ("error", "api_error", "r1")


def test_requests_are_counted(client):
    async def main():
        await (await client.post("/v1/messages", BASE)).body()
        return (await (await client.get("/metrics")).body()).decode()

    text = run(main())
    assert 'jaxinfer_http_responses_total{endpoint="/v1/messages",model="tiny",status="200"}' in text


def test_a_place_names_the_field():
    with pytest.raises(BadRequestError, match=r"tools\[0\].name: Expected"):
        chat(tools=[{"name": 1, "input_schema": {}}])

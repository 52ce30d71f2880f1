"""Tools and reasoning in chats: what a model writes in its own way is what clients get, whole and in chunks."""

import asyncio
import json

import pytest

from tests.tiny import byte_tokenizer

pytest.importorskip("starlette")

USER = [{"role": "user", "content": "hi"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "strict": True,
    },
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = {"tools": [WEATHER, NOW]}
THINK = "<think>Hm.</think>"
CALLS = (
    '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
)


def run(main):
    return asyncio.run(asyncio.wait_for(main, 120))


NOTHING = byte_tokenizer().encode("\0").ids[0]


def saying(text, **fields):
    """A body that has the model write this text: reasoning that is free would begin with a token that it avoids."""
    form = {"choice": [text], "reasoning_tags": ["\0", "\0"]}
    options = {"temperature": 0, "max_tokens": 400, "logit_bias": {str(NOTHING): -100}}
    return {"messages": USER, "structured_outputs": form, **options, **fields}


@pytest.fixture(scope="module")
def chat(agent_llm):
    """Asks for a chat, whole and as a stream; returns both."""
    from jaxinfer import http
    from tests.http.asgi import Client

    client = Client(http.app(agent_llm, name="tiny"))

    async def ask(body):
        whole = await client.post("/v1/chat/completions", body)
        if whole.status != 200:
            return await whole.json()
        stream = await client.post(
            "/v1/chat/completions", body | {"stream": True, "stream_options": {"include_usage": True}}
        )
        return (await whole.json()), [json.loads(event) for event in (await stream.events())[:-1]]

    return lambda body: run(ask(body))


def joined(events):
    """The message that the chunks of a stream make."""
    message, reason = {}, None
    for event in events:
        for choice in event["choices"]:
            reason = choice["finish_reason"] or reason
            for key, value in choice["delta"].items():
                if key == "tool_calls":
                    message.setdefault(key, []).extend(value)
                elif key == "role":
                    message[key] = value
                else:
                    message[key] = message.get(key, "") + value
    return message, reason


def functions(message):
    return [call["function"] for call in message.get("tool_calls", [])]


def test_calls_reasoning_and_content(chat):
    whole, events = chat(saying(f"{THINK}I look.{CALLS}", **TOOLS))
    message, streamed = whole["choices"][0]["message"], joined(events)[0]
    assert message["content"] == streamed["content"] == "I look."
    assert message["reasoning_content"] == message["reasoning"] == "Hm."
    assert streamed["reasoning_content"] == streamed["reasoning"] == "Hm."
    expected = [{"name": "weather", "arguments": '{"city": "Rome"}'}, {"name": "now", "arguments": "{}"}]
    assert functions(message) == functions(streamed) == expected
    assert whole["choices"][0]["finish_reason"] == joined(events)[1] == "tool_calls"
    assert [call["index"] for call in streamed["tool_calls"]] == [0, 1]
    assert all("index" not in call for call in message["tool_calls"])
    ids = [call["id"] for call in (*message["tool_calls"], *streamed["tool_calls"])]
    assert len(set(ids)) == 4
    reasoning = whole["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert 3 <= reasoning < whole["usage"]["completion_tokens"] / 2
    assert events[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"] == reasoning


def test_calls_alone_have_no_content(chat):
    whole, _ = chat(saying(CALLS, **TOOLS))
    assert whole["choices"][0]["message"]["content"] is None


def test_one_call_at_most(chat):
    whole, events = chat(saying(CALLS, **TOOLS, parallel_tool_calls=False))
    assert len(functions(whole["choices"][0]["message"])) == len(functions(joined(events)[0])) == 1


@pytest.mark.parametrize("fields", [{}, TOOLS | {"tool_choice": "none"}])
def test_nothing_is_a_call_without_tools(chat, fields):
    whole, events = chat(saying(f"{THINK}{CALLS}", **fields))
    assert whole["choices"][0]["message"]["content"] == joined(events)[0]["content"] == CALLS
    assert whole["choices"][0]["finish_reason"] == "stop"


def test_reasoning_may_be_left_out(chat):
    whole, events = chat(saying(f"{THINK}Yes.", include_reasoning=False))
    assert "reasoning" not in whole["choices"][0]["message"]
    assert "reasoning" not in joined(events)[0]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_call_satisfies_its_schema(chat, choice):
    parameters = {**WEATHER["function"]["parameters"], "properties": {"city": {"type": "string", "maxLength": 5}}}
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    free = byte_tokenizer().encode("<").ids[0]  # with which reasoning would begin
    options = {"max_tokens": 300, "seed": 3, "temperature": 1.5, "logit_bias": {str(free): -100}}
    whole, events = chat({"messages": USER, "tools": tools, "tool_choice": choice, **options})
    for message in (whole["choices"][0]["message"], joined(events)[0]):
        for call in functions(message):
            assert call["name"] == "weather"
            assert set(json.loads(call["arguments"])) == {"city"}
        assert functions(message)


@pytest.mark.parametrize("arguments", ['{"city": "Köln"}', {"city": "Köln"}])
@pytest.mark.parametrize(("as_text", "expected"), [(True, '{"city": "Köln"}'), (False, {"city": "Köln"})])
def test_templates_get_arguments_as_they_want_them(arguments, as_text, expected):
    from jaxinfer.http.tools import with_arguments

    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    (message,) = with_arguments([{"role": "assistant", "tool_calls": [call]}], as_text=as_text)
    assert message["tool_calls"] == [call | {"function": {"name": "weather", "arguments": expected}}]


JOINS = "{{ 'call:' + messages[1].tool_calls[0].function.arguments }}"
DUMPS = "{{ messages[1].tool_calls[0].function.arguments.city }}"


@pytest.mark.parametrize("template", [JOINS, DUMPS])
def test_calls_of_a_conversation_are_rendered_by_any_template(agent_llm, template):
    from jaxinfer import http
    from tests.http.asgi import Client

    client = Client(http.app(agent_llm, name="tiny"))
    call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    body = {"messages": [*USER, {"role": "assistant", "tool_calls": [call]}], "chat_template": template}
    answer = run(client.post("/v1/chat/completions", body | {"max_tokens": 1}))
    assert (run(answer.json()).get("error"), answer.status) == (None, 200)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        (TOOLS | {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", "none of tools"),
        ({"tools": [NOW, NOW]}, "tools", "two functions"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "letters, digits"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "Invalid enum"),
        ({"tools": [{"type": "web_search", "function": {"name": "a"}}]}, "tools[0].type", "Invalid enum"),
        (TOOLS | {"tool_choice": "some"}, "tool_choice", "Invalid|Expected"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "messages", "must be"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "["}}]}]},
            "messages",
            "must be the JSON text of an object",
        ),
        (
            TOOLS | {"tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
            "both give the answer's form",
        ),
    ],
)
def test_wrong_tools_are_refused(chat, fields, param, message):
    error = chat({"messages": USER, **fields})["error"]
    assert error["param"] == param
    assert any(each in error["message"] for each in message.split("|")), error

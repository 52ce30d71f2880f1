"""The Responses API: a stream tells of the same items that the response has at its end, and later requests go on."""

import itertools
import json

import msgspec
import pytest

from tests.http.test_tools import CALLS, NOW, THINK, WEATHER, run
from tests.http.test_tools import saying as chat_saying
from tests.tiny import byte_tokenizer

pytest.importorskip("starlette")

TOOLS = {"tools": [{"type": "function", **each["function"]} for each in (WEATHER, NOW)]}
ITEM_EVENTS = {"message": "output_text", "reasoning": "reasoning_text", "function_call": "function_call_arguments"}
EMPTY = {"message": {"content": []}, "reasoning": {"content": []}, "function_call": {"arguments": ""}}
"""The items at their beginning."""
NO_REASONING = {str(byte_tokenizer().encode("<").ids[0]): -100}


def saying(text, **fields):
    """A body that has the model write this text."""
    body = chat_saying(text, input="hi", max_output_tokens=400)
    return {key: value for key, value in body.items() if key not in ("messages", "max_tokens")} | fields


def parsed(content):
    """The events of a stream, whose names are also their types."""
    events = []
    for block in content.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


@pytest.fixture(scope="module")
def client(agent_llm):
    from jaxinfer import http
    from tests.http.asgi import Client

    return Client(http.app(agent_llm, name="tiny"))


@pytest.fixture(scope="module")
def ask(client):
    """Asks for a response; returns its status and its JSON."""

    def ask(body, method="POST", path="/v1/responses"):
        async def main():
            answer = await client.ask(method, path, body)
            return answer.status, await answer.json()

        return run(main())

    return ask


@pytest.fixture(scope="module")
def stream(client):
    """Asks for a response as a stream; returns its events."""

    def stream(body):
        async def main():
            answer = await client.post("/v1/responses", body | {"stream": True})
            assert (answer.status, answer.headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
            return parsed(await answer.body())

        return run(main())

    return stream


def texts(response):
    """The items of a response by their types, with their texts."""
    found = []
    for item in response["output"]:
        if item["type"] == "function_call":
            found.append((item["name"], item["arguments"]))
        else:
            found.append((item["type"], "".join(part["text"] for part in item["content"])))
    return found


EXPECTED = [("reasoning", "Hm."), ("message", "I look."), ("weather", '{"city": "Rome"}'), ("now", "{}")]


def without_ids(value):
    """A response without what differs between two requests."""
    if isinstance(value, list):
        return [without_ids(each) for each in value]
    if isinstance(value, dict):
        changing = ("id", "call_id", "created_at", "completed_at", "cached_tokens")
        return {key: without_ids(each) for key, each in value.items() if key not in changing}
    return value


def test_a_stream_ends_with_the_response_that_comes_whole(ask, stream):
    body = saying(f"{THINK}I look.{CALLS}", **TOOLS)
    status, whole = ask(body)
    events = stream(body)
    assert (status, events[-1]["type"]) == (200, "response.completed")
    assert texts(whole) == texts(events[-1]["response"]) == EXPECTED
    assert without_ids(whole) == without_ids(events[-1]["response"])
    assert whole["status"] == "completed"
    assert {item["status"] for item in whole["output"]} == {"completed"}
    usage = whole["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert 3 <= usage["output_tokens_details"]["reasoning_tokens"] < usage["output_tokens"] / 2


def test_events_are_numbered_and_tell_of_the_final_items(stream):
    events = stream(saying(f"{THINK}I look.{CALLS}", **TOOLS))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert [event["response"]["usage"] is None for event in events if "response" in event] == [True, True, False]
    final = events[-1]["response"]
    assert {event["response"]["id"] for event in events if "response" in event} == {final["id"]}
    assert all("output_index" in event for event in events[2:-1])
    for index, item in enumerate(final["output"]):
        own = [event for event in events[2:-1] if event["output_index"] == index]
        assert {event.get("item_id", item["id"]) for event in own} == {item["id"]}
        kind, is_call = ITEM_EVENTS[item["type"]], item["type"] == "function_call"
        part = ["content_part.added"], ["content_part.done"]
        before, after = ([], []) if is_call else part
        deltas = [event["delta"] for event in own if event["type"].endswith(".delta")]
        names = ["output_item.added", *before, *[f"{kind}.delta"] * len(deltas), f"{kind}.done", *after]
        assert [event["type"] for event in own] == [f"response.{name}" for name in (*names, "output_item.done")]
        assert own[0]["item"] == item | {"status": "in_progress"} | EMPTY[item["type"]]
        assert own[-1]["item"] == item
        text = item["arguments"] if is_call else item["content"][0]["text"]
        done = next(event for event in own if event["type"] == f"response.{kind}.done")
        assert "".join(deltas) == done["arguments" if is_call else "text"] == text


def test_one_call_at_most(ask):
    _, response = ask(saying(CALLS, **TOOLS, parallel_tool_calls=False))
    assert texts(response) == [("weather", '{"city": "Rome"}')]
    assert response["parallel_tool_calls"] is False


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "now"}])
def test_a_forced_call(ask, choice):
    tool = TOOLS["tools"][1] | {"parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
    body = {"input": "hi", "tools": [tool], "tool_choice": choice, "parallel_tool_calls": False}
    _, response = ask(body | {"temperature": 0, "logit_bias": NO_REASONING, "max_output_tokens": 100})
    assert texts(response) == [("now", "{}")]
    assert response["tool_choice"] == choice


def conversation(items, **options):
    from jaxinfer.http.responses.bodies import InputItem
    from jaxinfer.http.responses.conversation import to_messages

    return to_messages(msgspec.convert(items, list[InputItem]), **options)


def test_one_turn_of_the_model_is_one_message():
    items = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": '{"city": "Rome"}'},
        {"type": "function_call", "call_id": "2", "name": "now", "arguments": ""},
        {"type": "function_call_output", "call_id": "1", "output": "warm"},
        {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "noon"}]},
        {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "plain:So."},
        {"type": "function_call", "call_id": "3", "name": "now", "arguments": "{}"},
        {"type": "reasoning", "id": "rs_3", "summary": [], "encrypted_content": "gAAAA"},
        {"role": "assistant", "content": "Warm.", "phase": "final_answer"},
        {"role": "system", "content": "Be brief."},
    ]

    def call(id, name, arguments):
        return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}

    assert conversation(items, instructions="You help.") == [
        {"role": "system", "content": "You help.\n\nBe kind."},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Hm.",
            "tool_calls": [call("1", "weather", {"city": "Rome"}), call("2", "now", {})],
        },
        {"role": "tool", "tool_call_id": "1", "content": "warm"},
        {"role": "tool", "tool_call_id": "2", "content": "noon"},
        {"role": "assistant", "content": "", "reasoning_content": "So.", "tool_calls": [call("3", "now", {})]},
        {"role": "assistant", "content": "Warm.", "reasoning_content": ""},
        {"role": "system", "content": "Be brief."},
    ]


def test_a_tool_loop_without_and_with_the_store_has_the_same_prompt(ask):
    """The client sends all back, or only what is new; or names the items of the answer, as the AI SDK does."""
    _, first = ask(saying(f"{THINK}I look.{CALLS}", **TOOLS, instructions="Be kind."))
    calls = [item for item in first["output"] if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": call["call_id"], "output": "warm"} for call in calls]
    asked = {"role": "user", "content": "hi"}
    body = saying(f"{THINK}Warm.", **TOOLS)
    counts = []
    for fields in (
        {"input": [asked, *first["output"], *results], "instructions": "Be kind."},
        {"input": results, "previous_response_id": first["id"], "instructions": "Be kind."},
        {
            "input": [asked, *({"type": "item_reference", "id": item["id"]} for item in first["output"]), *results],
            "instructions": "Be kind.",
        },
        {"input": results, "previous_response_id": first["id"]},
    ):
        status, response = ask(body | fields)
        assert (status, texts(response)) == (200, [("reasoning", "Hm."), ("message", "Warm.")])
        counts.append(response["usage"]["input_tokens"])
    assert counts[0] == counts[1] == counts[2]
    assert counts[3] == counts[0] - len("system:Be kind.;")  # instructions are those of one request


def test_a_conversation_goes_on_from_response_to_response(ask):
    _, first = ask(saying("one"))
    _, second = ask(saying("two", previous_response_id=first["id"]))
    _, third = ask(saying("three", previous_response_id=second["id"]))
    counts = [each["usage"]["input_tokens"] for each in (first, second, third)]
    end = 1  # token
    assert counts[1] - counts[0] == len("one") + end + len(";user:hi;assistant:")
    assert counts[2] - counts[1] == len("two") + end + len(";user:hi;assistant:")
    assert third["previous_response_id"] == second["id"]


def test_stored_responses_can_be_had_and_deleted(ask, stream):
    final = stream(saying("one"))[-1]["response"]
    path = f"/v1/responses/{final['id']}"
    assert ask(b"", "GET", path) == (200, final)
    assert ask(b"", "DELETE", path) == (200, {"id": final["id"], "object": "response", "deleted": True})
    for method in ("GET", "DELETE"):
        status, answer = ask(b"", method, path)
        assert (status, answer["error"]["param"]) == (404, "response_id")
    status, answer = ask(saying("two", previous_response_id=final["id"]))
    assert (status, answer["error"]["code"]) == (404, "previous_response_not_found")
    status, answer = ask({"input": [{"type": "item_reference", "id": final["output"][0]["id"]}]})
    assert (status, answer["error"]["param"]) == (404, "input")


def test_nothing_is_stored_unasked(ask):
    _, response = ask(saying("one", store=False))
    assert response["store"] is False
    assert ask(b"", "GET", f"/v1/responses/{response['id']}")[0] == 404


def test_the_store_drops_the_least_recently_used():
    from jaxinfer.http.errors import BadRequestError
    from jaxinfer.http.responses.bodies import InputItem
    from jaxinfer.http.responses.store import ResponseStore

    def put(id, size=100):
        store.put(id, b"x" * size, [InputItem(id=f"msg_{id}", role="user", content="hi")], [f"msg_{id}"])

    store = ResponseStore(max_bytes=500)
    for id in "abc":
        put(id)
    assert 300 < store.num_bytes <= 500
    assert store.item("msg_a").content == "hi"  # it is used, so that "b" is the oldest
    put("d")
    assert store.response("a") == b"x" * 100
    for find in (lambda: store.response("b"), lambda: store.item("msg_b"), lambda: store.conversation("b")):
        with pytest.raises(BadRequestError, match="made room for newer ones"):
            find()
    put("large", 1000)
    assert store.num_bytes == 0


def test_the_text_has_the_form_that_its_schema_gives(ask, stream):
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    form = {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}
    body = {"input": "hi", "text": {"format": form, "verbosity": "low"}, "max_output_tokens": 100, "temperature": 0}
    body["logit_bias"] = NO_REASONING
    _, response = ask(body)
    for each in (response, stream(body)[-1]["response"]):
        assert json.loads(texts(each)[0][1]) in ({"n": 1}, {"n": 2})
    assert response["text"] == {"format": form | {"description": None}, "verbosity": "low"}


def test_a_response_that_is_cut_is_incomplete(ask, stream):
    body = saying("a long text", max_output_tokens=3)
    _, whole = ask(body)
    events = stream(body)
    assert events[-1]["type"] == "response.incomplete"
    for response in (whole, events[-1]["response"]):
        assert (response["status"], response["completed_at"]) == ("incomplete", None)
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert response["output"][0]["status"] == "incomplete"
        assert texts(response) == [("message", "a l")]


def test_reasoning_for_clients_that_send_back_nothing_else(ask):
    _, response = ask(saying(f"{THINK}Yes.", include=["reasoning.encrypted_content"], store=False))
    assert response["output"][0]["encrypted_content"] == "plain:Hm."


def test_a_failure_in_mid_stream_is_the_last_event(ask, stream, agent_llm, monkeypatch):
    collect, steps = agent_llm.engine.executor.collect, itertools.count()

    def fails(step):
        if next(steps) == 8:
            raise RuntimeError("a broken device")
        return collect(step)

    monkeypatch.setattr(agent_llm.engine.executor, "collect", fails)
    events = stream(saying("a long text" * 20))
    assert events[-1]["type"] == "response.failed"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    failed = events[-1]["response"]
    assert (failed["status"], failed["error"]["code"]) == ("failed", "server_error")
    assert failed["output"][0]["status"] == "incomplete"
    assert ask(b"", "GET", f"/v1/responses/{failed['id']}")[0] == 404


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"background": True}, "background", "is not implemented"),
        ({"top_logprobs": 2}, "top_logprobs", "is not implemented"),
        ({"include": ["message.output_text.logprobs"]}, "include", "message.output_text.logprobs is not implemented"),
        ({"truncation": "auto"}, "truncation", "'auto'"),
        ({"conversation": "conv_1"}, "conversation", "is not a field of this endpoint"),
        ({"max_tokens": 5}, "max_tokens", "is not a field of this endpoint"),
        ({"n": 2}, "n", "is not a field of this endpoint"),
        ({"max_output_tokens": 0}, "max_output_tokens", ">= 1"),
        ({"temperature": -1}, "temperature", "temperature must be"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "'web_search'"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools", "letters, digits"),
        ({"tools": [{"type": "function", "name": "a", "async": True}]}, "tools[0].async", "is not a field"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "none of tools"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format", "needs name and schema"),
        ({"input": [{"type": "web_search_call", "id": "1"}]}, "input[0].type", "'web_search_call'"),
        ({"input": [{"role": "user"}]}, "input[0].content", "is missing"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "a"}]}]},
            "input[0].content[0].type",
            "'input_image'",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "1", "name": "a", "arguments": "["}]},
            "input[0].arguments",
            "must be the JSON text of an object",
        ),
        ({"input": [{"type": "function_call_output", "output": "a"}]}, "input[0].call_id", "is missing"),
        ({"input": "a" * 5000}, "input", "context"),
        ({"input": []}, "input", "messages"),
    ],
)
def test_wrong_requests_are_refused(ask, fields, param, message):
    status, answer = ask({"input": "hi"} | fields)
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert message in answer["error"]["message"]

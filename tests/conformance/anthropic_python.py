"""What a user of the `anthropic` client does with a server: `anthropic_python.py URL MODEL TOKEN`.

Fails by an exception. TOKEN is one that no answer has. Its environment is that of `make conformance`.
"""

import sys

import anthropic

URL, MODEL, NOTHING = sys.argv[1:]
USER = {"role": "user", "content": "hi"}
BASE = {"model": MODEL, "max_tokens": 300, "messages": [USER]}
WEATHER = {
    "name": "weather",
    "description": "Tells the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOLS = [WEATHER, {"name": "now", "input_schema": {"type": "object", "properties": {}}}]
CALLS = (
    '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
)
client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0, timeout=120)


def saying(text):
    """Options with which the model writes a text."""
    form = {"choice": [text], "reasoning_tags": ["\0", "\0"]}
    return {"extra_body": {"structured_outputs": form, "logit_bias": {NOTHING: -100}}}


def both(**options):
    """The message, whole and put together from a stream's events, which must be the same."""
    whole = client.messages.create(**options)
    with client.messages.stream(**options) as stream:
        names = [event.type for event in stream]
        streamed = stream.get_final_message()
    assert (names[0], names[-1]) == ("message_start", "message_stop")
    assert [each.type for each in streamed.content] == [each.type for each in whole.content]
    for one, other in zip(whole.content, streamed.content, strict=True):
        assert one.to_dict() | {"id": ""} == other.to_dict() | {"id": ""}, (one, other)
    assert (streamed.stop_reason, streamed.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    return whole


def texts():
    whole = both(**BASE, system="Be short.")
    assert [each.text for each in whole.content] == ["Hi."]
    assert (whole.stop_reason, whole.role, whole.model) == ("end_turn", "assistant", MODEL)
    stopped = both(**BASE, stop_sequences=["."])
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", ".", "Hi")
    assert both(**BASE | {"max_tokens": 2}).stop_reason == "max_tokens"
    with client.messages.stream(**BASE) as stream:
        assert "".join(stream.text_stream) == "Hi."


def thinking():
    options = {"thinking": {"type": "enabled", "budget_tokens": 1024}}
    whole = both(**BASE | {"max_tokens": 2000}, **options, **saying("Hm.</think>Yes."))
    assert [each.type for each in whole.content] == ["thinking", "text"]
    assert (whole.content[0].thinking, whole.content[0].signature, whole.content[1].text) == ("Hm.", "", "Yes.")
    assert whole.usage.output_tokens_details.thinking_tokens
    again = [USER, {"role": "assistant", "content": whole.content}, USER]
    assert both(**BASE | {"messages": again}).content[0].text == "Hi."


def parallel_tools():
    whole = both(**BASE, tools=TOOLS, **saying(f"I look.{CALLS}"))
    text, *calls = whole.content
    assert (text.text, whole.stop_reason) == ("I look.", "tool_use")
    assert [(each.name, each.input) for each in calls] == [("weather", {"city": "Rome"}), ("now", {})]
    assert calls[0].id != calls[1].id
    results = [
        {"type": "tool_result", "tool_use_id": calls[0].id, "content": [{"type": "text", "text": "Sun."}]},
        {"type": "tool_result", "tool_use_id": calls[1].id, "content": "No clock.", "is_error": True},
    ]
    messages = [USER, {"role": "assistant", "content": whole.content}, {"role": "user", "content": results}]
    assert both(**BASE | {"messages": messages}, tools=TOOLS).content[0].text == "Hi."


def forced_tools():
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}):
        whole = both(**BASE, tools=[WEATHER], tool_choice=choice)
        assert [(each.type, each.name) for each in whole.content] == [("tool_use", "weather")]
        assert whole.content[0].input["city"] == "a"


def counts():
    prompt = {"model": MODEL, "messages": [USER], "system": "s" * 100, "tools": TOOLS}
    usage = client.messages.create(**prompt, max_tokens=5).usage
    assert client.messages.count_tokens(**prompt).input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    assert client.messages.create(**prompt, max_tokens=5).usage.cache_read_input_tokens >= 100


def refused(kind, named, call):
    caught = None
    try:
        call()
    except anthropic.APIStatusError as error:
        caught = error
    assert type(caught) is kind, caught
    assert caught.request_id == caught.body["request_id"]
    assert named in caught.body["error"]["message"], caught.body


def errors():
    def ask(**options):
        return lambda: client.messages.create(**BASE | options)

    image = {"type": "image", "source": {"type": "url", "url": "http://none"}}
    refused(anthropic.BadRequestError, "temperature", ask(extra_body={"temperature": -1}))
    refused(anthropic.BadRequestError, "'image'", ask(messages=[{"role": "user", "content": [image]}]))
    refused(anthropic.BadRequestError, "prompt is too long", ask(system="a" * 3000))
    refused(anthropic.BadRequestError, "web_search", ask(tools=[{"type": "web_search_20250305", "name": "web_search"}]))
    refused(anthropic.NotFoundError, "none", ask(model="none"))


def leaving():
    endless = {"logit_bias": {"256": -100}}
    with client.messages.create(**BASE | {"max_tokens": 900}, stream=True, extra_body=endless) as stream:
        next(iter(stream))


for check in (texts, thinking, parallel_tools, forced_tools, counts, errors, leaving):
    check()
    print(check.__name__, flush=True)

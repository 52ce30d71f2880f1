"""An agent's loop of ten turns by the `anthropic` client: `anthropic_agent.py URL MODEL`. The model has a script."""

import sys

import anthropic

URL, MODEL = sys.argv[1:]
client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0, timeout=120)
TOOLS = [
    {
        "name": name,
        "description": f"Can {name} a file.",
        "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    }
    for name in ("read", "write")
]
ASK = {"model": MODEL, "max_tokens": 200, "tools": TOOLS}


def whole(messages):
    return client.messages.create(messages=messages, **ASK)


def streamed(messages):
    with client.messages.stream(messages=messages, **ASK) as stream:
        return stream.get_final_message()


def run(ask):
    """Call the tools until the model does not; return the calls, and the model's last words."""
    messages, called = [{"role": "user", "content": "Go on."}], []
    while True:
        message = ask(messages)
        calls = [block for block in message.content if block.type == "tool_use"]
        assert message.stop_reason == ("tool_use" if calls else "end_turn")
        if not calls:
            return called, "".join(block.text for block in message.content if block.type == "text")
        called += [(call.name, call.input["path"]) for call in calls]
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "ok"} for call in calls]
        messages += [{"role": "assistant", "content": message.content}, {"role": "user", "content": results}]


for ask in (whole, streamed):
    called, last = run(ask)
    assert called == [(("read", "write")[turn % 2], str(turn)) for turn in range(10)] + [("read", "a"), ("write", "b")]
    assert last == "Done."
    print(ask.__name__, flush=True)

"""An agent's loop of ten turns by the `openai` client: `openai_agent.py URL MODEL`. The model has a script."""

import json
import sys

import openai

URL, MODEL = sys.argv[1:]
client = openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=120)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Can {name} a file.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        },
    }
    for name in ("read", "write")
]


def whole(messages):
    return client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS).choices[0].message


def streamed(messages):
    with client.chat.completions.stream(model=MODEL, messages=messages, tools=TOOLS) as stream:
        return stream.get_final_completion().choices[0].message


def run(ask):
    """Call the tools until the model does not; return the calls, and the model's last words."""
    messages, called = [{"role": "user", "content": "Go on."}], []
    while True:
        message = ask(messages)
        if not message.tool_calls:
            return called, message.content
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            called.append((call.function.name, json.loads(call.function.arguments)["path"]))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "ok"})


for ask in (whole, streamed):
    called, last = run(ask)
    assert called == [(("read", "write")[turn % 2], str(turn)) for turn in range(10)] + [("read", "a"), ("write", "b")]
    assert last == "Done."
    print(ask.__name__, flush=True)

"""An agent's loop: a model that calls two tools in turn, and answers at the end."""

import itertools
import json

import pytest

from tests.http.test_tools import run

pytest.importorskip("starlette")

READ, WRITE = (
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        },
    }
    for name in ("read", "write")
)
CALLED = [(("read", "write")[turn % 2], str(turn)) for turn in range(10)]


def call_of(name, path, before="<think>Hm.</think>"):
    """The text of a call, with other blanks than the template writes."""
    return f'{before}<tool_call>{{"name":"{name}", "arguments": {{"path":"{path}"}}}}</tool_call>'


ANSWERS = [*(call_of(*each) for each in CALLED), "<think>Enough.</think>Done."]


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    from jaxinfer import AsyncLLM, http
    from tests.generation.few_programs import few_programs
    from tests.http.asgi import Client
    from tests.scripted import save_scripted

    path = save_scripted(tmp_path_factory.mktemp("models") / "scripted", ANSWERS)
    with few_programs():
        llm = AsyncLLM(path, max_batch=1, token_budget=256, chunk_size=256)
    yield Client(http.app(llm, name="tiny"))
    llm.close()


def test_ten_turns_with_two_tools(client):
    async def main():
        messages, usages, called = [{"role": "user", "content": "Go on."}], [], []
        while True:
            answer = await client.post("/v1/chat/completions", {"messages": messages, "tools": [READ, WRITE]})
            answer = await answer.json()
            usages.append(answer["usage"])
            message = answer["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                return message, called, usages
            for call in message["tool_calls"]:
                called.append((call["function"]["name"], json.loads(call["function"]["arguments"])["path"]))
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": "ok"})

    last, called, usages = run(main())
    assert called == CALLED
    assert (last["content"], last["reasoning"]) == ("Done.", "Enough.")
    for before, after in itertools.pairwise(usages):
        known = before["prompt_tokens"] + before["completion_tokens"] - 1
        assert after["prompt_tokens_details"]["cached_tokens"] > known - 16

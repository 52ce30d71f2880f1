"""Characters of several tokens, and stop strings of several, in streams: their texts are those of whole answers."""

import asyncio
import json

import pytest

pytest.importorskip("starlette")

TEXT = "é漢🙂👩‍👩‍👧z"
BODY = {"structured_outputs": {"choice": [TEXT]}, "temperature": 0, "max_tokens": 60}
MESSAGES = [{"role": "user", "content": "🙂"}]


def ask(client, path, body):
    """The text of the whole answer, the texts of the stream's chunks, and why both ended."""

    async def main():
        whole = await (await client.post(path, body)).json()
        events = await (await client.post(path, body | {"stream": True})).events()
        assert events.pop() == "[DONE]"
        return whole["choices"][0], [json.loads(each)["choices"][0] for each in events]

    whole, chunks = asyncio.run(asyncio.wait_for(main(), 120))
    assert chunks[-1]["finish_reason"] == whole["finish_reason"]
    if "message" in whole:
        return whole["message"]["content"], [each["delta"].get("content", "") for each in chunks]
    return whole["text"], [each["text"] for each in chunks]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, TEXT),
        ({"stop": ["🙂"]}, "é漢"),
        ({"stop": ["x", "漢🙂"]}, "é"),
        ({"stop": ["漢🙂"], "include_stop_str_in_output": True}, "é漢🙂"),
        ({"max_tokens": 4}, None),  # in the midst of a character
    ],
)
def test_streams_add_up_to_the_whole(client, path, options, expected):
    prompt = {"messages": MESSAGES} if path.startswith("/v1/chat") else {"prompt": "🙂"}
    whole, pieces = ask(client, path, prompt | BODY | options)
    assert "".join(pieces) == whole
    if expected is None:
        assert whole.rstrip("�") == "é"
    else:
        assert whole == expected
        assert "�" not in "".join(pieces)

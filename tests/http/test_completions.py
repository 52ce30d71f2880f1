"""Completions and chats over HTTP are what `AsyncLLM` generates; wrong requests are refused by name."""

import asyncio
import json

import pytest

from jaxinfer import SamplingParams

pytest.importorskip("starlette")

GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def run(main):
    return asyncio.run(asyncio.wait_for(main, 120))


def texts_of(llm, *prompts, **changes):
    params = SamplingParams(**{"temperature": 0, "max_tokens": 6, "ignore_eos": True} | changes)
    return [[x.text for x in llm.submit(prompt, params).result().outputs] for prompt in prompts]


def test_a_completion(client, async_llm):
    async def main():
        answer = await client.post("/v1/completions", {"model": "tiny", "prompt": "ab", **GREEDY})
        return answer.status, await answer.json()

    status, body = run(main())
    (choice,) = body.pop("choices")
    assert status == 200
    assert body["id"].startswith("cmpl-")
    assert (body["object"], body["model"]) == ("text_completion", "tiny")
    assert choice == {
        "index": 0,
        "text": texts_of(async_llm, "ab")[0][0],
        "logprobs": None,
        "finish_reason": "length",
        "stop_reason": None,
    }
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (2, 6, 8)


@pytest.mark.parametrize("as_tokens", [False, True])
def test_several_prompts_with_several_completions(client, async_llm, as_tokens):
    prompt = [async_llm.tokenizer.encode(text) if as_tokens else text for text in ("ab", "cde")]

    async def main():
        answer = await client.post("/v1/completions", {"prompt": prompt, "n": 2, **GREEDY})
        return await answer.json()

    choices = run(main())["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    wanted = [text for texts in texts_of(async_llm, "ab", "cde", n=2) for text in texts]
    assert [choice["text"] for choice in choices] == wanted


def test_a_stream_adds_up_to_the_whole(client, async_llm):
    async def main():
        body = {"prompt": ["ab", "cde"], "n": 2, "stream": True, "stream_options": {"include_usage": True}, **GREEDY}
        answer = await client.post("/v1/completions", body)
        return answer, await answer.events()

    answer, events = run(main())
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    assert len({chunk["id"] for chunk in chunks}) == 1
    usage = chunks.pop()
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 24
    texts, ends = {}, {}
    for chunk in chunks:
        assert "usage" not in chunk
        for choice in chunk["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
            ends[choice["index"]] = choice["finish_reason"]
    wanted = [text for texts in texts_of(async_llm, "ab", "cde", n=2) for text in texts]
    assert [texts[index] for index in range(4)] == wanted
    assert ends == dict.fromkeys(range(4), "length")


def test_echo_with_log_probabilities(client, async_llm):
    """As lm-eval asks: the prompt's tokens with theirs, of which the first has none."""

    async def main():
        answer = await client.post("/v1/completions", {"prompt": "abc", "echo": True, "logprobs": 2, **GREEDY})
        return (await answer.json())["choices"][0]

    choice = run(main())
    output = async_llm.submit(
        "abc", SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=2)
    ).result()
    assert choice["text"] == "abc" + output.outputs[0].text
    logprobs = choice["logprobs"]
    assert logprobs["tokens"][:3] == ["a", "b", "c"]
    assert logprobs["text_offset"][:4] == [0, 1, 2, 3]
    assert logprobs["token_logprobs"][0] is None
    known = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    assert logprobs["token_logprobs"][1:] == pytest.approx([entry.logprob for entry in known], abs=1e-4)
    assert len(logprobs["top_logprobs"][4]) == 2


def test_a_chat(client, async_llm):
    messages = [{"role": "user", "content": "hi"}]

    async def main():
        whole = await client.post("/v1/chat/completions", {"messages": messages, "logprobs": True, **GREEDY})
        parts = await client.post("/v1/chat/completions", {"messages": messages, "stream": True, **GREEDY})
        expected = await async_llm.chat(messages, PARAMS).final()
        return await whole.json(), await parts.events(), expected.outputs[0].text

    whole, events, expected = run(main())
    assert whole["object"] == "chat.completion"
    (choice,) = whole["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected, "refusal": None}
    assert len(choice["logprobs"]["content"]) == 6
    assert events.pop() == "[DONE]"
    deltas = [json.loads(event)["choices"][0] for event in events]
    assert deltas[0]["delta"]["role"] == "assistant"
    assert all("role" not in delta["delta"] for delta in deltas[1:])
    assert "".join(delta["delta"].get("content", "") for delta in deltas) == expected
    assert deltas[-1]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "message"),
    [
        ("completions", b"{", 400, None, "not JSON"),
        ("completions", {}, 400, "prompt", "missing required field"),
        ("completions", {"prompt": "a", "model": "no"}, 404, "model", "no model 'no'; models: tiny"),
        ("completions", {"prompt": "a", "temperature": "x"}, 400, "temperature", "Expected `float"),
        ("completions", {"prompt": "a", "temperature": -1}, 400, "temperature", "must be finite and >= 0"),
        ("completions", {"prompt": "a", "tools": []}, 400, "tools", "not implemented"),
        ("completions", {"prompt": "a", "suffix": "b"}, 400, "suffix", "not implemented"),
        ("completions", {"prompt": []}, 400, "prompt", "1 to 256 texts"),
        ("completions", {"prompt": ["a", 1]}, 400, "prompt", "a list of texts or of token ids"),
        ("completions", {"prompt": "a" * 200}, 400, "prompt", "leaves no room to generate"),
        ("completions", {"prompt": "a", "stream_options": {}}, 400, "stream_options", "needs stream=true"),
        ("completions", {"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias", "token ids"),
        ("chat/completions", {"messages": []}, 400, "messages", "messages must be a list"),
        ("chat/completions", {"messages": [{"content": "a"}]}, 400, "messages", "must have a role"),
        (
            "chat/completions",
            {"messages": [{"role": "user"}], "top_logprobs": 2},
            400,
            "top_logprobs",
            "needs logprobs",
        ),
        ("nothing", {}, 404, None, "there is no endpoint POST /v1/nothing"),
    ],
)
def test_wrong_requests_are_refused_by_name(client, path, body, status, param, message):
    async def main():
        answer = await client.post(f"/v1/{path}", body)
        return answer.status, (await answer.json())["error"]

    got, error = run(main())
    assert (got, error["param"], error["type"]) == (status, param, "invalid_request_error")
    assert message in error["message"]


def test_null_is_a_field_that_is_left_out(client):
    async def main():
        answer = await client.post("/v1/completions", {"prompt": "ab", "tools": None, "logprobs": None, **GREEDY})
        return answer.status

    assert run(main()) == 200

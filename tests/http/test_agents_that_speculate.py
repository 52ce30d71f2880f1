"""Calls and limits of reasoning are the same with speculation as without it."""

import json

import pytest

from tests.http.test_tools import CALLS, THINK, TOOLS, USER, functions, joined, run, saying
from tests.tiny import byte_tokenizer

pytest.importorskip("starlette")

pytestmark = pytest.mark.slow


REPEATED = THINK.replace("Hm.", "tell the weather. " * 4) + "weather " * 4 + CALLS * 2
ASKED = {"messages": USER, **TOOLS}


@pytest.fixture(scope="module")
def speculating_llm(agent_dir, agent_llm):
    """A model that speculates, and whose answers to `ASKED` are `REPEATED`: speculation checks no grammars."""
    import jax.numpy as jnp

    from jaxinfer import AsyncLLM, http
    from tests.generation.few_programs import few_programs
    from tests.http.asgi import Client

    answer = run(Client(http.app(agent_llm, name="tiny")).post("/v1/chat/completions", ASKED | {"max_tokens": 1}))
    start = run(answer.json())["usage"]["prompt_tokens"]
    script = jnp.array(byte_tokenizer().encode(REPEATED + "<end>").ids)

    def says(scores, history, length):
        wanted = script[jnp.clip(length - start, 0, len(script) - 1)]
        return jnp.where(jnp.arange(scores.shape[-1]) == wanted[:, None], 0.0, -jnp.inf)

    with few_programs():
        options = {"max_batch": 4, "token_budget": 256, "chunk_size": 256, "logits_processors": {"says": says}}
        llm = AsyncLLM(agent_dir, max_waiting=64, num_speculative_tokens=3, **options)
    yield llm
    llm.close()


@pytest.fixture(scope="module")
def ask(agent_llm, speculating_llm):
    """Asks for a chat of a model, which speculates or not, as a stream; returns its message, usage and reason."""
    from jaxinfer import http
    from tests.http.asgi import Client

    clients = [Client(http.app(llm, name="tiny")) for llm in (agent_llm, speculating_llm)]

    async def chat(client, body):
        stream = await client.post(
            "/v1/chat/completions", body | {"stream": True, "stream_options": {"include_usage": True}}
        )
        if stream.status != 200:
            return await stream.json()
        events = [json.loads(event) for event in (await stream.events())[:-1]]
        return *joined(events), events[-1]["usage"]

    return lambda body, *, speculates: run(chat(clients[speculates], body))


def test_the_same_calls(ask):
    plain = ask(saying(REPEATED, **TOOLS), speculates=False)[0]
    body = ASKED | {"logits_processors": ["says"], "temperature": 0, "max_tokens": 400}
    speculated, reason, usage = ask(body, speculates=True)
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] > 20
    for message in (plain, speculated):
        for call in message["tool_calls"]:
            del call["id"]
    assert plain == speculated
    assert reason == "tool_calls"
    assert [call["name"] for call in functions(plain)] == ["weather", "now"] * 2
    assert plain["content"] == ("weather " * 4).strip()


OPENED = {"messages": USER, "chat_template_kwargs": {"enable_thinking": True}, "seed": 1, "temperature": 1.5}
END = len("</think>")  # a token each


@pytest.mark.parametrize("speculates", [False, True])
@pytest.mark.parametrize("budget", [0, 1, 10])
def test_reasoning_ends_at_its_limit(ask, budget, speculates):
    body = OPENED | {"thinking_token_budget": budget, "max_tokens": 40, "ignore_eos": True}
    message, reason, usage = ask(body, speculates=speculates)
    reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
    assert reason == "length"
    assert budget <= reasoning - END <= budget + 3  # the last character may need more tokens
    assert len(message.get("reasoning", "")) <= budget + 3
    assert message["content"]


@pytest.mark.parametrize("speculates", [False, True])
def test_an_answer_of_a_form_comes_after_limited_reasoning(ask, speculates):
    body = OPENED | {"thinking_token_budget": 5, "max_tokens": 400, "tool_choice": "required"}
    parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    body["tools"] = [{"type": "function", "function": {"name": "now", "parameters": parameters}}]
    message, reason, usage = ask(body, speculates=speculates)
    assert reason == "tool_calls"
    assert functions(message)[0] == {"name": "now", "arguments": "{}"}
    assert usage["completion_tokens_details"]["reasoning_tokens"] <= 5 + 3 + END


def test_a_wrong_limit_is_refused(ask):
    error = ask(OPENED | {"thinking_token_budget": -1}, speculates=False)["error"]
    assert "thinking_token_budget must be an integer" in error["message"]


def test_a_model_that_does_not_reason_keeps_every_limit_of_it(client):
    body = {"messages": USER, "thinking_token_budget": 0, "max_tokens": 4, "ignore_eos": True}

    async def main():
        return await (await client.post("/v1/chat/completions", body)).json()

    assert run(main())["usage"]["completion_tokens"] == 4

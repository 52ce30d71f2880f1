"""The next turn of a conversation has the tokens that the model wrote, and finds them in the prefix cache."""

import pytest

from tests.http.test_tools import NOW, TOOLS, run, saying
from tests.tiny import byte_tokenizer

pytest.importorskip("starlette")

PAGE = 16
OWN_WAY = '<tool_call>{"arguments":{},"name":"now"}</tool_call>'
"""A call, other than the template writes it."""
RESULT = {"role": "tool", "content": "noon"}


@pytest.fixture
def client(agent_llm):
    from jaxinfer import http
    from tests.http.asgi import Client

    return Client(http.app(agent_llm, name="tiny"))


def two_turns(client, text, change=lambda message: message, **fields):
    """Ask, and ask again with the answer and a result; returns the usage of both, and the second prompt's tokens."""

    async def ask(body):
        return await (await client.post("/v1/chat/completions", body)).json()

    async def main():
        first = await ask(saying(text, **TOOLS, **fields))
        (message,) = (choice["message"] for choice in first["choices"])
        messages = [{"role": "user", "content": "hi"}, change(message), RESULT]
        second = await ask({"messages": messages, "max_tokens": 1, "temperature": 0, **TOOLS})
        return first["usage"], second["usage"]

    return run(main())


REST = len(";tool:noon;assistant:")


@pytest.mark.parametrize("text", [OWN_WAY, f"Well. {OWN_WAY}", f"<think>\nHm.\n\n</think> {OWN_WAY}{OWN_WAY}", "Noon."])
def test_the_next_turn_has_the_tokens_of_the_answer(client, text):
    first, second = two_turns(client, text)
    before = first["prompt_tokens"] + first["completion_tokens"]
    assert first["completion_tokens"] == len(text)  # a grammar needs no token at the end
    assert second["prompt_tokens"] == before + 1 + REST
    assert second["prompt_tokens_details"]["cached_tokens"] >= before - PAGE


@pytest.mark.parametrize(
    "change",
    [
        lambda message: {**message, "content": "Else."},
        lambda message: {**message, "tool_calls": message["tool_calls"] * 2},
        lambda message: {key: value for key, value in message.items() if "reasoning" not in key},
    ],
)
def test_an_answer_that_the_client_has_changed_is_written_by_the_template(client, change):
    text = f"<think>Hm, hm, hm.</think>{OWN_WAY}"
    first, second = two_turns(client, text, change)
    assert second["prompt_tokens"] != first["prompt_tokens"] + first["completion_tokens"] + 1 + REST


def test_a_cut_answer_goes_on_too(client):
    first, second = two_turns(client, "A long answer.", max_tokens=6)
    assert first["completion_tokens"] == 6
    assert second["prompt_tokens"] == first["prompt_tokens"] + 6 + 1 + REST


def test_memory_is_bounded():
    from jaxinfer.http.turns import OVERHEAD, TurnMemory, keys_of, turn_of
    from jaxinfer.text.parsing import AnswerFormat

    tokens, form = [0] * 1000, AnswerFormat("hermes", None)
    turns, keys = TurnMemory(max_bytes=3 * (4000 + OVERHEAD + 100)), []
    for number in range(5):
        key, _ = keys_of([{"role": "user", "content": str(number)}], tools=[NOW])
        for _ in range(2):
            turns.remember(key, turn_of("prompt", tokens, "answer", [1], form.parser()))
        keys.append(key)
    assert [key in turns._turns for key in keys] == [False, False, True, True, True]


def test_conversations_have_names_of_their_own():
    from jaxinfer.http.turns import keys_of

    talk = [{"role": role, "content": "a"} for role in ("user", "assistant", "user", "assistant", "user")]
    whole, before = keys_of(talk, tools=None)
    assert before == [keys_of(talk[:3], tools=None)[0], keys_of(talk[:1], tools=None)[0]]
    assert whole not in before
    assert keys_of(talk, tools=[NOW])[0] != whole


def test_tokens_that_no_tokenizer_would_choose_come_back():
    """A model may write a word in other tokens than the tokenizer does."""
    import tokenizers

    from jaxinfer.http.turns import TurnMemory, turn_of
    from jaxinfer.text.parsing import AnswerFormat

    inner = byte_tokenizer()
    vocab = inner.get_vocab(with_added_tokens=False)
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab | {"no": 300}, merges=[("n", "o")]))
    made.pre_tokenizer, made.decoder = inner.pre_tokenizer, inner.decoder
    made.add_special_tokens(["<end>"])

    class Wrapped:
        def text_of(self, token):
            return made.decode([token], skip_special_tokens=False)

        def encode_word(self, text):
            return made.encode(text, add_special_tokens=False).ids

    end = made.token_to_id("<end>")
    written = [vocab["u"], vocab["n"], vocab["o"], end]  # "no" is one token
    turns, form = TurnMemory(), AnswerFormat("hermes", None)
    turns.remember(b"key", turn_of("u", written, "no", [end], form.parser()))
    assert Wrapped().encode_word("uno") == [vocab["u"], 300]
    assert turns.encode("uno<end>no", [b"key"], Wrapped(), form.parser) == [*written, 300]
    assert turns.encode("uno<end>no", [b"other"], Wrapped(), form.parser) == [vocab["u"], 300, end, 300]

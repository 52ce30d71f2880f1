"""What callers see: outputs of a moment, whatever the engine does after it, and without copies of the prompt."""

import dataclasses
from random import Random

import msgspec
import pytest

from jaxinfer.generation.engine.growing_text import BLOCK
from jaxinfer.generation.engine.request import Request
from jaxinfer.generation.engine.ticket import RequestTicket
from jaxinfer.generation.engine.view import RequestView
from jaxinfer.generation.outputs import FinishReason, TokenLogprob
from jaxinfer.generation.params import SamplingParams
from jaxinfer.serving.ticket import Reader

PROMPT = tuple(range(1000))


@pytest.fixture
def request_():
    params = SamplingParams(max_tokens=50, n=2, logprobs=0, prompt_logprobs=0, stop="end")
    return Request(request_id="r", prompt=None, prompt_token_ids=PROMPT, params=params, max_length=1050)


def advance(sequence, token, text, now):
    """As `OutputProcessor` does."""
    sequence.token_ids.append(token)
    sequence.logprobs.append(TokenLogprob(token, -1.0, {}))
    sequence.prompt_logprobs.append(TokenLogprob(token, -2.0, {}))
    sequence.text.add(text)
    sequence.first_token_time = sequence.first_token_time or now
    sequence.last_token_time = now
    sequence.num_cached_tokens = 3


def test_an_output_is_of_the_moment_of_its_snapshot(request_):
    first, second = sequences = request_.sequences()
    view = RequestView(sequences)
    for now, (token, text) in enumerate([(5, "a"), (6, " b"), (7, " e")], 1):
        advance(first, token, text, float(now))
    advance(second, 9, "x", 2.0)
    at_once, snapshot = view.output(), view.snapshot()
    advance(first, 8, "nd", 4.0)
    first.finish_reason = FinishReason.STOP
    second.finish_reason, second.error = FinishReason.ERROR, "lost"
    later = snapshot.output()
    assert later == at_once
    assert [(c.text, c.token_ids, len(c.logprobs)) for c in later.outputs] == [("a b ", [5, 6, 7], 3), ("x", [9], 1)]
    assert [(c.finish_reason, c.error) for c in later.outputs] == [(None, None)] * 2
    assert later.outputs[0].timings.tokens_per_s == 1.0
    assert (len(later.prompt_logprobs), later.num_cached_tokens) == (4, 3)
    assert [(c.text, len(c.token_ids), c.finish_reason) for c in view.output().outputs] == [
        ("a b ", 4, FinishReason.STOP),
        ("x", 1, FinishReason.ERROR),
    ]


def test_outputs_share_the_prompt_and_the_engine_has_its_own(request_):
    sequences = request_.sequences()
    pending = RequestTicket(sequences, owner=None, reader=Reader())
    outputs = []
    for token in (5, 6):
        for sequence in sequences:
            advance(sequence, token, "a", 1.0)
        assert pending.advance()
        assert not pending.advance()
        outputs.append(pending.reader.newest.output())
    outputs.append(pending.result().output())
    assert outputs[0].prompt_token_ids == list(PROMPT)
    assert all(output.prompt_token_ids is outputs[0].prompt_token_ids for output in outputs)
    outputs[0].prompt_token_ids.clear()
    outputs[0].outputs[0].token_ids.clear()
    assert sequences[0].num_prompt_tokens == len(PROMPT)
    assert sequences[0].token_ids == [*PROMPT, 5, 6]
    assert RequestView(request_.sequences()).output().prompt_token_ids == list(PROMPT)


@pytest.mark.parametrize("keeps_stop", [False, True])
def test_deltas_are_the_outputs_in_parts(keeps_stop):
    """Whatever a reader misses: each delta has what the output has more than the one that was read before."""
    random = Random(0)
    stop = ("end", "nd.", "e" * 120 + "z")
    params = SamplingParams(
        max_tokens=9000, n=2, logprobs=0, prompt_logprobs=0, stop=stop, include_stop_str_in_output=keeps_stop
    )
    request = Request(request_id="r", prompt=None, prompt_token_ids=PROMPT, params=params, max_length=10_000)
    sequences = request.sequences()
    view, seen = RequestView(sequences), None
    texts, tokens, logprobs, prompt_logprobs = ["", ""], [[], []], [[], []], []
    for step in range(4000):
        for sequence in sequences:
            advance(sequence, step, random.choice(["e", "n", "ab", "ee", "", "日", "e" * 50]), 1.0)
        if step == 3999:
            assert sequences[0].text.add("xendy") == "end"
            sequences[0].finish_reason, sequences[1].finish_reason = FinishReason.STOP, FinishReason.LENGTH
        elif random.random() < 0.7:
            continue
        snapshot = view.snapshot()
        delta, output = snapshot.output(since=seen), snapshot.output()
        seen = snapshot
        prompt_logprobs += delta.prompt_logprobs
        for index, (part, whole) in enumerate(zip(delta.outputs, output.outputs, strict=True)):
            texts[index] += part.text
            tokens[index] += part.token_ids
            logprobs[index] += part.logprobs
            assert (texts[index], tokens[index], logprobs[index]) == (whole.text, whole.token_ids, whole.logprobs)
            assert dataclasses.replace(part, text="", token_ids=[], logprobs=[]) == dataclasses.replace(
                whole, text="", token_ids=[], logprobs=[]
            )
        assert prompt_logprobs == output.prompt_logprobs
    assert len(sequences[0].text.blocks) > 5
    assert texts[0].endswith("xend" if keeps_stop else "x")
    assert texts == [str(sequence.text) for sequence in sequences]


def test_a_delta_of_a_long_text_is_as_small_as_one_of_a_short_text(request_):
    """The engine's thread and the reader copy a bounded part of a text."""
    sequences = request_.sequences()
    view, copied = RequestView(sequences), []
    for step in range(3000):
        before = view.snapshot()
        advance(sequences[0], step, "some text", 1.0)
        after = view.snapshot()
        assert after.output(since=before).outputs[0].text == "some text"
        copied.append(len(after.completions[0].end))
    assert max(copied) <= BLOCK + 20


def test_a_step_copies_no_prompt(request_):
    """What the engine's thread makes in a step has no list but those that sequences and the request have."""
    sequences = request_.sequences()
    pending = RequestTicket(sequences, owner=None, reader=Reader())
    known = {id(value) for sequence in sequences for value in vars(sequence).values()}
    advance(sequences[0], 5, "a", 1.0)
    assert pending.advance()
    first, snapshot = pending.reader.newest, pending.reader.newest
    assert len(snapshot.completions) == len(sequences)
    for completion in snapshot.completions:
        assert all(
            id(value) in known for value in msgspec.structs.astuple(completion) if isinstance(value, list | tuple)
        )
    advance(sequences[0], 6, "a", 2.0)
    assert pending.advance()
    assert pending.reader.newest.prompt_token_ids is first.prompt_token_ids


def test_a_request_cannot_be_changed(request_):
    assert isinstance(request_.prompt_token_ids, tuple)
    with pytest.raises(dataclasses.FrozenInstanceError):
        request_.prompt_token_ids = ()

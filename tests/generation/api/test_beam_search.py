"""Beam search against transformers, against all texts there are, and what it costs."""

import functools
import itertools
import json

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.generation import LLM, FinishReason, SamplingParams
from jaxinfer.generation.api.beam_search import BeamSearch, BeamSearchParams
from jaxinfer.models.files.conversion import convert
from tests.generation.few_programs import few_programs
from tests.models import goldens

GOLDEN = goldens.DIRECTORY / "llama_llama3"
SEARCHES = json.loads((GOLDEN / "beams.json").read_text())


@pytest.fixture(scope="module")
def golden_llm(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "llama"
    convert(GOLDEN, path)
    with few_programs():
        return LLM(path, max_batch=4, token_budget=32)


def prompt_of(length):
    return np.random.default_rng(1000 + length).integers(0, 64, length).tolist()


@pytest.mark.parametrize("expected", SEARCHES)
def test_finds_what_transformers_finds(golden_llm, expected):
    params = BeamSearchParams(
        beam_width=expected["num_beams"],  # up to 10, on an engine of 4 slots
        n=expected["num_beams"],
        max_tokens=expected["max_new_tokens"],
        length_penalty=expected["length_penalty"],
        early_stopping=expected["early_stopping"],
        stop_token_ids=expected["eos_token_id"] or (),
    )
    (output,) = golden_llm.beam_search(expected["prompt"], params)
    assert [beam.token_ids for beam in output.beams] == [beam["token_ids"] for beam in expected["beams"]]
    scores = [beam["score"] for beam in expected["beams"]]
    np.testing.assert_allclose([beam.score for beam in output.beams], scores, rtol=1e-5)
    for beam in output.beams:
        assert beam.score == beam.cumulative_logprob / len(beam.token_ids) ** params.length_penalty
        stopped = beam.token_ids[-1] in params.stop_token_ids
        assert beam.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)


def test_several_prompts_find_what_each_finds_alone(golden_llm):
    params = BeamSearchParams(
        beam_width=2, n=2, max_tokens=6, stop_token_ids=(13,)
    )  # two searches have room in the 4 slots
    prompts = [search["prompt"] for search in SEARCHES[:3]]
    together = golden_llm.beam_search(prompts, params)
    alone = [golden_llm.beam_search(prompt, params)[0] for prompt in prompts]
    for output, expected in zip(together, alone, strict=True):
        assert output.prompt_token_ids == expected.prompt_token_ids
        assert [beam.token_ids for beam in output.beams] == [beam.token_ids for beam in expected.beams]
        np.testing.assert_allclose([b.score for b in output.beams], [b.score for b in expected.beams], rtol=1e-5)


def test_finds_the_likeliest_of_all_texts(golden_llm):
    """All 64 * 64 * 64 texts of three tokens, by the model without any cache."""
    golden = goldens.load(GOLDEN.name)
    vocab, (prompt,) = golden.config.vocab, SEARCHES[2]["prompt"]
    tokens = np.array([(prompt, *pair) for pair in itertools.product(range(vocab), repeat=2)], np.int32)
    positions = np.broadcast_to(np.arange(3, dtype=np.int32), tokens.shape)
    logits, _ = goldens.forward(*goldens.build(golden), tokens, positions)
    logprobs = np.asarray(jax.nn.log_softmax(logits)).reshape(vocab, vocab, 3, vocab)
    sums = logprobs[0, 0, 0][:, None, None] + logprobs[:, 0, 1][:, :, None] + logprobs[:, :, 2]
    (output,) = golden_llm.beam_search([prompt], BeamSearchParams(beam_width=10, max_tokens=3, length_penalty=0))
    assert output.beams[0].token_ids == [int(i) for i in np.unravel_index(sums.argmax(), sums.shape)]
    assert output.beams[0].score == pytest.approx(float(sums.max()), abs=1e-4)


def search_table(logprobs, params):
    """A search where a text's next tokens have the log probabilities logprobs(text)."""
    search = BeamSearch(params, params.stop_token_ids)
    while search.live:
        rows = [logprobs(beam.ids) for beam in search.live]
        ranked = [sorted(row.items(), key=lambda item: -item[1])[: search.branching] for row in rows]
        search.advance(map(dict, ranked))
    return search.finished


@given(
    vocab=st.integers(2, 3),
    max_tokens=st.integers(1, 3),
    length_penalty=st.sampled_from([0.0, -1.0]),
    stops=st.integers(0, 2),
    seed=st.integers(0, 999),
)
def test_wide_enough_it_finds_the_best_of_all_texts_in_order(vocab, max_tokens, length_penalty, stops, seed):
    """10 beams hold all of up to 3 * 3 texts; without a reward for length, ending early misses none."""
    rng = np.random.default_rng(seed)

    @functools.cache
    def logprobs(_text):
        return dict(enumerate(np.log(rng.dirichlet(np.ones(vocab))).tolist()))

    params = BeamSearchParams(
        beam_width=10, max_tokens=max_tokens, length_penalty=length_penalty, stop_token_ids=tuple(range(stops))
    )
    texts = {}
    for length in range(1, max_tokens + 1):
        for text in itertools.product(range(vocab), repeat=length):
            ends = text[-1] < stops or length == max_tokens
            if ends and all(token >= stops for token in text[:-1]):
                texts[text] = sum(logprobs(text[:i])[token] for i, token in enumerate(text)) / length**length_penalty
    best = sorted(texts, key=texts.__getitem__, reverse=True)
    assert [found.ids for found in search_table(logprobs, params)] == best[:10]


def test_a_round_computes_one_token_a_beam(golden_llm):
    params = BeamSearchParams(beam_width=4, max_tokens=6)
    rounds = params.beam_width * (params.max_tokens - 1)
    for prompt in (prompt_of(29), prompt_of(40)):  # the beams of the first go on to another page
        (cold,), (warm,) = golden_llm.beam_search(prompt, params), golden_llm.beam_search(prompt, params)
        assert (cold.num_cached_tokens, cold.num_computed_tokens) == (0, len(prompt) + rounds)
        assert (warm.num_cached_tokens, warm.num_computed_tokens) == (len(prompt) - 1, 1 + rounds)
        assert warm.beams[0].token_ids == cold.beams[0].token_ids
    golden_llm.engine.scheduler.check_integrity()


def test_one_beam_is_greedy(llm):
    greedy = llm.generate("a prompt", SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, logprobs=0))
    completion = greedy[0].outputs[0]
    stop = completion.token_ids[6]
    for stop_ids in ((), (stop,)):
        (expected,) = llm.generate("a prompt", SamplingParams(temperature=0, max_tokens=9, stop_token_ids=stop_ids))
        (output,) = llm.beam_search("a prompt", BeamSearchParams(beam_width=1, max_tokens=9, stop_token_ids=stop_ids))
        (beam,), (expected,) = output.beams, expected.outputs
        assert output.prompt == "a prompt"
        assert (beam.token_ids, beam.text) == (expected.token_ids, expected.text)
        assert beam.finish_reason is expected.finish_reason
    total = sum(t.logprob for t in completion.logprobs[: len(beam.token_ids)])
    assert beam.cumulative_logprob == pytest.approx(total, abs=1e-4)


def test_a_failed_step_is_an_error_of_its_prompt(golden_llm, monkeypatch):
    params, prompts = BeamSearchParams(beam_width=4, max_tokens=3), [prompt_of(3), prompt_of(5)]
    whole = golden_llm.beam_search(prompts, params)

    def fail(_batch):
        monkeypatch.undo()
        raise RuntimeError("out of luck")

    monkeypatch.setattr(golden_llm.engine.executor, "launch", fail)
    first, second = golden_llm.beam_search(prompts, params)
    assert first.error == "RuntimeError: out of luck"
    assert not first.beams
    assert second.error is None
    assert second.beams[0].token_ids == whole[1].beams[0].token_ids
    golden_llm.engine.scheduler.check_integrity()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beam_width": 11}, r"BeamSearchParams.beam_width must be an integer in \[1, 10\], got 11"),
        ({"beam_width": 2, "n": 3}, "BeamSearchParams.n must be <= beam_width=2, got 3"),
        ({"max_tokens": 0}, "BeamSearchParams.max_tokens must be an integer >= 1, below .*, got 0"),
        ({"length_penalty": float("nan")}, r"BeamSearchParams.length_penalty must be a number in \[-10, 10\], got nan"),
        ({"early_stopping": "never"}, "BeamSearchParams.early_stopping must be True or False, got 'never'"),
        ({"stop_token_ids": range(17)}, "BeamSearchParams.stop_token_ids must be at most 16 token ids"),
    ],
)
def test_bad_options_fail_at_birth(options, message):
    with pytest.raises(ValueError, match=message):
        BeamSearchParams(**options)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([], {}, "Prompt 1: The prompt is empty"),
        (
            [1] * 60,
            {"max_tokens": 5},
            "Prompt 1: The prompt has 60 tokens; max_tokens=5 more do not fit the context of 64",
        ),
        (
            [1],
            {"beam_width": 10, "stop_token_ids": range(11)},
            "Prompt 0: BeamSearchParams.beam_width=10 and 11 stop tokens",
        ),
        ([1], {"adapter": "none"}, "Prompt 0: SamplingParams.adapter is 'none', but the engine has no room"),
    ],
)
def test_bad_searches_fail_at_the_call(golden_llm, prompt, options, message):
    with pytest.raises(ValueError, match=message):
        golden_llm.beam_search([[1, 2], prompt], BeamSearchParams(**({"max_tokens": 4} | options)))
    assert not golden_llm.engine.scheduler.waiting

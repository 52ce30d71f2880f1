"""What a prompt can be, and what is refused by its place among the prompts."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given

from jaxinfer.generation import LLM, SamplingParams
from jaxinfer.generation.api.beam_search import BeamSearchParams
from jaxinfer.generation.api.embedding import embed
from jaxinfer.generation.engine.input import InputProcessor
from jaxinfer.text import Tokenizer, as_list, encode_prompt
from tests.generation.wrong import JSON

DEMO, DEMO_VOCAB = Path(__file__).parents[2] / "examples/demo_model", 4096
ONE = SamplingParams(temperature=0, max_tokens=1)
BEAMS = BeamSearchParams(beam_width=2, max_tokens=1)


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ("ab", ["ab"]),
        ([1, 2], [[1, 2]]),
        ((1, 2), [[1, 2]]),
        (range(3), [[0, 1, 2]]),
        ([np.int64(1), np.int32(2)], [[1, 2]]),
        (np.arange(3), [[0, 1, 2]]),
        (np.arange(4).reshape(2, 2), [[0, 1], [2, 3]]),
        ([np.arange(2), "a", (3, 4)], [[0, 1], "a", [3, 4]]),
        ([1.5, 2], [[1.5, 2]]),  # which is then refused as a whole
        ([True], [[True]]),
        (None, [None]),
        (b"ab", [b"ab"]),
        ({"prompt": "a"}, [{"prompt": "a"}]),
        ([], []),
        ([[]], [[]]),
    ],
)
def test_one_prompt_or_several(prompts, expected):
    assert as_list(prompts) == expected


@given(prompt=JSON)
def test_any_value_becomes_token_ids_or_is_refused(prompt):
    try:
        ids = encode_prompt(None, prompt, 257)
    except ValueError as error:
        assert "prompt" in str(error)  # noqa: PT017
    else:
        assert all(type(i) is int and 0 <= i < 257 for i in ids)


WRONG = [
    (None, "The prompt must be a text, or a list of token ids .* got None"),
    (b"ab", "The prompt must be a text, or a list of token ids .* got b'ab'"),
    ([1, 2.0], r"The prompt must be .* got \[1, 2.0\]"),
    ([True], r"The prompt must be .* got \[True\]"),
    ([[1], [2]], r"The prompt must be .* got \[\[1\], \[2\]\]"),
    ({1, 2}, r"The prompt must be .* got \{1, 2\}"),
    ({"prompt": "a"}, "The prompt must be .* got {'prompt': 'a'}"),
    (np.zeros(2), r"The prompt must be .* got \[0.0, 0.0\]"),
    ([10**5000], r"Token ids a value of type list that cannot be shown of the prompt are outside"),
    ([-1], r"Token ids \[-1\] of the prompt are outside the vocabulary"),
    ("a\ud800", r"Character 1 of the text is '\\ud800', half of a surrogate pair"),
    ([], "The prompt is empty"),
    ("", "The prompt is empty"),
]


@pytest.mark.parametrize(("prompt", "message"), WRONG)
def test_what_is_no_prompt_is_refused_with_its_place(llm, prompt, message):
    for run, name in (
        (lambda: llm.generate(["a", prompt], ONE), "Prompt"),
        (lambda: llm.beam_search(["a", prompt], BEAMS), "Prompt"),
        (lambda: llm.embed(["a", prompt]), "Text"),
    ):
        with pytest.raises(ValueError, match=f"^{name} 1: {message}"):
            run()
    assert not llm.engine.scheduler.waiting


def test_numbers_of_numpy_are_token_ids(llm):
    expected = llm.generate([[1, 2, 3]], ONE)[0]
    for prompt in (np.array([1, 2, 3]), [np.int64(1), np.int32(2), np.uint8(3)], (1, 2, 3)):
        (output,) = llm.generate(prompt, ONE)
        assert output.prompt_token_ids == expected.prompt_token_ids == [1, 2, 3]
        assert all(type(i) is int for i in output.prompt_token_ids)
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids


def test_a_list_that_changes_after_it_was_given_changes_nothing(llm):
    prompt = [1, 2, 3]
    request = llm.prepare(prompt, ONE)
    prompt[0] = 9
    assert llm.generate(request)[0].prompt_token_ids == [1, 2, 3]


def test_one_text_has_one_vector(llm):
    size = llm.model.transformer.output_width
    for text in ("hello", [104, 101], np.array([104, 101])):
        alone = embed(llm.engine, text, size=size)
        assert alone.shape == (1, size)
        np.testing.assert_array_equal(llm.embed(text), alone)
    assert embed(llm.engine, [], size=size).shape == (0, size)


def test_bad_words_are_tokens_alone_and_after_a_space():
    tokenizer = Tokenizer(DEMO)
    inputs = InputProcessor(vocab=DEMO_VOCAB, eos_ids=(), context=64, tokenizer=tokenizer, generates=True)
    request = inputs.process("a", SamplingParams(bad_words=("self", " return", "zqxj", "\n")))
    banned = {token for token in range(DEMO_VOCAB) if not request.bitmask[token // 32] >> (token % 32) & 1}
    assert {tokenizer.decode([token]) for token in banned} >= {"self", " self", "return", " return", "\n"}
    assert len(banned) <= 8
    assert "zqxj" in {tokenizer.decode(list(word)) for word in request.bad_words}
    assert inputs.process("a", SamplingParams()).bitmask is None


@pytest.mark.parametrize("wrong", [{"max_tokens": 5}, [{}], "greedy", 0, {}])
def test_params_of_another_type_are_refused(llm, wrong):
    with pytest.raises(
        ValueError, match=r"sampling_params must be SamplingParams or PoolingParams, got|but \d SamplingParams"
    ):
        llm.generate(["a"], wrong)
    with pytest.raises(ValueError, match="params must be BeamSearchParams, got"):
        llm.beam_search(["a"], wrong)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logits_processors": {5: abs}}, "logits_processors must be a dict of functions by name, got {5: "),
        ({"logits_processors": [abs]}, "logits_processors must be a dict of functions by name, got "),
        ({"logits_processors": {"a": "abs"}}, r"logits_processors\['a'\] must be a function, got 'abs'"),
    ],
)
def test_what_is_no_logits_processor(model_dir, options, message):
    with pytest.raises(ValueError, match=message):
        LLM(model_dir, **options)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "4", True, None])
def test_passes_of_a_stream(llm, wrong):
    with pytest.raises(ValueError, match=r"max_passes must be an integer >= 1, below .*, got"):
        next(llm.stream("a", ONE, max_passes=wrong))


def test_a_tokenizer_that_panics_is_an_error_like_others(tmp_path):
    """A mistake of the library: an empty pattern, of which it finds more places than the text has."""
    parts = json.loads((DEMO / "tokenizer.json").read_text())
    parts["normalizer"] = {"type": "Replace", "pattern": {"String": ""}, "content": "y"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(parts))
    tokenizer = Tokenizer(tmp_path)
    with pytest.raises(ValueError, match=r"tokenizer.json is damaged, or the tokenizers library has a mistake: index"):
        tokenizer.encode("hello world")

"""Sampling against plain numpy, row by row."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from jaxinfer.generation.outputs import NO_TOKEN
from jaxinfer.generation.params import SamplingParams, StructuredOutputsParams
from jaxinfer.generation.sampling.arrays import RowOptions, SamplingArrays, sampling_arrays
from jaxinfer.generation.sampling.logprobs import logprobs_if_asked, logprobs_of
from jaxinfer.generation.sampling.sampler import (
    asks_more_than_greedy,
    ends_of_bad_words,
    greedy,
    penalize,
    sample,
    truncate,
)
from jaxinfer.sharding import MeshConfig

VOCAB, CONTEXT = 50, 12
GREEDY = SamplingParams(temperature=0)
_truncate, _penalize, _ends_of_bad_words = map(jax.jit, (truncate, penalize, ends_of_bad_words))


@jax.jit
def _sample(logits, history, length, options):
    """Row i in slot i, all tokens allowed."""
    bitmask = jnp.full((len(logits), -(-logits.shape[-1] // 32)), 0xFFFFFFFF, jnp.uint32)
    rows = jnp.arange(len(logits))
    tokens = sample(logits, history, rows, length, options, bitmask)
    return tokens, logprobs_if_asked(options.logprobs, logits, tokens)


def options(*params: SamplingParams, prompt_length: int = 4, stop_token_ids=(), seeds=None) -> SamplingArrays:
    seeds = seeds or range(len(params))
    rows = zip(params, seeds, strict=True)
    return sampling_arrays([RowOptions(p, seed, prompt_length, CONTEXT, stop_token_ids) for p, seed in rows])


def truncated_by_numpy(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> set[int]:
    order = np.argsort(-logits, kind="stable")
    kept = order[: top_k or len(order)]
    p = np.exp(logits[kept] - logits.max())
    p /= p.sum()
    if top_p < 1:
        before = np.cumsum(p) - p
        kept, p = kept[before < top_p], p[before < top_p]
    return set(kept[p >= min_p * p.max()].tolist())


@settings(max_examples=60)
@given(
    seed=st.integers(0, 1000),
    top_k=st.sampled_from([0, 1, 3, 49, 50, 80]),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.1]),
    min_p=st.sampled_from([0.0, 0.05, 1.0]),
)
def test_truncation_keeps_what_a_sort_would_keep(seed, top_k, top_p, min_p):
    logits = np.random.default_rng(seed).normal(0, 3, VOCAB).astype(np.float32)
    out = _truncate(logits[None], options(SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)))
    assert set(np.flatnonzero(np.isfinite(out[0])).tolist()) == truncated_by_numpy(logits, top_k, top_p, min_p)


def test_truncation_with_banned_and_equal_tokens():
    logits = np.array([[1.0, -np.inf, 1.0, 0.0, -np.inf]], np.float32)
    out = _truncate(logits, options(SamplingParams(top_k=1)))
    np.testing.assert_array_equal(np.isfinite(out[0]), [True, False, True, False, False])  # a tie stays in
    out = _truncate(logits, options(SamplingParams(top_p=0.99)))
    np.testing.assert_array_equal(np.isfinite(out[0]), [True, False, True, True, False])


def test_penalties_follow_their_formulas():
    logits = np.random.default_rng(0).normal(0, 2, (1, VOCAB)).astype(np.float32)
    history = np.array([[3, 3, 5, 7, 9, 9, 9, 5, 0, 0, 0, 0]], np.int32)  # prompt: the first 4; known: 8
    params = SamplingParams(repetition_penalty=1.5, presence_penalty=0.25, frequency_penalty=0.5)
    out = np.asarray(_penalize(logits, history, np.array([8]), options(params)))
    expected = logits[0].copy()
    for token in (3, 5, 7, 9):
        expected[token] = expected[token] / 1.5 if expected[token] > 0 else expected[token] * 1.5
    for token, count in ((9, 3), (5, 1)):
        expected[token] -= 0.25 + 0.5 * count
    np.testing.assert_allclose(out[0], expected, rtol=1e-6)


def test_greedy_takes_the_best_and_bias_bans():
    logits = np.zeros((3, VOCAB), np.float32)
    logits[:, 7:9] = 5.0, 4.0
    biased = dataclasses.replace(GREEDY, logit_bias={7: -np.inf, 3: 1.0})
    tokens, _ = _sample(logits, np.zeros((3, CONTEXT), np.int32), np.full(3, 4), options(GREEDY, biased, GREEDY))
    assert tokens.tolist() == [7, 8, 7]


def test_options_are_stored_by_their_bits():
    params = SamplingParams(temperature=0.7, top_p=0.9, top_k=5, logit_bias={3: -1.5}, logprobs=0, min_tokens=2)
    idle = RowOptions(SamplingParams(), 0, 0, 0, (), (False, False))
    arrays = sampling_arrays([RowOptions(params, 2**32 - 1, 4, 9, (7, 8), (False, True)), idle])
    assert arrays.seed.tolist() == [2**32 - 1, 0]
    np.testing.assert_array_equal(arrays.temperature, np.float32([0.7, 1.0]))
    np.testing.assert_array_equal(arrays.top_p, np.float32([0.9, 1.0]))
    assert [x.tolist() for x in (arrays.top_k, arrays.limit, arrays.min_length)] == [[5, 0], [9, 0], [6, 0]]
    assert arrays.stop_token_ids[:, :3].tolist() == [[7, 8, -1], [-1] * 3]
    assert (arrays.bias_ids[0, :2].tolist(), arrays.bias[0, :2].tolist()) == ([3, -1], [-1.5, 0.0])
    assert (arrays.logprobs.tolist(), arrays.constrained.tolist()) == ([True, False], [False, False])
    assert arrays.processors.tolist() == [[False, True], [False, False]]


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": 0.5},
        {"logit_bias": {3: 1.0}},
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"min_tokens": 1},
        {"logprobs": 0},
        {"structured_outputs": StructuredOutputsParams(choice=("a",))},
        {"allowed_token_ids": (3,)},
        {"bad_words": ("a",)},
    ],
)
def test_one_row_that_asks_for_more_than_the_best_token_is_noticed(more):
    length = np.array([4, 4])
    assert not asks_more_than_greedy(options(GREEDY, GREEDY), length)
    assert asks_more_than_greedy(options(GREEDY, dataclasses.replace(GREEDY, **more)), length)


def test_a_logits_processor_is_more_than_the_best_token():
    rows = [RowOptions(GREEDY, 0, 4, CONTEXT, (), wanted) for wanted in ((False, False), (False, True))]
    assert [bool(asks_more_than_greedy(sampling_arrays([row]), np.array([4]))) for row in rows] == [False, True]


def test_rows_that_ask_for_nothing_more_get_the_best_token():
    history, length, arrays = np.zeros((3, CONTEXT), np.int32), np.full(3, 4), options(*[GREEDY] * 3)
    for logits in np.random.default_rng(0).normal(size=(21, 3, VOCAB)).astype(np.float32).round():  # with ties
        np.testing.assert_array_equal(_sample(logits, history, length, arrays)[0], greedy(logits))


def test_min_tokens_keeps_stop_tokens_away():
    logits = np.zeros((1, VOCAB), np.float32)
    logits[:, 7:9] = 5.0, 4.0
    arrays = options(SamplingParams(temperature=0, min_tokens=2), stop_token_ids=(7,))
    history = np.zeros((1, CONTEXT), np.int32)
    assert [_sample(logits, history, np.array([n]), arrays)[0].item() for n in (4, 5, 6)] == [8, 8, 7]


@settings(max_examples=60)
@given(
    words=st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=5).map(tuple), max_size=8),
    text=st.lists(st.integers(0, 2), min_size=1, max_size=CONTEXT),
    prompt_length=st.integers(1, 6),
)
def test_bad_words_end_where_the_output_ends_as_they_begin(words, text, prompt_length):
    output = text[prompt_length:]
    ends = {word[-1] for word in words if len(word) <= len(output) + 1 and [*word[:-1]] == output[1 - len(word) :]}
    row = RowOptions(GREEDY, 0, prompt_length, CONTEXT, (), (), tuple(words))
    history = np.array([[*text, *[1] * (CONTEXT - len(text))]], np.int32)  # what is behind the text is no part of it
    found = _ends_of_bad_words(history, np.array([len(text)]), sampling_arrays([row]))
    assert set(found[0].tolist()) - {-1, 2**31 - 1} == ends


def test_draws_follow_the_distribution():
    count = 4000
    logits = np.tile(np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32)), (count, 1))
    arrays = options(*[SamplingParams(temperature=1.0)] * count)
    tokens, _ = _sample(logits, np.zeros((count, 2), np.int32), np.full(count, 4), arrays)
    shares = np.bincount(np.asarray(tokens), minlength=4) / count
    np.testing.assert_allclose(shares, [0.5, 0.3, 0.15, 0.05], atol=0.03)  # 3.8 standard deviations


def test_a_row_draws_the_same_whatever_its_batch():
    logits = np.random.default_rng(1).normal(0, 1, (3, VOCAB)).astype(np.float32)
    history, length = np.zeros((3, CONTEXT), np.int32), np.array([5, 6, 7])
    params = [SamplingParams(temperature=0.8, top_p=0.9), SamplingParams(temperature=0), SamplingParams(top_k=4)]
    together, _ = _sample(logits, history, length, options(*params, seeds=[11, 12, 13]))
    for row in range(3):
        one = slice(row, row + 1)
        alone, _ = _sample(logits[one], history[one], length[one], options(params[row], seeds=[11 + row]))
        assert alone[0] == together[row]


def test_logprobs_are_the_models_own():
    logits = np.random.default_rng(2).normal(0, 1, (1, VOCAB)).astype(np.float32)
    arrays = options(SamplingParams(temperature=0, logit_bias={4: 100.0}, logprobs=3))
    tokens, logprobs = _sample(logits, np.zeros((1, CONTEXT), np.int32), np.array([4]), arrays)
    expected = logits[0] - np.log(np.exp(logits[0]).sum())
    assert tokens.item() == 4
    np.testing.assert_allclose(logprobs.chosen, expected[4:5], rtol=1e-5)
    np.testing.assert_array_equal(logprobs.top_ids[0, :3], np.argsort(-expected)[:3])
    np.testing.assert_allclose(logprobs.top[0, :3], np.sort(expected)[::-1][:3], rtol=1e-5)


def test_logprobs_of_a_vocabulary_smaller_than_the_array():
    out = logprobs_of(jnp.zeros((1, 5)), jnp.array([2]))
    assert out.top_ids[0, 5:].tolist() == [-1] * 15
    np.testing.assert_allclose(out.top[0, :5], np.log(0.2), rtol=1e-6)


def test_logprobs_where_devices_have_padding_alone():
    """Far below what exp() can take, so that the padding's maximum must not count."""
    logits = np.random.default_rng(2).normal(-200, 1, (2, 128)).astype(np.float32)
    logits[:, 40:] = -np.inf  # of four parts, two and a half
    tokens = np.array([3, 39])
    mesh = MeshConfig(tensor=4).build()
    split = jax.shard_map(logprobs_of, mesh=mesh, in_specs=(P(None, "tensor"), P()), out_specs=P(), check_vma=False)
    found, alone = jax.jit(split)(logits, tokens), logprobs_of(jnp.asarray(logits), tokens)
    assert np.isfinite(alone.chosen).all()
    np.testing.assert_allclose(found.chosen, alone.chosen, rtol=1e-5)
    np.testing.assert_allclose(found.top, alone.top, rtol=1e-5)
    np.testing.assert_array_equal(found.top_ids, alone.top_ids)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("min_tokens", -1),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("presence_penalty", float("inf")),
        ("frequency_penalty", float("nan")),
        ("seed", -1),
        ("seed", 2**32),
        ("n", 0),
        ("stop", ("",)),
        ("stop_token_ids", tuple(range(17))),
        ("logit_bias", dict.fromkeys(range(301), 0.0)),
        ("logit_bias", {1: float("nan")}),
        ("logprobs", 21),
        ("prompt_logprobs", -1),
    ],
)
def test_invalid_parameters_are_named(field, value):
    with pytest.raises(ValueError, match=rf"SamplingParams\.{field} must be"):
        SamplingParams(**{field: value})


def test_min_tokens_beyond_max_tokens():
    with pytest.raises(ValueError, match="max_tokens=3"):
        SamplingParams(max_tokens=3, min_tokens=4)


@pytest.mark.parametrize("params", [{"temperature": 0}, {}, {"top_k": 3}, {"top_p": 0.5, "min_p": 0.1}])
@pytest.mark.parametrize("wrong", ["all -inf", "all NaN", "one NaN", "one negative NaN"])
def test_a_row_that_leaves_nothing_has_no_token_and_its_neighbours_have_theirs(wrong, params):
    logits = np.random.default_rng(0).normal(0, 3, (3, VOCAB)).astype(np.float32)
    history, length = np.zeros((3, CONTEXT), np.int32), np.full(3, 4, np.int32)
    expected, _ = _sample(logits, history, length, options(*[SamplingParams(**params)] * 3))
    values = {"all -inf": -np.inf, "all NaN": np.nan, "one NaN": np.nan, "one negative NaN": -np.nan}
    logits[1, :: VOCAB if wrong.startswith("one") else 1] = values[wrong]
    tokens, _ = _sample(logits, history, length, options(*[SamplingParams(**params)] * 3))
    assert tokens.tolist() == [expected[0], NO_TOKEN, expected[2]]

"""The n-gram proposer: what it proposes, that it changes no text and no distribution, and when it stops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.compiled import Costs
from jaxinfer.generation import LLM, SamplingParams
from jaxinfer.generation.engine.speculation import RETRY, TRIES, PassCosts, SpeculationControl
from jaxinfer.generation.execution.programs.ngram import MAX_NGRAM, MIN_NGRAM, propose

CONTEXT, COUNT = 24, 5
_propose = jax.jit(propose, static_argnums=2)


def proposed(tokens):
    """What `propose` proposes, by its docstring."""
    ends = {}
    for end in range(len(tokens) - 1):
        for size in range(min(MAX_NGRAM, end + 1), MIN_NGRAM - 1, -1):
            if tokens[end + 1 - size : end + 1] == tokens[-size:]:
                ends[end] = size
                break
    if not ends:
        return []
    best = max(ends, key=lambda end: (ends[end], end))
    repeated = tokens[best + 1 :]
    return [repeated[i % len(repeated)] for i in range(COUNT)]


@settings(max_examples=200)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=CONTEXT), min_size=3, max_size=3))
def test_the_longest_then_latest_occurrence_is_continued(rows):
    history = np.full((3, CONTEXT), 1, np.int32)  # what is not known yet must not count
    for row, tokens in zip(history, rows, strict=True):
        row[: len(tokens)] = tokens
    found, count = _propose(history, np.array([len(tokens) for tokens in rows]), COUNT)
    found = [row[:n].tolist() for row, n in zip(np.asarray(found), count, strict=True)]
    assert found == [proposed(tokens) for tokens in rows]


@pytest.fixture(scope="module")
def speculating(model_dir):
    # One pass a dispatch: from a request's second dispatch on it has speculative tokens.
    # Speculation pays, however busy the machine is.
    costs = Costs.fixed({("decode", (("batch", 1), ("speculative", count))): 0.001 for count in (0, 4)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxinfer.generation.api.loading.engine_costs", lambda *key, **options: costs)
        return LLM(
            model_dir, max_batch=1, token_budget=32, chunk_size=32, num_speculative_tokens=4, max_decode_passes=1
        )


PROMPTS = [[5, 6, 7, 8, 9] * 4, [7] * 12]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.5, "stop_token_ids": tuple(range(0, 256, 17))},
        {"temperature": 0.0, "bad_words": ("&'(", "'(&", "((", ")&&"), "allowed_token_ids": (5, 6, 7, 8)},  # "&" is 5
    ],
    ids=["greedy", "sampled", "penalties", "logprobs", "stops", "bad words"],
)
def test_the_text_is_that_without_speculation(llm, speculating, options):
    # A bias makes the model repeat itself, so that speculative tokens are accepted.
    bias = dict.fromkeys((5, 6, 7, 8, 9), 6.0)
    params = [SamplingParams(seed=s, max_tokens=60, ignore_eos=True, logit_bias=bias, **options) for s in range(2)]
    plain = [output.outputs[0] for output in llm.generate(PROMPTS, params)]
    before = speculating.stats()
    drafted = [output.outputs[0] for output in speculating.generate(PROMPTS, params)]
    after = speculating.stats()
    assert after.draft_tokens - before.draft_tokens == sum(c.num_draft_tokens for c in drafted)
    assert after.accepted_tokens - before.accepted_tokens == sum(c.num_accepted_tokens for c in drafted)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in plain]
    assert [c.finish_reason for c in drafted] == [c.finish_reason for c in plain]
    if "logprobs" in options:
        expected = [p.logprob for c in plain for p in c.logprobs]
        np.testing.assert_allclose([p.logprob for c in drafted for p in c.logprobs], expected, atol=1e-4)
    if options == {"temperature": 0.0}:
        assert sum(c.num_accepted_tokens for c in drafted) > 10
    if "bad_words" in options:
        assert not any(word in c.text for c in drafted for word in options["bad_words"])


@pytest.mark.slow
def test_the_distribution_is_that_of_the_model(llm, speculating):
    """The second new token, which is proposed in each run, is drawn as often as the model says."""
    few = dict.fromkeys((5, 6, 7), 30.0)  # all the probability on three tokens
    # Every three of them stand in the prompt, so that there is always something to propose.
    prompt = [5 + int(digit) for digit in "00010020110120210221112122200"]

    def params(seed, count, **more):
        return SamplingParams(seed=seed, max_tokens=count, temperature=1.0, ignore_eos=True, logit_bias=few, **more)

    runs = 300
    # One after the other: steps that take in new prompts propose nothing.
    outputs = [speculating.generate([prompt], params(seed, 4))[0] for seed in range(runs)]
    pairs = [tuple(output.outputs[0].token_ids[:2]) for output in outputs]
    assert sum(output.outputs[0].num_draft_tokens for output in outputs) > runs / 2
    # The scores of the first and, after each first token, of the second token, by the engine's own log probabilities.
    likely = {}
    for first, p in following(llm, prompt).items():
        for second, q in following(llm, [*prompt, first]).items():
            likely[first, second] = p * q
    expected = np.array([likely[pair] for pair in sorted(likely)]) * runs
    observed = np.array([pairs.count(pair) for pair in sorted(likely)])
    kept = expected > 3
    chi2 = ((observed - expected) ** 2 / expected)[kept].sum()
    assert chi2 < kept.sum() + 4 * np.sqrt(2 * kept.sum()), (observed, expected)


def following(llm, prompt):
    """Probabilities of tokens 5, 6, 7 after a prompt, when all others are excluded."""
    scores = {}
    for token in (5, 6, 7):
        only = {i: -np.inf for i in range(257) if i != token}
        bias = dict(list(only.items())[:299])
        out = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=1, logprobs=0, logit_bias=bias))
        assert out[0].outputs[0].token_ids == [token]
        scores[token] = out[0].outputs[0].logprobs[0].logprob
    total = jax.nn.logsumexp(jnp.array(list(scores.values())))
    return {token: float(np.exp(score - total)) for token, score in scores.items()}


def test_speculation_that_does_not_pay_ends_and_is_tried_again():
    control = SpeculationControl(7)
    assert control.limit(0) == 7
    control.record(passes=2, accepted=1, num_output_tokens=3, cost=2.0)  # half a token a pass, for twice the time
    assert control.limit(3) == control.limit(3 + RETRY - 1) == 0
    assert control.limit(3 + RETRY) == 7
    control.record(passes=1, accepted=0, num_output_tokens=80, cost=2.0)
    assert control.limit(80 + 2 * RETRY - 1) == 0  # the wait doubles
    assert control.limit(80 + 2 * RETRY) == 7
    control.record(passes=1, accepted=5, num_output_tokens=300, cost=2.0)
    assert control.limit(300) == 7


def test_speculation_in_vain_is_tried_ever_more_rarely():
    control, tries = SpeculationControl(7), 0
    for tokens in range(1024):
        if control.limit(tokens):
            tries += 1
            control.record(passes=1, accepted=0, num_output_tokens=tokens, cost=1.5)
    assert tries == 7  # after 0, 16, 48, 112, 240, 496 and 1008 tokens


def test_costs_of_passes_are_told_apart():
    costs = PassCosts(Costs(), 7)
    plain, speculative = ((("batch", 4), ("speculative", count), ("pages", 8)) for count in (0, 7))
    assert costs.seconds(4) is None
    assert costs.ratio(4) == 2.0
    for _ in range(30):
        costs.record(plain, seconds=0.010, plain=10, speculative=0)
        costs.record(speculative, seconds=0.005 + 5 * 0.003, plain=5, speculative=5)
        costs.record(speculative, seconds=10.0, plain=9, speculative=1)  # tells next to nothing
        costs.record(speculative, seconds=1e-5, plain=0, speculative=0)  # all rows had ended
    assert costs.seconds(4) == pytest.approx(0.001)
    assert costs.ratio(4) == pytest.approx(3.0)
    costs.record((("batch", 2), ("speculative", 7), ("pages", 8)), seconds=0.02, plain=0, speculative=4)
    assert costs.seconds(2) is None  # the first call does not count
    costs.record((("batch", 2), ("speculative", 7), ("pages", 8)), seconds=0.02, plain=0, speculative=4)
    assert costs.seconds(2) == pytest.approx(0.005)


# In how many micro-batches rows go through the stages of a pipeline


def measured(stages, seconds, speculative=0):
    """Costs of a pipeline, in which passes of so many (rows, speculative tokens, micro-batches) took these seconds."""
    costs = PassCosts(Costs(), speculative, name="ring", stages=stages)
    for (rows, tokens, micro_batches), times in seconds.items():
        bucket = {"chunks": 0, "batch": rows, "speculative": tokens, "pages": 8, "micro_batches": micro_batches}
        plain, passes = (0, 4) if tokens else (4, 0)
        for time in (times[0], *times):  # the first call does not count
            costs.record(tuple(bucket.items()), 4 * time, plain=plain, speculative=passes)
    return costs


def test_rows_go_in_one_piece_without_stages_and_alone():
    assert PassCosts(Costs(), 0).micro_batches(8) == 1
    assert PassCosts(Costs(), 0, name="ring", stages=4).micro_batches(1) == 1


@pytest.mark.parametrize(
    ("divided", "together", "expected"),
    [
        ([], [], 4),  # nothing is known: the way that should be best comes first
        ([1.0] * (TRIES - 1), [], 4),
        ([1.0] * TRIES, [], 1),  # then the other
        ([1.0] * TRIES, [2.0] * (TRIES - 1), 1),
        ([1.0] * TRIES, [2.0] * TRIES, 4),  # then the quicker one
        ([2.0] * TRIES, [1.0] * TRIES, 1),
        ([1.0] * TRIES, [1.0] * TRIES, 4),
        ([1.0, 1.0, 1.0, 9.0], [2.0] * TRIES, 4),  # a stall changes nothing
    ],
)
def test_both_ways_through_a_pipeline_are_tried_and_the_quicker_one_is_kept(divided, together, expected):
    times = {(8, 0, 4): divided, (8, 0, 1): together}
    costs = measured(4, {sizes: seconds for sizes, seconds in times.items() if seconds})
    assert costs.micro_batches(8) == expected


def test_each_number_of_rows_is_judged_by_itself():
    times = {(4, 0, 4): 3.0, (4, 0, 1): 1.0, (8, 0, 4): 2.0, (8, 0, 1): 5.0}
    costs = measured(4, {sizes: [seconds] * TRIES for sizes, seconds in times.items()})
    assert [costs.micro_batches(rows) for rows in (1, 4, 8, 16)] == [1, 1, 4, 4]
    assert costs.seconds(8, 4) == pytest.approx(2.0)
    assert costs.seconds(8, 1) == pytest.approx(5.0)


def test_rows_are_padded_to_equal_micro_batches():
    """Six rows in four micro-batches are two in each."""
    costs = measured(4, {(8, 0, 4): [1.0] * TRIES, (6, 0, 1): [2.0] * TRIES})
    assert costs.micro_batches(6) == 4
    assert costs.seconds(6, 4) == pytest.approx(1.0)


def test_what_a_speculative_pass_costs_in_a_pipeline():
    """The ratio is of passes that go through it the same way."""
    times = {(8, 0, 2): 1.0, (8, 3, 2): 1.5, (8, 0, 1): 2.0, (8, 3, 1): 8.0}
    costs = measured(2, {sizes: [seconds] * TRIES for sizes, seconds in times.items()}, speculative=3)
    assert costs.micro_batches(8) == 2
    assert costs.ratio(8) == pytest.approx(1.5)


def test_speculative_passes_alone_decide_too():
    times = {(8, 3, 2): 1.5, (8, 3, 1): 1.0}
    costs = measured(2, {sizes: [seconds] * TRIES for sizes, seconds in times.items()}, speculative=3)
    assert costs.micro_batches(8) == 1


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({(8, 0, 2): [1.0], (8, 3, 2): [1.5] * 2}, 1),  # few plain passes are made once there is something to suggest
        ({(8, 0, 2): [1.0], (8, 3, 2): [1.5] * 2, (8, 3, 1): [1.2] * TRIES}, 1),
        ({(8, 0, 2): [1.0], (8, 3, 2): [1.5] * 2, (8, 3, 1): [1.7] * TRIES}, 2),
        ({(8, 0, 2): [2.0] * TRIES, (8, 3, 1): [1.7] * TRIES}, 2),  # they do not say: a speculative one will
    ],
)
def test_passes_of_one_kind_are_compared(times, expected):
    assert measured(2, times, speculative=3).micro_batches(8) == expected

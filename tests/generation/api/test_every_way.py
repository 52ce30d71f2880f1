"""Everything an engine can do, in every way to run a model: the results are those of one device."""

import dataclasses
import itertools

import jax
import numpy as np
import pytest
from flax import nnx

from jaxinfer import BeamSearchParams, FinishReason, SamplingParams, StructuredOutputsParams
from tests.generation.few_programs import few_programs
from tests.generation.sampled import PROMPTS, SAMPLED, check_logprobs, fail_one_launch, generate, logprob_errors
from tests.generation.ways import RARE_WAYS, THREE, WAYS, layout_of, whole_of
from tests.tiny import random_model

pytestmark = pytest.mark.xdist_group("ways")

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
MANY = [*PROMPTS, *([n] * (n + 1) for n in range(6))]
LONG = [list(range(3, 100)), [7, 3, 250, 9], list(range(200, 130, -1))]
"""Prompts of thirteen chunks, of one, and of nine."""

in_every_way = pytest.mark.parametrize(
    "way",
    [
        *(way for way in WAYS if way != whole_of(way)),
        *(pytest.param(way, marks=pytest.mark.slow) for way in RARE_WAYS if way != whole_of(way)),
    ],
)


def more_or_fewer_than_slots(llm):
    """One request, as many as slots or stages, and more than there are slots in all lanes."""
    return [generate(llm, GREEDY, MANY[:count]) for count in (1, 2, 9)]


def ends_of_rows(llm):
    """Rows that end early hold up no other, whichever lane or micro-batch they are in."""
    lengths = [dataclasses.replace(GREEDY, max_tokens=count) for count in (1, 40, 3)]
    stops = [dataclasses.replace(GREEDY, max_tokens=40, stop_token_ids=range(at, 256, 17)) for at in range(3)]
    long, short = dataclasses.replace(GREEDY, max_tokens=60), SamplingParams(temperature=0, max_tokens=1)
    return [generate(llm, lengths), generate(llm, stops), generate(llm, [long, short], PROMPTS[:2])]


def long_prompts(llm):
    """Rows go on beside the chunks of prompts, also those that end before others."""
    params = [dataclasses.replace(GREEDY, max_tokens=count) for count in (9, 30, 6, 14, 3, 2)]
    prompts = [*LONG, *([number + 1] * 33 for number in range(3))]
    return [generate(llm, params[these], prompts[these]) for these in (slice(1), slice(None))]


def options_of_sampling(llm):
    """Rows of different options share each step."""
    params = [SamplingParams(max_tokens=12, **options) for options in SAMPLED.values()]
    prompts = list(itertools.islice(itertools.cycle(PROMPTS), len(params)))
    return dict(zip(SAMPLED, generate(llm, params, prompts), strict=True))


def structures(llm):
    """Structured outputs of each kind, twice each, beside text that is free."""
    kinds = [
        {"choice": ["abc", "abd", "zz top"]},
        {"json": {"type": "object", "properties": {"a": {"enum": ["b", "cd"]}}, "required": ["a"]}},
        {"regex": "(ab|cd){3}[0-9]"},
    ]
    asked = [
        SamplingParams(temperature=1.0, seed=5, max_tokens=30, n=2, structured_outputs=StructuredOutputsParams(**kind))
        for kind in kinds
    ]
    return generate(llm, [*asked, GREEDY], [*PROMPTS, PROMPTS[1]])


def completions_from_the_prefix_cache(llm):
    """Several of a prompt, whose pages are copied; the second time from the prefix cache."""
    several = SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=6, logprobs=2, prompt_logprobs=2)
    before = llm.stats().cached_tokens
    texts = [generate(llm, params, LONG) for params in (several, dataclasses.replace(several, prompt_logprobs=None))]
    assert llm.stats().cached_tokens - before > 2 * 64
    return texts


def adapters(llm):
    """Each changes what is generated, beside rows with others and with none."""
    texts = [
        generate(llm, [dataclasses.replace(GREEDY, adapter=name) for name in names])
        for names in ((None,) * 3, ("a",) * 3, ("b",) * 3, ("c",) * 3, ("a", None, "b"), ("c", "c", "a"))
    ]
    assert all(texts.count(text) == 1 for text in texts)
    return texts


def beams(llm):
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    return [[beam.token_ids for beam in output.beams] for output in llm.beam_search(PROMPTS, params)]


FEATURES = (
    more_or_fewer_than_slots,
    ends_of_rows,
    long_prompts,
    options_of_sampling,
    structures,
    completions_from_the_prefix_cache,
    adapters,
    beams,
)


@in_every_way
@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.__name__)
def test_what_is_generated_is_what_one_device_generates(ways, way, feature):
    assert feature(ways[way]) == ways.expected(way, feature)
    ways[way].engine.scheduler.check_integrity()


def test_one_device_generates_what_passes_without_a_cache_predict(ways):
    """All layers have the same tokens in the pages that a table names, whatever the pages of each are like."""
    outputs = ways["whole"].generate(LONG, dataclasses.replace(GREEDY, logprobs=0, prompt_logprobs=0))
    model, tokens = random_model(THREE), np.zeros((len(LONG), THREE.context), np.int32)
    for row, prompt, output in zip(tokens, LONG, outputs, strict=True):
        row[: len(prompt) + 10] = prompt + output.outputs[0].token_ids
    positions = np.broadcast_to(np.arange(THREE.context, dtype=np.int32), tokens.shape)
    scores = nnx.jit(lambda model: jax.nn.log_softmax(model.logits(model(tokens, positions)[0])))(model)
    for row, expected, prompt, output in zip(tokens, np.asarray(scores), LONG, outputs, strict=True):
        found = [token.logprob for token in (*output.prompt_logprobs[1:], *output.outputs[0].logprobs)]
        np.testing.assert_allclose(found, expected[np.arange(len(found)), row[1 : len(found) + 1]], atol=1e-4)
        first, last = len(prompt) - 1, len(found)
        assert list(expected[first:last].argmax(-1)) == output.outputs[0].token_ids


@in_every_way
def test_log_probabilities_and_vectors(ways, way):
    llm, whole = ways[way], ways[whole_of(way)]
    check_logprobs(whole, llm)
    assert logprob_errors(llm, whole, GREEDY, LONG).max() < (1e-2 if way.endswith("bfloat16") else 1e-4)
    np.testing.assert_allclose(llm.embed(PROMPTS), whole.embed(PROMPTS), atol=1e-5)


@pytest.mark.slow
def test_pages_in_int8(ways):
    """Each page is rounded by its own scale, in layers of both widths."""
    errors = logprob_errors(ways.make(kv_dtype="int8"), ways["whole"], GREEDY, LONG)
    assert 0 < np.median(errors) < 0.1


@in_every_way
def test_a_step_that_fails_keeps_the_layout(ways, way, monkeypatch):
    llm, before = ways[way], layout_of(ways[way])
    fail_one_launch(llm.engine.executor, monkeypatch)
    failed = llm.generate(MANY, GREEDY)
    assert FinishReason.ERROR in {output.outputs[0].finish_reason for output in failed}
    assert [generate(llm, GREEDY, MANY[:1])] == ways.expected(way, more_or_fewer_than_slots)[:1]
    assert generate(llm, GREEDY, MANY) == ways.expected(way, more_or_fewer_than_slots)[2]
    assert layout_of(llm) == before


@in_every_way
def test_an_interrupt(ways, way, monkeypatch):
    llm = ways[way]
    calls, committing = [], llm.engine.scheduler.commit

    def commit(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return committing(*args)

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.scheduler, "commit", commit)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY)
    assert generate(llm, GREEDY, MANY) == ways.expected(way, more_or_fewer_than_slots)[2]
    llm.engine.scheduler.check_integrity()


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["host", "disk", "both ends"])
@pytest.mark.parametrize("way", [*WAYS, "lanes in stages", "bfloat16"])
def test_pages_come_back(ways, way, tier, tmp_path):
    """With few pages on the devices, of which each keeps its own part; from disk also to another engine.

    With both ends, the first half of the host's pages is computed while the second half comes.
    """
    both_ends, tier = tier == "both ends", tier.replace("both ends", "host")
    tiers = {"host": {"host_kv": 1 << 20}, "disk": {"disk_kv": tmp_path / "kv", "disk_kv_limit": 1 << 20}}
    options = (WAYS | RARE_WAYS)[way] | {"cache_bytes": 9 * ways[way].memory.page_bytes, **tiers[tier]}
    for times in (2, 1) if tier == "disk" else (2,):
        with few_programs():
            llm = ways.make(**options)
        for restoring in llm.engine._restoring if both_ends else ():
            restoring._split = lambda keys, tokens: (len(keys) // 2, 60.0)
        for feature in (more_or_fewer_than_slots, long_prompts, options_of_sampling, adapters, beams):
            for _ in range(times):
                assert feature(llm) == ways.expected(way, feature)
        llm.engine.scheduler.check_integrity()
        stats = llm.stats()
        kept = getattr(stats, f"{tier}_kv")
        assert kept.hits > 3
        assert kept.read_back > 10
        assert not both_ends or kept.from_back > 3
        assert stats.compile_misses == 0
        llm.close()
    assert tier == "host" or kept.stored < kept.pages  # the first engine had written most

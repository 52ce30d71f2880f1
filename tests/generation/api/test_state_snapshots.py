"""The prefix cache of models with recurrent states: prompts go on from snapshots, and tokens are the same without."""

import dataclasses

import jax
import pytest

from jaxinfer import LLM, BeamSearchParams, SamplingParams
from tests.generation.api.test_recurrent_states import GREEDY, LONG, SIZES, WAYS
from tests.generation.few_programs import few_programs
from tests.generation.sampled import generate
from tests.tiny import HYBRID, save_tiny

WITHOUT_CACHE = dataclasses.replace(GREEDY, prompt_logprobs=0)
"""The same tokens, after prompts that are computed from their first token."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models") / "hybrid", config=HYBRID)


@pytest.fixture(scope="module")
def whole(folder):
    """Its snapshots are at multiples of 16 tokens."""
    with few_programs():
        return LLM(folder, **SIZES | {"token_budget": 8})


def cached_tokens(llm, prompt, params=GREEDY):
    """Check that what follows a prompt is the same without the cache; returns how many of its tokens that has."""
    (output,), (plain,) = (llm.generate([prompt], p) for p in (params, WITHOUT_CACHE))
    assert all(completion.token_ids == plain.outputs[0].token_ids for completion in output.outputs)
    llm.engine.scheduler.check_integrity()
    return output.num_cached_tokens


def test_turns_and_prompts_with_a_common_beginning_go_on_from_snapshots(whole):
    turn = [250, *LONG[1][:40]]
    assert cached_tokens(whole, turn) == 0
    (answer,) = whole.generate([turn], GREEDY)
    assert cached_tokens(whole, [*turn, *answer.outputs[0].token_ids, 1, 2, 3]) == 32
    common = [251, *LONG[2][:20]]
    found = [cached_tokens(whole, [*common, n, *LONG[2][:n]]) for n in (25, 5, 30, 31)]
    assert found == [0, 0, 16, 16]


def test_completions_begin_with_the_snapshot_of_their_prompt(whole):
    before = whole.stats().cached_tokens
    assert cached_tokens(whole, [252, *LONG[3]], dataclasses.replace(GREEDY, n=3)) == 0
    assert whole.stats().cached_tokens - before == 2 * 64


def test_a_copy_needs_no_memory_in_addition(whole):
    state = sum(leaf.nbytes for leaf in jax.tree.leaves(whole.engine.executor.state.arrays))
    (program,) = (p for p in whole.engine.executor.programs if p.name == "copy_states")
    assert program.memory.alias_bytes == state
    assert program.memory.workspace_bytes < state // 4


@pytest.mark.slow
def test_completions_and_beams_are_the_same_without_the_cache(folder, whole):
    plain = LLM(folder, **SIZES, prefix_caching=False)
    several = SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=6)
    beams = BeamSearchParams(beam_width=2, n=2, max_tokens=20)
    for _ in range(2):
        assert generate(whole, several, LONG) == generate(plain, several, LONG)
        found, expected = (
            [[beam.token_ids for beam in output.beams] for output in llm.beam_search(LONG[1:4], beams)]
            for llm in (whole, plain)
        )
        assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize("way", [way for way in WAYS if way != "int8 KV"])
def test_every_way(folder, whole, way):
    """Twice, so that the second time goes on from snapshots."""
    llm = LLM(folder, **SIZES, **WAYS[way])
    expected = generate(whole, WITHOUT_CACHE, LONG[1:4])
    assert generate(llm, GREEDY, LONG[1:4]) == generate(llm, GREEDY, LONG[1:4]) == expected
    assert llm.stats().cached_tokens == 48 + 48 + 64
    llm.engine.scheduler.check_integrity()


@pytest.mark.slow
def test_preempted_sequences_go_on_from_their_prompts(folder, whole):
    """Pages for one sequence, and the prompt of another."""
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    llm = LLM(folder, cache_bytes=11 * whole.memory.page_bytes, **SIZES)
    steps, launch = [], llm.engine.executor.launch
    llm.engine.executor.launch = lambda batch: steps.append(batch) or launch(batch)
    expected = generate(whole, dataclasses.replace(params, prompt_logprobs=0), LONG[1:4])
    assert generate(llm, params, LONG[1:4]) == expected
    assert llm.stats().preemptions > 0
    assert any(batch.used_snapshots for batch in steps)

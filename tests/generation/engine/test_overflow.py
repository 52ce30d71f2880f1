"""A request whose values overflow harms itself alone: neither those beside it nor the next owners of its pages."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.generation.api.build import build_engine
from jaxinfer.generation.engine.config import KV_DTYPES
from jaxinfer.generation.execution.plan import Plan
from jaxinfer.generation.outputs import FinishReason
from jaxinfer.generation.params import SamplingParams
from jaxinfer.models.files.loading import load_model
from jaxinfer.text import Tokenizer
from tests.generation.conftest import SMALL_CONFIG, SMALL_PAGES

OVERFLOWS = 200  # a token whose embedding is infinite
PROMPTS = [np.random.default_rng(n).integers(97, 105, n).tolist() for n in (36, 33)]  # two take all pages
PREFIX = np.random.default_rng(7).integers(97, 105, 11).tolist()
PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def model(model_dir):
    loaded = load_model(model_dir)
    table = loaded.leaves["embed.table"].at[OVERFLOWS].set(jnp.inf)
    return dataclasses.replace(loaded, leaves=loaded.leaves | {"embed.table": table})


def run(engine, prompts, params=PARAMS):
    """The sequences of all prompts, run together."""
    sequences = [sequence for prompt in prompts for sequence in engine.prepare(prompt, params).sequences()]
    engine.add(sequences)
    while not all(sequence.finished for sequence in sequences):
        engine.step()
    engine.drain()
    return sequences


@pytest.fixture(scope="module", params=[None, *(pytest.param(name, marks=pytest.mark.slow) for name in KV_DTYPES)])
def kv_dtype(request):
    return request.param


@pytest.fixture(scope="module", params=[True, pytest.param(False, marks=pytest.mark.slow)], ids=["kernels", "xla"])
def engine(model, model_dir, kv_dtype, request):
    config = dataclasses.replace(SMALL_CONFIG, kv_dtype=kv_dtype, kernels=request.param)
    plan = Plan.of_model(model, config, num_pages=SMALL_PAGES)
    return build_engine(model, Tokenizer.from_folder(model_dir), config, plan)


def test_neighbours_and_next_owners_get_their_tokens(engine, kv_dtype):
    expected = [sequence.token_ids for sequence in run(engine, PROMPTS)]
    overflowing = [OVERFLOWS] * 33
    beside, overflown = run(engine, [PROMPTS[0], overflowing])
    assert beside.token_ids == expected[0]
    assert (overflown.finish_reason, overflown.num_output_tokens) == (FinishReason.ERROR, 0)
    assert "No token can be chosen" in overflown.error
    run(engine, [[*prompt[:4], *overflowing] for prompt in PROMPTS])  # begin like pages to be copied
    for cache in engine.executor.state.arrays.caches:
        finite = {
            name: np.isfinite(x.astype(jnp.float32)).all() for name, x in cache._asdict().items() if x is not None
        }
        assert finite.pop("k") == (kv_dtype == "int8")
        assert all(finite.values())
    assert [sequence.token_ids for sequence in run(engine, PROMPTS)] == expected


def test_who_shares_the_beginning_of_a_prompt_gets_its_tokens(engine, kv_dtype):
    """Of a chunk with a token that overflows: whole pages, and what is copied of one."""
    for count in (4, 8, 12):
        prompt = [count, *PREFIX[: count - 1]]
        (overflown,) = run(engine, [[*prompt, OVERFLOWS, 98]])
        assert kv_dtype == "int8" or "No token can be chosen" in overflown.error  # int8 stores 0
        (shared,) = run(engine, [[*prompt, 98, 99]])
        assert (shared.num_cached_tokens, shared.error) == (count, None)
        (computed,) = run(engine, [[*prompt, 98, 99]], dataclasses.replace(PARAMS, prompt_logprobs=0))
        assert (computed.num_cached_tokens, computed.token_ids) == (0, shared.token_ids)

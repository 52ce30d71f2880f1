"""A request whose values overflow harms itself alone: neither those beside it nor the next owners of its pages."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.generation.api.build import build_engine
from jaxinfer.generation.engine.config import KV_DTYPES
from jaxinfer.generation.execution.engine_plan import EnginePlan
from jaxinfer.generation.outputs import FinishReason
from jaxinfer.generation.params import SamplingParams
from jaxinfer.generation.text import Tokenizer
from jaxinfer.models.files.loading import load_model
from tests.generation.conftest import SMALL_CONFIG, SMALL_PAGES

OVERFLOWS = 200  # a token whose embedding is infinite
PROMPTS = [np.random.default_rng(n).integers(97, 105, n).tolist() for n in (36, 33)]  # two take all pages
PARAMS = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def model(model_dir):
    loaded = load_model(model_dir)
    table = loaded.leaves["embed.table"].at[OVERFLOWS].set(jnp.inf)
    return dataclasses.replace(loaded, leaves=loaded.leaves | {"embed.table": table})


def run(engine, prompts):
    """The sequences of all prompts, run together."""
    sequences = [sequence for prompt in prompts for sequence in engine.prepare(prompt, PARAMS).sequences()]
    engine.add(sequences)
    while not all(sequence.finished for sequence in sequences):
        engine.step()
    engine.drain()
    return sequences


@pytest.mark.parametrize("kv_dtype", [None, *(pytest.param(name, marks=pytest.mark.slow) for name in KV_DTYPES)])
def test_neighbours_and_next_owners_get_their_tokens(model, model_dir, kv_dtype):
    config = dataclasses.replace(SMALL_CONFIG, kv_dtype=kv_dtype, token_budget=32, chunk_size=8)
    engine = build_engine(model, Tokenizer.from_folder(model_dir), config, EnginePlan(num_pages=SMALL_PAGES))
    expected = [sequence.token_ids for sequence in run(engine, PROMPTS)]
    overflowing = [OVERFLOWS] * 33
    beside, overflown = run(engine, [PROMPTS[0], overflowing])
    assert beside.token_ids == expected[0]
    assert (overflown.finish_reason, overflown.num_output_tokens) == (FinishReason.ERROR, 0)
    assert "No token can be chosen" in overflown.error
    run(engine, [[*prompt[:4], *overflowing] for prompt in PROMPTS])  # begin like pages to be copied
    left = [x for x in jax.tree.leaves(engine.executor.state.arrays.caches) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert all(np.isfinite(x).all() == (kv_dtype == "int8") for x in left)  # in int8 these are the scales
    assert [sequence.token_ids for sequence in run(engine, PROMPTS)] == expected

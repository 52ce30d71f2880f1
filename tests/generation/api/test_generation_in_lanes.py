"""Data-parallel lanes: each has its own requests, slots and pages, and all run a step together."""

import jax
import numpy as np
import pytest

from jaxinfer import LLM, Embedder, SamplingParams
from jaxinfer.models.files.conversion import convert
from jaxinfer.sharding import MeshConfig
from tests.generation.sampled import PROMPTS, SIZES, generate, logprob_errors
from tests.models import goldens
from tests.tiny import MOE_CONFIGS, save_tiny

pytestmark = pytest.mark.xdist_group("ways")

LANES, SPLIT = MeshConfig(data=2), MeshConfig(data=2, tensor=2)
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
UNEQUAL = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (1, 40, 3)]


def test_each_lane_has_slots_and_pages_of_its_own(ways):
    lanes, alone = ways["lanes"], ways["whole"]
    table = jax.tree.leaves(lanes.engine.executor.state.arrays.caches)[0]
    assert len(table) == 2 * lanes.memory.num_pages
    assert table.sharding.shard_shape(table.shape)[0] == lanes.memory.num_pages
    assert lanes.memory.num_pages == alone.memory.num_pages
    assert lanes.memory.page_bytes == alone.memory.page_bytes
    history = lanes.engine.executor.state.arrays.slots.history
    assert history.shape[0] == 2 * (lanes.engine.config.max_batch + 1)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [LANES, SPLIT], ids=str)
@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_speculation(model_dir, mesh, kv_dtype):
    """A lane whose rows have speculative tokens beside one whose rows have none."""
    options = {**SIZES, "num_speculative_tokens": 4, "kv_dtype": kv_dtype, "max_batch": 1}
    bias = dict.fromkeys((5, 6, 7, 8, 9), 6.0)  # makes the model repeat itself
    params = [SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logit_bias=bias), GREEDY]
    prompts = [[5, 6, 7, 8, 9] * 4, [7, 3, 250, 9]]
    alone, llm = LLM(model_dir, **options), LLM(model_dir, mesh=mesh, **options)
    assert generate(llm, params, prompts) == generate(alone, params, prompts)
    assert llm.stats().accepted_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [LANES, MeshConfig(data=2, expert=2), SPLIT], ids=str)
def test_loads_of_experts(tmp_path, mesh):
    """All lanes have a part of the experts, and go on until the last one ends."""
    path = save_tiny(tmp_path / "moe", config=MOE_CONFIGS["shared"])
    options = {**SIZES, "max_batch": 1, "context": 64, "max_decode_passes": 4, "expert_load": True}
    alone, lanes = (LLM(path, mesh=mesh, **options).generate(PROMPTS, UNEQUAL) for mesh in (None, mesh))
    for (expected,), (completion,) in ((a.outputs, b.outputs) for a, b in zip(alone, lanes, strict=True)):
        assert completion.token_ids == expected.token_ids
        np.testing.assert_array_equal(completion.expert_load.tokens, expected.expert_load.tokens)
        assert not completion.expert_load.dropped.any()


@pytest.mark.parametrize("weights", ["host", "disk", "auto"])
def test_streamed_weights_are_refused(model_dir, weights):
    with pytest.raises(ValueError, match=f"weights='{weights}' is not for a mesh with lanes, and this one has data=2"):
        LLM(model_dir, mesh=LANES, weights=weights)


# Encoders


@pytest.fixture(scope="module")
def encoder_dir(tmp_path_factory):
    convert(goldens.DIRECTORY / "bert_awkward", path := tmp_path_factory.mktemp("models") / "bert")
    return path


@pytest.mark.parametrize("mesh", [LANES, pytest.param(SPLIT, marks=pytest.mark.slow)], ids=str)
def test_an_encoder(encoder_dir, mesh):
    """One text beside nothing in the other lane, and a number that lanes do not divide."""
    texts = [[1, 2, 3], [4, 5, 6, 7, 8], [9] * 14]
    alone, lanes = (Embedder(encoder_dir, mesh=mesh, max_batch=4) for mesh in (None, mesh))
    for count in (1, 3):
        np.testing.assert_allclose(lanes.embed(texts[:count]), alone.embed(texts[:count]), atol=1e-5)
    (program, *_) = list(lanes.engine.executor.programs)
    assert program.sizes.batch % 2 == 0


# In bfloat16 tokens may differ where two are nearly as likely.


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [MeshConfig(tensor=3), SPLIT], ids=str)
def test_bfloat16(model_dir, processing_llm, mesh):
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    one, several = (LLM(model_dir, dtype="bfloat16", mesh=mesh, **SIZES) for mesh in (None, mesh))
    errors = [logprob_errors(llm, processing_llm, params).mean() for llm in (one, several)]
    assert 0 < errors[1] < 1.5 * errors[0]

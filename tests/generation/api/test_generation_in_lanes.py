"""Data-parallel lanes: each has its own requests, slots and pages, and all run a step together."""

import jax
import numpy as np
import pytest

from jaxinfer import LLM, Embedder, SamplingParams
from jaxinfer.generation.outputs import FinishReason
from jaxinfer.models.files.conversion import convert
from jaxinfer.sharding import MeshConfig
from tests.generation.sampled import PROMPTS, SAMPLED, SIZES, fail_one_launch, generate, logprob_errors, only_even
from tests.models import goldens
from tests.peft import random_pair, save_adapter
from tests.tiny import CONFIG, MOE_CONFIGS, save_tiny

LANES, SPLIT = MeshConfig(data=2), MeshConfig(data=2, tensor=2)
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
UNEQUAL = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (1, 40, 3)]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    rng = np.random.default_rng(0)
    width, heads = CONFIG.embed, CONFIG.attention.q_heads * CONFIG.attention.head_dim
    pairs = {
        "model.layers.0.self_attn.q_proj": random_pair(heads, width, 3, rng),
        "model.layers.1.mlp.down_proj": random_pair(width, CONFIG.mlp.hidden, 3, rng),
    }
    return {"a": save_adapter(tmp_path_factory.mktemp("adapters") / "a", pairs)}


@pytest.fixture(scope="module")
def options(adapters):
    return {"max_decode_passes": 4, "logits_processors": {"even": only_even}, "adapters": adapters, **SIZES}


@pytest.fixture(scope="module")
def alone(model_dir, options):
    return LLM(model_dir, **options)


@pytest.fixture(scope="module")
def lanes(model_dir, options):
    return LLM(model_dir, mesh=LANES, **options)


@pytest.fixture(scope="module")
def split(model_dir, options):
    return LLM(model_dir, mesh=SPLIT, **options)


def test_each_lane_has_slots_and_pages_of_its_own(lanes, alone):
    table = jax.tree.leaves(lanes.engine.executor.state.arrays.caches)[0]
    assert len(table) == 2 * lanes.memory.num_pages
    assert table.sharding.shard_shape(table.shape)[0] == lanes.memory.num_pages
    assert lanes.memory.num_pages == alone.memory.num_pages
    assert lanes.memory.page_bytes == alone.memory.page_bytes
    history = lanes.engine.executor.state.arrays.slots.history
    assert history.shape[0] == 2 * (SIZES["max_batch"] + 1)


def test_lanes_generate_the_tokens_of_one_device(lanes, alone):
    """One request, fewer than slots, and more than there are slots in all lanes."""
    prompts = [*PROMPTS, *([n] * (n + 1) for n in range(6))]
    for count in (1, 2, 9):
        assert generate(lanes, GREEDY, prompts[:count]) == generate(alone, GREEDY, prompts[:count])
    lanes.engine.scheduler.check_integrity()


def test_the_end_of_one_lane_holds_up_no_other(lanes, alone):
    assert generate(lanes, UNEQUAL) == generate(alone, UNEQUAL)
    long = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    short = SamplingParams(temperature=0, max_tokens=1)
    assert generate(lanes, [long, short], PROMPTS[:2]) == generate(alone, [long, short], PROMPTS[:2])


QUICK = "seeded", "structured"


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SAMPLED if name not in QUICK)]
)
def test_every_option_of_sampling(lanes, alone, name):
    params = [SamplingParams(max_tokens=8, **SAMPLED[name]), GREEDY, SamplingParams(max_tokens=12, **SAMPLED[name])]
    assert generate(lanes, params) == generate(alone, params)


def test_several_completions_prefixes_adapters_and_vectors(lanes, alone):
    several = SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=6, logprobs=2, prompt_logprobs=2)
    for _ in range(2):  # the second time from the prefix cache
        assert generate(lanes, several) == generate(alone, several)
    assert lanes.stats().cached_tokens > 0
    adapted = [SamplingParams(temperature=0, max_tokens=6, adapter=name) for name in ("a", None, "a")]
    assert generate(lanes, adapted) == generate(alone, adapted)
    np.testing.assert_allclose(lanes.embed(PROMPTS), alone.embed(PROMPTS), atol=1e-5)


def test_log_probabilities(lanes, alone):
    params = SamplingParams(temperature=0, max_tokens=5)
    assert logprob_errors(lanes, alone, params).max() < 1e-5


@pytest.mark.slow
def test_lanes_of_several_devices(split, alone):
    assert generate(split, UNEQUAL) == generate(alone, UNEQUAL)
    seeded = SamplingParams(max_tokens=8, **SAMPLED["seeded"])
    assert generate(split, seeded) == generate(alone, seeded)


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


# What goes wrong


def test_a_step_that_fails(lanes, alone, monkeypatch):
    executor = lanes.engine.executor
    before = [x.sharding for x in jax.tree.leaves(executor.state.arrays)]
    fail_one_launch(executor, monkeypatch)
    failed = lanes.generate(PROMPTS, GREEDY)
    assert FinishReason.ERROR in {output.outputs[0].finish_reason for output in failed}
    assert generate(lanes, GREEDY) == generate(alone, GREEDY)
    assert [x.sharding for x in jax.tree.leaves(executor.state.arrays)] == before


def test_an_interrupt(lanes, alone, monkeypatch):
    calls = []

    def commit(*args):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return committing(*args)

    committing = lanes.engine.scheduler.commit
    with monkeypatch.context() as patch:
        patch.setattr(lanes.engine.scheduler, "commit", commit)
        with pytest.raises(KeyboardInterrupt):
            lanes.generate(PROMPTS, GREEDY)
    assert generate(lanes, GREEDY) == generate(alone, GREEDY)
    lanes.engine.scheduler.check_integrity()


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
def test_bfloat16(model_dir, alone, mesh):
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    one, several = (LLM(model_dir, dtype="bfloat16", mesh=mesh, **SIZES) for mesh in (None, mesh))
    errors = [logprob_errors(llm, alone, params).mean() for llm in (one, several)]
    assert 0 < errors[1] < 1.5 * errors[0]

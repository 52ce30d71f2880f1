"""A model split over a mesh generates what it generates on one device."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from jaxinfer import LLM, Embedder, SamplingParams
from jaxinfer.compiled.dumps import read_collectives
from jaxinfer.generation.execution.programs.decode import Decode
from jaxinfer.models import Decoder, WeightFormat
from jaxinfer.models.config import BlockKind
from jaxinfer.models.files.conversion import convert
from jaxinfer.models.files.loading import save_model
from jaxinfer.sharding import MeshConfig, ShardingRules
from tests.generation.sampled import (
    PROMPTS,
    SAMPLED,
    SIZES,
    generate,
    logprob_errors,
    only_even,
)
from tests.models import goldens
from tests.peft import random_pair, save_adapter
from tests.tiny import CONFIG, MOE_CONFIGS, save_tiny

pytestmark = pytest.mark.xdist_group("ways")

ONE = {"max_batch": 1, "token_budget": 8, "chunk_size": 8, "max_decode_passes": 4}
"""An engine of few programs, for one request at a time."""


def test_leaves_and_caches_are_split(ways):
    llm = ways["mesh"]
    leaves = llm.model.leaves
    for name, axis in (("layers.0.attention.qkv.weight", 0), ("layers.1.mlp.down.weight", 1), ("embed.table", 0)):
        assert leaves[name].addressable_shards[0].data.shape[axis] == leaves[name].shape[axis] // 4
    caches = jax.tree.leaves(llm.engine.executor.state.arrays.caches)
    assert all(c.addressable_shards[0].data.shape[2] == 1 for c in caches)  # one of four copies of two KV heads


# What a pass exchanges


def collectives(llm, **sizes):
    """Of every run or turn of the decode program, without what rows may ask for besides their best tokens."""
    program = llm.engine.executor.programs.get(Decode(**sizes))
    return read_collectives(program.executable.as_text(), llm.model.mesh.size)


def test_a_greedy_pass_exchanges_sums_and_one_pair_a_row(ways):
    llm = ways["mesh"]
    found = [c for c in collectives(llm, batch=2, speculative=0, pages=8) if not c.conditions]
    sums = [c for c in found if c.kind == "all-reduce"]
    assert len(sums) == 2 * llm.model.config.layers + 1
    assert {(c.shape[-1], c.bytes) for c in sums} == {(CONFIG.embed, 2 * 4 * CONFIG.embed)}
    (best,) = [c for c in found if c.kind != "all-reduce"]
    assert (best.kind, best.bytes) == ("all-gather", 2 * 4 * 8)
    assert all(c.participants == 4 for c in found)


def test_sampling_exchanges_little(ways):
    llm = ways["mesh"]
    found = collectives(llm, batch=2, speculative=0, pages=8)
    found = [c for c in found if c.kind != "all-reduce" or c.shape[-1] != CONFIG.embed]  # those are of the model
    bounded = [
        c for c in found if not any("logits_processor" in x or "top_k" in x or "top_p" in x for x in c.conditions)
    ]
    assert 0 < len(bounded) <= 6
    assert sum(c.bytes for c in bounded) <= 64 * 2 * 4 * 8


# Everything that an engine can do


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"kv_dtype": "int8", "num_speculative_tokens": 3}, marks=pytest.mark.slow),
        pytest.param({"quantize": "fp8"}, marks=pytest.mark.slow),
        pytest.param({"kv_dtype": "int8"}, marks=pytest.mark.slow),
        pytest.param({"kv_dtype": "bfloat16", "num_speculative_tokens": 3}, marks=pytest.mark.slow),
        pytest.param({"num_speculative_tokens": 3}, marks=pytest.mark.slow),
        pytest.param({"rules": ShardingRules(vocab=None)}, marks=pytest.mark.slow),
        pytest.param({"rules": ShardingRules(heads=None, kv_heads=None, mlp=None)}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_two_devices_generate_the_same(model_dir, options):
    params = SamplingParams(temperature=0, max_tokens=10)
    prompts = [[1, 2, 3] * 5]
    on_one = {name: value for name, value in options.items() if name != "rules"}
    alone = generate(LLM(model_dir, **ONE, **on_one), params, prompts)
    assert generate(LLM(model_dir, mesh=MeshConfig(tensor=2), **ONE, **options), params, prompts) == alone


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["int4", "int8"])
def test_quantised_rows_are_as_precise_in_parts(model_dir, quantize):
    """Each device rounds its part of a row by its own maximum: other numbers than one device's, no worse ones."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)

    def logprobs(**options):
        (out,) = LLM(model_dir, **ONE, **options).generate([list(range(40))], params)
        return np.array([token.logprob for token in out.prompt_logprobs[1:]])

    exact = logprobs()
    alone, split = (
        np.abs(logprobs(quantize=quantize, mesh=mesh) - exact).mean() for mesh in (None, MeshConfig(tensor=2))
    )
    assert split < 1.5 * alone


def save_random_adapter(path):
    """An adapter of matrices whose outputs or inputs a mesh splits."""
    rng = np.random.default_rng(0)
    width, heads = CONFIG.embed, CONFIG.layer(0).attention.q_heads * CONFIG.layer(0).attention.head_dim
    pairs = {
        "model.layers.0.self_attn.q_proj": random_pair(heads, width, 3, rng),
        "model.layers.0.self_attn.v_proj": random_pair(heads // 2, width, 3, rng),
        "model.layers.1.self_attn.o_proj": random_pair(width, heads, 3, rng),
        "model.layers.1.mlp.gate_proj": random_pair(CONFIG.layer(0).mlp.hidden, width, 3, rng),
        "model.layers.1.mlp.down_proj": random_pair(width, CONFIG.layer(0).mlp.hidden, 3, rng),
    }
    return save_adapter(path, pairs)


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [2, 4])
def test_narrow_embeddings_in_post_norm_blocks(tmp_path, tensor):
    config = dataclasses.replace(CONFIG.with_block(BlockKind.POST_NORM), word_embed=16, final_norm=False)
    save_model(tmp_path / "m", Decoder(config, WeightFormat(), rngs=nnx.Rngs(1)), family="tiny")
    params, prompts = SamplingParams(temperature=0, max_tokens=10), PROMPTS[:1]
    alone = generate(LLM(tmp_path / "m", **ONE), params, prompts)
    assert generate(LLM(tmp_path / "m", mesh=MeshConfig(tensor=tensor), **ONE), params, prompts) == alone


@pytest.fixture(scope="module")
def encoder_dir(tmp_path_factory):
    """Three heads."""
    convert(goldens.DIRECTORY / "bert_awkward", path := tmp_path_factory.mktemp("models") / "bert")
    return path


def test_an_encoder(encoder_dir):
    texts = [[1, 2, 3], [4, 5, 6, 7, 8]]
    alone, split = (Embedder(encoder_dir, mesh=mesh).embed(texts) for mesh in (None, MeshConfig(tensor=4)))
    np.testing.assert_allclose(split, alone, atol=1e-5)


@pytest.mark.parametrize(
    ("tensor", "rules"),
    [
        (2, None),  # three heads and an empty one
        pytest.param(4, None, marks=pytest.mark.slow),
        pytest.param(2, ShardingRules(heads=None, kv_heads=None), marks=pytest.mark.slow),
    ],
)
def test_an_encoder_merges_the_same_tokens(encoder_dir, tensor, rules):
    """Each device has the keys of some heads; which tokens are alike is known from all of them."""
    texts = [np.random.default_rng(seed).integers(1, 53, 14).tolist() for seed in range(3)]
    alone = Embedder(encoder_dir, level=-2).embed(texts)
    split = Embedder(encoder_dir, level=-2, mesh=MeshConfig(tensor=tensor), rules=rules)
    np.testing.assert_allclose(split.embed(texts), alone, atol=1e-5)
    if rules is None:  # besides what level 0 exchanges, the mean key of each token in each layer
        (program,) = [program for program in split.engine.executor.programs if program.name == "embed"]
        found = read_collectives(program.executable.as_text(), tensor)
        layers = split.model.config.layers
        assert [one.kind for one in found] == ["all-reduce"] * (3 * layers + 1)
        head_dim = split.model.config.layer(0).attention.head_dim
        assert [one.shape[-1] for one in found].count(head_dim) == layers


# In bfloat16 tokens may differ where two are nearly as likely. What is generated is as precise as on one device.


THREE = MeshConfig(tensor=3)
BY_LAYER = {"weights": "host", "max_batch": 1, "token_budget": 64, "chunk_size": 64}
"""One program for all layers of a kind, so that deep models compile quickly."""
LONG_PROMPTS = [np.random.default_rng(seed).integers(0, 256, 128).tolist() for seed in range(2)]
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A model of 32 layers, in float32, and the mean error of its log probabilities in bfloat16 on one device."""
    config = dataclasses.replace(CONFIG.with_windows((None,)), layers=32, context=256)
    model = Decoder(config, WeightFormat(), rngs=nnx.Rngs(1))
    save_model(path := tmp_path_factory.mktemp("models") / "deep", model, family="tiny")
    exact = LLM(path, **BY_LAYER)
    alone = LLM(path, dtype="bfloat16", **BY_LAYER)
    return path, exact, logprob_errors(alone, exact, ONE_TOKEN, LONG_PROMPTS).mean()


@pytest.mark.slow
@pytest.mark.parametrize("tensor", range(2, 9))
def test_deep_models_are_as_precise_in_bfloat16(deep, tensor):
    """The residual stream, which all layers add to, is rounded as on one device, whatever the number of devices."""
    path, exact, alone = deep
    split = LLM(path, dtype="bfloat16", mesh=MeshConfig(tensor=tensor), **BY_LAYER)
    assert logprob_errors(split, exact, ONE_TOKEN, LONG_PROMPTS).mean() < 1.5 * alone


def test_an_encoder_in_bfloat16(encoder_dir):
    texts = [np.random.default_rng(seed).integers(1, 53, 14).tolist() for seed in range(4)]
    exact = Embedder(encoder_dir).embed(texts)
    alone, split = (
        np.abs(Embedder(encoder_dir, dtype="bfloat16", mesh=mesh).embed(texts) - exact).mean()
        for mesh in (None, MeshConfig(tensor=3))
    )
    assert split < 1.5 * alone


def check_precision(path, exact, params, prompts=PROMPTS, *, mesh=THREE, rules=None, average=np.mean, **options):
    """That several devices' log probabilities are as near to those in float32 as one device's, but for chance."""
    split = LLM(path, dtype="bfloat16", mesh=mesh, rules=rules, **options)
    errors = [
        average(logprob_errors(llm, exact, params, prompts)) for llm in (LLM(path, dtype="bfloat16", **options), split)
    ]
    assert 0 < errors[1] < 1.5 * errors[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"mesh": MeshConfig(tensor=2), "kv_dtype": "int8"},
        {"quantize": "int8"},
        {"quantize": "int4"},
        {"quantize": "fp8"},
        {"num_speculative_tokens": 3},
        {"weights": "disk", "max_decode_passes": 1},
        {"rules": ShardingRules(vocab=None)},
        {"rules": ShardingRules(heads=None, kv_heads=None)},
        {"rules": ShardingRules(heads=None, kv_heads=None, mlp=None)},
    ],
    ids=str,
)
def test_everything_an_engine_can_do_in_bfloat16(model_dir, processing_llm, options):
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    check_precision(model_dir, processing_llm, params, [[1, 2, 3] * 5, *PROMPTS], **ONE | options)


@pytest.fixture(scope="module")
def bfloat16_pair(model_dir):
    options = {"dtype": "bfloat16", "max_decode_passes": 4, "logits_processors": {"even": only_even}, **SIZES}
    return LLM(model_dir, **options), LLM(model_dir, mesh=MeshConfig(tensor=3), **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLED)
def test_every_option_in_bfloat16(bfloat16_pair, processing_llm, name):
    params = SamplingParams(max_tokens=30, **SAMPLED[name])
    alone, split = (logprob_errors(llm, processing_llm, params).mean() for llm in bfloat16_pair)
    assert 0 < split < 1.5 * alone


@pytest.mark.slow
def test_adapters_in_bfloat16(model_dir, tmp_path):
    adapters = {"a": save_random_adapter(tmp_path / "a")}
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, adapter="a")
    exact = LLM(model_dir, adapters=adapters, **ONE)
    check_precision(model_dir, exact, params, adapters=adapters, **ONE)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in goldens.FEATURES["on a mesh"] if name in goldens.DECODERS])
def test_every_family_in_bfloat16(name, tmp_path):
    """Of mixtures most tokens: rounding makes a few choose other experts, on one device too, and these are far off."""
    convert(goldens.DIRECTORY / name, tmp_path / name)
    average, count = (np.median, 16) if name in goldens.EXPERTS else (np.mean, 4)
    prompts = [np.random.default_rng(seed).integers(0, 50, 16).tolist() for seed in range(count)]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    mesh = MeshConfig(tensor=2) if name in goldens.WITH_STATES else THREE  # a mesh that divides their key heads
    exact = LLM(tmp_path / name, **ONE)
    check_precision(tmp_path / name, exact, params, prompts, mesh=mesh, average=average, **ONE)


# Mixtures of experts


@pytest.fixture(scope="module", params=MOE_CONFIGS)
def mixture(request, tmp_path_factory):
    """A mixture whose widths are whole groups of int4, and its log probabilities in float32."""
    config = MOE_CONFIGS[request.param]
    config = config.with_mlps([wide(config.layer(layer).mlp) for layer in range(config.layers)])
    config = dataclasses.replace(config.with_attention(q_heads=16, kv_heads=8, head_dim=16), embed=128)
    path = save_tiny(tmp_path_factory.mktemp("models") / "mixture", config=config)
    return path, LLM(path, **ONE)


def wide(mlp):
    moe = mlp.moe and dataclasses.replace(mlp.moe, shared_hidden=mlp.moe.shared_hidden and 512)
    return dataclasses.replace(mlp, hidden=512 if moe is None else 256, moe=moe)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [MeshConfig(expert=2, tensor=2), MeshConfig(data=2, expert=2)], ids=str)
@pytest.mark.parametrize(
    "options", [{"quantize": q} for q in ("int8", "int4", "fp8")] + [{"dtype": "bfloat16"}], ids=str
)
def test_rounded_experts_are_as_precise_in_parts(mixture, mesh, options):
    """Median errors are compared: where rounding chooses other experts, a token's error is of another size."""
    path, exact = mixture
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = [np.random.default_rng(seed).integers(0, 256, 40).tolist() for seed in range(4)]
    alone, split = (
        np.median(logprob_errors(LLM(path, mesh=on, **ONE, **options), exact, params, prompts)) for on in (None, mesh)
    )
    assert 0 < split < 1.5 * alone


# Refusals


@pytest.mark.parametrize(
    ("shape", "rules", "message"),
    [
        ({"model": 2}, None, r"mesh: unknown field 'model'; known: data, pipeline, expert, tensor"),
        (None, ShardingRules(vocab=None), "rules say how a mesh splits a model, and there is no mesh"),
    ],
)
def test_what_would_do_nothing_is_refused(model_dir, shape, rules, message):
    mesh = None if shape is None else jax.make_mesh((*shape.values(),), (*shape,), (AxisType.Auto,) * len(shape))
    with pytest.raises(ValueError, match=message):
        LLM(model_dir, mesh=mesh, rules=rules)


@pytest.mark.slow
def test_a_mesh_of_jax_with_its_axes_in_another_order(model_dir):
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh = jax.sharding.Mesh(devices, ("tensor", "data"), axis_types=(AxisType.Auto,) * 2)
    llm, params = LLM(model_dir, mesh=mesh, **ONE), SamplingParams(temperature=0, max_tokens=6)
    assert generate(llm, params, PROMPTS[:2]) == generate(LLM(model_dir, **ONE), params, PROMPTS[:2])
    assert len(llm.engine.scheduler.lanes) == 2


def test_rules_are_given_once(model_dir, tmp_path):
    (tmp_path / "mesh.toml").write_text("[mesh]\ntensor = 2\n[rules]\nvocab = []\n")
    with pytest.raises(ValueError, match=r"mesh.toml has a table \[rules\], and rules are given too"):
        LLM(model_dir, mesh=tmp_path / "mesh.toml", rules=ShardingRules())
    llm = LLM(model_dir, mesh=tmp_path / "mesh.toml", **ONE)
    assert llm.model.leaves["embed.table"].sharding.is_fully_replicated

"""What works with what: every family streamed, on a mesh, in stages, with speculation, with int8 KV, quantised.

Each test runs for all goldens of `goldens.FEATURES`, from which docs/families.md is written. All are slow: other tests
run with every change what a small model of our own shows.
"""

import dataclasses

import numpy as np
import pytest

from jaxinfer import LLM, Embedder, SamplingParams
from jaxinfer.compiled import Costs
from jaxinfer.compiled.dumps import read_collectives
from jaxinfer.generation.execution.programs.prefill import Prefill
from jaxinfer.models.config import QKNormScope, SharedMix
from jaxinfer.models.files.conversion import convert
from jaxinfer.models.files.loading import save_model
from jaxinfer.models.stages import divide
from jaxinfer.sharding import MeshConfig, ShardingRules
from tests.generation.sampled import generate, logprob_errors
from tests.models import goldens
from tests.tiny import random_model

pytestmark = pytest.mark.slow

ONE = {"max_batch": 1, "token_budget": 8, "chunk_size": 8}
"""An engine of few programs, for one request at a time."""
SENSITIVE = ("gemma4_awkward",)
"""Mixtures of which weights in bfloat16 alone have a mean error of 0.16: tokens choose other experts."""
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2, 7]]


def goldens_of(feature):
    return pytest.mark.parametrize("name", goldens.FEATURES[feature])


@pytest.fixture
def model(name, tmp_path):
    convert(goldens.DIRECTORY / name, tmp_path / name)
    return tmp_path / name


def is_encoder(name):
    return name in goldens.ENCODERS


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@goldens_of("streamed")
def test_streamed(name, model, dtype):
    if is_encoder(name):
        alone, streamed = (Embedder(model, weights=weights, dtype=dtype) for weights in ("device", "disk"))
        np.testing.assert_allclose(streamed.embed(PROMPTS), alone.embed(PROMPTS), atol=1e-6)
        return
    alone, streamed = (LLM(model, weights=weights, dtype=dtype, **ONE) for weights in ("device", "disk"))
    if dtype == "bfloat16" and name in goldens.EXPERTS:  # the last bit of a score may choose another expert
        exact = LLM(model, dtype="float32", **ONE)
        errors = [np.median(logprob_errors(llm, exact, GREEDY, PROMPTS)) for llm in (alone, streamed)]
        assert 0 < errors[1] < 1.5 * errors[0]
        return
    assert generate(streamed, GREEDY, PROMPTS) == generate(alone, GREEDY, PROMPTS)


@pytest.mark.parametrize("tensor", [2, 4])
@goldens_of("on a mesh")
def test_on_a_mesh(name, model, tensor):
    """The greedy tokens of one device, and the exchanges of a pass: of 2 L + 1 sums or L + 1, and the best tokens.

    Norms over all heads add a sum to a layer with attention, norms of experts and of the MLP beside them another, and
    layer inputs one to a pass.
    """
    mesh = MeshConfig(tensor=tensor)
    if is_encoder(name):
        vectors = Embedder(model, mesh=mesh).embed(PROMPTS)
        np.testing.assert_allclose(vectors, Embedder(model).embed(PROMPTS), atol=1e-5)
        return
    llm = LLM(model, mesh=mesh, max_decode_passes=4, **ONE)
    assert generate(llm, GREEDY, PROMPTS) == generate(LLM(model, max_decode_passes=4, **ONE), GREEDY, PROMPTS)
    check_exchanges(llm, tensor)


def sums_of(kind):
    over_heads = kind.has_attention and kind.attention.qk_norm and kind.attention.qk_norm_scope is QKNormScope.ALL_HEADS
    beside = kind.mlp.moe is not None and kind.mlp.moe.shared_mix is SharedMix.NORMALIZED
    return (1 if kind.block.is_parallel else 2) + over_heads + beside


def check_exchanges(llm, tensor):
    config = llm.model.config
    expected = 1 + sum(sums_of(config.layer(layer)) for layer in range(config.layers))
    tables = [config.embed, config.output_width]
    if config.layer_inputs is not None:
        expected, tables = expected + 1, [*tables, config.layers * config.layer_inputs]
    for program in list(llm.engine.executor.programs):
        if program.name in ("decode", "prefill"):
            sizes = program.sizes
            rows = sizes.batch + (sizes.chunks * ONE["chunk_size"] if isinstance(sizes, Prefill) else 0)
            found = read_collectives(program.executable.as_text(), tensor)
            found = [c for c in found if not c.conditions]
            sums = [c for c in found if c.kind == "all-reduce"]
            assert len(sums) == expected
            assert sum(c.bytes for c in sums) <= 4 * rows * ((len(sums) - 1) * config.embed + max(tables))
            assert [c.kind for c in found if c not in sums] == ["all-gather"]


def divides(config, stages):
    try:
        return divide(config, stages).count == stages
    except ValueError:
        return False


@goldens_of("in stages")
def test_in_stages(name, model, tmp_path):
    """The greedy tokens of one device; a golden that has too few layers of a kind runs with its layers three times."""
    config = goldens.config_of(name)
    if not divides(config, 2):
        config = dataclasses.replace(config, layers=3 * config.layers)
        save_model(model := tmp_path / "deep", random_model(config), family=name)
    options = {"max_decode_passes": 4, **ONE}
    alone = generate(LLM(model, **options), GREEDY, PROMPTS)
    for stages in (2, 4) if divides(config, 4) else (2,):
        llm = LLM(model, mesh=MeshConfig(pipeline=stages), **options)
        assert llm.model.stages.count == stages
        assert generate(llm, GREEDY, PROMPTS) == alone


def test_layers_that_all_differ_are_not_divided(tmp_path):
    convert(goldens.DIRECTORY / "gpt2_inverse_layers", tmp_path / "model")
    with pytest.raises(ValueError, match=r"mesh pipeline=2: the layers of its stages differ in kind .* pipeline = 1\."):
        LLM(tmp_path / "model", mesh=MeshConfig(pipeline=2), **ONE)


def meshes_of(name):
    """The meshes that the experts of a golden divide over, on at most eight devices."""
    config = goldens.config_of(name)
    count = config.layer(config.moe_layers[0]).mlp.moe.router.experts
    if count % 2:
        return [{"expert": count}, {"data": count}]
    return [{"expert": 2}, {"expert": 2, "tensor": 2}, {"data": 2, "expert": count // 2 if count % 4 else 2}]


ON_MESHES = [
    *[(name, mesh, "cheapest") for name in goldens.EXPERTS for mesh in meshes_of(name)],
    *[(name, mesh, "pcc") for name in goldens.EXPERTS for mesh in meshes_of(name) if "data" in mesh],
    *[(name, {"data": 2, "tensor": 2}, "cheapest") for name in ("gemma2_window", "gpt_neox_parallel")],
]


@pytest.mark.parametrize(
    ("name", "mesh", "exchange"),
    ON_MESHES,
    ids=str,
)
def test_experts_and_lanes(name, model, mesh, exchange):
    """The greedy tokens of one device, and its log probabilities."""
    alone, llm = LLM(model, **ONE), LLM(model, mesh=MeshConfig(**mesh), rules=ShardingRules(exchange=exchange), **ONE)
    assert generate(llm, GREEDY, PROMPTS) == generate(alone, GREEDY, PROMPTS)
    assert logprob_errors(llm, alone, GREEDY, PROMPTS).max() < 1e-4


@goldens_of("speculation")
def test_speculation(name, model, monkeypatch):
    """The greedy tokens without it; a bias makes the model repeat itself, so that suggested tokens are right."""
    costs = Costs.fixed({("decode", (("batch", 1), ("speculative", count))): 0.001 for count in (0, 4)})  # it pays
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logit_bias={5: 12.0})
    prompts = [[3, 1, 4, *[5] * 6]]
    alone = generate(LLM(model, max_decode_passes=1, **ONE), params, prompts)
    monkeypatch.setattr("jaxinfer.generation.api.loading.engine_costs", lambda *key, **options: costs)
    llm = LLM(model, num_speculative_tokens=4, max_decode_passes=1, **ONE)
    assert generate(llm, params, prompts) == alone
    assert llm.stats().accepted_tokens > 0


@goldens_of("int8 KV")
def test_int8_kv(name, model):
    """Most log probabilities are close to those of float32, and not the same numbers.

    The rounded keys of a mixture's token may choose another expert. Three quarters of the errors are at most 0.02 in
    the families that were measured. Scales of another page make them 0.047 or more, and those of another head, or
    twice as large, more than that.
    """
    options = ONE | {"page_size": 4}  # several pages, so that each scale must be its page's
    errors = logprob_errors(LLM(model, kv_dtype="int8", **options), LLM(model, **options), GREEDY, PROMPTS)
    assert 0 < np.quantile(errors, 0.75) < (0.12 if name in SENSITIVE else 0.03)


@pytest.mark.parametrize("name", ["gemma2_window"])
def test_bfloat16_kv(name, model):
    errors = logprob_errors(LLM(model, kv_dtype="bfloat16", **ONE), LLM(model, **ONE), GREEDY, PROMPTS)
    assert 0 < errors.max() < 0.05


@goldens_of("int8, int4, fp8")
def test_quantised(name, model):
    """Results are close to those of float32, and not the same numbers.

    Of delta rules, bfloat16 alone has a mean error of up to 0.24: where their output is small, the norm after it makes
    rounding errors large.
    """
    limit = 0.75 if name in (*goldens.WITH_STATES, *SENSITIVE) else 0.25
    prompt_alone = SamplingParams(temperature=0, max_tokens=1)
    exact = Embedder(model) if is_encoder(name) else LLM(model, **ONE)
    for quantize in ("int8", "int4", "fp8"):
        if is_encoder(name):
            errors = np.abs(Embedder(model, quantize=quantize).embed(PROMPTS) - exact.embed(PROMPTS))
        else:
            errors = logprob_errors(LLM(model, quantize=quantize, **ONE), exact, prompt_alone, PROMPTS)
        assert 0 < errors.mean() < limit

"""Layers that use the keys and values of other layers: where they are kept, and that every way computes the same."""

import dataclasses

import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.generation.engine.config import EngineConfig
from jaxinfer.generation.engine.page_tier import bytes_of_page
from jaxinfer.generation.execution import memory
from jaxinfer.generation.execution.layout import DeviceLayout
from jaxinfer.models import WeightFormat
from jaxinfer.models.leaves import cache_leaves, canonical_leaves
from jaxinfer.models.planning import shape_of
from jaxinfer.models.stages import divide
from jaxinfer.sharding import MeshConfig
from jaxinfer.sharding.planner.search import meshes
from tests.generation.few_programs import few_programs
from tests.generation.sampled import generate, logprob_errors
from tests.tiny import SHARED_KV, TWO_WIDTHS, save_tiny

DEEP = dataclasses.replace(SHARED_KV, layers=8)
"""The same layers twice: each half shares keys and values within itself."""
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5] * 3, [2, 7]]
ENGINE = {"max_batch": 2, "token_budget": 8, "chunk_size": 8, "max_decode_passes": 1}


def test_a_layer_uses_the_cache_of_the_last_one_that_is_alike():
    assert SHARED_KV.cache_places == (0, 1, 0, 1)
    assert SHARED_KV.cached_layers == (0, 1)
    assert DEEP.cache_places == (0, 1, 0, 1, 2, 3, 2, 3)
    assert DEEP.cached_layers == (0, 1, 4, 5)


def test_a_layer_that_shares_with_none_is_refused():
    with pytest.raises(ValueError, match=r"shares_kv of layer 1: no layer before it"):
        SHARED_KV.with_layers((0, 3))
    with pytest.raises(ValueError, match=r"shares_kv is not implemented with qk_norm_after_rope=True"):
        SHARED_KV.layer(2).with_attention(qk_norm_after_rope=True)


def test_a_page_has_the_bytes_of_layers_with_keys_and_values_of_their_own():
    plain, shared = (
        DeviceLayout(config, WeightFormat(), EngineConfig(max_batch=4, context=128), num_pages=3, platform="cpu")
        for config in (TWO_WIDTHS, SHARED_KV)
    )
    assert memory.part_bytes(shared.caches) == memory.part_bytes(plain.caches)
    assert bytes_of_page(shared.host_page) == bytes_of_page(plain.host_page)
    assert list(cache_leaves(SHARED_KV, WeightFormat(), 1, 8)) == ["keys.0", "values.0", "keys.1", "values.1"]


def test_a_layer_that_shares_has_queries_alone():
    leaves = canonical_leaves(SHARED_KV, WeightFormat())
    attention = SHARED_KV.layer(2).attention
    assert leaves["layers.2.attention.qkv.weight"].shape == (attention.q_heads * attention.head_dim, SHARED_KV.embed)
    assert "layers.0.attention.k_norm.scale" in leaves
    assert "layers.2.attention.k_norm.scale" not in leaves


def test_stages_have_all_keys_and_values_that_their_layers_use():
    assert divide(DEEP, 2).count == 2
    with pytest.raises(ValueError, match=r"pipeline=2: layer 2 uses the keys and values of layer 0.*pipeline = 1\."):
        divide(SHARED_KV, 2)


def test_the_planner_counts_shared_keys_once_and_proposes_no_stages():
    shape = shape_of("shared", SHARED_KV)
    assert [layer.shares_kv for layer in shape.layers] == [False, False, True, True]
    assert [layer.kv_params > 0 for layer in shape.layers] == [True, True, False, False]
    assert {ways.pipeline for ways in meshes(shape, 4)} == {1}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models") / "shared", config=SHARED_KV)


def engine(model, **options):
    with few_programs():
        return LLM(model, **ENGINE, **options)


@pytest.fixture(scope="module")
def alone(model):
    return engine(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [
        {"mesh": MeshConfig(tensor=2)},
        {"mesh": MeshConfig(tensor=4)},
        {"mesh": MeshConfig(data=2)},
        {"weights": "disk"},
        {"num_speculative_tokens": 4},
        {"host_kv": 1 << 20},
    ],
    ids=str,
)
def test_ways_give_equal_tokens(model, alone, way):
    assert generate(engine(model, **way), GREEDY, PROMPTS) == generate(alone, GREEDY, PROMPTS)


@pytest.mark.slow
@pytest.mark.parametrize("way", [{"weights": "disk"}, {"mesh": MeshConfig(pipeline=2, tensor=2)}], ids=str)
def test_ways_of_deep_models_give_equal_tokens(tmp_path, way):
    """Streamed layers share programs, and stages have a half each."""
    model = save_tiny(tmp_path / "deep", config=DEEP)
    assert generate(engine(model, **way), GREEDY, PROMPTS) == generate(engine(model), GREEDY, PROMPTS)


@pytest.mark.slow
def test_int8_keys_are_shared(model, alone):
    assert 0 < logprob_errors(engine(model, kv_dtype="int8"), alone, GREEDY, PROMPTS).max() < 0.15


@pytest.mark.slow
def test_keys_on_the_host_are_refused(model):
    with pytest.raises(ValueError, match=r"kv_offload is not implemented for layers .* that share keys"):
        engine(model, weights="disk", kv_offload=1 << 20)

"""A model split over a mesh generates what it generates on one device."""

import dataclasses

import jax
import pytest
from flax import nnx

from jaxinfer.generation import LLM, SamplingParams
from jaxinfer.models import Decoder, WeightFormat
from jaxinfer.models.config import BlockKind
from jaxinfer.models.loading import save_model
from sharding import MeshConfig
from tests.tiny import CONFIG


@pytest.fixture(scope="module")
def even_model_dir(tmp_path_factory):
    """The tiny model with a vocabulary that divides, between projections of narrower embeddings."""
    path = tmp_path_factory.mktemp("models") / "even"
    weights = WeightFormat()
    config = dataclasses.replace(CONFIG, vocab=256, word_embed=16, block=BlockKind.POST_NORM, final_norm=False)
    model = Decoder(config, weights, rngs=nnx.Rngs(1))
    save_model(path, model, family="tiny")
    return path


def test_tensor_parallel_equals_one_device(even_model_dir):
    params = SamplingParams(temperature=0, max_tokens=10)
    prompts = [list(range(20))]
    alone = LLM(even_model_dir, max_batch=1).generate(prompts, params)
    llm = LLM(even_model_dir, mesh=MeshConfig(tensor=2), max_batch=1)
    split = llm.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in split] == [o.outputs[0].token_ids for o in alone]
    weight = llm.model.state["layers"][0]["attention"]["qkv"]["weight"][...]
    assert weight.addressable_shards[0].data.size == weight.size // 2
    caches = jax.tree.leaves(llm.engine.executor._state.caches)
    assert all(c.addressable_shards[0].data.shape[2] == 1 for c in caches)  # one of two KV heads
    program = llm.engine.executor.programs.get("decode", batch=1, speculative=0, pages=8)
    assert program.executable.as_text().count(" all-reduce(") >= 2 * CONFIG.layers


def test_a_mesh_that_does_not_divide_is_refused(model_dir):
    with pytest.raises(ValueError, match="vocab=257 does not divide over tensor=2"):
        LLM(model_dir, mesh=MeshConfig(tensor=2))


def test_copies_of_the_model_are_refused(even_model_dir):
    with pytest.raises(ValueError, match=r"MeshConfig.data=2 is not implemented for generation"):
        LLM(even_model_dir, mesh=MeshConfig(data=2))

"""What models reserve of the devices' memory and the host's."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxinfer import LLM, Embedder
from jaxinfer.models.files.conversion import convert
from jaxinfer.models.files.loading import OpenedModel
from jaxinfer.serving.budget import Budget, host_budget
from jaxinfer.sharding import MeshConfig
from tests.models import goldens
from tests.peft import random_pair, save_adapter
from tests.tiny import ONE_KIND, save_tiny

ONE = {"max_batch": 1, "token_budget": 8, "chunk_size": 8}


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A model of six layers."""
    return save_tiny(tmp_path_factory.mktemp("models") / "deep", config=dataclasses.replace(ONE_KIND, layers=6))


def reserved(held):
    """What it has of the host, by what it is for."""
    assert held.budgets == {"the host": host_budget()}
    return {tenant: size for (_, tenant), size in held._loaded.reservation.sizes.items()}


def stored(arrays):
    """Bytes of arrays on all devices together."""
    return sum(shard.data.nbytes for array in jax.tree.leaves(arrays) for shard in array.addressable_shards)


@pytest.mark.parametrize("mesh", [None, MeshConfig(tensor=2)], ids=str)
def test_each_device_of_a_mesh_has_its_part(model_dir, mesh):
    with LLM(model_dir, mesh=mesh, **ONE) as llm:
        caches = llm.engine.executor.state.arrays.caches
        assert reserved(llm) == {"weights": stored(llm.model.leaves), "KV pages": stored(caches)}


@pytest.fixture
def adapter(tmp_path):
    pair = random_pair(32, 32, 2, np.random.default_rng(0))
    return save_adapter(tmp_path / "adapter", {"model.layers.0.self_attn.o_proj": pair})


def test_adapters_are_on_the_devices_and_in_the_hosts_memory(model_dir, adapter):
    with LLM(model_dir, adapters={"a": adapter}, adapter_bytes=12345, **ONE) as llm:
        assert reserved(llm)["adapters"] == stored(llm.engine.executor.state.adapters) + 12345
        assert llm.engine.adapters.host_bytes == 12345


def test_where_there_is_little_memory_few_adapters_are_kept(model_dir, adapter, monkeypatch):
    monkeypatch.setattr(host_budget(), "capacity", host_budget().reserved + (32 << 20))
    with LLM(model_dir, adapters={"a": adapter}, **ONE) as llm:
        assert llm.engine.adapters.host_bytes == 8 << 20
    with pytest.raises(ValueError, match="raise cache_bytes"):
        LLM(model_dir, adapters={"a": adapter}, adapter_bytes=32 << 20, **ONE)


def test_programs_do_not_depend_on_what_is_free(model_dir, monkeypatch):
    """Else every start beside others would compile anew."""
    statics = []
    for free in (3_000_000_000, 3_100_000_000):
        monkeypatch.setattr(Budget, "free", free)
        with LLM(model_dir, max_adapters=1, **ONE) as llm:
            statics.append(llm.engine.executor.state.layout.static)
    assert statics[0] == statics[1]


def test_layers_that_stay_are_reserved(deep):
    size = LLM(deep, weights="disk", **ONE).placement.layer_bytes
    with LLM(deep, weights="disk", host_memory=2 * size, **ONE) as llm:
        assert llm.placement.tiers.count("host") == 2
        parts = reserved(llm)
        assert parts["weights"] == stored(llm.model.leaves)
        assert parts["layers"] == 2 * size
        assert parts["layers on their way"] == llm.placement.buffer_bytes == 2 * size


@pytest.mark.slow
def test_what_comes_from_disk_to_a_gpu_is_in_the_hosts_memory_first(deep, monkeypatch):
    """Beside what is on the device, which is the same memory here."""
    with LLM(deep, weights="disk", prefetch=1, **ONE) as llm:
        parts, placement = reserved(llm), llm.placement
    monkeypatch.setattr(OpenedModel, "platform", "gpu")
    with LLM(deep, weights="disk", prefetch=1, kernels=False, cache_bytes=1 << 16, **ONE) as llm:
        assert llm.placement.depth.host == 2
        expected = parts["layers on their way"] + 3 * placement.layer_bytes
        assert reserved(llm)["layers on their way"] == expected


def test_an_encoder_has_weights_alone(tmp_path):
    convert(goldens.DIRECTORY / "bert_awkward", tmp_path / "bert")
    with Embedder(tmp_path / "bert") as embedder:
        assert reserved(embedder) == {"weights": stored(embedder.model.leaves)}
    with Embedder(tmp_path / "bert", weights="host") as embedder:
        placement = embedder.placement
        assert reserved(embedder) == {
            "weights": stored(embedder.model.leaves),
            "layers": len(placement.tiers) * placement.layer_bytes,
            "layers on their way": placement.buffer_bytes,
        }

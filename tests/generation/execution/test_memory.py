"""The plan of the memory, and what then lives there."""

import collections
import dataclasses

import jax
import pytest

from jaxinfer.generation import LLM, SamplingParams
from jaxinfer.generation.engine.buckets import Buckets
from jaxinfer.generation.engine.config import EngineConfig
from jaxinfer.generation.engine.page_tier import bytes_of_page
from jaxinfer.generation.execution import memory
from jaxinfer.generation.execution.layout import DeviceLayout
from jaxinfer.generation.execution.platforms import buckets_of
from jaxinfer.generation.execution.programs import prefill, ring
from jaxinfer.models import WeightFormat
from jaxinfer.models.files.loading import load_model
from jaxinfer.serving.budget import HOST
from jaxinfer.sharding import MeshConfig
from tests.generation.conftest import PAGE_BYTES, SMALL, SMALL_BYTES
from tests.tiny import CONFIG as TINY
from tests.tiny import TWO_WIDTHS, save_tiny

CONFIG = EngineConfig(max_batch=4, context=128)


@pytest.fixture(scope="module")
def model(model_dir):
    return load_model(model_dir)


def test_a_cpu_with_ample_memory_holds_full_sequences(model):
    plan = memory.plan_memory(model, CONFIG)
    assert plan.workspace is None
    assert (plan.page_bytes, plan.num_pages, plan.cache) == (PAGE_BYTES, 4 * 8, 4 * 8 * PAGE_BYTES)
    assert plan.weights == sum(leaf.nbytes for leaf in jax.tree.leaves(model.state))
    assert "32 pages" in str(plan)
    assert plan.tenants == {"weights": plan.weights, "KV pages": plan.cache}


def test_an_int8_cache_takes_a_quarter(model):
    plan = memory.plan_memory(model, dataclasses.replace(CONFIG, kv_dtype="int8"))
    scales = 2 * 2 * 2 * 4  # keys and values, layers, heads
    assert plan.page_bytes == PAGE_BYTES // 4 + scales


def test_a_bfloat16_cache_takes_half(model):
    plan = memory.plan_memory(model, dataclasses.replace(CONFIG, kv_dtype="bfloat16"))
    assert plan.page_bytes == PAGE_BYTES // 2


@pytest.mark.parametrize(("kv_dtype", "token", "scales"), [(None, 4, 0), ("int8", 1, 2 * (2 + 1) * 4)])
def test_a_page_is_as_large_as_its_layers_are_together(kv_dtype, token, scales):
    config = dataclasses.replace(CONFIG, kv_dtype=kv_dtype)
    layout = DeviceLayout(TWO_WIDTHS, WeightFormat(), config, num_pages=3, platform="cpu")
    size = 16 * 2 * (2 * 8 + 1 * 32) * token + scales
    assert memory.part_bytes(layout.state.caches) == 3 * size
    assert bytes_of_page(layout.host_page) == size
    assert memory.part_bytes(layout.block(5)) == 5 * size


@pytest.mark.slow
def test_scarce_memory_is_divided_by_what_programs_need(model, monkeypatch):
    needed = memory.workspace_bytes(DeviceLayout.from_model(model, CONFIG, num_pages=4), buckets_of(CONFIG, "cpu"))
    assert needed > 0
    monkeypatch.setattr(memory, "AMPLE", 100)
    monkeypatch.setattr(memory, "available_bytes", lambda mesh: int((needed + 10.5 * PAGE_BYTES) / memory.FRACTION) + 1)
    plan = memory.plan_memory(model, CONFIG)
    assert plan.workspace == needed
    assert plan.num_pages == 10
    assert plan.tenants == {"weights": plan.weights, "KV pages": 10 * PAGE_BYTES, "programs' workspace": needed}
    with pytest.raises(MemoryError, match=f"cache_bytes={20 * PAGE_BYTES} does not fit"):
        memory.plan_memory(model, CONFIG, cache_bytes=20 * PAGE_BYTES)
    monkeypatch.setattr(memory, "available_bytes", lambda mesh: needed)
    with pytest.raises(ValueError, match=rf"16 tokens takes .* \({PAGE_BYTES} bytes\): raise cache"):
        memory.plan_memory(model, CONFIG)


def test_a_step_of_chunks_and_rows_copies_no_cache(model):
    """Chunks and decoding rows write to one cache in turn, and the first read it in between."""
    layout = DeviceLayout.from_model(model, CONFIG, num_pages=4096)
    program = prefill.spec(layout).compile(prefill.Prefill(chunks=1, batch=2, pages=8))
    assert program.memory.temp_bytes < layout.state.caches[0].k.size * 4


def test_a_little_more_free_memory_needs_no_other_programs(model, monkeypatch):
    monkeypatch.setattr(memory, "AMPLE", 1000)
    monkeypatch.setattr(memory, "workspace_bytes", lambda *args: 0)
    config = dataclasses.replace(CONFIG, max_batch=1000)

    def pages(room, **options):
        free = int((room + 0.5) * PAGE_BYTES / memory.FRACTION)
        monkeypatch.setattr(memory, "available_bytes", lambda mesh: free)
        return memory.plan_memory(model, config, **options).num_pages

    assert [pages(room) for room in (5, 63, 1008, 1023)] == [5, 63, 1008, 1008]
    assert all(pages(room) >= 0.96 * room for room in range(1, 3000, 61))
    assert len({pages(room) for room in range(1024, 2048, 8)}) == 32
    assert pages(1023, cache_bytes=1021 * PAGE_BYTES) == 1021
    assert pages(9000) == 8000  # as many as all sequences can have


def test_the_cache_is_as_large_as_planned_and_programs_need_no_more_than_said(model_dir):
    with LLM(model_dir, cache_bytes=SMALL_BYTES, **SMALL) as llm:
        llm.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=4, temperature=0))
        caches = llm.engine.executor.state.arrays.caches
        assert sum(leaf.nbytes for leaf in jax.tree.leaves(caches)) == llm.memory.cache == SMALL_BYTES
        assert 0 < llm.engine.executor.report().workspace_bytes <= llm.memory.workspace


def on_each_device(tree):
    """Bytes of arrays on each device."""
    held = collections.Counter()
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return held


@pytest.mark.parametrize(
    ("axes", "kv_dtype"),
    [
        ({"pipeline": 2}, None),
        ({"pipeline": 2, "tensor": 2}, "int8"),
        pytest.param({"data": 2, "pipeline": 2}, None, marks=pytest.mark.slow),
        pytest.param({"pipeline": 4}, "int8", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_each_device_of_stages_has_what_was_planned(axes, kv_dtype, tmp_path):
    """Of five layers a stage of two has three places, of four two; a page has keys and values of those."""
    config = dataclasses.replace(TINY, vocab=256, layers=5)
    mesh = MeshConfig(**axes)
    places, shares = -(-5 // mesh.pipeline), mesh.tensor
    devices = jax.devices()[: mesh.size]
    layer = 16 * 2 * (8 * (1 if kv_dtype else 4)) // shares + (2 // shares * 4 if kv_dtype else 0)
    with LLM(
        save_tiny(tmp_path / "staged", config=config), mesh=mesh.build(devices), max_batch=2, kv_dtype=kv_dtype
    ) as llm:
        plan, state = llm.memory, llm.engine.executor.state
        assert plan.page_bytes == places * 2 * layer
        assert plan.num_pages == 2 * 8  # of each lane
        assert on_each_device(state.arrays.caches) == dict.fromkeys(devices, plan.num_pages * plan.page_bytes)
        assert on_each_device(state.layout.leaves) == dict.fromkeys(devices, plan.weights)
        held = {x.tenant: x.bytes for x in llm.budgets[HOST].holdings if x.owner == "LLM staged"}
        assert held == {"weights": mesh.size * plan.weights, "KV pages": mesh.size * plan.cache}


@pytest.mark.slow
def test_scarce_memory_of_stages_is_divided_by_what_the_ring_needs(tmp_path, monkeypatch):
    path = save_tiny(tmp_path / "model", config=dataclasses.replace(TINY, layers=4))
    model = load_model(path, mesh=MeshConfig(pipeline=2).build(jax.devices()[:2]))
    layout = DeviceLayout.from_model(model, CONFIG, num_pages=4)
    needed = memory.workspace_bytes(layout, buckets_of(CONFIG, "cpu"))
    programs = [
        ring.spec(layout).compile(sizes, mesh=model.mesh)
        for sizes in (
            ring.prefill_sizes(2, chunks=4, rows_of_each=4, pages=8),
            ring.decode_sizes(1, 4, 0, 8),
            ring.decode_sizes(2, 4, 0, 8),
        )
    ]
    assert needed >= max(program.memory.workspace_bytes for program in programs) > 0
    monkeypatch.setattr(memory, "AMPLE", 100)
    monkeypatch.setattr(memory, "available_bytes", lambda mesh: int((needed + 10.5 * PAGE_BYTES) / memory.FRACTION) + 1)
    plan = memory.plan_memory(model, CONFIG)
    assert (plan.num_pages, plan.page_bytes, plan.workspace) == (10, PAGE_BYTES, needed)  # of a stage's two layers


def test_programs_without_room_to_run_are_refused(model_dir, monkeypatch):
    llm = LLM(model_dir, cache_bytes=SMALL_BYTES, **SMALL)
    monkeypatch.setattr("jaxinfer.generation.execution.decoder.available_bytes", lambda mesh: 1)
    with pytest.raises(MemoryError, match="lower cache_bytes, max_batch or token_budget"):
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_batch", 0),
        ("context", 1),
        ("page_size", 0),
        ("chunk_size", 0),
        ("max_decode_passes", 0),
        ("num_speculative_tokens", -1),
        ("kv_dtype", "fp8"),
        ("max_adapters", -1),
    ],
)
def test_bad_sizes_are_named(field, value):
    with pytest.raises(ValueError, match=rf"EngineConfig\.{field} must be"):
        EngineConfig(**{"max_batch": 4, "context": 128, field: value})


def test_steps_are_well_filled():
    config = EngineConfig(max_batch=4, context=128, token_budget=512, chunk_size=32)
    buckets = Buckets.from_config(config)
    assert buckets.chunks == (1, 4, 16)
    assert [buckets.full_chunks(n) for n in (0, 1, 3, 4, 5, 13, 16, 40)] == [0, 1, 1, 4, 4, 13, 16, 16]
    padded = dataclasses.replace(buckets, max_padding=4.0)
    assert [padded.full_chunks(n) for n in (1, 2, 5, 13)] == [1, 2, 5, 13]


def test_chunks_that_the_decode_kernel_would_take_are_refused_on_a_gpu():
    config = EngineConfig(max_batch=1, context=64, chunk_size=8)
    buckets_of(config, "cpu")
    buckets_of(dataclasses.replace(config, kernels=False), "gpu")
    with pytest.raises(ValueError, match="chunk_size must be > 8 with GPU kernels, got 8"):
        buckets_of(config, "gpu")

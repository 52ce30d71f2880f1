"""A KV cache in the host's memory: streamed layers run on slices of the rows, and the tokens stay the same."""

import dataclasses
import itertools

import numpy as np
import pytest

from jaxinfer import LLM, Embedder, SamplingParams
from jaxinfer.generation.execution.memory import ON_HOST, SLICES
from jaxinfer.models.files.conversion import convert
from jaxinfer.serving.budget import BudgetError
from jaxinfer.sharding import MeshConfig
from tests.generation.conftest import PAGE_BYTES
from tests.generation.few_programs import few_programs
from tests.generation.sampled import fail_one_launch, generate
from tests.models import goldens
from tests.tiny import CONFIG, save_tiny

SLICE, PAGES = 12, 40
"""Pages of a layer on the device, where the longest sequence has 8; and those of the cache."""
PAGE = PAGE_BYTES // 2
LAYER_PAGE = PAGE // 2  # of two layers
SIZES = {"max_batch": 4, "context": 64, "page_size": 8, "token_budget": 16, "chunk_size": 16}
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
PROMPTS = [np.random.default_rng(seed).integers(0, 250, 40 - 6 * seed).tolist() for seed in range(6)]
"""From 40 tokens down to 10, more than there are slots."""
OFFLOAD = {"weights": "disk", "kv_offload": PAGES * PAGE, "cache_bytes": SLICES * SLICE * LAYER_PAGE}


def make(folder, **options):
    with few_programs():
        return LLM(folder, **SIZES, **options)


@pytest.fixture(scope="module")
def plain(model_dir):
    """All layers and pages are on the device."""
    return make(model_dir, max_decode_passes=4, cache_bytes=14 * PAGE)


@pytest.fixture(scope="module")
def offloaded(model_dir):
    return make(model_dir, **OFFLOAD)


@pytest.fixture(scope="module")
def want(plain):
    return generate(plain, GREEDY, PROMPTS)


@pytest.fixture
def slices(offloaded, monkeypatch):
    """The number of slices of each step with (chunks, rows)."""
    passes, found = offloaded.engine.executor.passes, []
    split = passes.split

    def counted(batch):
        parts = split(batch)
        found.append((sum(bool(part.chunks) for part in parts), sum(bool(part.rows) for part in parts)))
        return parts

    monkeypatch.setattr(passes, "split", counted)
    return found


def test_rows_in_slices_give_the_same_tokens(offloaded, want, slices):
    offloaded.streaming.clear()
    assert generate(offloaded, GREEDY, PROMPTS) == want
    assert max(rows for _, rows in slices) > 1
    assert any(chunks and rows for chunks, rows in slices)
    assert offloaded.streaming.layers <= (len(slices) + 1) * 2  # each is fetched once for all slices
    assert offloaded.streaming.kv_bytes > len(PROMPTS) * 10 * LAYER_PAGE
    stats = offloaded.stats()
    assert (stats.compile_misses, stats.num_pages, stats.preemptions) == (0, PAGES, 0)
    offloaded.engine.scheduler.check_integrity()


def test_the_ledger_has_slices_on_the_device_and_the_cache_on_the_host(offloaded):
    memory = offloaded.memory
    assert (memory.num_pages, memory.slice_pages, memory.page_bytes) == (PAGES, SLICE, PAGE)
    assert memory.tenants["KV pages"] == SLICES * SLICE * LAYER_PAGE
    assert memory.host_tenants == {ON_HOST: PAGES * PAGE}
    assert f"{PAGES} pages of 2.0 kB on the host, {SLICE} of a layer at a time on the device" in str(memory)
    assert offloaded.engine.executor.state.arrays.caches == []


def test_pages_are_shared_and_copied_on_the_host(plain, offloaded):
    several = SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=6)
    texts = [[generate(llm, several, PROMPTS[:2]) for _ in range(2)] for llm in (plain, offloaded)]
    assert texts[0] == texts[1]
    assert texts[1][0] == texts[1][1]


def test_after_a_step_that_failed_and_a_request_that_was_given_up(offloaded, want, monkeypatch):
    with monkeypatch.context() as patch:
        fail_one_launch(offloaded.engine.executor, patch)
        offloaded.generate(PROMPTS, GREEDY)
    for _ in itertools.islice(offloaded.stream(PROMPTS[0], GREEDY), 3):
        pass
    assert generate(offloaded, GREEDY, PROMPTS) == want
    offloaded.engine.scheduler.check_integrity()


def test_sequences_give_way_if_the_host_has_few_pages(model_dir, plain):
    long = dataclasses.replace(GREEDY, max_tokens=24)
    with make(model_dir, **OFFLOAD | {"kv_offload": 16 * PAGE}) as llm:
        assert generate(llm, long, PROMPTS[2:]) == generate(plain, long, PROMPTS[2:])
        assert llm.stats().preemptions > 0
        llm.engine.scheduler.check_integrity()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "device"}, r"MemoryOptions.kv_offload=\d+ has no effect with weights='device'"),
        ({"weights": "auto"}, "is for streamed layers, and weights='auto' keeps all on the devices"),
        ({"host_kv": PAGE}, rf"keeps all pages in the host's memory, and host_kv={PAGE} those that the devices forget"),
        ({"kv_offload": PAGE - 1}, rf"kv_offload={PAGE - 1} has no room for one page of 8 tokens"),
        ({"kv_offload": "much"}, "kv_offload must be bytes or a size"),
        (
            {"cache_bytes": SLICES * 8 * LAYER_PAGE - 1},
            rf"pages of 64 tokens take, in 3 slices, .*\({SLICES * 8 * LAYER_PAGE} bytes\): raise cache_bytes",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_refused(model_dir, options, message):
    with pytest.raises(ValueError, match=message):
        make(model_dir, **OFFLOAD | options)


def test_more_than_the_host_has_is_refused(model_dir):
    with pytest.raises(BudgetError, match=r"kv_offload=4398046511104000: .* of the host's memory are free: lower it"):
        make(model_dir, **OFFLOAD | {"kv_offload": "4000TiB"})


@pytest.mark.slow
def test_encoders_have_none(tmp_path):
    convert(goldens.DIRECTORY / "bert_awkward", tmp_path / "bert")
    with pytest.raises(ValueError, match=r"Embedder.kv_offload=1024 is for decoders, .* leave it out"):
        Embedder(tmp_path / "bert", weights="host", kv_offload="1KiB")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"kv_dtype": "int8", "cache_bytes": 10_000},
        {"kv_dtype": "bfloat16"},
        {"dtype": "bfloat16"},
        {"mesh": MeshConfig(tensor=2)},
        {"weights": "host", "prefetch": 2},
        {"prefix_caching": False},
    ],
    ids=str,
)
def test_dtypes_meshes_and_placements(tmp_path, options):
    folder = save_tiny(tmp_path / "deep", config=dataclasses.replace(CONFIG, layers=6))
    resident = {name: value for name, value in options.items() if name not in OFFLOAD and name != "prefetch"}
    want = generate(LLM(folder, **SIZES, **resident), GREEDY, PROMPTS)
    with LLM(folder, **SIZES, **OFFLOAD | {"kv_offload": PAGES * PAGE * 3} | options) as llm:
        llm.engine.compile_ahead()
        assert llm.memory.slice_pages < 4 * 8
        assert generate(llm, GREEDY, PROMPTS) == want
        assert (llm.stats().compile_misses, llm.stats().preemptions) == (0, 0)


@pytest.mark.slow
def test_layers_that_stay_get_slices_too(tmp_path):
    folder = save_tiny(tmp_path / "deep", config=dataclasses.replace(CONFIG, layers=6))
    want = generate(LLM(folder, **SIZES), GREEDY, PROMPTS)
    whole = LLM(folder, **SIZES, weights="disk", kv_offload=PAGES * PAGE * 3, device_memory="1GiB")
    assert set(whole.placement.tiers) == {"device"}
    assert whole.memory.slice_pages == 4 * 8
    limit = int(sum(whole.memory.tenants.values()) / 0.9 - 2.5 * whole.placement.layer_bytes)
    some = LLM(folder, **SIZES, weights="disk", kv_offload=PAGES * PAGE * 3, device_memory=limit)
    assert set(some.placement.tiers) == {"device", "disk"}
    for llm in (whole, some):
        assert generate(llm, GREEDY, PROMPTS) == want
        assert sum(llm.memory.tenants.values()) <= (1 << 30 if llm is whole else limit)

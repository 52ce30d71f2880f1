"""Stages of a pipeline: each has some of the layers, and micro-batches of the requests go round."""

import asyncio
import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxinfer import LLM, AsyncLLM, Embedder, SamplingParams
from jaxinfer.models.files.conversion import convert
from jaxinfer.sharding import MeshConfig, ShardingRules
from jaxinfer.sharding.schedules import Schedule, queued, queued_idle
from tests.generation.sampled import PROMPTS, generate, logprob_errors
from tests.generation.ways import FIVE, in_stages
from tests.models import goldens
from tests.tiny import CONFIG, MOE_CONFIGS, save_tiny

pytestmark = pytest.mark.xdist_group("ways")

SIZES = {"max_batch": 4, "token_budget": 32, "chunk_size": 8, "max_decode_passes": 4}
FEW = {"max_batch": 2, "token_budget": 16, "chunk_size": 8}
"""An engine of few programs."""
TWO, FOUR = MeshConfig(pipeline=2), MeshConfig(pipeline=4)
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
UNEQUAL = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (1, 40, 3)]
MANY = [*PROMPTS, *([n] * (n + 1) for n in range(6))]
LONG = [list(range(3, 100)), [7, 3, 250, 9], list(range(200, 130, -1))]


@pytest.fixture(scope="module")
def five(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models") / "five", config=FIVE)


@pytest.fixture(scope="module")
def repeating(tmp_path_factory):
    """A model that repeats itself, if it is told to."""
    return save_tiny(tmp_path_factory.mktemp("models") / "repeating", config=dataclasses.replace(CONFIG, layers=5))


@pytest.fixture(scope="module")
def alone(five):
    return LLM(five, **FEW)


@pytest.fixture(params=["stages", pytest.param("four stages", marks=pytest.mark.slow)])
def staged(ways, request):
    return ways[request.param]


def test_each_stage_has_its_layers_and_their_pages(ways):
    two, alone = ways["stages"], ways["whole"]
    assert str(two.model.stages) == "2 stages of 2, 1 layers"
    caches = two.engine.executor.state.arrays.caches
    assert len(caches) == two.model.stages.config.layers == 2
    for cache in jax.tree.leaves(caches):
        assert cache.shape[0] == 2 * two.memory.num_pages
        assert cache.sharding.shard_shape(cache.shape)[0] == two.memory.num_pages
    assert two.memory.page_bytes == alone.memory.page_bytes // 4 * 3  # the second of three layers is as wide as both
    history = two.engine.executor.state.arrays.slots.history
    assert history.shape[0] == two.engine.config.max_batch + 1
    assert history.sharding.is_fully_replicated


# Schedules


def recorded(llm, monkeypatch, params, prompts):
    """The tables that the stages recorded at each step of decoding and of prompts, with the sizes of each."""
    passes, tables = llm.engine.executor.passes, {"decode": [], "prefill": []}
    run = passes.run

    def recording(commands, state):
        results, schedule = run(commands, state), commands[0].inputs.schedule
        sizes = int(schedule.micro_batches), int(schedule.passes)
        tables["prefill" if commands[0].sizes.chunks else "decode"].append((sizes, passes.recorded()))
        return results

    with monkeypatch.context() as patch:
        patch.setattr(passes, "run", recording)
        llm.generate(prompts, params)
    return tables


def check_queued(tables, stages):
    for (micro_batches, passes), table in tables:
        assert Schedule.from_ring(table) == queued(stages, micro_batches, passes)


def test_the_ring_does_what_is_scheduled(staged, monkeypatch):
    stages = staged.model.stages.count
    for rows in range(1, staged.engine.config.max_batch + 1):
        staged.engine.scheduler.pages.clear()
        prompts = [[10 * rows + at, 1, 2] for at in range(rows)]
        tables = recorded(staged, monkeypatch, dataclasses.replace(GREEDY, max_tokens=8), prompts)
        check_queued(tables["decode"], stages)
        assert [sizes for sizes, _ in tables["prefill"]] == [(rows, 1)]
        check_queued(tables["prefill"], stages)
        micro_batches = min(rows, stages) if rows > 1 else 1
        assert {sizes[0] for sizes, _ in tables["decode"]} == {micro_batches}
        assert {sizes[1] for sizes, _ in tables["decode"]} == {4, 3} if rows > 1 else {4}


def test_chunks_of_a_prompt_fill_the_stages(staged, monkeypatch):
    """Each chunk is a micro-batch: thirteen in steps of four, and the rest."""
    staged.engine.scheduler.pages.clear()
    tables = recorded(staged, monkeypatch, dataclasses.replace(GREEDY, max_tokens=1), [LONG[0]])
    assert [sizes for sizes, _ in tables["prefill"]] == [(4, 1), (4, 1), (4, 1), (1, 1)]
    check_queued(tables["prefill"], staged.model.stages.count)


def test_statistics_count_idle_slots(staged, monkeypatch):
    stages, before = staged.model.stages.count, staged.stats().pipeline
    tables = recorded(staged, monkeypatch, GREEDY, PROMPTS[1:2])
    steps = [sizes for part in tables.values() for sizes, _ in part]
    made = staged.stats().pipeline - before
    assert made.idle_slots == sum(queued_idle(stages, *sizes) for sizes in steps)
    assert made.slots == sum(queued(stages, *sizes).slots for sizes in steps)
    assert made.idle_share == pytest.approx(1 - 1 / stages)  # one sequence: one stage works at a time
    assert "ticks of stages idle" in str(staged.stats())


def test_without_stages_nothing_is_counted(ways):
    alone = ways["whole"]
    assert alone.stats().pipeline is None
    assert "stages" not in str(alone.stats())


@pytest.mark.slow
def test_rows_that_go_together(ways, monkeypatch):
    """Where the record says that one micro-batch of all rows is quicker."""
    llm, alone = ways.make(mesh=TWO, quick=1), ways["whole"]
    tables = recorded(llm, monkeypatch, GREEDY, MANY[:2])
    assert {sizes[0] for sizes, _ in tables["decode"]} == {1}
    check_queued(tables["decode"], 2)
    assert generate(llm, GREEDY, MANY) == generate(alone, GREEDY, MANY)


@pytest.mark.slow
def test_both_ways_are_tried(five, alone, monkeypatch):
    """An engine without a record runs rows both ways before it decides; the tokens stay the same."""
    llm, params = LLM(five, mesh=TWO, **SIZES), dataclasses.replace(GREEDY, max_tokens=60)
    tables = recorded(llm, monkeypatch, params, MANY[:4])
    assert {sizes[0] for sizes, _ in tables["decode"]} == {1, 2}
    for _ in range(2):
        assert generate(llm, params, MANY) == generate(alone, params, MANY)


# Memory


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [TWO, FOUR], ids=str)
def test_preemption(five, mesh):
    """Pages for two of four sequences."""
    sizes, params = {**SIZES, "context": 96}, dataclasses.replace(GREEDY, max_tokens=60)
    alone, llm = LLM(five, **sizes), in_stages(five, mesh=mesh, **sizes)
    pages = 2 * llm.engine.config.pages_per_sequence
    llm = in_stages(five, mesh=mesh, cache_bytes=pages * llm.memory.page_bytes, **sizes)
    assert llm.memory.num_pages == pages
    for _ in range(2):
        assert generate(llm, params, MANY) == generate(alone, params, MANY)
    assert llm.stats().preemptions > 0
    llm.engine.scheduler.check_integrity()


REPEATING = [
    SamplingParams(
        temperature=0, max_tokens=21, ignore_eos=True, logprobs=2, logit_bias=dict.fromkeys((5, 6, 7, 8, 9), 6.0)
    ),
    GREEDY,
]
"""A bias makes the model repeat itself, so that suggested tokens are right."""
REPEATED = [[5, 6, 7, 8, 9] * 4, [7, 3, 250, 9]]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [TWO, FOUR, MeshConfig(pipeline=2, tensor=2)], ids=str)
@pytest.mark.parametrize("kv_dtype", [None, "int8"])
def test_speculation(repeating, mesh, kv_dtype):
    """The tokens of one device without it: a row that has speculative tokens, and one that has none."""
    plain = LLM(repeating, kv_dtype=kv_dtype, **FEW)
    options = {**FEW, "max_decode_passes": 4, "num_speculative_tokens": 3}
    llm = in_stages(repeating, mesh=mesh, kv_dtype=kv_dtype, **options)
    assert generate(llm, REPEATING, REPEATED) == generate(plain, REPEATING, REPEATED)
    stats = llm.stats()
    assert 0 < stats.accepted_tokens <= stats.draft_tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7, "top_p": 0.9, "seed": 3},
        {"temperature": 0, "frequency_penalty": 0.05},
        {"temperature": 0, "logprobs": 2},
        {"temperature": 0.5, "seed": 1, "stop_token_ids": range(0, 256, 17)},
    ],
    ids=str,
)
def test_speculation_with_other_options(five, params):
    bias = dict.fromkeys((5, 6, 7, 8, 9), 6.0)
    params = SamplingParams(max_tokens=40, ignore_eos=True, logit_bias=bias, **params)
    alone, llm = LLM(five, **FEW), in_stages(five, mesh=TWO, num_speculative_tokens=3, **FEW)
    assert generate(llm, params, REPEATED) == generate(alone, params, REPEATED)
    assert llm.stats().draft_tokens > 0


# Formats


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Widths are whole groups of int4, also of two devices."""
    widened = FIVE.with_attention(q_heads=8, kv_heads=4, head_dim=16).with_mlp(hidden=256)
    config = dataclasses.replace(widened, embed=128)
    return save_tiny(tmp_path_factory.mktemp("models") / "wide", config=config)


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("mesh", [TWO, FOUR], ids=str)
def test_quantised(wide, mesh, quantize):
    """Each layer computes what it does on one device."""
    alone, llm = LLM(wide, quantize=quantize, **FEW), in_stages(wide, mesh=mesh, quantize=quantize, **FEW)
    assert generate(llm, UNEQUAL) == generate(alone, UNEQUAL)
    assert logprob_errors(llm, alone, GREEDY).max() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"kv_dtype": "int8"}], ids=str)
def test_what_is_rounded_is_as_precise_in_stages(five, options):
    """Numbers may differ by rounding: pages of int8 are rounded by what a step has of them, which is not the same."""
    exact, params = LLM(five, **FEW), dataclasses.replace(GREEDY, max_tokens=30)
    one, several = (LLM(five, mesh=mesh, **options, **FEW) for mesh in (None, TWO))
    errors = [logprob_errors(llm, exact, params).mean() for llm in (one, several)]
    assert 0 < errors[1] < 1.5 * errors[0]


# With other axes


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        {"pipeline": 2},
        {"pipeline": 2, "expert": 2},
        {"data": 2, "pipeline": 2},
        {"data": 2, "pipeline": 2, "expert": 2},
        {"pipeline": 2, "expert": 2, "tensor": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("exchange", ["cheapest", "pcc"])
@pytest.mark.parametrize("name", ["shared", "sigmoid"])
def test_experts_in_stages(tmp_path, name, mesh, exchange):
    path = save_tiny(tmp_path / "moe", config=dataclasses.replace(MOE_CONFIGS[name], layers=5))
    alone = LLM(path, **FEW)
    llm = LLM(path, mesh=MeshConfig(**mesh), rules=ShardingRules(exchange=exchange), **FEW)
    assert generate(llm, UNEQUAL, LONG) == generate(alone, UNEQUAL, LONG)
    assert logprob_errors(llm, alone, GREEDY).max() < 1e-4


@pytest.mark.slow
def test_a_mesh_of_jax_with_its_axes_in_another_order(five, alone):
    devices = np.array(jax.devices()[:8]).reshape(2, 2, 2)
    mesh = jax.sharding.Mesh(devices, ("tensor", "data", "pipeline"), axis_types=(AxisType.Auto,) * 3)
    llm = LLM(five, mesh=mesh, **SIZES)
    assert generate(llm, GREEDY, MANY) == generate(alone, GREEDY, MANY)


# Other ways in


@pytest.mark.slow
def test_an_embedder(five):
    alone, llm = (Embedder(five, mesh=mesh, **FEW) for mesh in (None, TWO))
    np.testing.assert_allclose(llm.embed([*PROMPTS, *LONG]), alone.embed([*PROMPTS, *LONG]), atol=1e-5)


@pytest.mark.slow
def test_an_async_llm(five, alone):
    async def served():
        async with AsyncLLM(five, mesh=TWO, compile_ahead=True, **FEW) as llm:
            outputs = await asyncio.gather(*(llm.generate(prompt, GREEDY).final() for prompt in MANY))
            assert llm.engine.executor.programs.misses == 0  # all that can be needed was compiled ahead
            return [[(o.token_ids, o.text) for o in output.outputs] for output in outputs]

    assert asyncio.run(served()) == generate(alone, GREEDY, MANY)


# What goes wrong


@pytest.fixture
def nothing_read(monkeypatch):
    """Reading any weight fails."""

    def read(*_, **__):
        raise AssertionError("a weight was read")

    monkeypatch.setattr("jaxinfer.checkpoints.reading._read_part", read)


@pytest.mark.parametrize(
    ("mesh", "options", "message"),
    [
        ({"pipeline": 6}, {}, r"five: mesh pipeline=6: the model has 5 layers, fewer than stages; lower pipeline"),
        *(
            (
                {"pipeline": 2},
                {"weights": weights},
                f"weights='{weights}' is not for a mesh with stages, and this one has pipeline=2",
            )
            for weights in ("host", "disk", "auto")
        ),
    ],
    ids=str,
)
def test_what_is_refused_before_a_weight_is_read(five, nothing_read, mesh, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        LLM(five, mesh=MeshConfig(**mesh), **options, **SIZES)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (CONFIG, {}, r"mesh pipeline=2: the layers of its stages differ in kind .* set pipeline = 1\.$"),
        (
            dataclasses.replace(MOE_CONFIGS["shared"], layers=4),
            {"expert_load": True},
            r"LLM.expert_load=True is not implemented for a model in stages \(pipeline=2\)",
        ),
    ],
    ids=["kinds", "experts"],
)
def test_models_that_are_refused_before_a_weight_is_read(tmp_path, nothing_read, config, options, message):
    path = save_tiny(tmp_path / "model", config=config)
    with pytest.raises(ValueError, match=message) as caught:
        LLM(path, mesh=TWO, **options, **SIZES)
    assert "\n" not in str(caught.value)


def test_encoders_are_refused_before_a_weight_is_read(tmp_path, nothing_read):
    convert(goldens.DIRECTORY / "bert_awkward", path := tmp_path / "bert")
    with pytest.raises(ValueError, match=r"bert: mesh pipeline=2: only decoders run in stages; set pipeline = 1"):
        Embedder(path, mesh=TWO)

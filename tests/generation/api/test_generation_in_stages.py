"""Stages of a pipeline: each has some of the layers, and micro-batches of the requests go round."""

import asyncio
import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxinfer import LLM, AsyncLLM, BeamSearchParams, Embedder, SamplingParams, StructuredOutputsParams
from jaxinfer.compiled import Costs
from jaxinfer.compiled.costs import Cost
from jaxinfer.generation.engine.speculation import TRIES
from jaxinfer.generation.outputs import FinishReason
from jaxinfer.models.files.conversion import convert
from jaxinfer.sharding import MeshConfig, ShardingRules
from jaxinfer.sharding.schedules import Schedule, queued, queued_idle
from tests.generation.sampled import (
    PROMPTS,
    SAMPLED,
    check_logprobs,
    fail_one_launch,
    generate,
    logprob_errors,
    only_even,
)
from tests.models import goldens
from tests.peft import random_pair, save_adapter
from tests.tiny import CONFIG, MOE_CONFIGS, save_tiny

SIZES = {"max_batch": 4, "token_budget": 32, "chunk_size": 8, "max_decode_passes": 4}
FIVE = dataclasses.replace(CONFIG, layers=5)
"""Layers of two kinds, which no number of stages divides evenly."""
TWO, FOUR = MeshConfig(pipeline=2), MeshConfig(pipeline=4)
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
UNEQUAL = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (1, 40, 3)]
MANY = [*PROMPTS, *([n] * (n + 1) for n in range(6))]
LONG = [list(range(3, 100)), [7, 3, 250, 9], list(range(200, 130, -1))]


@pytest.fixture(scope="module")
def five(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("models") / "five", config=FIVE)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Adapters of layers of both stages."""
    rng = np.random.default_rng(0)
    width, heads = CONFIG.embed, CONFIG.attention.q_heads * CONFIG.attention.head_dim
    pairs = {
        "model.layers.0.self_attn.q_proj": random_pair(heads, width, 3, rng),
        "model.layers.2.mlp.down_proj": random_pair(width, CONFIG.mlp.hidden, 3, rng),
        "model.layers.4.self_attn.q_proj": random_pair(heads, width, 3, rng),
    }
    folder = tmp_path_factory.mktemp("adapters")
    return {name: save_adapter(folder / name, dict([pair])) for name, pair in zip("abc", pairs.items(), strict=True)}


@pytest.fixture(scope="module")
def options(adapters):
    return {"logits_processors": {"even": only_even}, "adapters": adapters, **SIZES}


@pytest.fixture(scope="module")
def alone(five, options):
    return LLM(five, **options)


def costs_of(stages, *, quick):
    """A record by which rows go through the stages in so many micro-batches the fastest."""
    known = {}
    for rows, count in ((rows, count) for rows in range(1, 9) for count in (1, stages) if rows % count == 0):
        sizes = {"chunks": 0, "batch": rows, "speculative": 0, "micro_batches": count}
        cost = known["ring", tuple(sizes.items())] = Cost()
        for _ in range(TRIES):
            seconds = 1e-9 if count == quick else 1e-3
            cost.add(seconds, 1, seconds)
    return Costs(known, learns=False)


def in_stages(path, mesh=TWO, *, quick=None, **options):
    """An engine; quick: the number of micro-batches that rows go in, one for each stage by default."""
    costs = costs_of(mesh.pipeline, quick=quick or mesh.pipeline)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxinfer.generation.api.loading.open_costs", lambda *key: costs)
        return LLM(path, mesh=mesh, **options)


@pytest.fixture(scope="module")
def two(five, options):
    return in_stages(five, **options)


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def staged(five, options, two, request):
    return two if request.param == 2 else in_stages(five, FOUR, **options)


def test_each_stage_has_its_layers_and_their_pages(two, alone):
    assert str(two.model.stages) == "2 stages of 3, 2 layers"
    caches = two.engine.executor.state.arrays.caches
    assert len(caches) == two.model.stages.config.layers == 3
    for cache in jax.tree.leaves(caches):
        assert cache.shape[0] == 2 * two.memory.num_pages
        assert cache.sharding.shard_shape(cache.shape)[0] == two.memory.num_pages
    assert two.memory.page_bytes == alone.memory.page_bytes // 5 * 3
    history = two.engine.executor.state.arrays.slots.history
    assert history.shape[0] == SIZES["max_batch"] + 1
    assert history.sharding.is_fully_replicated


def test_stages_generate_the_tokens_of_one_device(staged, alone):
    """Fewer sequences than stages, and more than there are slots."""
    for count in (1, 2, 3, 9):
        assert generate(staged, GREEDY, MANY[:count]) == generate(alone, GREEDY, MANY[:count])
    staged.engine.scheduler.check_integrity()


def test_long_prompts_beside_rows_that_decode(staged, alone):
    """Thirteen chunks, four a step; rows go on beside them, also those that end before others."""
    params = [dataclasses.replace(GREEDY, max_tokens=count) for count in (9, 30, 6, 14, 3, 2)]
    prompts = [*LONG, *([number + 1] * 33 for number in range(3))]
    for these in (slice(1), slice(None)):
        assert generate(staged, params[these], prompts[these]) == generate(alone, params[these], prompts[these])


def test_rows_that_end_early(staged, alone):
    assert generate(staged, UNEQUAL) == generate(alone, UNEQUAL)
    stops = [
        SamplingParams(temperature=0, max_tokens=40, stop_token_ids=range(at, 256, 17), ignore_eos=True)
        for at in range(3)
    ]
    assert generate(staged, stops) == generate(alone, stops)


QUICK = "seeded", "penalties", "structured", "logits processor"


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SAMPLED if name not in QUICK)]
)
def test_every_option_of_sampling(staged, alone, name):
    params = [SamplingParams(max_tokens=8, **SAMPLED[name]), GREEDY, SamplingParams(max_tokens=12, **SAMPLED[name])]
    assert generate(staged, params) == generate(alone, params)


@pytest.mark.slow
@pytest.mark.parametrize(
    "structure",
    [
        {"choice": ["abc", "abd", "zz top"]},
        {"json": {"type": "object", "properties": {"a": {"enum": ["b", "cd"]}}, "required": ["a"]}},
        {"regex": "(ab|cd){3}[0-9]"},
    ],
    ids=str,
)
def test_structured_outputs(staged, alone, structure):
    asked = SamplingParams(
        temperature=1.0, seed=5, max_tokens=30, n=2, structured_outputs=StructuredOutputsParams(**structure)
    )
    for params in (asked, [asked, GREEDY, asked]):
        assert generate(staged, params) == generate(alone, params)


def test_several_completions_prefixes_adapters_and_vectors(staged, alone):
    several = SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=6, logprobs=2, prompt_logprobs=2)
    before = staged.stats().cached_tokens
    for params in (several, dataclasses.replace(several, prompt_logprobs=None)):  # then from the prefix cache
        assert generate(staged, params, LONG) == generate(alone, params, LONG)
    assert staged.stats().cached_tokens - before > 2 * 64
    for names in (("a", None, "b"), ("c", "c", "a")):
        adapted = [SamplingParams(temperature=0, max_tokens=6, adapter=name) for name in names]
        assert generate(staged, adapted) == generate(alone, adapted)
    np.testing.assert_allclose(staged.embed(PROMPTS), alone.embed(PROMPTS), atol=1e-5)


def test_adapters_change_what_is_generated(two):
    """Each of them does, whichever stage has the layer."""
    texts = [
        generate(two, SamplingParams(temperature=0, max_tokens=12, adapter=name), PROMPTS)
        for name in (None, "a", "b", "c")
    ]
    assert all(texts.count(text) == 1 for text in texts)


def test_log_probabilities(staged, alone):
    check_logprobs(alone, staged)
    assert logprob_errors(staged, alone, GREEDY, LONG).max() < 1e-4


@pytest.mark.slow
def test_beams(staged, alone):
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    one, another = (llm.beam_search(PROMPTS, params) for llm in (alone, staged))
    for first, second in zip(one, another, strict=True):
        assert [beam.token_ids for beam in first.beams] == [beam.token_ids for beam in second.beams]


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
    for rows in (1, 2, 3, 4):
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


def test_without_stages_nothing_is_counted(alone):
    assert alone.stats().pipeline is None
    assert "stages" not in str(alone.stats())


@pytest.mark.slow
def test_rows_that_go_together(five, options, alone, monkeypatch):
    """Where the record says that one micro-batch of all rows is quicker."""
    llm = in_stages(five, quick=1, **options)
    tables = recorded(llm, monkeypatch, GREEDY, MANY[:4])
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
    alone, llm = LLM(five, **sizes), in_stages(five, mesh, **sizes)
    pages = 2 * llm.engine.config.pages_per_sequence
    llm = in_stages(five, mesh, cache_bytes=pages * llm.memory.page_bytes, **sizes)
    assert llm.memory.num_pages == pages
    for _ in range(2):
        assert generate(llm, params, MANY) == generate(alone, params, MANY)
    assert llm.stats().preemptions > 0
    llm.engine.scheduler.check_integrity()


FEW = {"max_batch": 2, "token_budget": 16, "chunk_size": 8}
"""An engine of few programs."""
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
def test_speculation(five, alone, mesh, kv_dtype):
    """The tokens of one device without it: a row that has speculative tokens, and one that has none."""
    plain = alone if kv_dtype is None else LLM(five, kv_dtype=kv_dtype, **FEW)
    options = {**FEW, "max_decode_passes": 4, "num_speculative_tokens": 3}
    llm = in_stages(five, mesh, kv_dtype=kv_dtype, **options)
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
    alone, llm = LLM(five, **FEW), in_stages(five, num_speculative_tokens=3, **FEW)
    assert generate(llm, params, REPEATED) == generate(alone, params, REPEATED)
    assert llm.stats().draft_tokens > 0


# Formats


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Widths are whole groups of int4, also of two devices."""
    attention = dataclasses.replace(CONFIG.attention, q_heads=8, kv_heads=4, head_dim=16)
    mlp = dataclasses.replace(CONFIG.mlp, hidden=256)
    config = dataclasses.replace(FIVE, embed=128, attention=attention, mlp=mlp)
    return save_tiny(tmp_path_factory.mktemp("models") / "wide", config=config)


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("mesh", [TWO, FOUR], ids=str)
def test_quantised(wide, mesh, quantize):
    """Each layer computes what it does on one device."""
    alone, llm = LLM(wide, quantize=quantize, **FEW), in_stages(wide, mesh, quantize=quantize, **FEW)
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
        {"pipeline": 2, "tensor": 2},
        {"pipeline": 2, "tensor": 4},
        {"pipeline": 4, "tensor": 2},
        {"data": 2, "pipeline": 2},
        {"data": 2, "pipeline": 4},
        {"data": 2, "pipeline": 2, "tensor": 2},
    ],
    ids=str,
)
def test_stages_with_other_axes(five, options, alone, mesh):
    llm = in_stages(five, MeshConfig(**mesh), **options)
    for count in (1, 9):
        assert generate(llm, GREEDY, MANY[:count]) == generate(alone, GREEDY, MANY[:count])
    assert generate(llm, UNEQUAL, LONG) == generate(alone, UNEQUAL, LONG)
    for name in ("seeded", "top_p beyond the candidates", "penalties", "structured"):
        params = SamplingParams(max_tokens=8, **SAMPLED[name])
        assert generate(llm, params) == generate(alone, params)
    adapted = [SamplingParams(temperature=0, max_tokens=6, adapter=name) for name in ("a", None, "b")]
    assert generate(llm, adapted) == generate(alone, adapted)
    check_logprobs(alone, llm)
    np.testing.assert_allclose(llm.embed(PROMPTS), alone.embed(PROMPTS), atol=1e-5)
    llm.engine.scheduler.check_integrity()


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
        async with AsyncLLM(five, mesh=TWO, **FEW) as llm:
            outputs = await asyncio.gather(*(llm.generate(prompt, GREEDY).final() for prompt in MANY))
            assert llm.engine.executor.programs.misses == 0  # all that can be needed was compiled ahead
            return [[(o.token_ids, o.text) for o in output.outputs] for output in outputs]

    assert asyncio.run(served()) == generate(alone, GREEDY, MANY)


# What goes wrong


def test_a_step_that_fails(two, alone, monkeypatch):
    executor = two.engine.executor
    before = [x.sharding for x in jax.tree.leaves(executor.state.arrays)]
    fail_one_launch(executor, monkeypatch)
    failed = two.generate(PROMPTS, GREEDY)
    assert FinishReason.ERROR in {output.outputs[0].finish_reason for output in failed}
    assert generate(two, GREEDY) == generate(alone, GREEDY)
    assert [x.sharding for x in jax.tree.leaves(executor.state.arrays)] == before


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

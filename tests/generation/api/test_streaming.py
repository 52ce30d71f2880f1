"""A model whose layers come from the host's memory or from disk generates what it generates on its device."""

import dataclasses
import math
import os
import shutil
import sys
import threading
import time
import types

import jax
import numpy as np
import pytest

from jaxinfer import LLM, Embedder, FinishReason, SamplingParams
from jaxinfer.checkpoints import CheckpointError, readers
from jaxinfer.compiled import Costs
from jaxinfer.compiled.dumps import read_collectives
from jaxinfer.generation.engine.decider import RequestDecider
from jaxinfer.generation.engine.ticket import RequestTicket
from jaxinfer.generation.execution.base import DevicePrograms
from jaxinfer.generation.execution.chain import ChainDecoderPasses, ChainPasses, LayerStream
from jaxinfer.generation.execution.decoder import DecoderExecutor
from jaxinfer.generation.execution.decoder_state import DecoderState
from jaxinfer.generation.execution.programs.chain import Layer
from jaxinfer.models.files.conversion import convert
from jaxinfer.models.files.loading import open_model
from jaxinfer.models.leaves import layer_of
from jaxinfer.serving import ClosedError
from jaxinfer.sharding import MeshConfig, ShardingRules
from jaxinfer.streaming.layer_folders import layer_folder
from jaxinfer.streaming.model import layer_ranges
from jaxinfer.streaming.prefetch import Prefetcher
from tests.generation.sampled import PROMPTS, check_logprobs, generate
from tests.generation.ways import with_speculation
from tests.models import goldens
from tests.peft import random_pair, save_adapter
from tests.tiny import CONFIG, save_tiny

pytestmark = pytest.mark.xdist_group("ways")

ONE = {"max_batch": 1, "token_budget": 8, "chunk_size": 8}
"""An engine of few programs, for one request at a time."""
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


in_both = pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
"""Every result is rounded to its dtype, in one program as in one for each layer: on a CPU no bit differs."""


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A model of six layers of two kinds."""
    return save_tiny(tmp_path_factory.mktemp("models") / "deep", config=dataclasses.replace(CONFIG, layers=6))


@pytest.fixture(scope="module")
def from_disk(deep):
    """LayerStream from disk, one request at a time."""
    return LLM(deep, weights="disk", **ONE)


@pytest.fixture(scope="module")
def want(from_disk):
    """What `deep` generates: in any way what it does from disk (`test_every_way.py`)."""
    return generate(from_disk, GREEDY)


@pytest.mark.slow
def test_log_probabilities_in_bfloat16_are_the_same_numbers(model_dir):
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=0, prompt_logprobs=0)
    found = []
    for weights in ("device", "disk"):
        llm = LLM(model_dir, weights=weights, dtype="bfloat16", **ONE)
        (output,) = llm.generate([list(range(40))], params)
        found.append([token.logprob for token in (*output.prompt_logprobs[1:], *output.outputs[0].logprobs)])
    assert found[0] == found[1]


def test_one_fetch_of_a_layer_serves_all_sequences(ways):
    llm = ways["streamed"]
    layers = llm.model.config.layers
    statistics = llm.engine.executor.report().streaming
    statistics.clear()
    llm.generate([[1, 2, 3]] * 2, GREEDY)
    passes = 2 + 5  # a chunk each, and what follows together
    assert statistics.layers <= layers * passes
    sizes = [llm.model.store.start(layer).bytes for layer in range(layers)]
    assert statistics.bytes["disk"] <= passes * sum(sizes) + max(sizes)


def test_all_layers_of_a_kind_are_one_program(from_disk):
    from_disk.generate([[1, 2, 3]], GREEDY)
    layers = [program for program in from_disk.engine.executor.programs if program.name == "layer"]
    assert {program.sizes.kind for program in layers} == {0, 1}
    assert len(layers) == 2 * 2  # with a chunk, and with a row


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["host", "disk"])
def test_layers_that_stay_run_together(deep, weights):
    """Six layers, whose kinds alternate, of which those after layers 0 and 3 stay."""
    want = generate(LLM(deep, **ONE), GREEDY)
    llm = limited(deep, 4, weights=weights, prefetch=2)
    assert [dataclasses.astuple(layers) for layers in layer_ranges(llm.model, llm.placement)] == [
        (0, 1, 0, True),
        (1, 2, 1, False),
        (3, 1, 1, True),
        (4, 2, 0, False),
    ]
    assert generate(llm, GREEDY) == want
    llm.engine.executor.passes.layers.prefetcher.restart()


def limited(model, resident, **options):
    """With as much of the device's memory as lets so many layers stay there."""
    memory = (llm := LLM(model, weights="disk", device_memory="1GiB", **ONE)).memory  # of all layers
    assert set(llm.placement.tiers) == {"device"}
    absent = llm.model.transformer.layers - resident - options.get("prefetch", 1) - 1
    beside = (memory.cache + memory.workspace) / 0.9
    limit = int(memory.weights - (absent - 0.5) * llm.placement.layer_bytes + beside)
    return LLM(model, device_memory=limit, **options, **ONE)


@pytest.mark.parametrize(("weights", "depth"), [("host", 2), ("disk", 0)])
def test_at_most_so_many_layers_are_on_the_device(deep, monkeypatch, weights, depth):
    llm = LLM(deep, weights=weights, prefetch=depth, **ONE)
    store, counted = llm.model.store, []
    shapes = {leaf.shape for name, leaf in llm.model.shapes.items() if layer_of(name) == 0 and len(leaf.shape) == 2}
    starts = type(store).start

    def start(self, layer):
        fetch = starts(self, layer)
        on_device = [x for x in jax.live_arrays() if x.shape in shapes and x.sharding.memory_kind == "device"]
        counted.append(sum(x.nbytes for x in on_device))
        return fetch

    monkeypatch.setattr(type(store), "start", start)
    others = [x for x in jax.live_arrays() if x.shape in shapes and x.sharding.memory_kind == "device"]
    before = sum(x.nbytes for x in others)
    llm.generate([[1, 2, 3]], GREEDY)
    matrices = sum(
        leaf.bytes for name, leaf in llm.model.shapes.items() if layer_of(name) == 0 and leaf.shape in shapes
    )
    assert max(counted) - before <= (depth + 1) * matrices
    llm.engine.executor.passes.layers.prefetcher.restart()


def test_buffers_are_not_filled_while_they_are_used(deep, want):
    llm = LLM(deep, weights="disk", **ONE)
    (store,) = set(llm.model.store._stores)
    store.staging._on_release = lambda buffer: buffer.fill(255)  # NaN, unless it is read anew
    assert generate(llm, GREEDY) == want


@pytest.mark.slow
@pytest.mark.parametrize(("in_host", "counts"), [(2, (2, 2, 2)), (None, (2, 0, 4))])
def test_a_device_limit_keeps_some_layers_there(deep, from_disk, want, in_host, counts):
    layer = from_disk.placement.layer_bytes
    llm = limited(deep, 2, weights="disk", host_memory=in_host and in_host * layer)
    tiers = llm.placement.tiers
    assert tuple(tiers.count(tier) for tier in ("device", "host", "disk")) == counts
    assert generate(llm, GREEDY) == want


@pytest.mark.slow
def test_activations_that_do_not_fit_go_through_a_layer_in_slices(deep):
    sizes = {"max_batch": 1, "token_budget": 32, "chunk_size": 8}
    prompts = [list(range(50))]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    alone = LLM(deep, **sizes)
    memory = alone.memory
    limit = int((4 * memory.weights // 6 + memory.cache + 40_000) / 0.9)
    sliced = LLM(deep, weights="disk", device_memory=limit, **sizes)
    assert sliced.memory.max_chunks == 1
    for one, other in zip(alone.generate(prompts, params), sliced.generate(prompts, params), strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        logprobs = [[p.logprob for p in output.prompt_logprobs[1:]] for output in (one, other)]
        np.testing.assert_allclose(*logprobs, atol=1e-4)
    assert sliced.streaming.layers == 6 * 4  # four chunks together, then three one by one: not a pass for each slice


@pytest.mark.slow
def test_a_row_reads_what_chunks_of_its_step_have_written(deep):
    """The second prompt is the first and one token, so it decodes in the step that computes the first."""
    sizes = {"max_batch": 2, "token_budget": 64, "chunk_size": 8, "page_size": 8}
    prompts = [list(range(32)), [*range(32), 7]]
    want = generate(LLM(deep, **sizes), GREEDY, prompts)
    sliced = LLM(deep, weights="disk", **sizes)
    sliced.engine.executor.passes._buckets = dataclasses.replace(sliced.engine.executor.passes._buckets, chunks=(1,))
    assert generate(sliced, GREEDY, prompts) == want
    assert sliced.stats().cached_tokens == 32


@pytest.mark.slow
def test_auto_takes_the_first_that_fits(deep):
    whole = LLM(deep, weights="auto", **ONE)
    assert whole.placement is None
    limit = int((whole.memory.weights + whole.memory.cache) / 0.9) - 40_000
    host = LLM(deep, weights="auto", device_memory=limit, **ONE)
    assert set(host.placement.tiers) == {"device", "host"}
    disk = LLM(deep, weights="auto", device_memory=limit, host_memory=1, **ONE)
    assert set(disk.placement.tiers) == {"device", "disk"}
    assert "auto: the model takes" in str(disk.placement)
    assert generate(host, GREEDY) == generate(disk, GREEDY) == generate(whole, GREEDY)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"dtype": "bfloat16", "kv_dtype": "int8", "quantize": "int8"}, marks=pytest.mark.slow),
        pytest.param({"quantize": "int4"}, marks=pytest.mark.slow),
        pytest.param({"kv_dtype": "int8", "quantize": "int8"}, marks=pytest.mark.slow),
        pytest.param({"kv_dtype": "bfloat16", "quantize": "int8"}, marks=pytest.mark.slow),
        pytest.param({"dtype": "bfloat16", "quantize": "fp8"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_narrow_weights_and_caches(model_dir, options):
    alone, streamed = (LLM(model_dir, weights=weights, **options, **ONE) for weights in ("device", "host"))
    assert generate(streamed, GREEDY) == generate(alone, GREEDY)


@pytest.mark.slow
@in_both
def test_adapters(model_dir, tmp_path, dtype):
    rng = np.random.default_rng(0)
    pairs = {
        "model.layers.0.self_attn.q_proj": random_pair(32, 32, 4, rng),
        "model.layers.1.mlp.down_proj": random_pair(32, 48, 4, rng),
    }
    adapters = {"a": save_adapter(tmp_path / "a", pairs)}
    results = []
    for weights in ("device", "disk"):
        llm = LLM(model_dir, weights=weights, adapters=adapters, dtype=dtype, **ONE)
        params = [GREEDY, dataclasses.replace(GREEDY, adapter="a")]
        results.append([generate(llm, each) for each in params])
    assert results[0] == results[1]
    assert results[0][0] != results[0][1]


@pytest.mark.parametrize(
    ("weights", "mesh"),
    [
        pytest.param("host", MeshConfig(tensor=2), marks=pytest.mark.slow),
        ("disk", MeshConfig(tensor=2)),
        pytest.param("disk", MeshConfig(expert=2), marks=pytest.mark.slow),
        pytest.param("host", MeshConfig(expert=2, tensor=2), marks=pytest.mark.slow),
        pytest.param("disk", MeshConfig(expert=2, tensor=2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_on_a_mesh_each_device_gets_its_own_slice(deep, want, weights, mesh):
    llm = LLM(deep, weights=weights, mesh=mesh, **ONE)
    assert generate(llm, GREEDY) == want
    arrays = fetched(llm)
    assert all(shard.data.size == x.size // mesh.size for x in arrays for shard in x.addressable_shards if x.ndim > 1)
    assert all(one.kind == "all-reduce" for one in exchanged(llm))


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["host", "disk"])
def test_on_a_mesh_layers_have_leaves_of_their_own(tmp_path, weights):
    """The first layer has more leaves than the second, in another order of shardings, and other widths to pad."""
    plain = dataclasses.replace(CONFIG.layer(0).mlp, hidden=45, gated=False)
    config = CONFIG.with_mlps((dataclasses.replace(plain, hidden=21, bias=True), plain))
    want = generate(LLM(save_tiny(tmp_path / "m", config=config), **ONE), GREEDY)
    llm = LLM(tmp_path / "m", weights=weights, mesh=MeshConfig(expert=2, tensor=2), **ONE)
    assert generate(llm, GREEDY) == want
    first, second = (llm.model.layer_shapes(layer) for layer in range(2))
    assert len(first) > len(second)
    assert [x.sharding for x in fetched(llm)] == [x.sharding for x in first]


@pytest.mark.slow
def test_on_a_mesh_bfloat16_is_that_of_resident_layers(deep):
    options = {"mesh": MeshConfig(tensor=3), "dtype": "bfloat16", **ONE}
    alone, streamed = (LLM(deep, weights=weights, **options) for weights in ("device", "disk"))
    assert generate(streamed, GREEDY) == generate(alone, GREEDY)
    check_logprobs(alone, streamed)


@pytest.mark.slow
def test_what_every_device_has_whole_comes_in_parts(deep):
    whole = ShardingRules(heads=None, kv_heads=None, mlp=None, vocab=None)
    llm = LLM(deep, weights="disk", mesh=MeshConfig(tensor=2), rules=whole, **ONE)
    assert generate(llm, GREEDY) == generate(LLM(deep, **ONE), GREEDY)
    matrices = [x for x in fetched(llm) if x.ndim > 1]
    assert all(shard.data.size == x.size // 2 for x in matrices for shard in x.addressable_shards)
    gathers = [one for one in exchanged(llm) if one.kind == "all-gather"]
    assert sorted(one.bytes for one in gathers) == sorted(x.nbytes for x in matrices)
    (store,) = set(llm.model.store._stores)
    sizes = [math.prod(part.shape) for leaf in store.files.layers[0].leaves for part in leaf.slices]
    assert sum(sizes) == sum(x.size for x in fetched(llm))  # no byte is stored, nor read, twice


def fetched(llm):
    """The leaves of a layer, as they come to the devices."""
    fetch = llm.model.store.start(0)
    fetch.place()
    return fetch.arrays()


def exchanged(llm):
    sizes = Layer(kind=0, layers=1, chunks=0, batch=1, speculative=0, pages=8)
    program = llm.engine.executor.programs.get(sizes)
    return read_collectives(program.executable.as_text(), llm.model.mesh.size)


@in_both
def test_an_encoder(tmp_path, dtype):
    convert(goldens.DIRECTORY / "bert_awkward", tmp_path / "bert")
    texts = [[1, 2, 3], [4, 5, 6, 7, 8]]
    alone = Embedder(tmp_path / "bert", dtype=dtype).embed(texts)
    for weights in ("host", "disk"):
        streamed = Embedder(tmp_path / "bert", weights=weights, dtype=dtype)
        np.testing.assert_allclose(streamed.embed(texts), alone, atol=1e-6)
        assert weights in streamed.placement.tiers
        assert streamed.streaming.layers > 0
    streamed.embed(texts)  # a program's first call does not count
    costs = streamed.engine.executor.costs
    assert costs.for_sizes("pass", batch=2).calls == 1
    assert costs.for_sizes("leave") is None


REPETITIVE = [[5, 6, 7, 8, 9] * 4, [7] * 12]
BIAS = dict.fromkeys((5, 6, 7, 8, 9), 15.0)
"""Makes the model repeat itself, so that speculative tokens are accepted."""


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.2, "logprobs": 2},
        {"temperature": 0.5, "stop_token_ids": tuple(range(0, 256, 17))},
        {"temperature": 0.0, "logits_processors": ("even",)},
    ],
    ids=["greedy", "sampled", "penalties and logprobs", "stops", "logits processor"],
)
def test_speculation_changes_no_text(ways, options):
    whole, speculating = ways["whole"], ways["streamed"]
    params = [SamplingParams(seed=s, max_tokens=40, ignore_eos=True, logit_bias=BIAS, **options) for s in range(2)]
    plain, guessed = (
        [output.outputs[0] for output in llm.generate(REPETITIVE, params)] for llm in (whole, speculating)
    )
    assert [c.token_ids for c in guessed] == [c.token_ids for c in plain]
    assert [c.finish_reason for c in guessed] == [c.finish_reason for c in plain]
    if "logprobs" in options:
        expected = [p.logprob for c in plain for p in c.logprobs]
        np.testing.assert_allclose([p.logprob for c in guessed for p in c.logprobs], expected, atol=1e-4)
    if options == {"temperature": 0.0}:
        assert sum(c.num_accepted_tokens for c in guessed) > 10


def test_one_fetch_serves_all_speculative_tokens(ways):
    speculating = ways["streamed"]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logit_bias=BIAS)
    statistics = speculating.streaming
    statistics.clear()
    (output,) = speculating.generate(REPETITIVE[1:], params)
    accepted = output.outputs[0].num_accepted_tokens
    assert accepted > 5
    assert statistics.layers <= speculating.model.config.layers * (
        2 + 40 - 1 - accepted
    )  # two chunks, the second of which gives a token


def test_passes_are_compiled_ahead_with_and_without_speculation(ways):
    speculating = ways["streamed"]
    speculating.generate(REPETITIVE[1:], SamplingParams(temperature=0, max_tokens=12, logit_bias=BIAS))
    programs = speculating.engine.executor.programs
    widths = {program.sizes.speculative for program in programs if program.name == "leave"}
    assert (widths, programs.misses) == ({0, 4}, 0)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"kv_dtype": "int8"}, marks=pytest.mark.slow),
        pytest.param({"mesh": MeshConfig(tensor=2), "kv_dtype": "int8"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_speculation_with_adapters_narrow_caches_and_meshes(model_dir, tmp_path, options):
    pairs = {"model.layers.1.mlp.down_proj": random_pair(32, 48, 4, np.random.default_rng(0))}
    options = {"adapters": {"a": save_adapter(tmp_path / "a", pairs)}, "weights": "disk", **options, **ONE}
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logit_bias=BIAS)
    plain, guessing = LLM(model_dir, **options), with_speculation(model_dir, num_speculative_tokens=4, **options)
    for each in (params, dataclasses.replace(params, adapter="a")):
        assert generate(guessing, each, REPETITIVE[1:]) == generate(plain, each, REPETITIVE[1:])
    (output,) = guessing.generate(REPETITIVE[1:], params)
    assert output.outputs[0].num_accepted_tokens


def test_what_passes_cost_is_told_apart(ways, monkeypatch):
    llm, costs = ways["streamed"], Costs()
    monkeypatch.setattr(llm.engine.executor, "costs", costs)
    monkeypatch.setattr(llm.engine.executor._pass_costs, "all", costs)
    llm.generate(REPETITIVE[1:], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logit_bias=BIAS))
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    assert costs.for_sizes("pass", chunks=0, batch=2, speculative=4)
    assert costs.for_sizes("pass", chunks=0, batch=2, speculative=0)
    assert costs.for_sizes("decode") is None


# What goes wrong


def test_a_damaged_layer_ends_requests_with_its_name(from_disk, want, monkeypatch):
    llm = from_disk
    (store,) = set(llm.model.store._stores)
    read, broken = store.files._preadv, [True]

    def preadv(handle, buffers, offset):
        count = read(handle, buffers, offset)
        if broken and "layer-00003" in os.readlink(f"/proc/self/fd/{handle}"):
            buffers[0][100:101] = bytes([buffers[0][100] ^ 1])
        return count

    monkeypatch.setattr(store.files, "_preadv", preadv)
    (failed, *_) = llm.generate(PROMPTS[:1], GREEDY)
    assert failed.outputs[0].finish_reason is FinishReason.ERROR
    assert "layer 3: " in failed.outputs[0].error
    assert "layer-00003.bin" in failed.outputs[0].error
    assert store.files.retries
    broken.clear()
    assert generate(llm, GREEDY) == want


class Interrupts:
    """Within it, Ctrl-C comes before the instruction of this number, of those that run a streamed pass."""

    TOOL = 3  # of `sys.monitoring`: none that Python has a name for

    def __init__(self, at=None):
        self.at, self.count = at, 0

    def __enter__(self):
        sys.monitoring.use_tool_id(self.TOOL, "interrupts")
        sys.monitoring.register_callback(self.TOOL, sys.monitoring.events.INSTRUCTION, self.step)
        self.set_events(sys.monitoring.events.INSTRUCTION)
        return self

    def __exit__(self, *error):
        self.set_events(0)
        sys.monitoring.free_tool_id(self.TOOL)

    def set_events(self, events):
        for owner in (
            DecoderExecutor,
            DecoderState,
            ChainPasses,
            ChainDecoderPasses,
            DevicePrograms,
            LayerStream,
            Prefetcher,
        ):
            for function in vars(owner).values():
                if isinstance(function, types.FunctionType):
                    sys.monitoring.set_local_events(self.TOOL, function.__code__, events)

    def step(self, code, offset):
        self.count += 1
        if self.count == self.at:
            raise KeyboardInterrupt


def run_until_interrupted(llm, tracer):
    """Take a request as far as the tracer lets it come, then give it up; whether it was interrupted."""
    engine = llm.engine
    sequences = engine.prepare(list(range(12)), GREEDY).sequences()
    engine.add(sequences)
    try:
        with tracer:
            while not sequences[0].finished:
                engine.step()
    except KeyboardInterrupt:
        return True
    finally:
        engine._in_flight.clear()
        engine.abort(sequences[0].request_id)
    return False


def restart(llm):
    llm.engine.scheduler.restart()
    llm.engine.executor.restart()


@pytest.mark.slow
@pytest.mark.parametrize("points", [10, 250])
@pytest.mark.parametrize(
    "options",
    [
        {"weights": "host", "prefetch": 2},
        {"weights": "disk", "num_speculative_tokens": 4},
        {"weights": "disk", "mesh": MeshConfig(tensor=2)},
    ],
    ids=str,
)
def test_an_interrupt_anywhere_in_a_pass_leaves_nothing_behind(deep, want, options, points):
    llm = limited(deep, 2, **options)
    generate(llm, GREEDY)  # compiles
    run_until_interrupted(llm, all_of_it := Interrupts())
    interrupted = 0
    for at in np.linspace(1, all_of_it.count, points, dtype=int):
        interrupted += run_until_interrupted(llm, Interrupts(at))
        restart(llm)
        assert llm.engine.executor.passes.layers.prefetcher.live == 0
        assert generate(llm, GREEDY) == want, f"after instruction {at}"
    assert interrupted > points // 2  # a pass that need not wait for a layer has fewer instructions
    llm.engine.scheduler.check_integrity()
    llm.engine.executor.passes.layers.prefetcher.restart()


@pytest.mark.slow
def test_a_restart_that_is_interrupted_is_done_again(deep):
    want = generate(LLM(deep, **ONE), GREEDY)
    llm = limited(deep, 2, weights="disk")
    generate(llm, GREEDY)
    with Interrupts() as whole:
        restart(llm)
    interrupted = 0
    for at in np.linspace(1, whole.count, 15, dtype=int):
        generate(llm, GREEDY)  # layers are on their way
        run_until_interrupted(llm, Interrupts(400 + at))
        llm.engine.scheduler.restart()
        try:
            with Interrupts(at):
                llm.engine.executor.restart()
        except KeyboardInterrupt:
            interrupted += 1
        assert generate(llm, GREEDY) == want, f"after instruction {at}"
    assert interrupted > 5  # what is on its way decides how many instructions there are
    restart(llm)
    restart(llm)
    assert generate(llm, GREEDY) == want
    llm.engine.executor.passes.layers.prefetcher.restart()


def test_a_disk_that_becomes_slow_changes_no_token(deep, want, monkeypatch):
    llm = LLM(deep, weights="disk", **ONE)
    (store,) = set(llm.model.store._stores)
    read, calls = store.files._preadv, []

    def preadv(handle, buffers, offset):
        calls.append(offset)
        if len(calls) % 7 == 0:
            raise InterruptedError("injected")
        return read(handle, buffers, offset)

    store.files._preadv = preadv
    monkeypatch.setattr("jaxinfer.checkpoints.layer_files.FIRST_DELAY", 0.01)
    assert generate(llm, GREEDY) == want
    until = time.monotonic() + 60
    while store.files.retries != len(calls) // 7:  # the next pass's first layers are on their way
        assert time.monotonic() < until
        time.sleep(0.01)
    assert llm.engine.executor.report().streaming.stalls


def hang(monkeypatch, llm):
    """Have reads of layer 3 hang until the event that is returned is set; and one that is set when they do."""
    (store,) = set(llm.model.store._stores)
    read, hanging, let_go = store.files._preadv, threading.Event(), threading.Event()

    def preadv(handle, buffers, offset):
        if "layer-00003" in os.readlink(f"/proc/self/fd/{handle}"):
            hanging.set()
            let_go.wait()
        return read(handle, buffers, offset)

    monkeypatch.setattr(store.files, "_preadv", preadv)
    return let_go, hanging


def test_a_disk_that_hangs_ends_requests_and_may_come_back(from_disk, want, monkeypatch):
    llm = from_disk
    monkeypatch.setattr(readers, "READ_SECONDS", 0.3)
    let_go, _ = hang(monkeypatch, llm)
    (failed, *_) = llm.generate(PROMPTS[:1], GREEDY)
    assert failed.outputs[0].finish_reason is FinishReason.ERROR
    assert "layer 3: " in failed.outputs[0].error
    assert "layer-00003.bin, bytes 0 to " in failed.outputs[0].error
    assert "not read within 0.3 s" in failed.outputs[0].error
    let_go.set()
    monkeypatch.undo()
    assert generate(llm, GREEDY) == want


def test_closing_does_not_wait_for_a_disk_that_hangs(deep, monkeypatch):
    llm = LLM(deep, weights="disk", **ONE)
    let_go, hanging = hang(monkeypatch, llm)
    loop = RequestDecider(llm.engine, max_requests=1).loop
    loop.submit(request := RequestTicket(llm.prepare(PROMPTS[0], GREEDY).sequences(), owner=llm))
    assert hanging.wait(60)
    loop.close(drain=False)  # else this waits for a minute, and the request ends with another error
    with pytest.raises(ClosedError, match="closed"):
        request.future.result(0)
    let_go.set()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"weights": "nvme"}, ValueError, "weights must be one of device, host, disk, auto, got 'nvme'"),
        ({"device_memory": "12 apples"}, ValueError, r'device_memory must be bytes or a size such as "12GiB"'),
        ({"weights": "disk", "prefetch": -1}, ValueError, r"prefetch must be an integer in \[0, 64\] or None, got -1"),
        (
            {"weights": "disk", "device_memory": "1KiB"},
            MemoryError,
            r"2 layers such as layer 0 of .* raise device_memory above .* \(\d+ bytes\), lower prefetch",
        ),
        ({"weights": "host", "host_memory": 1}, MemoryError, "raise host_memory, or use weights='disk'"),
        ({"weights": "device", "device_memory": "1KiB"}, MemoryError, "use weights='auto'"),
        ({"weights": "disk", "max_decode_passes": 3}, ValueError, "max_decode_passes=3 needs all weights"),
        ({"weights": "device", "prefetch": 3}, ValueError, "prefetch=3 has no effect with weights='device'"),
        (
            {"prefetch": 0},
            ValueError,
            "prefetch=0 has no effect with weights='device': .* to 'host' or 'disk' or 'auto'",
        ),
        ({"weights": "device", "host_memory": "1GB"}, ValueError, "host_memory=1000000000 has no effect"),
        ({"layer_files": "layers"}, ValueError, "layer_files=layers has no effect with weights='device'"),
        (
            {"weights": "host", "layer_files": "layers"},
            ValueError,
            "no effect with weights='host': .* to 'disk' or 'auto'",
        ),
        ({"weigths": "disk"}, TypeError, "LLM has no option weigths; known: .*weights"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(deep, options, error, message):
    with pytest.raises(error, match=message):
        LLM(deep, **ONE | options)


def test_damaged_files_are_refused_when_loading(deep, tmp_path):
    options = {"weights": "disk", "layer_files": tmp_path, **ONE}
    folder = layer_folder(open_model(deep), tmp_path)
    LLM(deep, **options)
    os.truncate(folder / "layer-00000.bin", 10)
    with pytest.raises(CheckpointError, match=r"layer-00000\.bin has 10 bytes"):
        LLM(deep, **options)
    shutil.rmtree(folder)  # as the error says
    generate(LLM(deep, **options), GREEDY)


@pytest.mark.slow
def test_the_file_of_the_mesh_says_it_too(deep, tmp_path):
    file = tmp_path / "memory.toml"
    file.write_text('[mesh]\ntensor = 2\n[memory]\nweights = "disk"\nprefetch = 2\ndevice_memory = "1GiB"\n')
    llm = LLM(deep, mesh=file, **ONE)
    assert (llm.model.mesh.size, llm.placement.depth.device) == (2, 2)
    alone = LLM(deep, mesh=file, weights="device", **ONE)  # what is given counts more
    assert alone.placement is None
    file.write_text('[memory]\nweigths = "disk"\n')
    with pytest.raises(ValueError, match=r"\[memory\]: unknown field 'weigths'; known: weights, device_memory"):
        LLM(deep, mesh=file)

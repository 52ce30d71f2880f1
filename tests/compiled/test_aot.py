"""What GPT-J-6B and other models run on an H200 and other GPUs, compiled ahead of time (marker `aot`)."""

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxinfer.cli.inspect import decode_program
from jaxinfer.compiled import compiler_options
from jaxinfer.compiled.target import Target, compile_for, compile_program
from jaxinfer.generation.engine.config import EngineConfig
from jaxinfer.generation.execution.layout import DeviceLayout
from jaxinfer.generation.execution.programs import chain, prefill
from jaxinfer.models import KVPages, WeightFormat
from jaxinfer.models.abstract import abstract_model
from jaxinfer.models.layers.token_adaptation import TokenAdaptation
from jaxinfer.models.leaves import canonical_leaves
from jaxinfer.models.presets import preset, vision_preset
from jaxinfer.sharding import MeshConfig

BF16 = WeightFormat(dtype=np.dtype(jnp.bfloat16))
CONTEXT = 2048
KERNELS_PER_LAYER = 5  # norm + qkv, attention, output + residual, norm + up + activation, down + residual
OUTSIDE = 9  # embedding, rotary tables, last norm, head, argmax
MOST_OUTSIDE = 13  # and besides: what came of the pass


def step_report(layers, model="gpt-j-6b", *, batch=1, weights=BF16, page_size=16, target="h200"):
    """One greedy decode step of a model's shape, compiled for a target."""
    config = dataclasses.replace(preset(model), layers=layers)
    graphdef, state = nnx.split(abstract_model(config, weights))
    leaves, treedef = jax.tree.flatten(state)
    pages = CONTEXT // page_size
    page = (page_size, config.layer(0).attention.kv_heads, config.layer(0).attention.head_dim)
    cache = jax.ShapeDtypeStruct((batch * pages, *page), weights.dtype)
    one = jax.ShapeDtypeStruct((batch, 1), jnp.int32)

    def step(leaves, caches, tokens, positions, page_table):
        model = nnx.merge(graphdef, jax.tree.unflatten(treedef, leaves))
        hidden, caches = model(tokens, positions, caches, page_table)
        return jnp.argmax(model.logits(hidden[:, -1]), axis=-1), caches

    options = compiler_options("gpu", rows=batch, dtype=weights.matrix_dtype)
    args = (leaves, [KVPages(cache, cache)] * layers, one, one, jax.ShapeDtypeStruct((batch, pages), jnp.int32))
    return compile_for(Target.load(target), step, args, donate=(1,), options=options)


def cache_bytes(batch=1):
    """Bytes of one layer's keys, or of its values."""
    attention = preset("gpt-j-6b").layer(0).attention
    return batch * CONTEXT * attention.kv_heads * attention.head_dim * 2


@pytest.fixture(scope="module")
def whole_step():
    return step_report(preset("gpt-j-6b").layers)


@pytest.mark.aot
def test_caches_are_written_in_place(whole_step):
    assert whole_step.aliased == whole_step.donated == 2 * 28
    assert whole_step.alias_bytes == 2 * 28 * cache_bytes()


@pytest.mark.aot
def test_nothing_large_is_temporary(whole_step):
    """Pages are read in place and no weights are converted; clusters' partial sums remain, shared by all layers."""
    assert whole_step.temp_bytes < 2e6


@pytest.mark.aot
def test_kernels_per_layer(whole_step):
    assert whole_step.layers == 28
    assert {len(whole_step.of_layer(layer)) for layer in range(1, 28)} == {KERNELS_PER_LAYER}
    assert len(whole_step.kernels) <= 28 * KERNELS_PER_LAYER + OUTSIDE


@pytest.mark.aot
def test_a_step_is_one_graph(whole_step):
    assert (whole_step.graphs, whole_step.host_launches) == (1, ())
    assert all(kernel.in_graph for kernel in whole_step.kernels)


@pytest.mark.aot
@pytest.mark.parametrize(
    ("model", "batch", "quantized"),
    [
        ("gpt-j-6b", 4, None),
        ("gpt-j-6b", 1, "int8"),
        ("llama3-8b", 1, None),
        ("llama3-8b", 4, "int4"),
        ("gpt2-1.5b", 1, None),
        ("gpt2-1.5b", 1, "int8"),
    ],
)
def test_a_layer_is_five_mosaic_kernels(model, batch, quantized):
    report = step_report(2, model, batch=batch, weights=dataclasses.replace(BF16, quantized=quantized))
    assert [kernel.kind for kernel in report.of_layer(1)] == ["mosaic"] * KERNELS_PER_LAYER
    assert (report.graphs, report.host_launches) == (1, ())
    assert report.temp_bytes < (2e6 if batch == 1 else 8e6)  # including logits


@pytest.mark.aot
@pytest.mark.parametrize(
    ("batch", "quantized", "ours", "others"),
    [(8, None, KERNELS_PER_LAYER, 2), (16, "int4", KERNELS_PER_LAYER, 2), (16, "int8", KERNELS_PER_LAYER + 4, 0)],
)
def test_more_than_four_rows_are_prepared_by_kernels_of_their_own(batch, quantized, ours, others):
    """XLA normalises float rows; one of our kernels quantises them before each int8 product."""
    report = step_report(2, "llama3-8b", batch=batch, weights=dataclasses.replace(BF16, quantized=quantized))
    kinds = [kernel.kind for kernel in report.of_layer(1)]
    assert (kinds.count("mosaic"), len(kinds)) == (ours, ours + others)
    assert (report.graphs, report.host_launches) == (1, ())


@pytest.mark.aot
@pytest.mark.parametrize(
    ("model", "batch", "outside"),
    [
        ("gpt-j-6b", 1, 13),
        ("gpt-j-6b", 4, 10),
        ("llama3-8b", 1, 12),
        ("llama3-8b", 4, 10),
        ("gpt2-1.5b", 1, 12),
        ("gpt2-1.5b", 4, 10),
    ],
)
def test_the_generation_loop_is_one_graph_with_little_outside_the_layers(model, batch, outside):
    """For greedy rows: embedding, rotary tables, last norm, head, argmax, whether there is a
    token, stop check, the token into the history."""
    config = dataclasses.replace(preset(model), layers=2)
    context = min(CONTEXT, config.context)
    spec, sizes = decode_program(config, BF16, batch=batch, context=context, passes=16)
    report = compile_program(Target.load("h200"), spec, sizes)
    assert (report.graphs, report.host_launches) == (1, ())
    # A GPU that is here sorts by a library, which no graph can capture; XLA has none ahead of time.
    assert not [kernel.name for kernel in report.kernels if kernel.name.startswith("sort")]
    assert (
        report.aliased == report.donated == len(jax.tree.leaves(spec.arguments(sizes)[2]))
    )  # the caches and the slots
    assert len(report.of_layer(1)) == KERNELS_PER_LAYER
    assert report.temp_bytes < (16e6 if model != "llama3-8b" else 32e6)  # including logits
    running = [kernel for kernel in report.kernels if not kernel.condition]
    in_pass = [kernel for kernel in running if kernel.in_loop]
    assert len(in_pass) - config.layers * KERNELS_PER_LAYER <= outside <= MOST_OUTSIDE
    assert len(running) - len(in_pass) <= MOST_OUTSIDE  # once a step: options come, tokens and lengths go
    assert {kernel.condition for kernel in report.kernels if "truncate" in kernel.scope} == {
        "while/body/sample/cond/branch_1_fun/draw/cond/branch_1_fun/truncate/cond"
    }


LAYER = ["small_batch_linear", "decode_attention", "small_batch_linear", "small_batch_linear", "small_batch_linear"]


def kernels_of_a_layer(report):
    assert report.graphs == 1
    assert report.aliased == report.donated
    return [kernel.name.removesuffix("_kernel") for kernel in report.of_layer(0) if kernel.kind == "mosaic"]


def kernels_of_a_step(name):
    return kernels_of_a_layer(step_report(1, "llama3-8b", target=name))


def kernels_of_whole_programs(name):
    """Of the engine's decode and prefill programs for a target."""
    config = dataclasses.replace(preset("llama3-8b"), layers=1)
    layout = DeviceLayout(config, BF16, EngineConfig(max_batch=1, context=512), num_pages=32, platform="gpu")
    chunks = prefill.Prefill(chunks=4, batch=0, pages=32)
    found = {}
    for spec, sizes in (decode_program(config, BF16, batch=1, context=512, passes=4), (prefill.spec(layout), chunks)):
        found[spec.name] = kernels_of_a_layer(compile_program(Target.load(name), spec, sizes))
    return found


@pytest.mark.aot
def test_a_step_of_chunks_and_rows_copies_no_cache():
    config = dataclasses.replace(preset("llama3-8b"), layers=2)
    layout = DeviceLayout(config, BF16, EngineConfig(max_batch=2, context=512), num_pages=1024, platform="gpu")
    spec, sizes = prefill.spec(layout), prefill.Prefill(chunks=1, batch=2, pages=32)
    report = compile_program(Target.load("h200"), spec, sizes)
    assert report.aliased == report.donated
    assert report.temporaries[0].bytes < layout.state.caches[0].k.size * 2


@pytest.mark.aot
def test_a_streamed_layer_runs_the_same_kernels_and_copies_nothing():
    config = dataclasses.replace(preset("llama3-8b"), layers=2)
    layout = DeviceLayout(config, BF16, EngineConfig(max_batch=2, context=512), num_pages=1024, platform="gpu")
    (spec,) = (spec for spec in chain.decoder_specs(layout, ()) if spec.name == "layer")
    layer = chain.Layer(kind=0, layers=1, chunks=0, batch=1, speculative=0, pages=32)
    rows = compile_program(Target.load("h200"), spec, layer)
    assert kernels_of_a_layer(rows) == LAYER  # the cache and the activations are written in place
    assert len(rows.outside_layers()) <= 2  # rotary tables
    assert rows.temp_bytes < 2e6
    chunks = compile_program(Target.load("h200"), spec, dataclasses.replace(layer, chunks=1, batch=2))
    assert chunks.aliased == chunks.donated
    assert chunks.temp_bytes < layout.state.caches[0].k.size * 2


@pytest.mark.aot
@pytest.mark.parametrize(("first", "attention", "kernels"), [(True, ["prefill_attention"], 20), (False, [], 22)])
def test_a_layer_of_a_vision_transformer_that_merges_tokens(first, attention, kernels):
    """ViT-B in bfloat16, 32 images of 197 tokens, 13 of which it merges, without cuDNN.

    Past the first layer tokens have sizes, and without cuDNN attention is plain XLA. `merge_tokens` is six kernels:
    beside its two of Mosaic the keys' lengths, a pad to an even number of tokens, the sizes, and a slice of the new
    ones.
    """
    config = dataclasses.replace(vision_preset("vit-b", labels=("x",)), layers=1)
    graphdef, state = nnx.split(abstract_model(config, BF16))
    adaptation = TokenAdaptation(merges=(13,))

    def layer(state, x, sizes):
        model = nnx.merge(graphdef, state)
        return adaptation.run_layers(model.layers, x, sizes=sizes)[:2]

    x = jax.ShapeDtypeStruct((32, config.tokens, config.embed), jnp.bfloat16)
    sizes = None if first else jax.ShapeDtypeStruct(x.shape[:2], jnp.float32)
    report = compile_for(Target.load("h200"), layer, (state, x, sizes), resources=True)
    assert not any(kernel.resources.spill_bytes for kernel in report.kernels if kernel.resources)
    mosaic = [kernel.name for kernel in report.kernels if kernel.kind == "mosaic"]
    assert sorted(mosaic) == sorted([*attention, "merge_choose", "merge_average"])
    assert len([kernel for kernel in report.kernels if kernel.scope.startswith("jit(merge_tokens)")]) == 6
    assert len(report.kernels) <= kernels


def in_its_own_process(function, name):
    """Mosaic compiles for one compute capability in a process."""
    code = f"import json; from tests.compiled.test_aot import *; print(json.dumps({function.__name__}({name!r})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.aot
@pytest.mark.parametrize(("name", "kernels"), [("rtx-5090", LAYER), ("a100", []), ("l4", [])])
def test_a_step_on_other_gpus(name, kernels):
    assert in_its_own_process(kernels_of_a_step, name) == kernels


@pytest.mark.aot
@pytest.mark.parametrize(
    ("name", "of_prompts"), [("h100-pcie", ["prefill_attention"]), ("h20", ["prefill_attention"]), ("b200", [])]
)
def test_whole_programs(name, of_prompts):
    """Prompts run as plain XLA where there is no `wgmma`; a step is the same everywhere."""
    assert in_its_own_process(kernels_of_whole_programs, name) == {"decode": LAYER, "prefill": of_prompts}


def eight_devices(layers):
    """A decode step of Llama 3 70B's shape, split over eight H200s, and the bytes of its weights."""
    config, target = dataclasses.replace(preset("llama3-70b"), layers=layers), Target.load("h200")
    mesh = target.mesh(MeshConfig(tensor=8))
    spec, sizes = decode_program(config, BF16, batch=1, context=CONTEXT, passes=16, mesh=mesh)
    leaves = canonical_leaves(config, BF16)
    return compile_program(target, spec, sizes, mesh=mesh), sum(leaf.bytes for leaf in leaves.values())


def check_eight_devices(layers):
    report, weight_bytes = eight_devices(layers)
    kinds = [kernel.kind for kernel in report.of_layer(0)]
    assert [kind for kind in kinds if kind != "kCustomKernel"] == [
        *("mosaic", "mosaic", "mosaic", "kAllReduce", "mosaic", "mosaic", "kAllReduce"),
    ]
    assert kinds.count("kCustomKernel") == 2  # after each sum, the residual
    assert (report.graphs, report.host_launches) == (1, ())
    assert report.aliased == report.donated
    assert (report.argument_bytes - report.alias_bytes) * 8 == pytest.approx(weight_bytes, rel=0.01)
    assert report.temp_bytes < 0.01 * weight_bytes / 8
    always = [one for one in report.collectives if not one.conditions]
    assert [one.kind for one in always].count("all-reduce") == 2 * layers + 1
    assert [one.kind for one in always if one.kind != "all-reduce"] == ["all-gather"]
    assert {one.participants for one in report.collectives} == {8}
    return report


@pytest.mark.aot
def test_eight_devices_run_five_kernels_two_sums_and_two_additions_a_layer():
    check_eight_devices(2)


@pytest.mark.aot
@pytest.mark.slow
def test_seventy_billion_parameters_on_eight_devices():
    before = time.process_time()
    check_eight_devices(80)
    assert time.process_time() - before < 240  # the time of the processors, whatever else they do

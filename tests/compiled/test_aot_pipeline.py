"""What LM-175B runs on eight H200s, in two stages of four devices, compiled ahead of time (marker `aot`)."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.cli.inspect import decode_program
from jaxinfer.compiled.target import Target, compile_program
from jaxinfer.generation.engine.config import EngineConfig
from jaxinfer.generation.execution.layout import DeviceLayout
from jaxinfer.generation.execution.memory import part_bytes
from jaxinfer.generation.execution.programs import ring
from jaxinfer.models import DecoderConfig, WeightFormat
from jaxinfer.models.devices import bytes_per_device
from jaxinfer.models.fitting import fit
from jaxinfer.models.leaves import canonical_leaves
from jaxinfer.models.presets import preset
from jaxinfer.models.stages import divide
from jaxinfer.sharding import MeshConfig, ShardingRules
from tests.tiny import CONFIG

BF16 = WeightFormat(dtype=np.dtype(jnp.bfloat16))
LM = preset("lm-175b")
MESH = MeshConfig(pipeline=2, tensor=4)
CONTEXT, PAGES = 2048, 128
NEIGHBOURS = {(device, (device + 4) % 8) for device in range(8)}
"""Devices 0 to 3 are the first stage, 4 to 7 the second: from each to the one with the same part of the other."""


def fitted(layers):
    """The model of so many layers with a vocabulary that divides."""
    config = fit(dataclasses.replace(LM, layers=layers), BF16, MESH.abstract(), ShardingRules()).config
    assert isinstance(config, DecoderConfig)
    return config


def compile_decode(layers, axes=MESH):
    """The ring of a decode step: two requests, each a micro-batch."""
    target = Target.load("h200")
    mesh, config = target.mesh(axes), dataclasses.replace(LM, layers=layers)
    spec, sizes = decode_program(config, BF16, batch=2, context=CONTEXT, passes=16, mesh=mesh)
    return compile_program(target, spec, sizes, mesh=mesh)


def compile_prefill(layers):
    """The ring of a prefill step: four micro-batches of a chunk of 32 tokens and a decoding row."""
    target, engine = Target.load("h200"), EngineConfig(max_batch=2, context=CONTEXT)
    mesh = target.mesh(MESH)
    layout = DeviceLayout(fitted(layers), BF16, engine, num_pages=2 * PAGES, platform="gpu", mesh=mesh)
    sizes = ring.prefill_sizes(2, chunks=4, rows_of_each=1, pages=PAGES)
    assert (sizes.micro_batches, engine.chunk_size) == (4, 32)
    return compile_program(target, ring.spec(layout), sizes, mesh=mesh)


def weight_bytes(layers):
    """Bytes of the whole model."""
    return sum(leaf.bytes for leaf in canonical_leaves(dataclasses.replace(LM, layers=layers), BF16).values())


def weights_of_a_device(layers):
    """Bytes of a device's part of its stage."""
    leaves = divide(fitted(layers), MESH.pipeline).leaves(BF16)
    return bytes_per_device({name: x.leaf for name, x in leaves.items()}, MESH.abstract(), ShardingRules())


def cache_bytes(positions):
    """Bytes of a device's keys and values: two requests, a quarter of the heads."""
    return (
        positions
        * 2
        * (2 * CONTEXT)
        * (LM.layer(0).attention.kv_heads // 4)
        * LM.layer(0).attention.head_dim
        * BF16.dtype.itemsize
    )


def place(collective):
    """Where a collective is in a tick, and the conditions that must hold."""
    inside = collective.op_name.partition("while/body/")[2].replace("cond/branch_1_fun/", "")
    return inside, [re.sub(".*/(.*)/cond", r"\1", condition) for condition in collective.conditions]


def check_memory(report, positions):
    """Check that caches and slots are written in place, and that nothing as large as a cache or a matrix is copied."""
    assert report.aliased == report.donated == 2 * positions + 4
    assert report.alias_bytes == pytest.approx(cache_bytes(positions), rel=1e-3)  # and the slots
    assert report.temp_bytes < min(cache_bytes(1) // 2, LM.embed * LM.embed // 4 * 2)
    weights = report.argument_bytes - report.alias_bytes
    assert weights == pytest.approx(weights_of_a_device(2 * positions), rel=1e-3)


def check_graph(report):
    """Check that a step is one CUDA graph, its ticks and their exchanges included."""
    assert (report.graphs, report.host_launches) == (1, ())
    assert all(kernel.in_graph for kernel in report.kernels)


def check_ticks(report, positions, tokens, permuted, chosen):
    """Check all that a tick exchanges while rows ask for no more than their best token.

    Args:
      tokens: shape of the activations.
      permuted: dtypes and shapes of what goes to the next stage.
      chosen: shape of what the devices of the last stage gather to choose tokens.
    """
    in_tick = [x for x in report.collectives if x.in_loop]
    always = [x for x in in_tick if not x.conditions]
    sums = [x for x in always if x.kind == "all-reduce"]
    assert [place(x)[0] for x in sums] == [
        f"layers.{layer}/{part}/psum" for layer in range(positions) for part in ("attention", "mlp")
    ]
    assert {(x.dtype, x.shape, x.participants, x.trips) for x in sums} == {("bf16", tokens, 4, 1)}
    permutes = [x for x in always if x.kind == "collective-permute"]
    assert [(x.dtype, x.shape) for x in permutes] == permuted
    assert all(set(x.pairs) == NEIGHBOURS for x in permutes)
    assert len(always) == len(sums) + len(permutes)
    greedy = [x for x in in_tick if len(x.conditions) == 1]
    assert sorted((*place(x), x.kind, x.dtype, x.shape, x.participants) for x in greedy) == [
        ("first_stage/psum", ["first_stage"], "all-reduce", "bf16", tokens, 4),
        ("last_stage/sample/all_gather", ["last_stage"], "all-gather", "s32", chosen, 4),
    ]
    asked = [x for x in in_tick if len(x.conditions) > 1]
    assert {(place(x)[1][0], x.participants) for x in asked} == {("last_stage", 4)}


def check_end(report, shape):
    """Check that the stages are told the tokens of a step once, after its last tick."""
    after = [x for x in report.collectives if not x.in_loop]
    assert [(x.kind, x.dtype, x.shape, x.participants, x.conditions) for x in after] == [
        ("all-reduce", "s32", shape, 2, ())
    ]


@pytest.mark.aot
def test_a_tick_of_decoding_in_ninety_six_layers():
    assert weight_bytes(LM.layers) == pytest.approx(175e9 * 2, rel=0.005)
    report = compile_decode(LM.layers)
    check_graph(report)
    check_memory(report, LM.layers // 2)
    assert (report.argument_bytes - report.alias_bytes) * 8 == pytest.approx(weight_bytes(LM.layers), rel=0.01)
    tokens = (1, 1, LM.embed)
    check_ticks(report, LM.layers // 2, tokens, [("bf16", tokens), ("s32", (2, 1, 1))], chosen=(4, 2))
    check_end(report, (2, 16 + 1))  # of each row the tokens of all passes, and its length


@pytest.mark.aot
def test_a_tick_of_prefill_in_ninety_six_layers():
    """Tokens do not come back: each micro-batch goes through the stages once."""
    report = compile_prefill(LM.layers)
    check_graph(report)
    check_memory(report, LM.layers // 2)
    tokens = (32 + 1, LM.embed)
    check_ticks(report, LM.layers // 2, tokens, [("bf16", tokens)], chosen=(4, 2, 2))
    check_end(report, (8, 1 + 1))  # the next token of four chunks and four rows, and the lengths


@pytest.mark.aot
def test_a_layer_that_not_all_stages_have_copies_nothing():
    """Three layers: the second position of the second stage is an identity layer."""
    report = compile_decode(3)
    check_graph(report)
    check_memory(report, 2)
    conditional = [x for x in report.collectives if place(x)[1] == ["some_stages"]]
    assert [place(x)[0] for x in conditional] == [
        "some_stages/layers.1/attention/psum",
        "some_stages/layers.1/mlp/psum",
    ]


@pytest.mark.aot
def test_lanes_of_stages_exchange_nothing_with_one_another():
    """All lanes run as many ticks. Devices 0 and 1 are the first stage of the first lane, 2 and 3 the second."""
    report = compile_decode(2, MeshConfig(data=2, pipeline=2, tensor=2))
    check_graph(report)
    assert report.aliased == report.donated
    greedy = [x for x in report.collectives if len(x.conditions) < 2]
    assert sorted((x.kind, x.dtype, x.participants, x.in_loop) for x in greedy) == [
        ("all-gather", "s32", 2, True),
        *[("all-reduce", "bf16", 2, True)] * 3,  # the embedding, attention, the MLP
        ("all-reduce", "s32", 2, False),
        ("collective-permute", "bf16", 2, True),
        ("collective-permute", "s32", 2, True),
    ]
    assert {pair for x in greedy for pair in x.pairs} == {(device, device ^ 2) for device in range(8)}


def test_a_device_has_its_share_of_the_weights():
    assert weights_of_a_device(LM.layers) * 8 == pytest.approx(weight_bytes(LM.layers), rel=0.01)


def copied_shapes(hlo):
    """The shapes of all that a module copies: outside fusions, which read and write whatever they need."""
    return {tuple(map(int, sizes.split(","))) for sizes in re.findall(r" = \w+\[([\d,]+)\]\S* copy\(", hlo)}


@pytest.mark.parametrize("chunks", [0, pytest.param(4, marks=pytest.mark.slow)])
def test_a_cpu_copies_neither_caches_nor_matrices(chunks):
    """Five layers in two stages, so that some positions are an identity layer on one; caches much larger than all."""
    config = dataclasses.replace(CONFIG.with_mlp(hidden=1024), embed=64, layers=5, tied=True)
    mesh, engine = MeshConfig(pipeline=2).build(jax.devices()[:2]), EngineConfig(max_batch=2, context=128)
    layout = DeviceLayout(config, WeightFormat(), engine, num_pages=4096, platform="cpu", mesh=mesh)
    sizes = ring.prefill_sizes(2, chunks=4, rows_of_each=1, pages=8) if chunks else ring.decode_sizes(2, 2, 0, 8)
    program = ring.spec(layout).compile(sizes, mesh=mesh)
    large = [leaf for leaf in (*layout.leaves, *jax.tree.leaves(layout.state.caches)) if part_bytes(leaf) > 200_000]
    memory = program.executable.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes == part_bytes(layout.state)
    assert memory.temp_size_in_bytes < max(part_bytes(leaf) for leaf in layout.leaves)
    copied, shapes = copied_shapes(program.executable.as_text()), {x.sharding.shard_shape(x.shape) for x in large}
    assert copied  # so they are written as they are read here
    assert {math.prod(shape) for shape in shapes} >= {4096 * 16 * 2 * 8, 2048 * 64, 1024 * 64}
    assert not copied & shapes

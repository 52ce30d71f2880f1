"""What Mixtral 8x7B runs on eight H200s, compiled ahead of time (marker `aot`)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.cli.inspect import decode_program
from jaxinfer.compiled.target import Target, compile_program
from jaxinfer.generation.engine.config import EngineConfig
from jaxinfer.generation.execution.layout import DeviceLayout
from jaxinfer.generation.execution.programs import prefill
from jaxinfer.models import WeightFormat
from jaxinfer.models.devices import bytes_per_device
from jaxinfer.models.leaves import canonical_leaves
from jaxinfer.models.presets import preset
from jaxinfer.sharding import MeshConfig, ShardingRules
from jaxinfer.sharding.planner.exchanges import ExchangeSizes

BF16 = WeightFormat(dtype=np.dtype(jnp.bfloat16))
MIXTRAL = preset("mixtral-8x7b")
TOKEN_BYTES = 2 * MIXTRAL.embed
CONTEXT = 2048
ATTENTION = ["small_batch_linear", "decode_attention_kernel", "small_batch_linear"]
EXPERTS = ["moe_gate", "moe_permute", "grouped_matmul", "grouped_matmul", "moe_unpermute"]


def compile_decode(layers, **axes):
    config, target = dataclasses.replace(MIXTRAL, layers=layers), Target.load("h200")
    mesh = target.mesh(MeshConfig(**axes)) if axes else None
    spec, sizes = decode_program(config, BF16, batch=1, context=CONTEXT, passes=16, mesh=mesh)
    return compile_program(target, spec, sizes, mesh=mesh)


def mosaic_kernels(report, layer):
    return [kernel.name for kernel in report.of_layer(layer) if kernel.kind == "mosaic"]


def weight_bytes(layers):
    leaves = canonical_leaves(dataclasses.replace(MIXTRAL, layers=layers), BF16)
    return sum(leaf.bytes for leaf in leaves.values())


def check_one_lane(layers):
    """Experts that are split within a lane alone exchange nothing but the sum that a dense layer needs, too."""
    report = compile_decode(layers, expert=4, tensor=2)
    assert mosaic_kernels(report, layers - 1) == [*ATTENTION, *EXPERTS]
    assert (report.graphs, report.host_launches) == (1, ())
    assert report.aliased == report.donated
    always = [one for one in report.collectives if not one.conditions]
    sums = [one for one in always if one.kind == "all-reduce"]
    assert len(sums) == 2 * layers + 1
    assert {(one.dtype, one.bytes, one.wire_bytes) for one in sums} == {("bf16", TOKEN_BYTES, 2 * 7 / 8 * TOKEN_BYTES)}
    assert [(one.kind, one.shape) for one in always if one.kind != "all-reduce"] == [("all-gather", (8, 2))]
    assert {one.participants for one in report.collectives} == {8}
    assert (report.argument_bytes - report.alias_bytes) * 8 == pytest.approx(weight_bytes(layers), rel=0.01)
    assert report.temp_bytes < 2e6
    return report


@pytest.mark.aot
def test_experts_within_a_lane_add_no_exchange_and_run_the_kernels_of_one_device():
    check_one_lane(2)
    assert mosaic_kernels(compile_decode(1), 0) == [*ATTENTION, *EXPERTS]


@pytest.mark.aot
@pytest.mark.slow
def test_forty_seven_billion_parameters_on_eight_devices():
    assert weight_bytes(MIXTRAL.layers) == pytest.approx(46.7e9 * 2, rel=0.001)
    check_one_lane(MIXTRAL.layers)


def check_lanes(report, tokens, loops):
    """Check that a layer gathers the tokens of both lanes, and scatters and adds what their experts give."""
    assert (report.graphs, report.host_launches) == (1, ())
    assert report.aliased == report.donated
    assert mosaic_kernels(report, 0)[-len(EXPERTS) :] == EXPERTS
    always = [one for one in report.collectives if not one.conditions]
    of_layer = [one for one in always if "/layers.0/" in one.op_name]
    assert [(one.kind, one.dtype, one.participants, one.bytes) for one in of_layer] == [
        ("all-reduce", "bf16", 4, tokens * TOKEN_BYTES),  # attention's
        ("all-gather", "bf16", 2, 2 * tokens * TOKEN_BYTES),
        ("all-gather", "f32", 2, 2 * tokens * 2 * 8),  # numbers of two experts, and weights
        ("reduce-scatter", "bf16", 2, tokens * TOKEN_BYTES),
        ("all-reduce", "bf16", 4, tokens * TOKEN_BYTES),
    ]
    sizes = ExchangeSizes(
        lanes=2, column=2, slices=2, tokens=tokens, choices=2, experts=8, capacity=tokens, token_bytes=TOKEN_BYTES
    )
    assert sizes.cheapest == "all_gather"
    assert sum(one.wire_bytes for one in of_layer[1:]) == sizes.wire_bytes("all_gather")
    rest = [(one.kind, one.dtype, one.participants, one.in_loop) for one in always if one not in of_layer]
    assert rest == [
        ("all-reduce", "bf16", 4, loops),  # the embedding
        ("all-gather", "s32", 4, loops),  # the best token
        *([("all-reduce", "s32", 2, True), ("all-reduce", "s32", 2, False)] if loops else []),  # whether a lane goes on
    ]


@pytest.mark.aot
def test_two_lanes_decode_in_one_graph():
    check_lanes(compile_decode(1, data=2, expert=2, tensor=2), tokens=1, loops=True)


@pytest.mark.aot
def test_two_lanes_prefill_in_one_graph():
    target, engine = Target.load("h200"), EngineConfig(max_batch=1, context=512)
    mesh = target.mesh(MeshConfig(data=2, expert=2, tensor=2))
    config = dataclasses.replace(MIXTRAL, layers=1)
    layout = DeviceLayout(config, BF16, engine, num_pages=32, platform="gpu", mesh=mesh)
    sizes = prefill.Prefill(chunks=1, batch=0, pages=32)
    check_lanes(compile_program(target, prefill.spec(layout), sizes, mesh=mesh), tokens=engine.chunk_size, loops=False)


@pytest.mark.parametrize("axes", [{"expert": 4, "tensor": 2}, {"data": 2, "expert": 2, "tensor": 2}], ids=str)
def test_a_device_has_its_share_of_the_weights(axes):
    """An eighth of the experts; of the rest, which each lane has whole, a part of a lane."""
    mesh = MeshConfig(**axes).build(jax.devices())
    leaves = canonical_leaves(MIXTRAL, BF16)
    experts = sum(leaf.bytes for name, leaf in leaves.items() if ".experts." in name)
    rest = sum(leaf.bytes for leaf in leaves.values()) - experts
    share = experts / 8 + rest * axes.get("data", 1) / 8
    assert bytes_per_device(leaves, mesh, ShardingRules()) == pytest.approx(share, rel=0.01)

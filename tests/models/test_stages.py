"""Layers as stages of a pipeline: how they are divided, what each device has of them, and what is refused."""

import dataclasses
import functools
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer import checkpoints
from jaxinfer.models.files.conversion import convert
from jaxinfer.models.files.loading import load_model, open_model
from jaxinfer.models.leaves import layer_of
from jaxinfer.models.stages import divide, stages_on
from jaxinfer.sharding import MeshConfig, ShardingRules
from tests.models import goldens
from tests.tiny import CONFIG, MOE_CONFIGS, ONE_KIND, save_tiny


def config_of(kinds):
    """A config whose layers are of these kinds, small numbers: their windows."""
    windows = tuple(4 + kind for kind in kinds)
    return dataclasses.replace(CONFIG, layers=len(kinds)).with_windows(windows)


def layers_of(stages):
    return [[layer for layer in stage if layer is not None] for stage in stages.layers]


@pytest.mark.parametrize(
    ("kinds", "count", "expected"),
    [
        ([0] * 3, 1, [(0, 1, 2)]),
        ([0] * 6, 2, [(0, 1, 2), (3, 4, 5)]),
        ([0] * 4, 4, [(0,), (1,), (2,), (3,)]),
        ([0] * 7, 3, [(0, 1, 2), (3, 4, None), (5, 6, None)]),
        ([0, 1] * 2, 2, [(0, 1), (2, 3)]),
        ([0, 1, 0, 1, 0], 2, [(0, 1, 2), (None, 3, 4)]),
    ],
    ids=["one", "even", "a layer each", "uneven", "alternate", "alternate uneven"],
)
def test_how_layers_are_divided(kinds, count, expected):
    assert list(divide(config_of(kinds), count).layers) == expected


@pytest.mark.parametrize(("kinds", "positions"), [([0, 1] * 3, 4), ([0, 1, 1, 1, 1, 1], 4), ([0, 1, 1, 1], 3)])
def test_a_position_more_for_a_layer_of_another_kind(kinds, positions):
    """Which position it is does not matter."""
    stages = divide(config_of(kinds), 2)
    assert stages.config.layers == positions
    assert layers_of(stages) == [[*range(len(kinds) // 2)], [*range(len(kinds) // 2, len(kinds))]]


def test_a_dense_layer_before_experts():
    dense, moe = (kind.mlp for kind in MOE_CONFIGS["sigmoid"].pattern)
    config = dataclasses.replace(ONE_KIND, layers=4).with_mlps((dense, moe, moe, moe))
    stages = divide(config, 2)
    assert layers_of(stages) == [[0, 1], [2, 3]]
    mlps = [stages.config.layer(position).mlp for position in range(stages.config.layers)]
    assert (mlps.count(dense), mlps.count(moe)) == (1, 2)
    assert stages.there(mlps.index(dense)) == (True, False)


def test_what_stages_say_of_layers():
    stages = divide(config_of([0, 1, 0, 1, 0]), 2)
    assert stages.count == 2
    assert [stages.at(position) for position in range(3)] == [(0, None), (1, 3), (2, 4)]
    assert [stages.there(position) for position in range(3)] == [(True, False), (True, True), (True, True)]
    assert [stages.example(position) for position in range(3)] == [0, 1, 2]
    assert str(stages) == "2 stages of 3, 2 layers"


@functools.cache
def shortest_length(a, b):
    """The length of the shortest sequence that has both in it, by its definition."""
    if not a or not b:
        return len(a) + len(b)
    if a[0] == b[0]:
        return 1 + shortest_length(a[1:], b[1:])
    return 1 + min(shortest_length(a[1:], b), shortest_length(a, b[1:]))


KINDS = st.lists(st.integers(0, 2), min_size=1, max_size=12)


@settings(max_examples=200)
@given(KINDS, st.integers(1, 6))
def test_each_layer_is_in_one_place_among_layers_of_its_kind(kinds, count):
    config = config_of(kinds)
    try:
        stages = divide(config, count)
    except ValueError as error:
        check_refused(config, kinds, count, str(error))
        return
    assert [*itertools.chain(*layers_of(stages))] == [*range(len(kinds))]
    sizes = [len(layers) for layers in layers_of(stages)]
    assert len(sizes) == count
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
    positions = stages.config.layers
    assert {len(stage) for stage in stages.layers} == {positions}
    assert max(sizes) <= positions
    assert positions < len(kinds) or count == 1
    for position in range(positions):
        assert any(stages.there(position))
        for layer in stages.at(position):
            assert (
                layer is None or config.layer(layer).attention.window == stages.config.layer(position).attention.window
            )
    if len(set(kinds)) == 1:
        assert positions == -(-len(kinds) // count)
    if count == 2:
        assert positions == shortest_length(*_halves(kinds))


def check_refused(config, kinds, count, message):
    """The model cannot be divided so, and can be as the message says."""
    assert "\n" not in message
    if count <= len(kinds):
        nearest = int(message.rpartition("pipeline = ")[2].rstrip("."))
        assert divide(config, nearest).count == nearest
        assert count != 2 or shortest_length(*_halves(kinds)) >= len(kinds)


def _halves(kinds):
    middle = -(-len(kinds) // 2)
    return tuple(kinds[:middle]), tuple(kinds[middle:])


@settings(max_examples=100)
@given(st.integers(1, 4), st.integers(4, 40), st.integers(2, 4))
def test_kinds_that_come_round_need_few_positions(period, layers, count):
    """One layer of each round is of another kind, as in models with windows."""
    kinds = [int(layer % period == period - 1) for layer in range(layers)]
    assert divide(config_of(kinds), count).config.layers <= -(-layers // count) + period - 1


@pytest.mark.parametrize(
    ("kinds", "count", "message"),
    [
        ([0] * 3, 4, r"the model has 3 layers, fewer than stages; lower pipeline to at most 3\.$"),
        ([0, 1], 2, r"differ in kind .* would need 2 positions on each device, .*; set pipeline = 1\.$"),
        (
            [0, 0, 1, 1],
            2,
            r"would need 4 positions on each device, as many as the model has layers; set pipeline = 1\.$",
        ),
        ([0, 1, 2], 3, r"would need 3 positions .*; set pipeline = 1\.$"),
        ([0, 0, 1, 1, 2], 3, r"would need 5 positions .*; set pipeline = 2\.$"),
    ],
)
def test_what_cannot_be_divided(kinds, count, message):
    with pytest.raises(ValueError, match=rf"^mesh pipeline={count}: .*{message}") as caught:
        divide(config_of(kinds), count)
    assert "\n" not in str(caught.value)


def test_scales_that_differ_by_layer_cannot_be_divided():
    config = config_of([0] * 6)
    config = config.vary(lambda kind, scale: kind.with_attention(scale=scale), [1 / (i + 1) for i in range(6)])
    with pytest.raises(ValueError, match=r"pipeline=2: .* differ in kind .*set pipeline = 1"):
        divide(config, 2)


def test_stages_on_a_mesh():
    config, rules = dataclasses.replace(CONFIG, layers=5), ShardingRules()
    assert stages_on(config, None, rules) is None
    assert stages_on(config, MeshConfig(data=2, tensor=2).build(), rules) is None
    assert stages_on(config, MeshConfig(pipeline=2, tensor=2).build(), rules) is divide(config, 2)


# Loading


@pytest.fixture(scope="module")
def alternating(tmp_path_factory):
    """Five layers of two kinds, of which the widths are whole groups of int4."""
    config = dataclasses.replace(CONFIG, layers=5).with_mlp(hidden=256)
    return save_tiny(tmp_path_factory.mktemp("models") / "alternating", config=config)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    """A dense layer, and four of eight experts."""
    dense, moe = (kind.mlp for kind in MOE_CONFIGS["sigmoid"].pattern)
    config = dataclasses.replace(CONFIG, layers=5).with_mlps((dense, moe, moe, moe, moe))
    return save_tiny(tmp_path_factory.mktemp("models") / "mixture", config=config)


def check_parts(model, flat):
    """Each device has what the device beside it on a mesh without stages has of its stage's leaves, or zeros."""
    beside = {device: i for i, device in enumerate(flat.mesh.devices.flat)}
    expected = {
        name: {beside[s.device]: np.asarray(s.data) for s in leaf.addressable_shards}
        for name, leaf in flat.leaves.items()
    }
    seen = set()
    for place, leaf in model.stage_leaves.items():
        parts = {s.device: np.asarray(s.data) for s in model.leaves[place].addressable_shards}
        for stage, name in enumerate(leaf.parts or [place] * model.stages.count):
            seen.add(name)
            for i, device in enumerate(model.mesh.devices.take(stage, axis=1).flat):
                if name is None:
                    assert not parts[device].any()
                else:
                    np.testing.assert_array_equal(parts[device], expected[name][i], err_msg=name)
                    assert model.stages.stage_of(model.weights).get(name) == (stage if leaf.parts else None)
    assert seen - {None} == expected.keys()


def check_bytes(model):
    for device in model.mesh.devices.flat:
        parts = (s.data.nbytes for leaf in model.leaves.values() for s in leaf.addressable_shards if s.device == device)
        assert sum(parts) == model.bytes_per_device()


MESHES = [{}, {"tensor": 2}, {"data": 2, "tensor": 2}]


@pytest.mark.parametrize(
    ("mesh", "quantize"),
    [*((mesh, None) for mesh in MESHES), (MESHES[2], "int4"), pytest.param(MESHES[2], "int8", marks=pytest.mark.slow)],
)
def test_each_device_has_the_layers_of_its_stage(alternating, mesh, quantize):
    flat = load_model(alternating, mesh=MeshConfig(**mesh), quantize=quantize)
    model = load_model(alternating, mesh=MeshConfig(pipeline=2, **mesh), quantize=quantize)
    assert list(model.leaves) == list(model.stage_leaves)
    shapes = [(x.shape, x.dtype, x.sharding) for x in model.leaves.values()]
    assert shapes == [(x.shape, x.dtype, x.sharding) for x in model.placed_shapes()]
    check_parts(model, flat)
    check_bytes(model)
    assert model.bytes_per_device() < flat.bytes_per_device()


def test_a_device_for_each_layer(alternating):
    """The kinds of layers alternate: each device has room for both."""
    model = load_model(alternating, mesh=MeshConfig(pipeline=5))
    assert model.stages.config.layers == 2
    check_parts(model, load_model(alternating, mesh=MeshConfig()))
    check_bytes(model)


@pytest.mark.parametrize(
    "mesh", [{"expert": 2}, {"data": 2, "expert": 2}, pytest.param({"expert": 2, "tensor": 2}, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("quantize", [None, pytest.param("int8", marks=pytest.mark.slow)])
def test_experts_of_stages(mixture, mesh, quantize):
    flat = load_model(mixture, mesh=MeshConfig(**mesh), quantize=quantize)
    model = load_model(mixture, mesh=MeshConfig(pipeline=2, **mesh), quantize=quantize)
    check_parts(model, flat)
    check_bytes(model)


@pytest.mark.parametrize("name", ["alternating", "mixture"])
@pytest.mark.parametrize("mesh", [{"pipeline": 2}, {"pipeline": 2, "tensor": 2}], ids=str)
def test_all_that_is_stored_is_read_once(request, name, mesh, asked):
    """No stage reads what another one has."""
    path = request.getfixturevalue(name)
    load_model(path, mesh=MeshConfig(**mesh))
    assert sum(asked) == sum(math.prod(leaf.shape) for leaf in checkpoints.read_manifest(path).leaves.values())


def test_a_converted_model_that_is_stored_quantised(tmp_path):
    convert(goldens.DIRECTORY / "olmo3_window", path := tmp_path / "model", quantize="int8")
    model = load_model(path, mesh=MeshConfig(pipeline=2, tensor=2))
    check_parts(model, load_model(path, mesh=MeshConfig(tensor=2)))
    check_bytes(model)


def test_memory_is_asked_for_by_stage(alternating):
    """Three layers, and the embedding or the head."""
    whole, opened = open_model(alternating), open_model(alternating, mesh=MeshConfig(pipeline=2))
    layers = whole.bytes_per_device(lambda name: layer_of(name) is not None)
    head = whole.bytes_per_device(lambda name: name.startswith("head."))
    rest = whole.bytes_per_device() - layers - head
    assert opened.bytes_per_device() == layers // 5 * 3 + rest
    assert whole.shapes["head.weight"].shape == whole.shapes["embed.table"].shape


@pytest.mark.parametrize("pipeline", [2, 3])
def test_an_embedding_that_is_also_the_head_is_on_all_stages(tmp_path, pipeline):
    path = save_tiny(tmp_path / "tied", config=dataclasses.replace(CONFIG, layers=3, tied=True))
    model = load_model(path, mesh=MeshConfig(pipeline=pipeline))
    assert model.leaves["embed.table"].sharding.is_fully_replicated
    check_parts(model, load_model(path, mesh=MeshConfig()))
    check_bytes(model)


# What is refused


def test_a_module_is_of_all_layers(alternating):
    model = load_model(alternating, mesh=MeshConfig(pipeline=2))
    with pytest.raises(
        ValueError, match=r"alternating is split into 2 stages of 3, 2 layers, each on its own devices"
    ) as caught:
        _ = model.state
    assert "\n" not in str(caught.value)


def test_encoders_have_no_stages(tmp_path, asked):
    convert(goldens.DIRECTORY / "bert_awkward", path := tmp_path / "bert")
    asked.clear()
    with pytest.raises(ValueError, match=r"bert: mesh pipeline=2: only decoders run in stages; set pipeline = 1"):
        load_model(path, mesh=MeshConfig(pipeline=2))
    assert not asked


def test_more_stages_than_layers_are_refused_before_reading(alternating, asked):
    with pytest.raises(ValueError, match=r"alternating: mesh pipeline=6: the model has 5 layers, fewer") as caught:
        load_model(alternating, mesh=MeshConfig(pipeline=6))
    assert "\n" not in str(caught.value)
    assert not asked

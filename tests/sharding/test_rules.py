import jax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxinfer.sharding import MeshConfig, ShardingRules


def test_spec():
    rules = ShardingRules()
    assert rules.spec("vocab", "embed") == P(("expert", "tensor"), None)
    assert rules.spec("embed", "heads") == P(None, ("expert", "tensor"))


def test_a_typo_does_not_mean_replicate():
    with pytest.raises(ValueError, match="Unknown axes \\['hedas'\\]"):
        ShardingRules().spec("hedas", "embed")


def test_one_mesh_axis_per_array():
    with pytest.raises(ValueError, match="two dimensions to one mesh axis"):
        ShardingRules().spec("vocab", "mlp")


def test_sharding_places_by_name():
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), (AxisType.Auto,) * 2)
    sharding = ShardingRules().sharding(mesh, ("mlp", "embed"), (8, 6))
    assert sharding.shard_shape((8, 6)) == (2, 6)
    assert ShardingRules(mlp=None).sharding(mesh, ("mlp", "embed"), (7, 6)).is_fully_replicated


def test_what_does_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"vocab=7 does not divide over tensor=2 .* ShardingRules\(vocab=None\)"):
        ShardingRules().sharding(MeshConfig(tensor=2).build(), ("vocab", "embed"), (7, 6))
    with pytest.raises(ValueError, match="one name per dimension"):
        ShardingRules().sharding(MeshConfig().build(), ("vocab",), (7, 6))


def test_abstract_mesh_needs_no_devices():
    assert ShardingRules().sharding(MeshConfig(tensor=64).abstract(), ("mlp",), (128,)).shard_shape((128,)) == (2,)


def test_several_mesh_axes_split_one_dimension():
    rules = ShardingRules(mlp=("expert", "tensor"))
    assert rules.spec("mlp", "embed") == P(("expert", "tensor"), None)
    mesh = jax.make_mesh((2, 4), ("expert", "tensor"), (AxisType.Auto,) * 2)
    assert rules.sharding(mesh, ("mlp", "embed"), (16, 6)).shard_shape((16, 6)) == (2, 6)
    with pytest.raises(ValueError, match=r"mlp=12 does not divide over expert x tensor=8"):
        rules.sharding(mesh, ("mlp",), (12,))
    with pytest.raises(ValueError, match="two dimensions to one mesh axis"):
        rules.spec("vocab", "mlp")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embed": "tensor"}, r"ShardingRules.embed='tensor' is not implemented: every device needs all of embed"),
        ({"heads": None}, r"heads=None and kv_heads=\('expert', 'tensor'\) must be equal"),
        ({"mlp": ("tensor", "tensor")}, "names a mesh axis twice"),
        ({"mlp": 2}, r"must be a mesh axis, a tuple of them, or None; got 2"),
        ({"batch": None}, r"ShardingRules.batch=None must be 'data': batch has no other split"),
        ({"mlp": ("data", "tensor")}, r"mlp=\('data', 'tensor'\): devices along 'data' serve different requests"),
        ({"mlp": ("pipeline", "tensor")}, r"mlp=\('pipeline', 'tensor'\): devices along 'pipeline' hold different"),
        ({"stages": None}, r"ShardingRules.stages=None must be 'pipeline': stages has no other split"),
        ({"experts": ("expert", "data")}, "must list 'data' first"),
        ({"expert_mlp": ("expert", "tensor")}, "both use 'expert'"),
        ({"exchange": "ragged"}, "exchange must be one of cheapest, all_to_all, pcc, pcc_all_gather, all_gather; got"),
        ({"exchange": ["pcc"]}, r"exchange must be one of .*; got \['pcc'\]"),
        ({"mlp": ()}, r"must be a mesh axis, a tuple of them, or None; got \(\)"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(ValueError, match=message):
        ShardingRules(**changes)


def test_an_axis_that_the_mesh_has_not():
    mesh = jax.make_mesh((2,), ("tensor",), (AxisType.Auto,))
    assert ShardingRules().sharding(mesh, ("mlp",), (8,)).spec == P("tensor")
    assert ShardingRules(mlp="expert").sharding(mesh, ("mlp",), (7,)).is_fully_replicated
    with pytest.raises(ValueError, match=r"ShardingRules.mlp='model': the mesh has no axis 'model'; it has tensor"):
        ShardingRules(mlp="model").sharding(mesh, ("mlp",), (8,))


def test_experts_over_lanes_and_columns():
    mesh = MeshConfig(data=2, expert=2, tensor=2).abstract()
    rules = ShardingRules()
    assert rules.sharding(mesh, ("experts", "expert_mlp", "embed"), (8, 6, 4)).shard_shape((8, 6, 4)) == (2, 3, 4)
    assert rules.sharding(mesh, ("pages", "page", "kv_heads"), (8, 6, 4)).shard_shape((8, 6, 4)) == (4, 6, 1)
    with pytest.raises(ValueError, match=r"experts=6 does not divide over data x expert=4 devices"):
        rules.sharding(mesh, ("experts",), (6,))

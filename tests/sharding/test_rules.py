import pytest
from jax.sharding import PartitionSpec as P

from sharding import MeshConfig, ShardingRules


def test_spec():
    rules = ShardingRules()
    assert rules.spec("vocab", "embed") == P("tensor", None)
    assert rules.spec("embed", "heads") == P(None, "tensor")
    assert rules.spec("batch", None) == P("data", None)


def test_a_typo_does_not_mean_replicate():
    with pytest.raises(ValueError, match="Unknown axes \\['hedas'\\]"):
        ShardingRules().spec("hedas", "embed")


def test_one_mesh_axis_per_array():
    with pytest.raises(ValueError, match="two dimensions to one mesh axis"):
        ShardingRules().spec("vocab", "mlp")


def test_sharding_places_by_name():
    mesh = MeshConfig(data=2, tensor=4).build()
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

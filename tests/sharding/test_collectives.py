"""What model programs exchange, by logical axis, inside `shard_map` and without a mesh."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxinfer.sharding import ShardingRules
from jaxinfer.sharding.collectives import (
    all_gather,
    any_part,
    axis_index,
    axis_size,
    local_part,
    mesh_axes,
    psum,
    use_rules,
)


def on_devices(function, x, *, rules=None, **mesh):
    def traced(x):
        with use_rules(rules or ShardingRules()):
            return function(x)

    devices = jax.make_mesh((*mesh.values(),), (*mesh,), (AxisType.Auto,) * len(mesh))
    mapped = jax.shard_map(traced, mesh=devices, in_specs=P("tensor"), out_specs=P(), check_vma=False)
    return jax.jit(mapped)(x)


def test_without_a_mesh_nothing_happens():
    x = jnp.arange(4)
    assert axis_size("heads") == 1
    assert mesh_axes("heads") == ()
    assert axis_index("vocab") == 0
    assert psum(x, "heads") is x
    assert local_part(x, "heads") is x
    assert all_gather(x, "vocab").shape == (1, 4)


def test_parts_of_a_split_axis():
    x = np.arange(8)
    np.testing.assert_array_equal(on_devices(lambda x: psum(x, "heads"), x, tensor=4), [12, 16])
    gathered = on_devices(lambda x: all_gather(x, "mlp"), x, tensor=4)
    np.testing.assert_array_equal(gathered, x.reshape(4, 2))
    own = on_devices(lambda x: psum(jnp.abs(local_part(jnp.arange(8), "heads") - x), "heads"), x, tensor=4)
    np.testing.assert_array_equal(own, [0, 0])


def test_what_is_not_split_is_not_exchanged():
    x = np.arange(8)
    rules = ShardingRules(vocab=None)
    np.testing.assert_array_equal(on_devices(lambda x: psum(x, "embed"), x[:1], tensor=1), [0])
    first = on_devices(lambda x: psum(x, "vocab") * (axis_index("mlp") == 0), x, rules=rules, tensor=2)
    np.testing.assert_array_equal(first, x[:4])


def test_an_axis_over_two_mesh_axes():
    index = on_devices(lambda x: all_gather(axis_index("mlp"), "mlp"), np.arange(8), expert=2, tensor=4)
    np.testing.assert_array_equal(index, np.arange(8))


def test_what_holds_in_one_lane_holds_in_all():
    def any_of_second(x):
        here = (axis_index("batch") == 1) & (axis_index("mlp") == 0)
        return jnp.stack([any_part(here, "batch"), any_part(here, "mlp"), any_part(here & False, "batch")])[None]

    devices = jax.make_mesh((2, 2), ("data", "tensor"), (AxisType.Auto,) * 2)

    @jax.jit
    @functools.partial(jax.shard_map, mesh=devices, in_specs=(), out_specs=P(("data", "tensor")), check_vma=False)
    def on_each():
        with use_rules(ShardingRules()):
            return any_of_second(None)

    expected = [[True, False, False], [False, False, False], [True, True, False], [False, True, False]]
    np.testing.assert_array_equal(on_each(), expected)

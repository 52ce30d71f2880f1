"""The exchange between the devices of a model program, by logical axis.

A model program is traced inside `jax.shard_map`: every array is this device's part of it. A layer that has summed over
a split axis adds the parts up by `psum("heads")`, whatever mesh axes the rules map it to. Without a mesh, and where an
axis is not split, everything here does nothing, so that layers have no second way.
"""

import contextlib
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, get_abstract_mesh

from jaxinfer.sharding.rules import ShardingRules, is_shared

_rules = jax.make_user_context(ShardingRules())


def use_rules(rules: ShardingRules) -> contextlib.AbstractContextManager[None]:
    """Trace inside by these rules, by which what programs take was split."""
    return _rules(rules)


def rules() -> ShardingRules:
    """The rules by which the program is traced."""
    return _rules.value


def mesh_axes(axis: str) -> tuple[str, ...]:
    """The mesh axes of more than one device that a logical axis is split over in the program being traced."""
    mesh = get_abstract_mesh()
    manual = {
        name
        for name, size, kind in zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
        if kind is AxisType.Manual and size > 1
    }
    return tuple(name for name in _rules.value.mesh_axes(axis) if name in manual)


def axis_size(axis: str) -> int:
    """Return how many parts a logical axis has."""
    sizes = get_abstract_mesh().shape
    return math.prod(sizes[name] for name in mesh_axes(axis))


def axis_index(axis: str) -> jax.Array:
    """Return which part this device has: int32 [], from 0."""
    names = mesh_axes(axis)
    return lax.axis_index(names) if names else jnp.zeros((), jnp.int32)


def psum(x: jax.Array, axis: str) -> jax.Array:
    """Compute the sum of x over the devices that have the other parts of an axis."""
    names = mesh_axes(axis)
    return lax.psum(x, names) if names else x


def any_part(x: jax.Array, axis: str) -> jax.Array:
    """Return whether x, bool [], holds on any of these devices: bool [], the same on all of them."""
    names = mesh_axes(axis)
    return lax.pmax(x.astype(jnp.int32), names) > 0 if names else x


def all_gather(x: jax.Array, axis: str) -> jax.Array:
    """Return x of each of these devices: [...] -> [parts, ...]."""
    names = mesh_axes(axis)
    return lax.all_gather(x, names) if names else x[None]


def to_next(x: jax.Array, axis: str) -> jax.Array:
    """Return x of the device that has the part before; the first gets that of the last, as in a ring."""
    names, parts = mesh_axes(axis), axis_size(axis)
    return lax.ppermute(x, names, [(part, (part + 1) % parts) for part in range(parts)]) if names else x


def from_last(x: jax.Array, axis: str) -> jax.Array:
    """Return x, numbers, of the device that has the last part, on all of them."""
    return psum(jnp.where(axis_index(axis) == axis_size(axis) - 1, x, jnp.zeros_like(x)), axis)


def gather_fetched(x: jax.Array, axes: Sequence[str | None], shape: Sequence[int]) -> jax.Array:
    """Gather a weight of this shape that came to the devices as `ShardingRules.fetch_sharding` says, as they use it."""
    mesh = get_abstract_mesh()
    is_whole = not any(mesh_axes(axis) for axis in axes if axis is not None)
    if is_shared(is_whole, shape, math.prod(mesh.shape.values())):
        return lax.all_gather(x, tuple(mesh.shape), tiled=True)
    return x


def local_start(axis: str, size: int) -> jax.Array:
    """The index in a split dimension at which this device's part begins, of `size` on each: int32 []."""
    return axis_index(axis) * size


def local_index(index: jax.Array, axis: str, size: int) -> jax.Array:
    """Return where indices of a split dimension are in this device's part, of `size`; else, or below 0, `size`."""
    local = index - local_start(axis, size)
    return jnp.where((local >= 0) & (local < size), local, size)


def local_part(x: jax.Array, axis: str, dim: int = 0) -> jax.Array:
    """Slice this device's part from a dimension of which all devices have everything."""
    parts = axis_size(axis)
    if parts == 1:
        return x
    size = x.shape[dim] // parts
    return lax.dynamic_slice_in_dim(x, local_start(axis, size), size, dim)

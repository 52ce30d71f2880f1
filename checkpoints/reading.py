"""Reading weights directly into the sharding and dtype in which they will be used."""

import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.host_memory import slice_start
from jaxinfer.checkpoints.layouts import open_checkpoint
from jaxinfer.checkpoints.manifest import Leaf, part_name, part_of
from jaxinfer.checkpoints.orbax_folder import OrbaxFolder
from jaxinfer.checkpoints.single_file import SingleFile
from jaxinfer.sharding import ShardingRules

GROUP_BYTES = 128 << 20  # read at once: bounds host memory, and is enough to keep the disk busy


Takes = tuple[np.ndarray | None, ...]
"""For each dimension of a leaf: the stored index of each index, -1 for zeros; None: all as stored."""


def load(
    path: str | os.PathLike[str],
    *,
    mesh: Mesh | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    only: Callable[[str], bool] | None = None,
) -> dict[str, jax.Array]:
    """Load the weights of a model directory by dotted path; options as in `stream`."""
    return dict(stream(path, mesh=mesh, dtype=dtype, only=only))


def stream(
    path: str | os.PathLike[str],
    *,
    mesh: Mesh | None = None,
    rules: ShardingRules | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    keep: Callable[[str], bool] | None = None,
    only: Callable[[str], bool] | None = None,
    part: int | None = None,
    takes: Callable[[str, Leaf], Takes] | None = None,
    mesh_of: Callable[[str], Mesh | None] | None = None,
) -> Iterator[tuple[str, jax.Array]]:
    """Yield weights one at a time, so that a caller can convert each and drop the original.

    Args:
      path: a model directory.
      mesh: the devices; None means the first device.
      rules: which dimension is split over which mesh axis.
      dtype: what floating-point matrices are cast to (None: as stored). Vectors, scales and
        quantised matrices stay as stored.
      keep: selects leaves that stay as stored in any case.
      only: selects leaves by dotted path; nothing else is read. None: all.
      part: of the leaves that are stored in parts this one alone is read, under its own name; no other leaf is.
      takes: which stored indices the dimensions of a leaf have. None: all, in order.
      mesh_of: the devices of each leaf, by dotted path, where they differ. None: `mesh` for all.
    """
    checkpoint = open_checkpoint(pathlib.Path(path).resolve())
    leaves = {name: leaf for name, leaf in checkpoint.manifest.leaves.items() if only is None or only(name)}
    if part is not None:
        leaves = {part_name(name, part): leaf.part for name, leaf in leaves.items() if leaf.parts}
    taken = {name: takes(name, leaf) if takes else (None,) * len(leaf.shape) for name, leaf in leaves.items()}
    targets = {}
    for name, leaf in leaves.items():
        shape = tuple(n if take is None else len(take) for n, take in zip(leaf.shape, taken[name], strict=True))
        whole, _ = part_of(name)
        devices = mesh if mesh_of is None else mesh_of(whole)
        sharding = _place(name, leaf.axes, shape, devices, rules or ShardingRules())
        cast_to = None if keep is not None and keep(whole) else dtype
        target_dtype = _target_dtype(whole, checkpoint.manifest.leaves[whole], cast_to)
        targets[name] = jax.ShapeDtypeStruct(shape, target_dtype, sharding=sharding)
    for group in _groups(targets, leaves):
        arrays = _read(checkpoint, group, taken)
        while arrays:
            yield arrays.popitem()  # only the caller references it


def _read(
    checkpoint: OrbaxFolder | SingleFile, targets: dict[str, jax.ShapeDtypeStruct], taken: dict[str, Takes]
) -> dict[str, jax.Array]:
    """Return leaves by name, each shard read once."""
    stores = checkpoint.open_leaves(targets)
    reading = {name: _read_shards(stores[name], x, taken[name]) for name, x in targets.items()}
    arrays = {}
    for name, target in targets.items():
        shards = {start: finish() for start, finish in reading.pop(name).items()}
        arrays[name] = jax.make_array_from_callback(
            target.shape, target.sharding, lambda index, shards=shards: shards[slice_start(index)]
        )
    return arrays


def _read_shards(store: Any, target: Any, takes: Takes) -> dict[tuple[int, ...], Callable[[], np.ndarray]]:
    """Begin to read the parts of a leaf that are on devices of this process, in the target's dtype; by their starts."""
    import tensorstore as ts

    parts = target.sharding.addressable_devices_indices_map(target.shape).values()
    store = store if store.dtype.numpy_dtype == target.dtype else ts.cast(store, target.dtype)
    return {start: _read_part(store, part, takes) for start, part in {slice_start(x): x for x in parts}.items()}


def _read_part(store: Any, part: tuple[slice, ...], takes: Takes) -> Callable[[], np.ndarray]:
    """Begin to read one part, and nothing else; the function returned waits for it."""
    if all(take is None for take in takes):
        return store[part].read().result
    every = (np.arange(size) if take is None else take for size, take in zip(store.shape, takes, strict=True))
    indices = [index[of_dim] for index, of_dim in zip(every, part, strict=True)]
    there = np.ix_(*(index >= 0 for index in indices))
    future = store.oindex[tuple(index[index >= 0] for index in indices)].read()

    def finish() -> np.ndarray:
        array = np.zeros([len(index) for index in indices], store.dtype.numpy_dtype)
        array[there] = future.result()
        return array

    return finish


def _groups(
    targets: dict[str, jax.ShapeDtypeStruct], leaves: dict[str, Leaf]
) -> Iterator[dict[str, jax.ShapeDtypeStruct]]:
    group, size = {}, 0
    for name, target in targets.items():
        group[name] = target
        size += leaves[name].bytes
        if size >= GROUP_BYTES:
            yield group
            group, size = {}, 0
    if group:
        yield group


def _target_dtype(name: str, leaf: Leaf, dtype: jax.typing.DTypeLike | None) -> jnp.dtype:
    stored = jnp.dtype(leaf.dtype)
    is_float = jnp.issubdtype(stored, jnp.floating) and stored.itemsize > 1
    is_matrix = len(leaf.shape) >= 2 and not name.endswith(".scale")
    return jnp.dtype(dtype) if dtype is not None and is_float and is_matrix else stored


def _place(
    name: str, axes: tuple[str | None, ...], shape: tuple[int, ...], mesh: Mesh | None, rules: ShardingRules
) -> Sharding:
    if mesh is None:
        return SingleDeviceSharding(jax.local_devices()[0])
    try:
        return rules.sharding(mesh, axes, shape)
    except ValueError as error:
        raise CheckpointError(f"{name}: {error}") from error

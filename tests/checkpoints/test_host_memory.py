"""Memory that weights are read into, or lie in: `checkpoints/host_memory.py`."""

import gc
import re
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxinfer.checkpoints import host_memory
from jaxinfer.checkpoints.host_memory import ALIGNMENT, ARRAY_ALIGNMENT, HUGE_FROM, WeightMemory, aligned_buffer
from jaxinfer.sharding import MeshConfig


def addresses(array):
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


@pytest.mark.parametrize("size", [0, ALIGNMENT, HUGE_FROM, 3 * HUGE_FROM - 1])
def test_a_buffer_is_of_huge_pages_from_some_size_on(size):
    buffer = aligned_buffer(size)
    assert (buffer.shape, buffer.flags.writeable, buffer.any()) == ((size,), True, False)
    large = size >= HUGE_FROM
    assert buffer.ctypes.data % (host_memory.HUGE_PAGE if large else ALIGNMENT) == 0
    mappings = re.findall(r"^(\w+)-(\w+) .*?VmFlags:(.*?)$", Path("/proc/self/smaps").read_text(), re.M | re.S)
    (flags,) = [f for start, end, f in mappings if int(start, 16) <= buffer.ctypes.data < int(end, 16)]
    assert ("hg" in flags.split()) == large


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "uint16"])
def test_arrays_lie_one_after_the_other_and_are_equal(dtype):
    arrays = [jnp.arange(size).reshape(shape).astype(dtype) for size, shape in ((35, (5, 7)), (1, ()), (0, (0, 3)))]
    memory = WeightMemory(3 * 128)
    moved = [memory.move(array) for array in arrays]
    for array, copy in zip(arrays, moved, strict=True):
        assert (copy.dtype, copy.sharding) == (array.dtype, array.sharding)
        np.testing.assert_array_equal(np.asarray(copy), np.asarray(array))
    (first,), (second,) = map(addresses, moved[:2])
    distance = -(-arrays[0].nbytes // ARRAY_ALIGNMENT) * ARRAY_ALIGNMENT
    assert second - first == distance, "JAX copied what it could have taken as it is"


def test_devices_share_the_parts_that_they_have_in_common():
    mesh = MeshConfig(data=2, tensor=2).build()
    array = jax.device_put(jnp.arange(64.0).reshape(8, 8), NamedSharding(mesh, PartitionSpec("tensor")))
    moved = WeightMemory(array.nbytes).move(array)
    assert moved.sharding == array.sharding
    np.testing.assert_array_equal(np.asarray(moved), np.asarray(array))
    assert len(set(addresses(array))) == 4
    assert len(set(addresses(moved))) == 2


def test_a_program_that_may_overwrite_a_shared_part_does_not():
    mesh = MeshConfig(data=2).build()
    array = jax.device_put(jnp.arange(64.0), NamedSharding(mesh, PartitionSpec()))
    moved = WeightMemory(array.nbytes).move(array)
    before = [np.asarray(shard.data) for shard in moved.addressable_shards]
    result = jax.jit(lambda x: x + 1, donate_argnums=0)(moved)
    np.testing.assert_array_equal(np.asarray(result), np.arange(64.0) + 1)
    for part in before:
        np.testing.assert_array_equal(part, np.arange(64.0))


def test_arrays_outlive_those_that_they_were_copied_from_and_give_the_memory_back(monkeypatch):
    buffers = []

    def recorded(size):
        buffer = aligned_buffer(size)
        buffers.append(weakref.ref(buffer.base))
        return buffer

    monkeypatch.setattr(host_memory, "aligned_buffer", recorded)
    array = jnp.arange(100.0)
    memory = WeightMemory(array.nbytes + ARRAY_ALIGNMENT)
    moved = memory.move(array)
    array.delete()
    del memory
    gc.collect()
    assert buffers[0]() is not None
    np.testing.assert_array_equal(np.asarray(moved), np.arange(100.0))
    del moved
    gc.collect()
    assert buffers[0]() is None


def test_no_more_is_put_into_it_than_there_is_room():
    memory = WeightMemory(256)
    memory.move(jnp.zeros(48))
    with pytest.raises(ValueError, match="an array of 128 bytes does not fit into the 64 free bytes"):
        memory.move(jnp.zeros(17))
    assert isinstance(memory.move(jnp.zeros(16)).sharding, SingleDeviceSharding)

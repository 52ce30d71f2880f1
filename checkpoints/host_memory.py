"""Memory of the host that weights are read into, or lie in where the host computes: of huge pages, if it has such.

A core finds an address of a huge page at once. For others, of 4 KiB, it walks through tables, in a virtual machine
through those of its host besides; reading weights from memory, which is what decoding on a CPU waits for, takes a
quarter longer then (docs/cpu-speed.md).
"""

import contextlib
import mmap
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

ALIGNMENT = 4096
"""Alignment of what is read from files: `O_DIRECT` needs it."""
HUGE_PAGE = 2 << 20
HUGE_FROM = 8 << 20
"""Bytes from which on memory is of huge pages: of a smaller one much of the last page would be lost."""
ARRAY_ALIGNMENT = 64
"""Alignment of arrays that JAX takes without a copy."""


def aligned(size: int, alignment: int = ALIGNMENT) -> int:
    """The least multiple of the alignment that has room for so many bytes.

    >>> aligned(5000)
    8192
    """
    return -(-size // alignment) * alignment


def aligned_buffer(size: int) -> np.ndarray:
    """Return uint8 [size], zero, beginning at a page; its pages are given back when the last array over it is gone.

    From `HUGE_FROM` on they are huge where the system has such. A disk takes a request of a limited number of pieces of
    memory, which pages are unless they happen to follow each other: reads of huge ones are 1.2 to 3 times as fast.
    """
    if size < HUGE_FROM or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.frombuffer(mmap.mmap(-1, max(size, 1)), np.uint8)[:size]
    memory = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has none
    with contextlib.suppress(OSError):  # a kernel without
        memory.madvise(mmap.MADV_HUGEPAGE)
    array = np.frombuffer(memory, np.uint8)
    start = -array.ctypes.data % HUGE_PAGE
    return array[start : start + size]


def slice_start(index: Any) -> tuple[int, ...]:
    """Return where a device's part of an array (slices) begins, by which parts are told apart."""
    return tuple(part.start or 0 for part in index)


def array_of_parts(
    shape: tuple[int, ...], parts: Mapping[tuple[int, ...], np.ndarray], sharding: Sharding
) -> jax.Array:
    """An array, placed on its devices, from its parts by where they begin; on a CPU it is the parts."""
    places = sharding.addressable_devices_indices_map(shape)
    return jax.make_array_from_single_device_arrays(
        shape, sharding, [jax.device_put(parts[slice_start(index)], device) for device, index in places.items()]
    )


class WeightMemory:
    """Has arrays on CPU devices lie one after the other in one memory, which is given back with the last of them.

    Devices that have the same part of an array share it.

    Args:
      size: bytes of all arrays, each `aligned` to `ARRAY_ALIGNMENT`.
    """

    def __init__(self, size: int):
        self._free = aligned_buffer(size)

    def move(self, array: jax.Array) -> jax.Array:
        """Return the array, in this memory. Raises ValueError if there is no room left."""
        parts = {slice_start(shard.index): shard.data for shard in array.addressable_shards}
        copies = {start: self._copy(np.asarray(part)) for start, part in parts.items()}
        return array_of_parts(array.shape, copies, array.sharding)

    def _copy(self, part: np.ndarray) -> np.ndarray:
        size = aligned(part.nbytes, ARRAY_ALIGNMENT)
        if size > self._free.nbytes:
            raise ValueError(f"an array of {size} bytes does not fit into the {self._free.nbytes} free bytes.")
        copy = self._free[: part.nbytes].view(part.dtype).reshape(part.shape)
        self._free = self._free[size:]
        np.copyto(copy, part)
        return copy

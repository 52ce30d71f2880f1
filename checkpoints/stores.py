"""Where the weights of layers come from while a model runs: devices, host memory, or disk, behind one interface.

A layer is asked for (`start`), brought to its devices (`place`), used (`arrays`) and given back (`release`), in this
order and each by the thread that runs the model. Only reading files happens on other threads.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, override

import jax
import numpy as np
from jax.sharding import Sharding

from jaxinfer.checkpoints.host_memory import aligned_buffer, array_of_parts
from jaxinfer.checkpoints.layer_files import LayerFiles
from jaxinfer.checkpoints.readers import Readers
from jaxinfer.futures import INTERVAL, DaemonThreads, Event, InterruptibleFuture

TAKE_SECONDS = 1.0
"""How long to wait for a buffer that reads which were given up still write to, before there is another one."""


class Fetch(Protocol):
    """A layer on its way to the devices.

    Attributes:
      tier: where it comes from: "device", "host" or "disk".
      bytes: how many are moved; 0 from a device.
      cpu_seconds: what reading it took of the CPU.
      interval: when moving them began and when it was seen to be done, by `time.perf_counter`; None until then.
    """

    tier: str
    bytes: int
    cpu_seconds: float
    interval: tuple[float, float] | None

    @property
    def ready(self) -> bool:
        """Whether `arrays` need not wait for a copy or for a disk."""
        ...

    def place(self) -> None:
        """Let the devices begin to copy it, unless they have: before the computation that hides it is sent to them."""
        ...

    def arrays(self) -> list[jax.Array]:
        """Its leaves on the devices, in the order in which programs take them; waits for a disk.

        Raises CheckpointError if it cannot be read, or not in time.
        """
        ...

    def settle(self) -> list[jax.Array]:
        """Its leaves when they are there, for use until `release`, however long that is."""
        ...

    def release(self) -> None:
        """Give its memory back: all that was computed from the arrays is done."""
        ...


class LayerStore(Protocol):
    """The layers of a model."""

    def start(self, layer: int) -> Fetch:
        """Ask for a layer. Layers arrive in the order in which they are asked for."""
        ...

    def close(self) -> None:
        """End: whoever waits for a disk, or will, gets a CheckpointError at once. From any thread; may be repeated."""


class _OnDevice:
    """A layer that stays on its devices."""

    tier, bytes, cpu_seconds, ready = "device", 0, 0.0, True
    interval: tuple[float, float] | None = None

    def __init__(self, leaves: list[jax.Array]):
        self._leaves = leaves

    def place(self) -> None:
        pass

    def arrays(self) -> list[jax.Array]:
        return self._leaves

    def settle(self) -> list[jax.Array]:
        return self._leaves

    def release(self) -> None:
        pass


class DeviceStore(LayerStore):
    """Layers that are on their devices all the time."""

    def __init__(self, layers: dict[int, list[jax.Array]]):
        self._layers = layers

    @override
    def start(self, layer: int) -> Fetch:
        return _OnDevice(self._layers[layer])


class _FromHost:
    """A layer that is copied from the host's memory; the copy begins with `place` and runs by itself."""

    tier, cpu_seconds = "host", 0.0

    def __init__(self, store: "HostStore", layer: int):
        self._store, self._host, self.bytes = store, store.layers[layer], store.bytes[layer]
        self._shardings = store.shardings[layer]
        self.interval: tuple[float, float] | None = None
        self._arrays: list[jax.Array] = []
        self._begun = 0.0
        self._ended: InterruptibleFuture[float] | None = None

    @property
    def ready(self) -> bool:
        return self._ended is not None and self._ended.done()

    def place(self) -> None:
        if self._ended is not None:
            return
        self._begun = time.perf_counter()
        self._arrays = jax.device_put(self._host, list(self._shardings))
        self._ended = self._store.watcher.submit(_ended, self._arrays)

    def arrays(self) -> list[jax.Array]:
        assert self._ended is not None, "a layer is placed before it is used"
        self.interval = self._begun, self._ended.result()
        return self._arrays

    def settle(self) -> list[jax.Array]:
        self.place()
        return self.arrays()

    def release(self) -> None:
        if self._ended is not None:
            self._ended.wait()  # its arrays are deleted only then
        for array in self._arrays:
            array.delete()


def _ended(arrays: list[jax.Array]) -> float:
    """Return when the arrays were there."""
    jax.block_until_ready(arrays)
    return time.perf_counter()


class HostStore(LayerStore):
    """Layers in the host's memory, pinned where the device is a GPU.

    Args:
      layers: the leaves of each layer, as `to_host` made them.
      shardings: where the leaves of each layer live on the devices.

    Attributes:
      bytes: that each layer takes on all devices together.
      watcher: the thread that sees when copies end.
    """

    def __init__(self, layers: Mapping[int, list[jax.Array]], shardings: Mapping[int, Sequence[Sharding]]):
        self.layers, self.shardings = layers, shardings
        self.bytes = {layer: sum(map(_bytes, leaves)) for layer, leaves in layers.items()}
        self.watcher = DaemonThreads(1, "jaxinfer-host-copies")

    @override
    def start(self, layer: int) -> Fetch:
        return _FromHost(self, layer)


def _bytes(array: jax.Array) -> int:
    """The bytes of an array's parts on all devices together."""
    return sum(shard.data.nbytes for shard in array.addressable_shards)


def to_host(array: jax.Array) -> jax.Array:
    """The array in the host's memory, divided as on the devices, whose copy is freed."""
    moved = jax.device_put(array, array.sharding.with_memory_kind("pinned_host"))
    moved.block_until_ready()
    array.delete()
    return moved


class _FromDisk:
    """A layer that threads read into a staging buffer."""

    tier = "disk"

    def __init__(self, store: "DiskStore", layer: int):
        self._store, self._layer = store, layer
        buffer = store.staging.take(store.largest)
        self._buffer: np.ndarray | None = buffer
        self.bytes = store.files.layers[layer].bytes
        self.interval: tuple[float, float] | None = None
        self.cpu_seconds = 0.0
        self._arrays: list[jax.Array] | None = None
        self._begun = time.perf_counter()
        self._given_up = Event()
        view = buffer.data
        self._blocks: list[InterruptibleFuture[tuple[float, float]]] = [
            store.staging.readers.submit(self._read, offset, view) for offset in store.files.blocks(layer)
        ]

    def _read(self, offset: int, view: memoryview) -> tuple[float, float]:
        """Read a block; return when it was there, and the seconds that reading it took of the CPU."""
        begun = time.thread_time()
        self._store.files.read_block(self._layer, offset, view, given_up=self._given_up)
        return time.perf_counter(), time.thread_time() - begun

    @property
    def ready(self) -> bool:
        return all(block.done() for block in self._blocks)

    def place(self) -> None:
        if not self._store.aliases:
            self.arrays()

    def arrays(self) -> list[jax.Array]:
        if self._arrays is None:
            files, readers = self._store.files, self._store.staging.readers
            blocks = zip(self._blocks, files.blocks(self._layer), strict=True)
            reads = [readers.result(block, files.describe(self._layer, offset)) for block, offset in blocks]
            ends, cpu_seconds = zip(*reads, strict=True)
            self.interval, self.cpu_seconds = (self._begun, max(ends)), sum(cpu_seconds)
            assert self._buffer is not None
            views = files.views(self._layer, self._buffer)
            shapes = [leaf.shape for leaf in files.layers[self._layer].leaves]
            self._arrays = _arrays(shapes, views, self._store.shardings[self._layer])
        return self._arrays

    def release(self) -> None:
        self._given_up.set()
        for array in self._arrays or ():
            array.block_until_ready()  # the copy to a GPU has read the buffer
            array.delete()
        self._give_back()

    def settle(self) -> list[jax.Array]:
        """The arrays when they are there; a buffer that is not their memory is free for the next layer."""
        arrays = jax.block_until_ready(self.arrays())
        if not self._store.aliases:
            self._give_back()
        return arrays

    def _give_back(self) -> None:
        if self._buffer is not None:
            for block in self._blocks:
                block.cancel()
            self._store.staging.give_back(self._buffer, self._blocks)
        self._buffer = None


def _arrays(
    shapes: Sequence[tuple[int, ...]],
    leaves: Sequence[dict[tuple[int, ...], np.ndarray]],
    shardings: Sequence[Sharding],
) -> list[jax.Array]:
    """Return arrays, placed on their devices, from their parts by where they begin; on a CPU they are the parts."""
    if all(len(sharding.device_set) == 1 for sharding in shardings):
        return jax.device_put([next(iter(parts.values())) for parts in leaves], list(shardings))  # one call for all
    return [array_of_parts(*leaf) for leaf in zip(shapes, leaves, shardings, strict=True)]


class Staging:
    """The threads that read files, and the buffers that they read to; stores can share them.

    Args:
      keep: bytes of buffers that are kept for the next layer; None: all.
      on_release: called with a buffer that nothing uses any more; tests fill it with wrong values.

    Attributes:
      readers: the threads.
    """

    def __init__(self, *, keep: int | None = None, on_release: Callable[[np.ndarray], None] | None = None):
        self.readers = Readers()
        self._keep, self._on_release = keep, on_release
        self._lock = threading.RLock()  # not a condition, whose lock an interrupt can leave taken
        self._free: list[np.ndarray] = []
        # Buffers that are free once these reads have ended.
        self._late: list[tuple[np.ndarray, list[InterruptibleFuture[Any]]]] = []

    def take(self, size: int) -> np.ndarray:
        """Allocate a buffer of exactly this size, with undefined content.

        Waits at most `TAKE_SECONDS` for one that is read to, before it makes one.
        """
        until = time.monotonic() + TAKE_SECONDS
        while True:
            with self._lock:
                self._collect()
                sizes = [buffer.nbytes for buffer in self._free]
                if size in sizes:
                    return self._free.pop(sizes.index(size))
                oldest = self._late[0][1][0] if self._late else None
            if oldest is None or (left := until - time.monotonic()) <= 0:
                return aligned_buffer(size)
            oldest.wait(min(left, INTERVAL))  # it may hang, and others end

    def reserve(self, size: int, count: int) -> None:
        """Make buffers of this size in one memory, whose pages are huge even if each of them is small."""
        memory = aligned_buffer(size * count)
        with self._lock:
            self._free += [memory[start : start + size] for start in range(0, size * count, size)]

    def give_back(self, buffer: np.ndarray, reading: Sequence[InterruptibleFuture[Any]] = ()) -> None:
        """Take a buffer that nothing uses any more once these reads have ended: where one hangs, it never comes back.

        Does not wait for them.
        """
        with self._lock:
            self._late.append((buffer, list(reading)))
            self._collect()

    def trim(self) -> None:
        """Give the memory of free buffers back."""
        with self._lock:
            self._collect()
            self._free.clear()

    def _collect(self) -> None:
        """Free the buffers that nothing is read to any more; under the lock."""
        late = [(buffer, [read for read in reading if not read.done()]) for buffer, reading in self._late]
        self._late = [(buffer, reading) for buffer, reading in late if reading]
        for buffer in [buffer for buffer, reading in late if not reading]:
            if self._on_release is not None:
                self._on_release(buffer)
            while self._free and self._keep is not None and self._free_bytes + buffer.nbytes > self._keep:
                self._free.pop(0)
            if self._keep is None or buffer.nbytes <= self._keep:
                self._free.append(buffer)

    @property
    def _free_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._free)


class DiskStore(LayerStore):
    """Layers in files.

    Staging buffers are the memory of the arrays on a CPU (`aliases`), and on a GPU what they are copied from. One is
    used again only after `release`, which comes when the devices have finished.

    Args:
      files: the layers.
      shardings: where the leaves of each layer live on the devices, of those that it is asked for.
      aliases: whether arrays on the devices are the buffers.
      staging: threads and buffers; None: its own.

    Attributes:
      largest: bytes of the largest of them, and so of a buffer.
    """

    def __init__(
        self,
        files: LayerFiles,
        shardings: Mapping[int, Sequence[Sharding]],
        *,
        aliases: bool,
        staging: Staging | None = None,
    ):
        self.files, self.shardings, self.aliases = files, shardings, aliases
        self.staging = staging or Staging()
        self.largest = max(files.layers[layer].bytes for layer in shardings)

    @override
    def start(self, layer: int) -> Fetch:
        return _FromDisk(self, layer)

    @override
    def close(self) -> None:
        self.staging.readers.close()


class TieredStore(LayerStore):
    """Layers of which some are in one store and some in another.

    Args:
      stores: that of each layer.
    """

    def __init__(self, stores: Sequence[LayerStore]):
        self._stores = stores

    @override
    def start(self, layer: int) -> Fetch:
        return self._stores[layer].start(layer)

    @override
    def close(self) -> None:
        for store in set(self._stores):
            store.close()

"""Predicting a streamed model's speed from bandwidths and the rate of multiplication (`docs/streaming.md`)."""

import collections
import dataclasses
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import crc32c
import jax
import numpy as np

from jaxinfer.checkpoints import CheckpointError
from jaxinfer.checkpoints.host_memory import ALIGNMENT, aligned_buffer
from jaxinfer.checkpoints.layer_files import BLOCK_BYTES, read_direct
from jaxinfer.checkpoints.readers import Readers
from jaxinfer.checkpoints.stores import to_host
from jaxinfer.models.devices import devices_of
from jaxinfer.models.files.loading import OpenedModel
from jaxinfer.models.leaves import layer_of
from jaxinfer.pallas_kernels.matmul.api import matmul
from jaxinfer.streaming.config import Placement
from jaxinfer.streaming.layer_folders import layer_folder

MEASURED_BYTES = 1 << 30
"""Maximum bytes of files that are read to measure a disk's speed."""
MEASURED_SECONDS = 3.0
"""Minimum seconds of reading a disk, in repeated rounds if needed: the speed of a shared one varies."""
COPIED_BYTES = 256 << 20
MATRIX = 2048
REPEATS = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """The prediction for a pass over some sequences, one token each.

    Attributes:
      tokens: number of sequences.
      seconds: seconds of the pass.
      fetch_seconds, compute_seconds: seconds of fetching its layers, and of computing them.
      flops: operations a second of each device.
    """

    tokens: int
    seconds: float
    fetch_seconds: float
    compute_seconds: float
    flops: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassTraffic:
    """The traffic and computation of a pass through a model, with their speeds.

    Attributes:
      moved: bytes from each tier to all devices together, which share the disk and the host's memory.
      bandwidths: bytes a second from each tier to all devices together.
      parameters: parameters that each token multiplies with on each device.
      weight_bytes: bytes of layers that each device multiplies with.
      flops: operations a second of each device, while all compute.
      weight_rate: bytes a second of weights that each device multiplies with a single token, while all do.
      ahead: whether layers are fetched while others are computed.
    """

    moved: Mapping[str, int]
    bandwidths: Mapping[str, float]
    parameters: int
    weight_bytes: int
    flops: float
    weight_rate: float = math.inf
    ahead: bool = True

    @property
    def fetch_seconds(self) -> float:
        """The seconds of fetching the layers, which come one after the other from any tier."""
        return sum(size / self.bandwidths[tier] for tier, size in self.moved.items())

    def predict(self, tokens: int) -> Prediction:
        """Predict a pass over `tokens` tokens. Weights are read once, however many tokens multiply with them."""
        fetch = self.fetch_seconds
        compute = max(2 * self.parameters * tokens / self.flops, self.weight_bytes / self.weight_rate)
        seconds = max(fetch, compute) if self.ahead else fetch + compute
        return Prediction(
            tokens=tokens,
            seconds=seconds,
            fetch_seconds=fetch,
            compute_seconds=compute,
            flops=2 * self.parameters * tokens / seconds,
        )

    @property
    def balanced_tokens(self) -> int:
        """The number of tokens at which computing takes as long as fetching; more give no more tokens a second."""
        return max(1, round(self.fetch_seconds * self.flops / (2 * self.parameters)))


def plan_pass(
    opened: OpenedModel,
    placement: Placement,
    *,
    bandwidths: Mapping[str, float] | None = None,
    flops: float | None = None,
) -> PassTraffic:
    """Plan a pass of a placed model on this machine, measuring what is not given.

    Args:
      bandwidths: bytes a second from tiers to all devices together.
      flops: operations a second of each device; reading weights then takes no time.

    Raises as `measure_disk` does, and ValueError for a mixture of experts.
    """
    if placement.experts is not None:
        raise ValueError(
            f"{opened.folder}: plan is not implemented for a mixture of experts, since how fast it runs depends on "
            "which experts are chosen; measure it with python -m benchmarks.moe --part streaming."
        )
    devices, rates = devices_of(opened.mesh), dict(bandwidths or {})
    moved = moved_bytes(opened, placement)
    if "disk" in moved and "disk" not in rates:
        written = layer_folder(opened)
        rates["disk"] = measure_disk(written if written.exists() else opened.folder)
    if "host" in moved and "host" not in rates:
        rates["host"] = measure_host_copy(devices)
    return PassTraffic(
        moved=moved,
        bandwidths={tier: rates[tier] for tier in moved},
        parameters=opened.parameters_per_device,
        weight_bytes=opened.bytes_per_device(lambda name: layer_of(name) is not None),
        flops=flops or measure_flops(devices, opened.weights.dtype),
        weight_rate=math.inf if flops else measure_weight_rate(devices, opened.weights.dtype),
        ahead=placement.depth.device > 0,
    )


def moved_bytes(opened: OpenedModel, placement: Placement) -> dict[str, int]:
    """Compute the bytes from each tier in a pass, to all devices together.

    A disk gives each byte once, since files have no part twice; the host's memory gives each device its share.
    """
    moved: collections.Counter[str] = collections.Counter()
    for layer in placement.streamed:
        tier = placement.tiers[layer]
        for leaf in opened.layer_shapes(layer):
            of_all = len(leaf.sharding.device_set) * math.prod(leaf.sharding.shard_shape(leaf.shape))
            moved[tier] += leaf.dtype.itemsize * (leaf.size if tier == "disk" else of_all)
    return dict(moved)


def measure_disk(folder: Path, preadv: Callable[[int, list[Any], int], int] = os.preadv) -> float:
    """Measure a disk's bytes a second on a folder's files, past the page cache, read and verified as for streaming.

    They are read in blocks, as long as the largest file where all are shorter than a block of layer files.

    Args:
      preadv: reads from a file into buffers; tests pass one that fails.

    Raises ValueError if there is nothing to read, CheckpointError, naming the file, if it cannot be read.
    """
    files = {file: file.stat().st_size for file in sorted(folder.rglob("*")) if file.is_file()}
    size = min(BLOCK_BYTES, max(files.values(), default=0) // ALIGNMENT * ALIGNMENT)
    if not size:
        raise ValueError(f"{folder}: no file of {ALIGNMENT} bytes to measure the disk with; give --bandwidth.")
    blocks = [(file, start) for file, end in files.items() for start in range(0, end - size + 1, size)]
    blocks = blocks[: MEASURED_BYTES // size]
    readers, local = Readers(), threading.local()

    def read(file: Path, offset: int) -> None:
        if not hasattr(local, "buffer"):
            local.buffer = aligned_buffer(size).data
        try:
            read_direct(file, offset, local.buffer, preadv)
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read ({error.strerror or error}); check the disk.") from error
        crc32c.crc32c(local.buffer)

    start, count, seconds = time.perf_counter(), 0, 0.0
    try:
        while not count or seconds < MEASURED_SECONDS:
            tasks = [(readers.submit(read, *block), *block) for block in blocks]
            for task, file, offset in tasks:
                readers.result(task, f"{file}, bytes {offset} to {offset + size}")
            count, seconds = count + len(blocks), time.perf_counter() - start
    finally:
        readers.close()
    return count * size / seconds


def measure_host_copy(devices: Sequence[Any], size: int | None = None) -> float:
    """Measure the bytes a second from the host's memory to all devices, copying `size` bytes to each at once."""
    size = size or COPIED_BYTES
    shardings = [jax.sharding.SingleDeviceSharding(device) for device in devices]
    host = [to_host(jax.device_put(np.ones(size // 4, np.float32), sharding)) for sharding in shardings]
    return len(devices) * size / _best_seconds(lambda: jax.device_put(host, shardings))


def measure_flops(devices: Sequence[Any], dtype: np.dtype) -> float:
    """Measure the operations a second of each device in large products of this dtype, while all compute."""
    return 2 * MATRIX**3 / _product_seconds(devices, dtype, MATRIX, MATRIX)


def measure_weight_rate(devices: Sequence[Any], dtype: np.dtype) -> float:
    """Measure the bytes a second of a matrix of this dtype that each device multiplies with a vector, while all do."""
    rows = COPIED_BYTES // (MATRIX * np.dtype(dtype).itemsize)
    return COPIED_BYTES / _product_seconds(devices, dtype, rows, 1)


def _product_seconds(devices: Sequence[Any], dtype: np.dtype, outputs: int, tokens: int) -> float:
    """Time a product of [tokens, MATRIX] with a matrix [outputs, MATRIX] on every device at once."""
    product = jax.jit(matmul)  # as in models: XLA's own product of a single row is ten times slower
    shapes = (tokens, MATRIX), (outputs, MATRIX)
    given = [tuple(jax.device_put(np.ones(shape, dtype), device) for shape in shapes) for device in devices]
    return _best_seconds(lambda: [product(*arrays) for arrays in given])


def _best_seconds(run: Callable[[], Any]) -> float:
    """The least seconds of a call until its results are there, after a call that compiles."""
    seconds = []
    for _ in range(1 + REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])

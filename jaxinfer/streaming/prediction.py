"""Measures this machine, and has the planner predict a model on it (`docs/streaming.md`)."""

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
from jaxinfer.models import DecoderConfig
from jaxinfer.models.devices import available_bytes, device_name, devices_of, host_total_bytes
from jaxinfer.models.files.loading import OpenedModel
from jaxinfer.models.planning import shape_of
from jaxinfer.pallas_kernels.matmul.api import matmul
from jaxinfer.sharding.planner import Device, Fetched, Format, Runner, Seconds, System, Ways
from jaxinfer.streaming.config import Placement
from jaxinfer.streaming.layer_folders import layer_folder

MEASURED_BYTES = 1 << 30
"""Maximum bytes of files that are read to measure a disk's speed."""
MEASURED_SECONDS = 3.0
"""Minimum seconds of reading a disk, in repeated rounds if needed: the speed of a shared one varies."""
COPIED_BYTES = 256 << 20
MATRIX = 2048
REPEATS = 5
JAXINFER = System(name="jaxinfer", bandwidth_share=1.0, flops_share=1.0, layer_s=0.0, exchange="cheapest", drops=False)
"""On this machine, whose measured rates are those that products reach."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedPass:
    """A pass of a model on this machine, one token of each sequence, as the planner predicts it.

    Attributes:
      moved: bytes of layers from each tier to all devices together, which share the disk and the host's memory.
      bandwidths: bytes a second from each tier to all devices together.
      runner: the model on these devices, with what they were measured to do.
      context: tokens that each sequence sees.
    """

    moved: Mapping[str, int]
    bandwidths: Mapping[str, float]
    runner: Runner
    context: float

    def predict(self, sequences: int) -> Seconds:
        """Predict the seconds of a pass."""
        return self.runner.token(sequences, self.context)

    @property
    def balanced(self) -> int:
        """The fewest sequences for which computing takes as long as fetching."""
        return self.runner.balanced(self.context)


def plan_pass(
    opened: OpenedModel,
    placement: Placement | None,
    *,
    context: int,
    bandwidths: Mapping[str, float] | None = None,
    flops: float | None = None,
) -> PlannedPass:
    """Plan a pass of a model on this machine, measuring what is not given.

    Args:
      placement: where layers are; None: all are on the devices.
      context: tokens of a sequence at its end; it is planned in the middle.
      bandwidths: bytes a second from tiers to all devices together.
      flops: operations a second of each device; reading weights then takes no time.

    Raises as `measure_disk` does, and ValueError for a model that generates no text.
    """
    if not isinstance(opened.fitting.original, DecoderConfig):
        raise ValueError(f"{opened.folder}: plan predicts language models, and this one generates no text.")
    moved = {} if placement is None else moved_bytes(opened, placement)
    rates = _measured(opened, placement, moved, bandwidths or {})
    fetched = Fetched(layers_s=sum(size / rates[tier] for tier, size in moved.items()))
    if placement is not None:
        fetched = dataclasses.replace(fetched, ahead=placement.depth.device > 0)
        if (experts := placement.experts) is not None and experts.is_fetched:
            fetched = dataclasses.replace(fetched, experts=rates[experts.tier], held=experts.slots / experts.count)
        if placement.kv_offload:
            fetched = dataclasses.replace(fetched, cache=rates["host"] / len(devices_of(opened.mesh)))
    return PlannedPass(moved=moved, bandwidths=rates, runner=_runner(opened, flops, fetched), context=context / 2)


def _measured(
    opened: OpenedModel, placement: Placement | None, moved: Mapping[str, int], given: Mapping[str, float]
) -> dict[str, float]:
    """Return the bytes a second from each tier that something comes from, measured if not given."""
    tiers, rates = set(moved), dict(given)
    if placement is not None and placement.kv_offload:
        tiers.add("host")
    if placement is not None and placement.experts is not None and placement.experts.is_fetched:
        tiers.add(placement.experts.tier)
    if "disk" in tiers - rates.keys():
        written = layer_folder(opened)
        rates["disk"] = measure_disk(written if written.exists() else opened.folder)
    if "host" in tiers - rates.keys():
        rates["host"] = measure_host_copy(devices_of(opened.mesh))
    return {tier: rates[tier] for tier in sorted(tiers)}


def _runner(opened: OpenedModel, flops: float | None, fetched: Fetched) -> Runner:
    """Make the planner's model on these devices. What they send one another takes no time: it was not measured."""
    config, devices, dtype = opened.fitting.original, devices_of(opened.mesh), opened.weights.dtype
    assert isinstance(config, DecoderConfig)
    peak = flops or measure_flops(devices, dtype)
    device = Device(
        name=device_name(devices[0]),
        memory=available_bytes(opened.mesh),
        bandwidth=math.inf if flops else measure_weight_rate(devices, dtype),
        flops=peak,
        flops8=peak,
        node=len(devices),
        link=math.inf,
        network=math.inf,
        host_link=math.inf,
        disk=math.inf,
        host_memory=host_total_bytes(),
        disk_bytes=math.inf,
    )
    number = float(dtype.itemsize)
    weight = {None: number, "int4": 0.5}.get(opened.weights.quantized, 1.0)
    return Runner(
        model=shape_of(str(opened.folder), config),
        device=device,
        system=JAXINFER,
        ways=Ways() if opened.mesh is None else Ways(**opened.mesh.shape),
        format=Format(weight_bytes=weight, kv_bytes=number, number_bytes=number),
        fetched=fetched,
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

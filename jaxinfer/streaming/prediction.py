"""What a streamed model will do, from bandwidths and the rate of multiplication (`docs/streaming.md`)."""

import dataclasses
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import crc32c
import jax
import jax.numpy as jnp
import numpy as np

from checkpoints import CheckpointError
from checkpoints.layer_files import BLOCK_BYTES, aligned_buffer, read_direct
from checkpoints.readers import Readers
from checkpoints.stores import to_host

MEASURED_BYTES = 1 << 30
"""Read of a disk, at most, to learn its speed."""
COPIED_BYTES = 256 << 20
MATRIX = 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """A pass over some sequences, one token each.

    Attributes:
      tokens: the sequences.
      seconds: of the pass: fetching its layers or computing them, whichever takes longer.
      fetch_seconds, compute_seconds: these two.
      flops: operations a second.
    """

    tokens: int
    seconds: float
    fetch_seconds: float
    compute_seconds: float
    flops: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def predict(tokens: int, *, streamed_bytes: int, parameters: int, bandwidth: float, flops: float) -> Prediction:
    """A pass over so many tokens: min(flops, tokens * bandwidth / bytes of a parameter * 2) operations a second.

    Args:
      streamed_bytes: that come to each device in a pass.
      parameters: that each token multiplies with.
      bandwidth: bytes a second. flops: operations a second that products of these sizes reach.
    """
    fetch, compute = streamed_bytes / bandwidth, 2 * parameters * tokens / flops
    seconds = max(fetch, compute)
    return Prediction(
        tokens=tokens,
        seconds=seconds,
        fetch_seconds=fetch,
        compute_seconds=compute,
        flops=2 * parameters * tokens / seconds,
    )


def balanced_tokens(*, streamed_bytes: int, parameters: int, bandwidth: float, flops: float) -> int:
    """How many tokens make computing take as long as fetching; more give no more tokens a second."""
    return max(1, round(streamed_bytes / bandwidth * flops / (2 * parameters)))


def measure_disk(folder: Path, preadv: Callable[[int, list[Any], int], int] = os.preadv) -> float:
    """Bytes a second that the disk of a folder's files gives, past the page cache, read and verified as for streaming.

    preadv: reads from a file into buffers; tests give one that fails.
    Raises ValueError if there is too little to read, CheckpointError, naming the file, if it cannot be read.
    """
    blocks = list(itertools.islice(_blocks(folder), MEASURED_BYTES // BLOCK_BYTES))
    if not blocks:
        raise ValueError(f"{folder}: no file of {BLOCK_BYTES >> 20} MiB to measure the disk with; give --bandwidth.")
    readers, local = Readers(), threading.local()

    def read(file: Path, offset: int) -> None:
        if not hasattr(local, "buffer"):
            local.buffer = aligned_buffer(BLOCK_BYTES).data
        try:
            read_direct(file, offset, local.buffer, preadv)
        except OSError as error:
            raise CheckpointError(f"{file}: cannot be read ({error.strerror or error}); check the disk.") from error
        crc32c.crc32c(local.buffer)

    start = time.perf_counter()
    tasks = [(readers.submit(read, *block), *block) for block in blocks]
    try:
        for task, file, offset in tasks:
            readers.result(task, f"{file}, bytes {offset} to {offset + BLOCK_BYTES}")
    finally:
        readers.close()
    return len(blocks) * BLOCK_BYTES / (time.perf_counter() - start)


def _blocks(folder: Path) -> Iterator[tuple[Path, int]]:
    """Files, and where whole blocks of them begin."""
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        for offset in range(0, file.stat().st_size - BLOCK_BYTES + 1, BLOCK_BYTES):
            yield file, offset


def measure_host_copy(device: Any, size: int = COPIED_BYTES) -> float:
    """Bytes a second from the host's memory to a device, in copies of this size."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    host = to_host(jax.device_put(np.ones(size // 4, np.float32), sharding))
    best = 0.0
    for _ in range(3):
        start = time.perf_counter()
        jax.device_put(host, sharding).block_until_ready()
        best = max(best, host.nbytes / (time.perf_counter() - start))
    return best


def measure_flops(device: Any, dtype: np.dtype) -> float:
    """Operations a second of a large product of this dtype."""
    x = jax.device_put(jnp.ones((MATRIX, MATRIX), dtype), device)
    product = jax.jit(lambda x: x @ x)
    product(x).block_until_ready()
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        product(x).block_until_ready()
        best = max(best, 2 * MATRIX**3 / (time.perf_counter() - start))
    return best

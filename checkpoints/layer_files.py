"""Layers on disk as devices take them: one aligned file a layer, which is read past the page cache and verified.

FOLDER/layer-00000.bin         the layer's leaves, fitted and quantised; each device's slice of a leaf is contiguous,
                               and begins at a multiple of 4 KiB, which `O_DIRECT` needs and JAX takes without a copy
                               on a CPU
FOLDER/expert-00000-00000.bin  likewise those of one expert of a layer, which the layer's own file then lacks
FOLDER/layers.json             what is where, a crc32c of every block, and one of all this; written last

Orbax's files are unaligned and compressed in parts: reading a layer of them takes a core and half the disk's speed.
"""

import dataclasses
import errno
import itertools
import math
import os
import pathlib
import re
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import crc32c
import jax
import ml_dtypes  # noqa: F401  (teaches numpy the name "bfloat16")
import msgspec
import numpy as np
from rich.filesize import decimal

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.host_memory import ALIGNMENT, aligned, aligned_buffer, slice_start
from jaxinfer.checkpoints.paths import inside
from jaxinfer.checkpoints.writing import sole_owner
from jaxinfer.futures import Event
from jaxinfer.progress import long_work

FORMAT = 2
MANIFEST = "layers.json"
BLOCK_BYTES = 8 << 20
"""Read at once, and verified by itself; at 8 MiB a read costs the CPU least for each byte."""
EXPERT_BLOCK_BYTES = 2 << 20
"""Likewise where experts have files of their own: of the few that a token needs, all threads read parts."""
ATTEMPTS = 4
"""How often a block is read before its error counts."""
FIRST_DELAY = 0.05
"""Seconds before the second attempt; each further one waits twice as long."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredSlice:
    """A contiguous part of a leaf: where it begins in the leaf, its shape, and its first byte in the file."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredLeaf:
    """A leaf of a layer: its name in the model, its dtype, its shape, and its slices, which cover it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    slices: tuple[StoredSlice, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredLayer:
    """The file of a layer, or of an expert: its name, its bytes, what is in it, and the crc32c of every block."""

    file: str
    bytes: int
    leaves: tuple[StoredLeaf, ...]
    crc32c: tuple[int, ...]

    @property
    def title(self) -> str:
        """Its content in words, such as "layer 3" or "layer 3, expert 12"."""
        numbers = map(int, re.findall(r"\d+", self.file))
        return ", ".join(f"{what} {number}" for what, number in zip(("layer", "expert"), numbers, strict=False))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayersManifest:
    """The content of `layers.json`.

    Attributes:
      about: what the files are of, for people.
      block_bytes: what is read at once.
      checksum: the crc32c of all other fields, as `encoded` has them.
    """

    format: int
    about: str
    block_bytes: int
    layers: tuple[StoredLayer, ...]
    checksum: int = 0

    def encoded(self) -> bytes:
        """All but the checksum, as JSON."""
        return msgspec.json.encode(dataclasses.replace(self, checksum=0))


class LayerFiles:
    """The layers of a folder, for reading.

    Args:
      folder: one that `write_layers` made.
      preadv: reads from a file into buffers; tests give one that fails.
      cached: whether the system may keep what is read in its page cache, from which reading it again is fast.

    Attributes:
      folder: the same.
      layers: what each layer has, and then each expert.
      retries: reads that failed or did not verify and were done again.

    Raises CheckpointError for a folder that is damaged, truncated, or not such a folder.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        preadv: Callable[[int, list[Any], int], int] = os.preadv,
        *,
        cached: bool = False,
    ):
        self.folder, self._preadv, self.retries = folder, preadv, 0
        self._read = read_cached if cached else read_direct
        manifest = _read_manifest(folder)
        self.layers, self._block_bytes = manifest.layers, manifest.block_bytes
        for layer in self.layers:
            if problem := _problem(inside(folder, layer.file), layer.bytes):
                raise CheckpointError(f"{layer.title}: {problem}; {self._remedy}.")

    @property
    def _remedy(self) -> str:
        return f"remove {self.folder}; the next run writes it again"

    def check(self, layers: Sequence[Mapping[str, jax.ShapeDtypeStruct]]) -> None:
        """Raise CheckpointError unless these are the leaves of the layers, in this order and divided so."""
        if len(layers) != len(self.layers):
            raise CheckpointError(
                f"{self.folder}: has {len(self.layers)} layers, and the model has {len(layers)}; {self._remedy}."
            )
        for shapes, layer in zip(layers, self.layers, strict=True):
            stored = [(leaf.name, leaf.dtype, leaf.shape, _ends(leaf, layer)) for leaf in layer.leaves]
            expected = [(name, x.dtype.name, x.shape, _divided(x)) for name, x in shapes.items()]
            if stored != expected:
                other = next((a for a, b in itertools.zip_longest(stored, expected) if a != b), None)
                what = "lacks a leaf" if other is None else f"{other[0]} {other[1]}{list(other[2])} is not the model's"
                raise CheckpointError(f"{layer.title}: {self.folder / layer.file}: {what}; {self._remedy}.")

    def blocks(self, layer: int) -> range:
        """The offsets of a layer's blocks."""
        return range(0, self.layers[layer].bytes, self._block_bytes)

    def describe(self, layer: int, offset: int) -> str:
        """Return a block of a layer, as errors name it."""
        stored = self.layers[layer]
        end = min(offset + self._block_bytes, stored.bytes)
        return f"{stored.title}: {self.folder / stored.file}, bytes {offset} to {end}"

    def read_block(self, layer: int, offset: int, buffer: memoryview, *, given_up: Event | None = None) -> None:
        """Read one block of a layer into its place in a buffer for the whole layer, and verify it.

        given_up: set when nobody waits for it any more: there is no further attempt.
        Raises CheckpointError, naming layer and file, if that fails `ATTEMPTS` times.
        """
        stored, given_up = self.layers[layer], given_up or Event()
        part = buffer[offset : min(offset + self._block_bytes, stored.bytes)]
        checksum, problem = stored.crc32c[offset // self._block_bytes], ""
        for attempt in range(ATTEMPTS):
            if attempt:
                if given_up.wait(FIRST_DELAY * 2 ** (attempt - 1)):
                    break
                self.retries += 1
            try:
                self._read(self.folder / stored.file, offset, part, self._preadv)
            except OSError as error:
                problem = f"cannot be read ({error.strerror or error}); check the disk"
                continue
            if crc32c.crc32c(part) == checksum:
                return
            problem = f"is damaged: its crc32c differs; {self._remedy}"
        raise CheckpointError(f"{self.describe(layer, offset)}: {problem}.")

    def views(self, layer: int, buffer: np.ndarray) -> list[dict[tuple[int, ...], np.ndarray]]:
        """The slices of each leaf by where they begin, as views of a buffer (uint8) that has the layer."""

        def view(leaf: StoredLeaf, part: StoredSlice) -> np.ndarray:
            dtype = np.dtype(leaf.dtype)
            size = int(np.prod(part.shape, dtype=np.int64)) * dtype.itemsize
            return buffer[part.offset : part.offset + size].view(dtype).reshape(part.shape)

        return [{part.start: view(leaf, part) for part in leaf.slices} for leaf in self.layers[layer].leaves]


def _problem(file: pathlib.Path, size: int) -> str | None:
    """Return why this cannot be a file of so many bytes that `write_layers` wrote."""
    try:
        status = file.lstat()
    except FileNotFoundError:
        return f"{file} is missing"
    if not stat.S_ISREG(status.st_mode):
        return f"{file} is not a file"
    return None if status.st_size == size else f"{file} has {status.st_size} bytes instead of {size}"


def _ends(leaf: StoredLeaf, layer: StoredLayer) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return where the slices of a leaf that are in the file begin in the leaf, and their shapes."""
    item = np.dtype(leaf.dtype).itemsize
    fit = [0 <= s.offset <= layer.bytes - math.prod(s.shape) * item and not s.offset % ALIGNMENT for s in leaf.slices]
    return {(part.start, part.shape) for part, fits in zip(leaf.slices, fit, strict=True) if fits}


def _divided(array: jax.ShapeDtypeStruct) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return where the parts of an array on its devices begin, and their shapes."""
    assert array.sharding is not None, "leaves are placed"
    shape = array.sharding.shard_shape(array.shape)
    return {(slice_start(part), shape) for part in array.sharding.addressable_devices_indices_map(array.shape).values()}


def read_direct(
    file: pathlib.Path,
    offset: int,
    part: memoryview,
    preadv: Callable[[int, list[Any], int], int] = os.preadv,
) -> None:
    """Fill a buffer from a file, past the page cache where the file system can.

    Offset, size and place of the buffer are multiples of `ALIGNMENT`. Raises OSError if it cannot be read, or ends.
    """
    handle, direct = _open(file)
    try:
        try:
            _fill(handle, offset, part, preadv)
        except OSError as error:
            if not direct or error.errno != errno.EINVAL:
                raise
            os.close(handle)  # the file system takes O_DIRECT when opening, and refuses to read
            handle, direct = os.open(file, os.O_RDONLY), False
            _fill(handle, offset, part, preadv)
        if not direct:  # what is read once a pass would push everything else out of the page cache
            _drop_pages(handle, offset, len(part))
    finally:
        os.close(handle)


def read_cached(
    file: pathlib.Path,
    offset: int,
    part: memoryview,
    preadv: Callable[[int, list[Any], int], int] = os.preadv,
) -> None:
    """Fill a buffer from a file, whose pages stay in the page cache. Raises OSError if it cannot be read, or ends."""
    handle = os.open(file, os.O_RDONLY)
    try:
        _fill(handle, offset, part, preadv)
    finally:
        os.close(handle)


def _fill(handle: int, offset: int, part: memoryview, preadv: Callable[[int, list[Any], int], int]) -> None:
    done = 0
    while done < len(part):
        count = preadv(handle, [part[done:]], offset + done)
        if count == 0:
            raise OSError(errno.EIO, f"ends after {offset + done} bytes")
        done += count


def _drop_pages(handle: int, offset: int, size: int) -> None:
    """Have the kernel forget a part of a file, or all from `offset` on (size 0), where it can be told to."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(handle, offset, size, os.POSIX_FADV_DONTNEED)


def _open(file: pathlib.Path) -> tuple[int, bool]:
    """Open a file for reading, past the page cache where the file system can; also return whether it can."""
    try:
        return os.open(file, os.O_RDONLY | getattr(os, "O_DIRECT", 0)), hasattr(os, "O_DIRECT")
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    return os.open(file, os.O_RDONLY), False


def write_layers(
    folder: pathlib.Path,
    layers: int,
    read: Callable[[int], Mapping[str, jax.Array]],
    *,
    experts: Sequence[tuple[int, int]] = (),
    total_bytes: int,
    about: str = "",
) -> None:
    """Make a folder of layer files, unless it is there; one process writes, others that want the same wait.

    Until all is written it is in `.NAME.partial` beside it, which the next writer empties if this one is killed.

    Args:
      layers: how many.
      read: the leaves of a layer, placed as they will be used, in the order in which they will be wanted; after the
        layers, at further indices, those of the experts.
      experts: the layer and number of each expert that has a file of its own.
      total_bytes: about how many bytes there will be.
      about: what they are of, for people.
    Raises CheckpointError if the disk is full.
    """
    if folder.exists():
        return
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with sole_owner(folder.parent / f".{folder.name}.partial", wait=True) as partial:
            if folder.exists():  # by the process that was waited for
                return
            if total_bytes > (free := shutil.disk_usage(partial).free):
                raise OSError(errno.ENOSPC, f"needs {decimal(total_bytes)}, {decimal(free)} are free")
            made = partial / "layers"
            made.mkdir()
            stored = []
            names = [f"layer-{layer:05}.bin" for layer in range(layers)]
            names += [f"expert-{layer:05}-{expert:05}.bin" for layer, expert in experts]
            block_bytes = EXPERT_BLOCK_BYTES if experts else BLOCK_BYTES
            with long_work("writing layer files", total=len(names)) as work:
                for index, name in enumerate(names):
                    stored.append(_write_layer(made, name, read(index), block_bytes))
                    work.advance()
            manifest = LayersManifest(format=FORMAT, about=about, block_bytes=block_bytes, layers=tuple(stored))
            manifest = dataclasses.replace(manifest, checksum=crc32c.crc32c(manifest.encoded()))
            _write(made / MANIFEST, msgspec.json.encode(manifest))
            made.rename(folder)
    except OSError as error:
        remedy = "free some space, or " if error.errno == errno.ENOSPC else ""
        raise CheckpointError(
            f"{folder}: cannot be written ({error.strerror or error}); {remedy}set layer_files to another folder."
        ) from error


def _write_layer(folder: pathlib.Path, name: str, leaves: Mapping[str, jax.Array], block_bytes: int) -> StoredLayer:
    """Write a layer's file: first what every device has, then the slices of one device after the other."""
    slices = [(rank, *part) for leaf, array in leaves.items() for rank, part in enumerate(_slices(leaf, array))]
    size, placed = 0, []
    for _, leaf, start, part in sorted(slices, key=lambda part: part[0]):
        placed.append((leaf, part, StoredSlice(start=start, shape=part.shape, offset=size)))
        size += aligned(part.nbytes)
    buffer = aligned_buffer(size)
    for _, part, where in placed:
        target = buffer[where.offset : where.offset + part.nbytes]
        target[:] = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
    _write(folder / name, buffer.data)
    blocks = range(0, size, block_bytes)
    return StoredLayer(
        file=name,
        bytes=size,
        leaves=tuple(
            StoredLeaf(
                name=leaf,
                dtype=array.dtype.name,
                shape=array.shape,
                slices=tuple(where for owner, _, where in placed if owner == leaf),
            )
            for leaf, array in leaves.items()
        ),
        crc32c=tuple(crc32c.crc32c(buffer[at : at + block_bytes].data) for at in blocks),
    )


def _slices(leaf: str, array: jax.Array) -> Iterator[tuple[str, tuple[int, ...], np.ndarray]]:
    """Yield the different slices of an array on its devices: its leaf, where each begins, and its values."""
    parts = {slice_start(shard.index): shard.data for shard in array.addressable_shards}
    for start, part in sorted(parts.items()):
        yield leaf, start, np.asarray(part)


def _write(file: pathlib.Path, content: bytes | memoryview) -> None:
    """Write a file to the disk itself, and keep nothing of it in the page cache."""
    with file.open("xb", buffering=0) as opened:
        done = 0
        while done < len(content):
            done += opened.write(content[done:])
        os.fsync(opened.fileno())
        _drop_pages(opened.fileno(), 0, 0)


def describe_layers(folder: pathlib.Path) -> str:
    """Return the model and format of a folder's files. Raises CheckpointError if `LayerFiles` would not take it."""
    return _read_manifest(folder).about


class _Format(msgspec.Struct):
    """The part of `layers.json` that is the same in every version."""

    format: int


def _read_manifest(folder: pathlib.Path) -> LayersManifest:
    file = folder / MANIFEST
    try:
        content = file.read_bytes()
        if (version := msgspec.json.decode(content, type=_Format).format) != FORMAT:
            raise CheckpointError(
                f"{file}: format={version} is unknown, this version of jaxinfer reads {FORMAT}; remove {folder}."
            )
        manifest = msgspec.json.decode(content, type=LayersManifest)
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{file}: damaged ({error}); remove {folder}; the next run writes it again.") from error
    blocks = manifest.block_bytes
    sound = blocks > 0 and not blocks % ALIGNMENT and manifest.checksum == crc32c.crc32c(manifest.encoded())
    if not sound or any(len(layer.crc32c) != -(-layer.bytes // blocks) for layer in manifest.layers):
        raise CheckpointError(f"{file}: damaged (its checksum differs); remove {folder}; the next run writes it again.")
    return manifest

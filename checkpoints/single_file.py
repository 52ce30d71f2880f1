"""A small model in one file, of safetensors: its weights, and in the header its manifest and its other files.

DIR/checkpoint.safetensors    the length of the header in 8 bytes, the header (JSON), the weights one after the other

The header's `__metadata__` has each other file under its name, as text: `manifest.json`, `config.json`, perhaps
`tokenizer.json`; and `sha256`, of all that comes before the weights with 64 zeros in its own place. The manifest has
the sha256 of each weight. So nothing in the file can change unnoticed: opening it checks the header, reading a weight
checks the weight. Any reader of safetensors can read it too.
"""

import hashlib
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec
import numpy as np

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.manifest import (
    MANIFEST,
    STATE,
    File,
    Leaf,
    Manifest,
    decode_manifest,
    encode_manifest,
    part_of,
)

SINGLE_FILE = "checkpoint.safetensors"
MAX_BYTES = 16 << 20
"""The largest file that is written: it is made and checked in memory."""
_LENGTH_BYTES = 8
_ALIGNMENT = 8
"""The header is padded to a multiple of it."""
_METADATA, _DIGEST = "__metadata__", "sha256"
_ZEROS = "0" * 64
_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
"""numpy's name of a dtype -> that of safetensors."""


class _Tensor(msgspec.Struct, forbid_unknown_fields=True):
    """A tensor as the header has it; the offsets count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class SingleFile:
    """A model directory of one file, for reading. Opening it checks the header and the size of the file.

    Attributes:
      path: the directory.
      manifest: what it holds.
      texts: the other files by name.
    """

    def __init__(self, path: pathlib.Path):
        self.path, self._file = path, path / SINGLE_FILE
        header, self._start = self._read_header()
        try:
            self.texts = msgspec.convert(header.pop(_METADATA), dict[str, str])
            tensors = msgspec.convert(header, dict[str, _Tensor])
            content = self.texts.pop(MANIFEST).encode()
            del self.texts[_DIGEST]
        except (KeyError, msgspec.ValidationError) as error:
            raise CheckpointError(
                f"{self._file}: not written by jaxinfer ({error}); convert the model again."
            ) from error
        self.manifest: Manifest = decode_manifest(content, self._file)
        if tensors != (expected := _tensors(self.manifest.leaves)):
            differing = sorted(name for name in tensors | expected if tensors.get(name) != expected.get(name))
            raise CheckpointError(
                f"{self._file}: {', '.join(differing)} not stored as in {MANIFEST}; copy or convert again."
            )
        self._offsets = {f"{STATE}/{name}": tensor.data_offsets for name, tensor in tensors.items()}
        if self.manifest.files.keys() != self._offsets.keys() | self.texts.keys():
            raise CheckpointError(f"{self._file}: its files differ from {MANIFEST}; copy or convert again.")
        size = self._start + sum(leaf.bytes for leaf in self.manifest.leaves.values())
        if (actual := self._file.stat().st_size) != size:
            raise CheckpointError(f"{self._file}: has {actual} bytes instead of {size}; copy or convert again.")

    def _read_header(self) -> tuple[dict[str, Any], int]:
        """Read the header and where the weights begin. Raises CheckpointError unless it is as it was written."""
        with self._file.open("rb") as stream:
            length = stream.read(_LENGTH_BYTES)
            size = int.from_bytes(length, "little")
            content = stream.read(size) if size <= self._file.stat().st_size else b""
        try:
            header = msgspec.json.decode(content, type=dict[str, Any])
            digest = header[_METADATA][_DIGEST]
            written = content.replace(digest.encode(), _ZEROS.encode(), 1)
        except (msgspec.DecodeError, UnicodeError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{self._file}: its header is damaged or not written by jaxinfer ({error}); copy or convert again."
            ) from error
        if digest != _sha256(length + written):
            raise CheckpointError(f"{self._file}: sha256 of its header differs; copy or convert again.")
        return header, _LENGTH_BYTES + size

    def content(self, name: str) -> bytes:
        """The bytes of one of the manifest's files, unchecked."""
        if name in self.texts:
            return self.texts[name].encode()
        begin, end = self._offsets[name]
        with self._file.open("rb") as stream:
            stream.seek(self._start + begin)
            return stream.read(end - begin)

    def sha256(self, name: str, progress: Callable[[int], None]) -> str:
        """The sha256 of one of the manifest's files as it is now. `progress` receives its bytes."""
        content = self.content(name)
        progress(len(content))
        return _sha256(content)

    def open_leaves(self, names: Iterable[str]) -> dict[str, Any]:
        """Return leaves, or parts of leaves, as TensorStores, which is how they are read from many files.

        They are read and checked.
        """
        import tensorstore as ts

        return {name: ts.array(self._leaf(*part_of(name))) for name in names}

    def _leaf(self, name: str, index: int | None) -> np.ndarray:
        leaf, file = self.manifest.leaves[name], self.manifest.files[f"{STATE}/{name}"]
        content = self.content(f"{STATE}/{name}")
        if _sha256(content) != file.sha256:
            raise CheckpointError(f"{self._file}: sha256 of {name} differs from {MANIFEST}; copy or convert again.")
        array = np.frombuffer(content, np.dtype(leaf.dtype)).reshape(leaf.shape)
        return array if index is None else array[index]


def encode_single_file(
    path: pathlib.Path, leaves: dict[str, Leaf], arrays: Mapping[str, np.ndarray], files: Mapping[str, bytes]
) -> bytes:
    """Return the content of the one file of a model directory.

    Args:
      path: the directory, for errors.
      leaves: the weights.
      arrays: their values.
      files: what else is in the directory.

    Raises:
      CheckpointError: A file is not text or has a reserved name, safetensors lacks a dtype, or the whole would be
        larger than `MAX_BYTES`.
    """
    tensors, texts = _tensors(leaves), {name: _text(path, name, content) for name, content in files.items()}
    contents = {f"{STATE}/{name}": np.ascontiguousarray(arrays[name]).tobytes() for name in tensors}
    described = {name: File(size=len(data), sha256=_sha256(data)) for name, data in {**files, **contents}.items()}
    metadata = {_DIGEST: _ZEROS, MANIFEST: encode_manifest(leaves, described).decode(), **texts}
    header = msgspec.json.encode({_METADATA: metadata, **tensors})
    header += b" " * (-len(header) % _ALIGNMENT)
    length = len(header).to_bytes(_LENGTH_BYTES, "little")
    header = header.replace(_ZEROS.encode(), _sha256(length + header).encode(), 1)
    content = b"".join([length, header, *contents.values()])
    require_small(path, len(content))
    return content


def require_small(path: pathlib.Path, size: int) -> None:
    """Raise CheckpointError if so many bytes are too many for a single file."""
    if size > MAX_BYTES:
        raise CheckpointError(
            f"{path}: {size / 2**20:.1f} MiB exceed the {MAX_BYTES >> 20} MiB that a single file may have; use the "
            "layout orbax."
        )


def _text(path: pathlib.Path, name: str, content: bytes) -> str:
    if name in (MANIFEST, _DIGEST):
        raise CheckpointError(f"{path}: the name {name} is reserved in a single file; rename it.")
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{path}: {name} is not text ({error}), which a single file requires; use the layout orbax."
        ) from error


def _tensors(leaves: Mapping[str, Leaf]) -> dict[str, _Tensor]:
    """Return where each leaf is: one after the other, the widest numbers first so that all of them are aligned."""
    for name, leaf in leaves.items():
        if leaf.dtype not in _DTYPES:
            raise CheckpointError(f"{name}: safetensors has no dtype {leaf.dtype}; use the layout orbax.")
    tensors, begin = {}, 0
    for name, leaf in sorted(leaves.items(), key=lambda item: (-np.dtype(item[1].dtype).itemsize, item[0])):
        tensors[name] = _Tensor(_DTYPES[leaf.dtype], leaf.shape, (begin, begin + leaf.bytes))
        begin += leaf.bytes
    return tensors


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()

"""Reading a GGUF file, whole or split: its metadata, and its tensors one at a time, dequantised.

The header is read here: for the vocabularies of today `gguf.GGUFReader` takes ten seconds and 500 MB. What the types
of tensors are and how they are dequantised is the package's. No file stays mapped or open between two reads. The
format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import dataclasses
import math
import os
import pathlib
import struct
from typing import Any, BinaryIO

import gguf
import ml_dtypes
import numpy as np

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.paths import gguf_parts

ALIGNMENT = 32  # bytes, unless the metadata says otherwise

_Type = gguf.GGMLQuantizationType
_FLOATS = {_Type.F32: np.dtype("float32"), _Type.F16: np.dtype("float16"), _Type.BF16: np.dtype(ml_dtypes.bfloat16)}
TYPES = (
    *(*_FLOATS, _Type.Q8_0, _Type.Q4_0, _Type.Q4_1, _Type.Q5_0, _Type.Q5_1),
    *(_Type.Q2_K, _Type.Q3_K, _Type.Q4_K, _Type.Q5_K, _Type.Q6_K),
)
"""The types of tensors that are read. llama.cpp stores in Q5_0 or Q5_1 what Q4_K or Q5_K does not divide."""

_SCALARS = {
    gguf.GGUFValueType.UINT8: "<u1",
    gguf.GGUFValueType.INT8: "<i1",
    gguf.GGUFValueType.UINT16: "<u2",
    gguf.GGUFValueType.INT16: "<i2",
    gguf.GGUFValueType.UINT32: "<u4",
    gguf.GGUFValueType.INT32: "<i4",
    gguf.GGUFValueType.FLOAT32: "<f4",
    gguf.GGUFValueType.BOOL: "?",
    gguf.GGUFValueType.UINT64: "<u8",
    gguf.GGUFValueType.INT64: "<i8",
    gguf.GGUFValueType.FLOAT64: "<f8",
}


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """One tensor of a file.

    Attributes:
      shape: its shape, the slowest dimension first, as numpy has it.
      type: how its values are stored.
      file: where they are.
      offset: where they begin, in bytes of the file.
    """

    shape: tuple[int, ...]
    type: gguf.GGMLQuantizationType
    file: pathlib.Path
    offset: int

    @property
    def bytes(self) -> int:
        """The size of its values in the file."""
        values, size = gguf.GGML_QUANT_SIZES[self.type]
        return math.prod(self.shape) // values * size


class GgufFile:
    """A GGUF file, in one part or several, whose headers are read and checked.

    Attributes:
      path: the file, or the first part.
      metadata: values by key: numbers, strings, and lists of them.
      tensors: by name.

    Args:
      path: the file, or any part of one that is split.

    Raises CheckpointError for what is no GGUF, is truncated, or has tensors of other types than `TYPES`; and for parts
    that are missing or do not belong together.
    """

    def __init__(self, path: str | os.PathLike[str]):
        files = gguf_parts(pathlib.Path(path))
        self.path = files[0]
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        for number, file in enumerate(files):
            self._join(_Part(file), number, len(files))
        total = self.metadata.get("split.tensors.count", len(self.tensors))
        if len(files) > 1 and total != len(self.tensors):
            raise CheckpointError(
                f"{self.path}: split.tensors.count={total}, and its {len(files)} parts have {len(self.tensors)}; fetch "
                "all parts of one split again."
            )

    def _join(self, part: "_Part", number: int, count: int) -> None:
        """Add a part, which by its name has a number, from 0, of so many."""
        part.require(number, count)
        for key, value in part.metadata.items():
            if key != "split.no" and self.metadata.setdefault(key, value) != value:
                raise CheckpointError(
                    f"{part.path}: {key}={str(value)[:40]}, which {self.path.name} has otherwise; fetch all parts of "
                    "one split again."
                )
        if twice := next((name for name in part.tensors if name in self.tensors), None):
            raise CheckpointError(
                f"{part.path}: {twice} is in {self.tensors[twice].file.name}, too; fetch all parts of one split again."
            )
        self.tensors |= part.tensors

    def read(self, name: str, index: int | None = None) -> np.ndarray:
        """Read a tensor, or one of its slowest dimension: floats as they are stored, all other types as float32."""
        tensor = self.tensors[name]
        if index is not None:
            matrix = dataclasses.replace(tensor, shape=tensor.shape[1:])
            tensor = dataclasses.replace(matrix, offset=tensor.offset + index * matrix.bytes)
        with tensor.file.open("rb") as file:
            file.seek(tensor.offset)
            stored = np.frombuffer(file.read(tensor.bytes), np.uint8)
        if stored.size < tensor.bytes:
            raise CheckpointError(f"{tensor.file}: truncated in {name}; fetch it again.")
        if tensor.type in _FLOATS:
            return stored.view(_FLOATS[tensor.type]).reshape(tensor.shape)
        rows = stored.reshape(*tensor.shape[:-1], -1)
        return gguf.dequantize(rows, tensor.type).reshape(tensor.shape)


def has_header(path: pathlib.Path, size: int, tensor: str) -> bool:
    """Tell whether the beginning of a file is enough to open it, and to read one tensor if it is there.

    A damaged header counts as enough: whoever opens the file says what is wrong.

    Args:
      path: the beginning.
      size: bytes of the whole file.
      tensor: the name of the tensor.
    """
    try:
        needed = _Part(path, size).tensors.get(tensor)
    except _ShortError:
        return False
    except CheckpointError:
        return True
    return needed is None or needed.offset + needed.bytes <= path.stat().st_size


class _ShortError(CheckpointError):
    """The header goes on after the beginning of a file."""


class _Part:
    """One file: its metadata, and where its tensors are. size: bytes of the whole file, if less of it is there."""

    def __init__(self, path: pathlib.Path, size: int | None = None):
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GgufTensor] = {}
        with path.open("rb") as file:
            header = _Header(path, file, size)
            tensors, entries = header.begin()
            for _ in range(entries):
                key = header.name()
                self.metadata[key] = header.value(header.number("<I"))
            infos = [header.tensor() for _ in range(tensors)]
            alignment = self._count("general.alignment", ALIGNMENT) or 1
            start = -(-file.tell() // alignment) * alignment
        for name, shape, type_, offset in infos:
            self._add(header, name, GgufTensor(shape, self._known_type(name, type_), path, start + offset))

    def require(self, number: int, count: int) -> None:
        """Refuse a file whose metadata says that it is another part than its name says; number: from 0."""
        actual = self._count("split.no", 0), self._count("split.count", 0) or 1
        if actual != (number, count):
            named = f"{self.path}: {_called(number, count)} by its name, and {_called(*actual)} by its metadata"
            raise CheckpointError(
                f"{named}; give each part its name, such as NAME-00001-of-00003.gguf, or fetch it again."
            )

    def _known_type(self, name: str, number: int) -> gguf.GGMLQuantizationType:
        if number in TYPES:
            return _Type(number)
        kind = _Type(number).name if number in list(_Type) else f"type {number}"
        raise CheckpointError(
            f"{self.path}: {name} is stored as {kind}, which is not implemented; use a file in "
            f"{', '.join(known.name for known in TYPES)}."
        )

    def _add(self, header: "_Header", name: str, tensor: GgufTensor) -> None:
        values, _ = gguf.GGML_QUANT_SIZES[tensor.type]
        if name in self.tensors or not tensor.shape or tensor.shape[-1] % values:
            raise header.corrupt(f"{name} {list(tensor.shape)} in {tensor.type.name}")
        if tensor.offset + tensor.bytes > header.size:
            raise CheckpointError(f"{self.path}: truncated: {name} exceeds its {header.size} bytes; fetch it again.")
        self.tensors[name] = tensor

    def _count(self, key: str, default: int) -> int:
        value = self.metadata.get(key, default)
        if type(value) is not int or value < 0:
            raise CheckpointError(f"{self.path}: {key}={value!r} must be a whole number; fetch it again.")
        return value


def _called(number: int, count: int) -> str:
    return f"part {number + 1} of {count}" if count > 1 else "a whole file"


class _Header:
    """The beginning of a file, read value after value."""

    def __init__(self, path: pathlib.Path, file: BinaryIO, size: int | None):
        self._path, self._file = path, file
        self.size = path.stat().st_size if size is None else size

    def begin(self) -> tuple[int, int]:
        """Read how many tensors and how many entries of metadata there are."""
        if self._file.read(4) != b"GGUF":
            raise CheckpointError(f"{self._path}: not a GGUF file; name one, or a Hugging Face directory.")
        version = self.number("<I")
        if version and not version & 0xFFFF:
            raise CheckpointError(f"{self._path}: big-endian, which is not implemented; use a little-endian file.")
        if version not in (2, 3):
            raise CheckpointError(
                f"{self._path}: version {version} of GGUF is not implemented, only 2 and 3; convert the model again."
            )
        return self.number(), self.number()

    def corrupt(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: truncated or corrupt ({what}); fetch it again.")

    def number(self, code: str = "<Q") -> int:
        return struct.unpack(code, self._take(struct.calcsize(code)))[0]

    def string(self) -> str:
        try:
            return self._take(self.number()).decode()
        except UnicodeDecodeError as error:
            raise self.corrupt(f"a string is not UTF-8: {error}") from error

    def name(self) -> str:
        """Read the name of a key or a tensor, which errors may show."""
        if not (name := self.string()).isprintable():
            raise self.corrupt(f"the name {name!r}")
        return name

    def value(self, type_: int) -> Any:
        """Read a value of metadata."""
        try:
            return self._array(type_, 1)[0]
        except RecursionError as error:
            raise self.corrupt("arrays are nested too deeply") from error

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Read the name, shape, type and offset of a tensor."""
        name, dimensions = self.name(), self.number("<I")
        shape = tuple(self.number() for _ in range(dimensions))[::-1]
        return name, shape, self.number("<I"), self.number()

    def _array(self, type_: int, count: int) -> list[Any]:
        if type_ == gguf.GGUFValueType.STRING:
            return [self.string() for _ in range(count)]
        if type_ == gguf.GGUFValueType.ARRAY:
            return [self._array(self.number("<I"), self.number()) for _ in range(count)]
        if type_ not in _SCALARS:
            raise self.corrupt(f"a value of type {type_}")
        dtype = np.dtype(_SCALARS[gguf.GGUFValueType(type_)])
        return np.frombuffer(self._take(count * dtype.itemsize), dtype).tolist()

    def _take(self, count: int) -> bytes:
        if count > self.size - self._file.tell():
            raise self.corrupt(f"its header exceeds its {self.size} bytes")
        if len(content := self._file.read(count)) < count:
            raise _ShortError(f"{self._path}: its header goes on; fetch more of it.")
        return content

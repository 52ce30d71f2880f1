"""The content of a model directory: every weight with its shape, every file with its size and sha256.

DIR/config.json       what the model is (written and read by jaxinfer.models, opaque here)
DIR/tokenizer*.json   the tokenizer, if there is one
DIR/state/            the weights, one Orbax leaf each; DIR itself is the Orbax checkpoint
DIR/manifest.json     described here, written last
"""

import dataclasses
import hashlib
import math
import os
import pathlib
from collections.abc import Callable, Iterator

import ml_dtypes  # noqa: F401  (teaches numpy the name "bfloat16")
import msgspec
import numpy as np

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.paths import inside

FORMAT = 1
MANIFEST = "manifest.json"


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One weight: its shape, its dtype's name, and the logical name of each dimension."""

    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str | None, ...]

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.shape):
            raise ValueError(f"axes {self.axes} do not fit shape {self.shape}: one name per dimension.")

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"

    @property
    def bytes(self) -> int:
        """Bytes as stored."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclasses.dataclass(frozen=True, kw_only=True)
class File:
    """One file: its size in bytes and the sha256 of its content, in hex."""

    size: int
    sha256: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of `manifest.json`: leaves by dotted path, files by path relative to the directory."""

    format: int
    leaves: dict[str, Leaf]
    files: dict[str, File]

    @property
    def bytes(self) -> int:
        """Bytes of all weights as stored."""
        return sum(leaf.bytes for leaf in self.leaves.values())


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """The manifest of a model directory, after checking that every file exists with its size."""
    path = pathlib.Path(path)
    if not (file := path / MANIFEST).is_file():
        raise CheckpointError(
            f"{path}: no {MANIFEST}, so this is not a model directory; make one with `jaxinfer convert HF_DIR OUT_DIR`."
        )
    try:
        manifest = msgspec.json.decode(file.read_bytes(), type=Manifest)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{file}: damaged ({error}); convert or copy the model again.") from error
    if manifest.format != FORMAT:
        raise CheckpointError(
            f"{file}: format={manifest.format} is not known to this version (it reads {FORMAT}); "
            "update jaxinfer or convert the model again."
        )
    _check_sizes(path, manifest)
    return manifest


def write_manifest(path: pathlib.Path, leaves: dict[str, Leaf]) -> None:
    """Describe the directory as it is now; must be the last file written."""
    files = {}
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        files[file.relative_to(path).as_posix()] = File(size=file.stat().st_size, sha256=_sha256(file))
    manifest = Manifest(format=FORMAT, leaves=dict(sorted(leaves.items())), files=files)
    (path / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")


def verify_files(path: str | os.PathLike[str], progress: Callable[[int], None] = lambda done: None) -> Manifest:
    """Check the sha256 of every file; the error names all that differ. `progress` receives the bytes just read."""
    path = pathlib.Path(path)
    manifest = read_manifest(path)
    wrong = [name for name, file in manifest.files.items() if _sha256(inside(path, name), progress) != file.sha256]
    if wrong:
        raise CheckpointError(f"{path}: sha256 differs from {MANIFEST}: {', '.join(wrong)}; copy or convert again.")
    return manifest


def _check_sizes(path: pathlib.Path, manifest: Manifest) -> None:
    problems = []
    for name, file in manifest.files.items():
        if not (found := inside(path, name)).is_file():
            problems.append(f"{name} is missing")
        elif (size := found.stat().st_size) != file.size:
            problems.append(f"{name} has {size} bytes instead of {file.size}")
    if problems:
        raise CheckpointError(f"{path}: differs from {MANIFEST}: {'; '.join(problems)}; copy or convert again.")


def _sha256(file: pathlib.Path, progress: Callable[[int], None] = lambda done: None) -> str:
    digest = hashlib.sha256()
    with file.open("rb", buffering=0) as stream:
        for block in _blocks(stream.read):
            digest.update(block)
            progress(len(block))
    return digest.hexdigest()


def _blocks(read: Callable[[int], bytes], size: int = 1 << 22) -> Iterator[bytes]:
    while block := read(size):
        yield block

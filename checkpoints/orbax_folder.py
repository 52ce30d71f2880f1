"""A model directory of many files, for models of any size.

DIR/config.json       what the model is (written and read by jaxinfer.models, opaque here)
DIR/tokenizer*.json   the tokenizer, if there is one
DIR/state/            the weights, one Orbax leaf each; DIR itself is the Orbax checkpoint
DIR/manifest.json     described in `manifest.py`, written last
"""

import hashlib
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.manifest import (
    MANIFEST,
    STATE,
    File,
    Leaf,
    Manifest,
    decode_manifest,
    encode_manifest,
    part_name,
)
from jaxinfer.checkpoints.paths import inside


class OrbaxFolder:
    """A model directory of many files, for reading. Opening it checks that every file exists with its size.

    Attributes:
      path: the directory.
      manifest: what it holds.
    """

    def __init__(self, path: pathlib.Path):
        self.path = path
        self.manifest: Manifest = decode_manifest((path / MANIFEST).read_bytes(), path / MANIFEST)
        self._check_sizes()

    def _check_sizes(self) -> None:
        problems = []
        for name, file in self.manifest.files.items():
            if not (stored := inside(self.path, name)).is_file():
                problems.append(f"{name} is missing")
            elif (size := stored.stat().st_size) != file.size:
                problems.append(f"{name} has {size} bytes instead of {file.size}")
        if problems:
            raise CheckpointError(
                f"{self.path}: differs from {MANIFEST}: {'; '.join(problems)}; copy or convert again."
            )

    def sha256(self, name: str, progress: Callable[[int], None]) -> str:
        """The sha256 of a file as it is now. `progress` receives the bytes just read."""
        return _sha256(inside(self.path, name), progress)

    def open_leaves(self, names: Iterable[str]) -> dict[str, Any]:
        """Open the TensorStores of leaves, or parts of leaves, of which nothing but metadata is read.

        TensorStore reads what Orbax wrote with it. Importing Orbax takes longer than reading a small model. It goes by
        metadata of its own, which must be what the manifest says.
        """
        import tensorstore as ts

        state = self.path / STATE
        driver = "zarr3" if json.loads((state / "_METADATA").read_text())["use_zarr3"] else "zarr"
        files, context = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{state}/"}}, ts.Context()

        def opening(name: str) -> Any:
            return ts.open({"driver": driver, "kvstore": {**files, "path": f"{name}/"}}, open=True, context=context)

        leaves = {name: self.manifest.leaf(name) for name in names}
        parts = {name: leaf.parts for name, leaf in leaves.items()}
        futures = {
            name: [opening(part_name(name, index)) for index in range(count)] if count else [opening(name)]
            for name, count in parts.items()
        }
        results = {name: [future.result() for future in each] for name, each in futures.items()}
        stores = {name: ts.stack(each) if parts[name] else each[0] for name, each in results.items()}
        for name, store in stores.items():
            leaf = leaves[name]
            if (stored := f"{store.dtype.name}{list(store.shape)}") != str(leaf):
                raise CheckpointError(
                    f"{self.path}: {name} is stored as {stored}, and {MANIFEST} says {leaf}; copy or convert again."
                )
        return stores


def write_manifest(path: pathlib.Path, leaves: dict[str, Leaf]) -> None:
    """Describe the directory as it is now; must be the last file written."""
    files = {}
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        files[file.relative_to(path).as_posix()] = File(size=file.stat().st_size, sha256=_sha256(file))
    (path / MANIFEST).write_bytes(msgspec.json.format(encode_manifest(leaves, files), indent=1) + b"\n")


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

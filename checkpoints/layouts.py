"""The layouts of a model directory, and reading either without knowing which it is."""

import os
import pathlib
from collections.abc import Callable
from typing import Literal

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.manifest import MANIFEST, Manifest
from jaxinfer.checkpoints.orbax_folder import OrbaxFolder
from jaxinfer.checkpoints.paths import inside
from jaxinfer.checkpoints.single_file import SINGLE_FILE, SingleFile

Layout = Literal["orbax", "single-file"]
"""Many files, for models of any size (`orbax_folder.py`); or one, for small models (`single_file.py`)."""


def open_checkpoint(path: str | os.PathLike[str]) -> OrbaxFolder | SingleFile:
    """Open a model directory for reading, after the checks that need no weight."""
    path = pathlib.Path(path)
    many, single = (path / MANIFEST).is_file(), (path / SINGLE_FILE).is_file()
    if many and single:
        raise CheckpointError(f"{path}: has both {MANIFEST} and {SINGLE_FILE}, which are two models; remove one.")
    if single:
        return SingleFile(path)
    if many:
        return OrbaxFolder(path)
    raise CheckpointError(
        f"{path}: no {MANIFEST} and no {SINGLE_FILE}, so this is not a model directory; make one with "
        "`jaxinfer convert HF_DIR OUT_DIR`."
    )


def is_complete(path: str | os.PathLike[str]) -> bool:
    """Return whether a folder holds a complete model directory."""
    return any((pathlib.Path(path) / name).is_file() for name in (MANIFEST, SINGLE_FILE))


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Read the manifest of a model directory, and check that every file exists with its size."""
    return open_checkpoint(path).manifest


def verify_files(path: str | os.PathLike[str], progress: Callable[[int], None] = lambda done: None) -> Manifest:
    """Check the sha256 of every file; the error names all that differ. `progress` receives the bytes just read."""
    checkpoint = open_checkpoint(path)
    files = checkpoint.manifest.files.items()
    if wrong := [name for name, file in files if checkpoint.sha256(name, progress) != file.sha256]:
        raise CheckpointError(f"{path}: sha256 differs from {MANIFEST}: {', '.join(wrong)}; copy or convert again.")
    return checkpoint.manifest


def read_file(path: str | os.PathLike[str], name: str) -> bytes | None:
    """Read a file next to the weights, such as `config.json`; None if it does not exist."""
    path = pathlib.Path(path)
    if (path / SINGLE_FILE).is_file():
        text = SingleFile(path).texts.get(name)
        return None if text is None else text.encode()
    file = inside(path, name)
    return file.read_bytes() if file.is_file() else None


def list_files(path: str | os.PathLike[str], folder: str) -> list[str]:
    """Return the names of the files in a folder of a model directory, sorted, as `read_file` takes them."""
    path = pathlib.Path(path)
    if (path / SINGLE_FILE).is_file():
        return sorted(name for name in SingleFile(path).texts if name.startswith(f"{folder}/"))
    return sorted(f"{folder}/{file.name}" for file in (path / folder).glob("*") if file.is_file())

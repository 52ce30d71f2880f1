"""The layer files of a model: where they are, what is in them, writing them, and finding those that are not needed."""

import contextlib
import dataclasses
import logging
import os
import pathlib
import re
import stat
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxinfer.checkpoints import CheckpointError
from jaxinfer.checkpoints.layer_files import FORMAT, LayerFiles, describe_layers, write_layers
from jaxinfer.checkpoints.writing import sole_owner
from jaxinfer.disk_cache import keys
from jaxinfer.models.files.loading import OpenedModel
from jaxinfer.models.leaves import leaves_of_part

REVISION = 1
"""Of what is in the files of a model beside the format of files: raise it when weights are quantised, fitted to a mesh,
ordered or named otherwise than before, so that files of earlier versions are not taken for what they are not."""
_NAME = re.compile(r"layers-[0-9a-f]{16}")
_PARTIAL = re.compile(rf"\.{_NAME.pattern}\.partial")

_log = logging.getLogger("jaxinfer.streaming")

Progress = Callable[[int, int], None]
"""Called with the layers done and their number."""


def log_progress(done: int, total: int) -> None:
    """The default: to the log."""
    _log.info("written layer %d of %d", done, total)


def open_layer_files(
    opened: OpenedModel,
    base: pathlib.Path | None = None,
    *,
    whole: bool = False,
    preadv: Callable[[int, list[Any], int], int] = os.preadv,
) -> LayerFiles:
    """The files of a model in the format in which it was opened, for reading; written if they are not there.

    Args:
      base: the folder that has, or gets, a folder with them; None: the model directory.
      whole: all leaves in one file, in place of a file for each layer.
      preadv: as of `LayerFiles`.
    Raises CheckpointError for files that are damaged, do not fit the model, or cannot be written.
    """
    files = LayerFiles(write_layer_files(opened, base, whole=whole), preadv)
    files.check(_parts(opened, whole))
    return files


def write_layer_files(
    opened: OpenedModel,
    base: pathlib.Path | None = None,
    *,
    whole: bool = False,
    progress: Progress = log_progress,
) -> pathlib.Path:
    """The folder of a model's files, written if it is not there; arguments and errors as of `open_layer_files`."""
    folder, parts = layer_folder(opened, base, whole=whole), _parts(opened, whole)
    remove_unfinished(folder.parent)
    write_layers(
        folder,
        len(parts),
        lambda index: read_leaves(opened, parts[index]),
        total_bytes=sum(opened.shapes[name].bytes for part in parts for name in part),
        about=f"{opened.folder.resolve()}: {describe_format(opened)}",
        progress=progress,
    )
    return folder


def layer_folder(opened: OpenedModel, base: pathlib.Path | None = None, *, whole: bool = False) -> pathlib.Path:
    """Where the files of a model are, in this format and divided so: another format has another folder."""
    key = {
        "revision": [FORMAT, REVISION],
        "files": {name: file.sha256 for name, file in opened.manifest.files.items()},
        "weights": str(opened.weights),
        "config": str(opened.config),
        "mesh": None if opened.mesh is None else dict(opened.mesh.shape),
        "rules": str(opened.rules) if opened.mesh is not None else None,
        "whole": whole,
    }
    return (base or opened.folder).resolve() / f"layers-{keys.digest(key)[:16]}"


def read_leaves(opened: OpenedModel, part: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """These leaves, divided as they will come to the devices."""
    leaves = opened.read(part.__contains__)
    return {name: jax.device_put(leaves[name], shape.sharding) for name, shape in part.items()}


def layer_leaves(opened: OpenedModel, layer: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The leaves of a layer by name, as they come to the devices, in the order in which programs take them."""
    names = leaves_of_part(opened.config, opened.weights, layer)
    return dict(zip(names, opened.layer_shapes(layer), strict=True))


def _parts(opened: OpenedModel, whole: bool) -> list[dict[str, jax.ShapeDtypeStruct]]:
    """What each file has."""
    if not whole:
        return [layer_leaves(opened, layer) for layer in range(opened.transformer.layers)]
    shapes = opened.shapes.items()
    return [
        {
            name: jax.ShapeDtypeStruct(leaf.shape, np.dtype(leaf.dtype), sharding=opened.sharding(leaf))
            for name, leaf in shapes
        }
    ]


def describe_format(opened: OpenedModel) -> str:
    """What the files are made for, such as "bfloat16, int8, tensor=2": the options of a run that reads them."""
    mesh = [] if opened.mesh is None else [f"{axis}={n}" for axis, n in opened.mesh.shape.items() if n > 1]
    return ", ".join([opened.weights.dtype.name, *filter(None, [opened.weights.quantized]), *mesh])


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerFolder:
    """A folder of layer files.

    Attributes:
      path: where it is.
      about: what it is of; or why it is of no use.
      bytes: what it takes of the disk.
    """

    path: pathlib.Path
    about: str
    bytes: int


def find_layer_folders(base: pathlib.Path) -> list[LayerFolder]:
    """The folders of layer files in a model directory, or in any that was given for them; unfinished ones too."""
    found = []
    for path in _matching(base, _NAME):
        try:
            about = describe_layers(path)
        except CheckpointError:
            about = "of another version, or damaged"
        found.append(LayerFolder(path=path, about=about, bytes=_bytes(path)))
    unfinished = "being written, or left by a process that was killed"
    return found + [LayerFolder(path=path, about=unfinished, bytes=_bytes(path)) for path in _matching(base, _PARTIAL)]


def remove_layer_folders(base: pathlib.Path) -> None:
    """Delete all of them but those that are being written. A process that reads one ends with an error."""
    remove_unfinished(base)
    for path in _matching(base, _NAME):
        with contextlib.suppress(CheckpointError), sole_owner(base / f".{path.name}.partial") as partial:
            path.rename(partial / path.name)  # so that it is never seen in parts


def remove_unfinished(base: pathlib.Path) -> None:
    """Delete what processes that were killed while they wrote have left, as far as this user may."""
    for path in _matching(base, _PARTIAL):
        with contextlib.suppress(CheckpointError, OSError), sole_owner(path):
            pass


def _matching(base: pathlib.Path, pattern: re.Pattern[str]) -> list[pathlib.Path]:
    """The directories with such names, links left out."""
    try:
        with os.scandir(base) as entries:
            found = [e.path for e in entries if pattern.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    return [pathlib.Path(path) for path in sorted(found)]


def _bytes(folder: pathlib.Path) -> int:
    """Bytes of the files in a folder; those that are deleted meanwhile are left out."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total

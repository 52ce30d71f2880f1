"""A model's layer files: their folder and content, writing them, and finding those that are not needed."""

import contextlib
import dataclasses
import fcntl
import os
import pathlib
import re
import shutil
import stat
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxinfer.checkpoints import CheckpointError
from jaxinfer.checkpoints.layer_files import FORMAT, LayerFiles, describe_layers, write_layers
from jaxinfer.checkpoints.manifest import part_of
from jaxinfer.checkpoints.writing import sole_owner
from jaxinfer.disk_cache import cache_folder, keys, make_private
from jaxinfer.models.config import DecoderConfig, ModelConfig
from jaxinfer.models.files.loading import OpenedModel
from jaxinfer.models.leaves import leaves_of_part
from jaxinfer.sharding import axes_text

REVISION = 2
"""Revision of the files' content, counted apart from that of their format.

Raise it when weights are quantised, fitted to a mesh, ordered or named otherwise than before, so that files of earlier
versions are not mistaken for present ones.
"""
_NAME = re.compile(r"layers-[0-9a-f]{16}")
_PARTIAL = re.compile(rf"\.{_NAME.pattern}\.partial")


def open_layer_files(
    opened: OpenedModel,
    base: pathlib.Path | None = None,
    *,
    parts: int | None = None,
    cached: bool = False,
    preadv: Callable[[int, list[Any], int], int] = os.preadv,
) -> LayerFiles:
    """Open the files of a model for reading, in the format in which it was opened; write them if they are missing.

    Nobody removes files of layers while they are open.

    Args:
      base: the folder that holds the folder with them; None: the model directory if they are there, else the user's
        cache folder.
      parts: how many files `divide_leaves` divides all leaves over. They may be removed: models that run in hundreds
        would have as many folders open. None: a file has a layer, and those of no layer are left out.
      cached: see `LayerFiles`.
      preadv: see `LayerFiles`.

    Raises CheckpointError for files that are damaged, do not fit the model, or cannot be written.
    """
    while (held := _hold(folder := write_layer_files(opened, base, parts=parts))) is None:
        pass  # it was removed meanwhile
    with held:
        files = LayerFiles(folder, preadv, cached=cached)
        files.check(_parts(opened, parts))
        if parts is None:
            weakref.finalize(files, held.pop_all().close)
    return files


def write_layer_files(
    opened: OpenedModel,
    base: pathlib.Path | None = None,
    *,
    parts: int | None = None,
) -> pathlib.Path:
    """Write a model's files unless they exist; return their folder. For arguments and errors see `open_layer_files`."""
    folder, content = layer_folder(opened, base, parts=parts), _parts(opened, parts)
    experts = experts_of(opened.config) if parts is None else []
    total_bytes = sum(shape.size * shape.dtype.itemsize for part in content for shape in part.values())
    if folder.parent == _cached():
        _open_cache(folder, total_bytes)
    remove_unfinished(folder.parent)
    write_layers(
        folder,
        len(content) - len(experts),
        lambda index: read_leaves(opened, content[index]),
        experts=experts,
        total_bytes=total_bytes,
        about=f"{opened.folder.resolve()}: {describe_format(opened)}",
    )
    return folder


def layer_folder(opened: OpenedModel, base: pathlib.Path | None = None, *, parts: int | None = None) -> pathlib.Path:
    """The folder of a model's files in this format and division: another format has another folder.

    base, parts: as of `open_layer_files`.
    """
    key: dict[str, Any] = {
        "revision": [FORMAT, REVISION],
        "files": {name: file.sha256 for name, file in opened.manifest.files.items()},
        "weights": str(opened.weights),
        "config": str(opened.config),
        "mesh": None if opened.mesh is None else dict(opened.mesh.shape),
        "rules": str(opened.rules) if opened.mesh is not None else None,
        "whole": parts is not None,
    }
    if parts is not None and parts > 1:
        key["parts"] = parts
    name = f"layers-{keys.digest(key)[:16]}"
    beside = (base or opened.folder).resolve() / name
    return beside if base is not None or beside.exists() else _cached() / name


def _cached() -> pathlib.Path:
    """The folder of the user's cache that has layer folders of all models."""
    return (cache_folder() / "layers").absolute()


def _open_cache(folder: pathlib.Path, needed: int) -> None:
    """Make the cache that will have a folder, for this user alone, and room in it for what is not there yet.

    The least recently used folders are deleted until all, with the new one, take at most half of what the disk would
    have free without them. A folder that is in use stays, and so does the new one, however large it is.

    Raises CheckpointError if the user cannot have the cache alone.
    """
    base = folder.parent
    try:
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        if make_private(base):
            for path in _matching(base, _NAME):  # others may have filled them
                shutil.rmtree(path)
        if folder.exists():
            return
        entries = [(path.stat().st_mtime, _bytes(path), path) for path in _matching(base, _NAME)]
        kept = sum(size for _, size, _ in entries)
        surplus = needed + kept - (shutil.disk_usage(base).free + kept) // 2
    except OSError as error:
        raise CheckpointError(f"{base}: layers cannot be kept here ({error}); name a folder by layer_files.") from error
    for _, size, path in sorted(entries):
        if surplus <= 0:
            break
        with contextlib.suppress(OSError):
            surplus -= size if _remove(path) else 0


def experts_of(config: ModelConfig) -> list[tuple[int, int]]:
    """The layer and number of each expert, in the order of their files, which follow those of the layers."""
    if not isinstance(config, DecoderConfig):
        return []
    moes = [(layer, moe) for layer in range(config.layers) if (moe := config.layer(layer).mlp.moe)]
    return [(layer, expert) for layer, moe in moes for expert in range(moe.router.experts)]


def read_leaves(
    opened: OpenedModel, part: Mapping[str, jax.ShapeDtypeStruct], *, stays: bool = False
) -> dict[str, jax.Array]:
    """Read these leaves, sharded as on the devices; all of them, or none, are parts of leaves for one expert.

    stays: as of `OpenedModel.read`.
    """
    expert = part_of(next(iter(part)))[1]
    names = {part_of(name)[0] for name in part}
    leaves = opened.read(names.__contains__, expert=expert, stays=stays)
    return {name: jax.device_put(leaves[name], shape.sharding) for name, shape in part.items()}


def layer_leaves(opened: OpenedModel, layer: int, expert: int | None = None) -> dict[str, jax.ShapeDtypeStruct]:
    """The leaves of a layer without its experts, or of one of its experts, by name, as on the devices.

    In the order in which programs take them.
    """
    names = leaves_of_part(opened.config, opened.weights, layer, expert)
    return dict(zip(names, opened.layer_shapes(layer, expert), strict=True))


def divide_leaves(opened: OpenedModel, parts: int) -> list[list[str]]:
    """Divide the names of a model's leaves, in their order, into at most so many parts of about equal bytes."""
    shapes, groups, size = opened.shapes, list[list[str]](), 0
    least = sum(leaf.bytes for leaf in shapes.values()) / parts
    for name, leaf in shapes.items():
        if not groups or size >= least:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += leaf.bytes
    return groups


def _parts(opened: OpenedModel, parts: int | None) -> list[dict[str, jax.ShapeDtypeStruct]]:
    """The leaves of each file."""
    if parts is None:
        layers = [layer_leaves(opened, layer) for layer in range(opened.transformer.layers)]
        return layers + [layer_leaves(opened, layer, expert) for layer, expert in experts_of(opened.config)]
    shapes = {
        name: jax.ShapeDtypeStruct(leaf.shape, np.dtype(leaf.dtype), sharding=opened.sharding(leaf))
        for name, leaf in opened.shapes.items()
    }
    return [{name: shapes[name] for name in names} for names in divide_leaves(opened, parts)]


def describe_format(opened: OpenedModel) -> str:
    """Describe the format of the files, such as "bfloat16, int8, tensor=2": the options of a run that reads them."""
    mesh = "" if opened.mesh is None else axes_text(opened.mesh)
    return ", ".join(filter(None, [opened.weights.dtype.name, opened.weights.quantized, mesh]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerFolder:
    """A folder of layer files.

    Attributes:
      path: the folder's path.
      about: the model and format; or why it is of no use.
      bytes: its bytes on disk.
    """

    path: pathlib.Path
    about: str
    bytes: int


def find_layer_folders(base: pathlib.Path) -> list[LayerFolder]:
    """Find the layer folders in a model directory, or in a folder given for them; unfinished ones too."""
    folders = []
    for path in _matching(base, _NAME):
        try:
            about = describe_layers(path)
        except CheckpointError:
            about = "of another version, or damaged"
        folders.append(LayerFolder(path=path, about=about, bytes=_bytes(path)))
    unfinished = "being written, or left by a process that was killed"
    return folders + [
        LayerFolder(path=path, about=unfinished, bytes=_bytes(path)) for path in _matching(base, _PARTIAL)
    ]


def remove_layer_folders(base: pathlib.Path) -> None:
    """Delete all layer folders except those being written, or open for streaming."""
    remove_unfinished(base)
    for path in _matching(base, _NAME):
        _remove(path)


def _hold(folder: pathlib.Path) -> contextlib.ExitStack | None:
    """Keep others from removing a folder until the result is closed; None if it is not there any more."""
    with contextlib.ExitStack() as stack:
        try:
            handle = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            return None
        except OSError:
            return stack.pop_all()  # whoever reads it says what is wrong
        stack.callback(os.close, handle)
        with contextlib.suppress(OSError):  # where a file system has no locks, nobody gets the one to remove it either
            fcntl.flock(handle, fcntl.LOCK_SH)
        if not (folder.exists() and os.path.samestat(folder.stat(), os.fstat(handle))):
            return None
        with contextlib.suppress(OSError):
            os.utime(handle)  # used now
        return stack.pop_all()


def _remove(folder: pathlib.Path) -> bool:
    """Delete a layer folder, unless it is in use; return whether it is gone."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(CheckpointError, FileNotFoundError, BlockingIOError))
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        stack.callback(os.close, handle)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        partial = stack.enter_context(sole_owner(folder.parent / f".{folder.name}.partial"))
        folder.rename(partial / folder.name)  # so that nobody sees parts of it
    return not folder.exists()


def remove_unfinished(base: pathlib.Path) -> None:
    """Delete files left by processes that were killed while they wrote, as far as this user may."""
    for path in _matching(base, _PARTIAL):
        with contextlib.suppress(CheckpointError, OSError), sole_owner(path):
            pass


def _matching(base: pathlib.Path, pattern: re.Pattern[str]) -> list[pathlib.Path]:
    """List the directories with such names, without links."""
    try:
        with os.scandir(base) as entries:
            paths = [e.path for e in entries if pattern.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]
    except OSError:
        return []
    return [pathlib.Path(path) for path in sorted(paths)]


def _bytes(folder: pathlib.Path) -> int:
    """Sum the bytes of the files in a folder; files deleted meanwhile are left out."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            status = path.lstat()
            total += status.st_size if stat.S_ISREG(status.st_mode) else 0
    return total

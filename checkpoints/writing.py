"""Writing a model directory weight by weight: bounded memory, and nothing visible until it is complete."""

import contextlib
import errno
import fcntl
import itertools
import os
import pathlib
import shutil
import signal
import stat
import threading
from collections.abc import Iterator, Mapping
from typing import Self, get_args

import jax
import numpy as np

from jaxinfer.checkpoints.errors import CheckpointError
from jaxinfer.checkpoints.layouts import Layout
from jaxinfer.checkpoints.manifest import Leaf, part_name
from jaxinfer.checkpoints.orbax_folder import write_manifest
from jaxinfer.checkpoints.paths import inside
from jaxinfer.checkpoints.single_file import SINGLE_FILE, encode_single_file, require_small

GROUP_BYTES = 64 << 20  # leaves are collected up to this size, then written; an interrupt waits for them
CHUNK_BYTES = 64 << 20  # largest chunk of a leaf on disk; a device reads whole chunks to get its shard


class Writer:
    """A context in which leaves and files are added; leaving it without an exception makes the directory appear.

    Until then everything is in `.NAME.partial` next to the target. An exception removes it. If the process is killed,
    the next writer of the same target removes it. Peak memory: `GROUP_BYTES` and two leaves.

    Args:
      path: the directory, empty or not existing.
      layout: how it is stored; "single-file" takes no more than `single_file.MAX_BYTES`.

    >>> with Writer("model") as writer:  # doctest: +SKIP
    ...     writer.add("head.weight", np.zeros((10, 4), np.float32), ("vocab", "embed"))
    ...     writer.add_file("config.json", b"{}")
    """

    def __init__(self, path: str | os.PathLike[str], *, layout: Layout = "orbax"):
        if layout not in get_args(Layout):
            raise ValueError(f"layout={layout!r} is not implemented; known: {', '.join(get_args(Layout))}.")
        self.path, self._layout = pathlib.Path(path).resolve(), layout
        self._temporary = self.path.parent / f".{self.path.name}.partial"
        self._state = self._temporary / "model"
        self._files: dict[str, bytes | pathlib.Path] = {}
        self._leaves: dict[str, Leaf] = {}
        self._group: dict[str, np.ndarray] = {}
        self._group_bytes = 0
        self._added: set[str] = set()
        self._exit = contextlib.ExitStack()
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise CheckpointError(f"{self.path}: exists and is not empty; name another output directory or remove it.")

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._exit.enter_context(sole_owner(self._temporary))
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        with self._exit:  # removes the temporary directory in any case
            if kind is None:
                self._commit()

    def add(self, name: str, array: np.ndarray | jax.Array, axes: tuple[str | None, ...]) -> None:
        """Store one weight under its dotted path; `axes` names its dimensions."""
        if name in self._leaves:
            raise ValueError(f"leaf {name!r} was added twice.")
        array = np.asarray(array)
        self._leaves[name] = leaf = Leaf(array.shape, array.dtype.name, axes)
        for index in range(leaf.parts):
            self._hold(part_name(name, index), array[index])
        if not leaf.parts:
            self._hold(name, array)

    def add_part(self, name: str, index: int, array: np.ndarray, leaf: Leaf) -> None:
        """Store one part of a weight that is divided into parts (`Leaf.parts`). leaf: the whole weight."""
        assert leaf.part == Leaf(array.shape, array.dtype.name, leaf.axes[1:]), (name, index, leaf)
        self._leaves[name] = leaf
        if part_name(name, index) in self._added:
            raise ValueError(f"part {index} of leaf {name!r} was added twice.")
        self._hold(part_name(name, index), array)

    def _hold(self, name: str, array: np.ndarray) -> None:
        """Keep an array until its group is written; a copy, since the caller may reuse its own."""
        self._added.add(name)
        self._group[name] = np.array(array)
        self._group_bytes += array.nbytes
        self.check_size(self._group_bytes)
        if self._group_bytes >= GROUP_BYTES:
            self._flush()

    def check_size(self, size: int) -> None:
        """Raise CheckpointError if weights of so many bytes are too many for the layout."""
        if self._layout == "single-file":
            require_small(self.path, size)

    def add_file(self, name: str, content: bytes | pathlib.Path) -> None:
        """Store a file under a path of its own in the directory: its bytes, or a path to copy from."""
        inside(self._state, name)
        self._files[name] = content

    def _flush(self) -> None:
        from orbax.checkpoint import v1 as ocp

        context = ocp.Context()
        saving = context.array.saving
        saving.use_compression = False  # trained weights do not compress, and reading stays a plain copy
        saving.storage_options.chunk_byte_size = CHUNK_BYTES
        saving.enable_write_sharding_file = False  # the reader chooses the sharding
        saving.array_metadata_store = None
        with context, _uninterrupted():
            ocp.partial.save(str(self._state), self._group)
        self._group, self._group_bytes = {}, 0

    def _commit(self) -> None:
        if not self._leaves:
            raise ValueError(f"{self.path}: no leaf was added.")
        parts = ((name, index) for name, leaf in self._leaves.items() for index in range(leaf.parts))
        if missing := [name for name in itertools.starmap(part_name, parts) if name not in self._added]:
            raise ValueError(f"{self.path}: {len(missing)} parts were not added, such as {missing[0]}.")
        if self._layout == "single-file":
            self._write_single_file()
        else:
            self._write_folder()
        self._state.rename(self.path)

    def _write_single_file(self) -> None:
        files = {name: x if isinstance(x, bytes) else x.read_bytes() for name, x in self._files.items()}
        arrays = {
            name: np.stack([self._group[part_name(name, index)] for index in range(leaf.parts)])
            if leaf.parts
            else self._group[name]
            for name, leaf in self._leaves.items()
        }
        content = encode_single_file(self.path, self._leaves, arrays, files)
        self._state.mkdir()
        (self._state / SINGLE_FILE).write_bytes(content)

    def _write_folder(self) -> None:
        from orbax.checkpoint import v1 as ocp

        if self._group:
            self._flush()
        with _uninterrupted():
            ocp.partial.finalize(str(self._state))
        (self._state / "commit_success.txt").unlink(missing_ok=True)  # contains a path of this machine
        for name, content in self._files.items():
            (self._state / name).parent.mkdir(exist_ok=True)
            if isinstance(content, bytes):
                (self._state / name).write_bytes(content)
            else:
                shutil.copyfile(content, self._state / name)
        write_manifest(self._state, self._leaves)


def save(
    path: str | os.PathLike[str],
    leaves: Mapping[str, np.ndarray | jax.Array],
    axes: Mapping[str, tuple[str | None, ...]],
    files: Mapping[str, bytes | pathlib.Path],
    *,
    layout: Layout = "orbax",
) -> None:
    """Write a whole model directory at once; see `Writer`."""
    with Writer(path, layout=layout) as writer:
        for name, content in files.items():
            writer.add_file(name, content)
        for name, array in leaves.items():
            writer.add(name, array, axes[name])


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C back while Orbax writes.

    It has threads of its own, which would write on while what they write is removed, and fail one by one, with
    tracebacks, when the process ends.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is None:  # no interrupt comes here
        yield
        return
    held = []
    signal.signal(signal.SIGINT, lambda *_: held.append(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if held:
            signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def sole_owner(directory: pathlib.Path, *, wait: bool = False) -> Iterator[pathlib.Path]:
    """Yield an empty directory that no other process and no other user writes to, removed at the end.

    If a killed process has left anything in it, that is deleted; nothing is that links lead to.

    Args:
      wait: for another process that has it, rather than raise CheckpointError.
    Raises CheckpointError if a link, a file or another user's directory is in its place.
    """
    with _locked(directory, wait=wait) as handle:
        _empty(handle)
        try:
            yield directory
        finally:
            _empty(handle)
            directory.rmdir()


def _empty(handle: int) -> None:
    """Delete all that is in an open directory, wherever it is by now."""
    with os.scandir(handle) as entries:
        for entry in list(entries):
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.name, dir_fd=handle)
            else:
                os.unlink(entry.name, dir_fd=handle)


@contextlib.contextmanager
def _locked(directory: pathlib.Path, *, wait: bool) -> Iterator[int]:
    """Hold the lock of a directory, which is made; yields it, open."""
    while True:
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        try:
            handle = _open_own(directory)
        except FileNotFoundError:
            continue  # removed meanwhile
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))  # a killed process has no lock
            except BlockingIOError:
                raise CheckpointError(f"{directory}: another process is writing here; wait for it to end.") from None
            if directory.exists() and os.path.samestat(directory.lstat(), os.fstat(handle)):
                yield handle
                return
            # Whoever was waited for has removed the directory.
        finally:
            os.close(handle)


def _open_own(directory: pathlib.Path) -> int:
    """Open a directory of this user's, closed to others. Raises CheckpointError if it is not one."""
    try:
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        raise CheckpointError(f"{directory}: is not a directory but a file or a link; remove it.") from None
    status = os.fstat(handle)
    if status.st_uid != os.geteuid():
        os.close(handle)
        raise CheckpointError(f"{directory}: belongs to another user; ask its owner to remove it.")
    os.fchmod(handle, stat.S_IMODE(status.st_mode) & ~0o077)
    return handle

"""A folder of blocks that outlives the process, with a limit: one file a block, named by its key."""

import contextlib
import fcntl
import logging
import os
import re
import shutil
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Buffer
from pathlib import Path

import crc32c
from rich.filesize import decimal

from jaxinfer.disk_cache.files import make_private, read_ahead, read_own_into, write_atomically

KEY_BYTES = 32
PAUSE = 60.0
"""Seconds after a write that failed, as on a full disk, until another one is tried."""
_BLOCK = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}")
_TEMPORARY = re.compile(rf"\.{_BLOCK.pattern}\.[0-9a-f]+\.tmp")
_LOCK = ".lock"
_CHECKSUM_BYTES = 4
_OPEN: "weakref.WeakValueDictionary[Path, BlockFolder]" = weakref.WeakValueDictionary()
"""The folders that this process has."""
_OPENING = threading.Lock()

log = logging.getLogger(__name__)


class BlockFolder:
    """The least recently used blocks leave when the files would take more than `max_bytes`, also after a restart.

    One process has the folder at a time, and everything in that process shares it. A block appears whole: it is written
    under a temporary name, then renamed. It begins with a checksum, over its key, too. A block that is damaged, or that
    others can write to, is deleted, named in the log, and counts as absent.

    `in` is for any thread; a key's use counts. All else may wait for the disk, and is for threads without signals.

    Attributes:
      folder: the folder.
      max_bytes: the limit of all files together.
    """

    def __init__(self, folder: Path, *, max_bytes: int):
        self.folder, self.max_bytes = folder, max_bytes
        self._users = 0
        self._changing = threading.Lock()
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # the least recently used first
        self._bytes = 0
        self._paused_until = 0.0
        _files_of(folder)  # nothing is changed in a folder of others
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        distrusted = make_private(folder)
        self._release = weakref.finalize(self, os.close, _lock(folder / _LOCK))
        try:
            self._find(distrusted=distrusted)
        except BaseException:
            self._release()
            raise

    @classmethod
    def open(cls, folder: Path, *, max_bytes: int) -> "BlockFolder":
        """Open a folder, which is made if it does not exist; each caller calls `close` in the end.

        Raises ValueError for a folder that has other files, or that another process has, and for a limit that is more
        than its disk has free, or in all if there are blocks; OSError if it cannot be written.
        """
        folder = folder.resolve()
        with _OPENING:
            if (known := _OPEN.get(folder)) is None:
                known = _OPEN[folder] = cls(folder, max_bytes=max_bytes)
            elif known.max_bytes != max_bytes:
                raise ValueError(
                    f"another model of this process has this folder with a limit of {known.max_bytes} bytes, and not "
                    f"{max_bytes}: give both the same limit, or folders of their own"
                )
            known._users += 1
            return known

    def close(self) -> None:
        """Let another process have the folder, once all callers of `open` have called this."""
        with _OPENING:
            self._users -= 1
            if self._users == 0:
                _OPEN.pop(self.folder, None)
                self._release()

    def _find(self, *, distrusted: bool) -> None:
        """Note the blocks that are there already, and delete the oldest beyond the limit.

        distrusted: whether others may have written them.
        """
        blocks, temporaries = _files_of(self.folder)
        if distrusted and blocks:
            log.warning("%s was open to other users: the %d blocks in it are deleted.", self.folder, len(blocks))
        for file in temporaries + (blocks if distrusted else []):  # temporary ones are of writers that were killed
            file.unlink()
        trusted = [(file.lstat(), file.name) for file in blocks if not distrusted]
        for status, name in sorted(trusted, key=lambda file: file[0].st_mtime):
            self._sizes[bytes.fromhex(name)] = status.st_size
            self._bytes += status.st_size
        self._check_room()
        self._make_room(0)

    def _check_room(self) -> None:
        """Raise ValueError if the disk has too little room; what others have filled since a first start is no error."""
        disk = shutil.disk_usage(self.folder)
        room = disk.free + self._bytes
        if self.max_bytes > (disk.total if self._sizes else room):
            raise ValueError(
                f"{decimal(room)} ({room} bytes) of its disk are free or have its blocks, and the limit is "
                f"{self.max_bytes} bytes: lower it, or free space"
            )
        if self.max_bytes > room:
            log.warning("%s: its disk has room for %d bytes of blocks, less than the limit.", self.folder, room)

    def __contains__(self, key: bytes) -> bool:
        with contextlib.suppress(KeyError):
            self._sizes.move_to_end(key)
            return True
        return False

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def can_write(self) -> bool:
        """Whether no write has failed for a while."""
        return time.monotonic() >= self._paused_until

    def put(self, key: bytes, *content: Buffer) -> bool:
        """Write a block unless it is there; the least recently used leave for it. Returns whether it was written.

        If that fails, as on a full disk, the log says so, and nothing is written for `PAUSE` seconds.
        """
        size = _CHECKSUM_BYTES + sum(memoryview(part).nbytes for part in content)
        checksum = _checksum(key, *content)
        with self._changing:
            if key in self or size > self.max_bytes or not self.can_write:
                return False
            self._make_room(size)
            try:
                write_atomically(self._file(key), checksum, *content, mode=0o600)
            except OSError as error:
                self._paused_until = time.monotonic() + PAUSE
                log.warning(
                    "%s: a block cannot be written (%s). Nothing is written there for %g s; blocks are still read.",
                    self.folder,
                    error.strerror or error,
                    PAUSE,
                )
                return False
            self._sizes[key] = size
            self._bytes += size
            return True

    def get_into(self, key: bytes, *parts: memoryview) -> bool:
        """Read a block into these bytes, as many as it has; False if it is absent, or damaged."""
        problem, checksum = "it is damaged, or others can write to it", bytearray(_CHECKSUM_BYTES)
        try:
            if read_own_into(self._file(key), memoryview(checksum), *parts) and checksum == _checksum(key, *parts):
                return True
        except OSError as error:
            problem = error.strerror or str(error)
        with self._changing:
            if key in self:
                log.warning("%s is not used, and deleted: %s.", self._file(key), problem)
                self._delete(key, self._sizes.pop(key))
        return False

    def read_ahead(self, key: bytes) -> None:
        """Have the system read a block meanwhile, which `get_into` asks for soon."""
        read_ahead(self._file(key))

    def clear(self) -> None:
        """Delete all blocks."""
        with self._changing:
            while self._sizes:
                self._delete(*self._sizes.popitem())

    def check_integrity(self) -> None:
        """Raise AssertionError unless its records and its files fit together. Nothing may be written meanwhile."""
        blocks, temporaries = _files_of(self.folder)
        assert {bytes.fromhex(file.name): file.lstat().st_size for file in blocks} == self._sizes
        assert sum(self._sizes.values()) == self._bytes <= self.max_bytes
        assert not temporaries

    def _make_room(self, size: int) -> None:
        while self._sizes and self._bytes + size > self.max_bytes:
            self._delete(*self._sizes.popitem(last=False))

    def _delete(self, key: bytes, size: int) -> None:
        self._bytes -= size
        with contextlib.suppress(OSError):
            self._file(key).unlink()

    def _file(self, key: bytes) -> Path:
        return self.folder / key.hex()


def _checksum(key: bytes, *content: Buffer) -> bytes:
    value = crc32c.crc32c(key)
    for part in content:
        value = crc32c.crc32c(part, value)
    return value.to_bytes(_CHECKSUM_BYTES, "little")


def _files_of(folder: Path) -> tuple[list[Path], list[Path]]:
    """The blocks of a folder, and the files that were not renamed. Raises ValueError if it has others."""
    blocks, temporaries = [], []
    for file in folder.iterdir() if folder.exists() else ():
        if _BLOCK.fullmatch(file.name):
            blocks.append(file)
        elif _TEMPORARY.fullmatch(file.name):
            temporaries.append(file)
        elif file.name != _LOCK:
            raise ValueError(f"it has other files, such as {file.name!r}: name a new folder, or an empty one")
    return blocks, temporaries


def _lock(file: Path) -> int:
    """Take a file's lock, which the end of the process frees; return its handle. Raises ValueError if it is taken."""
    handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        owner = os.read(handle, 20).decode(errors="replace").strip() or "unknown"
        os.close(handle)
        raise ValueError(f"process {owner} has it: end that process, or name another folder") from error
    os.ftruncate(handle, 0)
    os.write(handle, f"{os.getpid()}\n".encode())
    return handle

"""Files that processes keep for one another: where they are, and a folder of them that is safe under many processes."""

import contextlib
import hashlib
import logging
import os
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

_log = logging.getLogger("jaxinfer.disk_cache")

_DIGEST = hashlib.sha256
_ABANDONED = 3600.0
"""Seconds after which a temporary file is one whose writer was killed."""


def cache_folder() -> Path:
    """The user's cache folder for jaxinfer: $JAXINFER_CACHE, else $XDG_CACHE_HOME/jaxinfer, else ~/.cache/jaxinfer."""
    if folder := os.environ.get("JAXINFER_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxinfer"


def write_atomically(file: Path, *content: bytes, mode: int = 0o666) -> None:
    """Write all of a file or nothing: under a temporary name, hidden and this thread's own, which is then renamed.

    mode: who may read and write it, as far as the process's umask lets them.
    """
    temporary = file.with_name(f".{file.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as opened:
            opened.writelines(content)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


class KeptFiles:
    """A folder of files by name, which any number of processes and threads read and write without a lock.

    A file appears whole: it is written under a temporary name, then renamed. It begins with a checksum, so that one
    which a full disk or a failing machine damaged is found out, deleted, and counts as not there. Nobody but the user
    can read or write in the folder. Whoever writes deletes what was used longest ago, once all are more than
    `max_bytes`.
    """

    def __init__(self, folder: Path, *, max_bytes: int):
        self.folder, self.max_bytes = folder, max_bytes
        self._warned = False

    def get(self, name: str) -> bytes | None:
        """What was put under this name, or None. A damaged file is deleted."""
        path = self.folder / name
        try:
            if not self._private():
                return None
            data = path.read_bytes()
            size = _DIGEST().digest_size
            content = memoryview(data)[size:]
            if _DIGEST(content).digest() != data[:size]:
                self.remove(name)
                return None
            os.utime(path)  # used now
            return bytes(content)
        except OSError:
            return None

    def put(self, name: str, content: bytes) -> None:
        """Keep this under a name. If it cannot be written, nothing is kept, and the first time there is a warning."""
        if len(content) > self.max_bytes:
            return
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._private():
                write_atomically(self.folder / name, _DIGEST(content).digest(), content, mode=0o600)
                self._delete_oldest()
        except OSError as error:
            self._warn(f"nothing can be kept in {self.folder}: {error}")

    def remove(self, name: str) -> None:
        """Delete a file, if it is there."""
        (self.folder / name).unlink(missing_ok=True)

    def sizes(self) -> dict[str, int]:
        """The bytes of every file, by name."""
        return {entry.name: status.st_size for entry, status in self._entries() if not _is_temporary(entry)}

    def _private(self) -> bool:
        """Whether the folder is the user's alone; one of the user's that others may enter is closed to them."""
        status = self.folder.stat()
        if status.st_uid != os.geteuid():
            self._warn(f"{self.folder} is not used: it belongs to another user")
            return False
        if stat.S_IMODE(status.st_mode) & 0o077:
            self.folder.chmod(0o700)
        return True

    def _entries(self) -> Iterator[tuple[os.DirEntry, os.stat_result]]:
        """The files there are; those that other processes delete meanwhile are left out."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    yield entry, entry.stat()

    def _delete_oldest(self) -> None:
        kept, now = [], time.time()
        for entry, status in self._entries():
            if not _is_temporary(entry):
                kept.append((status.st_mtime, status.st_size, entry.name))
            elif now - status.st_mtime > _ABANDONED:
                self.remove(entry.name)
        surplus = sum(size for _, size, _ in kept) - self.max_bytes
        for _, size, name in sorted(kept):
            if surplus <= 0:
                break
            self.remove(name)
            surplus -= size

    def _warn(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            _log.warning(message)


def _is_temporary(entry: os.DirEntry) -> bool:
    return entry.name.startswith(".")

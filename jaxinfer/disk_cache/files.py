"""Files that processes keep for one another: their folder, which many processes may use at once."""

import contextlib
import hashlib
import logging
import os
import secrets
import stat
import time
from collections.abc import Buffer, Iterator
from pathlib import Path

import platformdirs

_log = logging.getLogger("jaxinfer.disk_cache")

_DIGEST = hashlib.sha256
_ABANDONED = 3600.0
"""Seconds after which a temporary file counts as abandoned: its writer was killed."""
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_WARNED = set[Path]()
"""The folders of which this process has warned."""


def cache_folder() -> Path:
    """The user's cache folder: $JAXINFER_CACHE, else the system's (on Linux $XDG_CACHE_HOME or ~/.cache)."""
    return Path(os.environ.get("JAXINFER_CACHE") or platformdirs.user_cache_dir("jaxinfer", appauthor=False))


def write_atomically(file: Path, *content: Buffer, mode: int = 0o666) -> None:
    """Write all of a file or nothing: write a hidden temporary file with an unguessable name, then rename it.

    mode: who may read and write it, as far as the process's umask lets them.
    """
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(8)}.tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)  # follows no link
    try:
        with os.fdopen(handle, "wb") as opened:
            opened.writelines(content)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)


class UntrustedFolderError(OSError):
    """A folder that another user may have filled, or may fill."""


def make_private(folder: Path) -> bool:
    """Close a folder to others; return whether they could write to it, so that what is in it may be theirs.

    Raises UntrustedFolderError if it is another user's, or a link, and OSError if it is not there.
    """
    status = folder.lstat()
    if stat.S_ISLNK(status.st_mode):
        raise UntrustedFolderError(f"{folder} is not used: it is a link")
    if status.st_uid != os.geteuid():
        raise UntrustedFolderError(f"{folder} is not used: it belongs to another user")
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"{folder} is not a folder")
    if not stat.S_IMODE(status.st_mode) & 0o077:
        return False
    folder.chmod(0o700)
    return bool(status.st_mode & _OTHERS_WRITE)


def require_trusted(folder: Path) -> None:
    """Close a folder to other users' writing, and require that its files can be trusted.

    Raises UntrustedFolderError if the folder, or a link to it, belongs to another user than this one and root; if
    others can write to root's; and once if they could write to this user's, who then decides what to do.
    """
    if not folder.exists():
        return
    link, status = folder.lstat(), folder.stat()
    if not {link.st_uid, status.st_uid} <= {0, os.geteuid()}:
        raise UntrustedFolderError(f"{folder} is not used: it belongs to another user")
    others_of_group = status.st_mode & stat.S_IWGRP and status.st_gid != os.getegid()
    if not (others_of_group or status.st_mode & stat.S_IWOTH):
        return
    if status.st_uid != os.geteuid():
        raise UntrustedFolderError(f"{folder} is not used: other users can write to it")
    folder.chmod(stat.S_IMODE(status.st_mode) & ~_OTHERS_WRITE)
    raise UntrustedFolderError(
        f"{folder} was open to other users, who may have changed what is in it. It is closed now: start again if you "
        "trust its files, or delete it first"
    )


class KeptFiles:
    """A folder of files by name, which any number of processes and threads read and write without a lock.

    A file appears whole: it is written under a temporary name, then renamed. It begins with a checksum, so that damage
    by a full disk or a failing machine is noticed: the file is deleted and counts as absent. Only the user can read or
    write in the folder, and files that others own or can write to are ignored. A writer deletes the least recently
    used files once all together exceed `max_bytes`.
    """

    def __init__(self, folder: Path, *, max_bytes: int):
        self.folder, self.max_bytes = folder, max_bytes

    def get(self, name: str) -> bytes | None:
        """Return the content of a file, or None. A file that is damaged, or another user's, is deleted."""
        try:
            self._make_private()
            content = _verified(read_own(self.folder / name))
            if content is None:
                self.remove(name)
            return content
        except UntrustedFolderError as error:
            self._warn(str(error))
        except OSError:
            pass
        return None

    def put(self, name: str, content: bytes) -> None:
        """Keep content by name. If it cannot be written, nothing is kept, and there is one warning of the folder."""
        try:
            self.write(name, content)
        except UntrustedFolderError as error:
            self._warn(str(error))
        except OSError as error:
            self._warn(f"nothing can be kept in {self.folder}: {error}")

    def write(self, name: str, content: bytes) -> None:
        """Write content under a name, unless it exceeds `max_bytes`. Raises OSError if it cannot be written."""
        if len(content) > self.max_bytes:
            return
        self.make()
        write_atomically(self.folder / name, _DIGEST(content).digest(), content, mode=0o600)
        self._delete_oldest()

    def make(self) -> None:
        """Make the folder, for this user alone. Raises OSError on failure."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._make_private()

    @contextlib.contextmanager
    def locked(self, *, seconds: float) -> Iterator[None]:
        """Keep other processes that take this lock from changing files; raises OSError if they hold it for too long."""
        import filelock  # processes that only read do without it

        self.make()
        with filelock.FileLock(self.folder / ".lock", timeout=seconds):
            yield

    def remove(self, name: str) -> None:
        """Delete a file, if it is there."""
        with contextlib.suppress(IsADirectoryError):  # not ours, and never read
            (self.folder / name).unlink(missing_ok=True)

    def sizes(self) -> dict[str, int]:
        """The bytes of every file, by name."""
        return {entry.name: status.st_size for entry, status in self._entries() if not entry.name.startswith(".")}

    def _make_private(self) -> None:
        """Close the folder to others. If they could write to it, its files are deleted. Raises as `make_private`."""
        if make_private(self.folder):
            for entry, _ in self._entries():
                self.remove(entry.name)
            self._warn(f"{self.folder} was open to other users: what was in it is deleted")

    def _entries(self) -> Iterator[tuple[os.DirEntry, os.stat_result]]:
        """Yield the files, without those that other processes delete meanwhile."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(self.folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    yield entry, entry.stat(follow_symlinks=False)

    def _delete_oldest(self) -> None:
        kept, now = [], time.time()
        for entry, status in self._entries():
            if not entry.name.startswith("."):
                kept.append((status.st_mtime, status.st_size, entry.name))
            elif entry.name.endswith(".tmp") and now - status.st_mtime > _ABANDONED:
                self.remove(entry.name)
        surplus = sum(size for _, size, _ in kept) - self.max_bytes
        for _, size, name in sorted(kept):
            if surplus <= 0:
                break
            self.remove(name)
            surplus -= size

    def _warn(self, message: str) -> None:
        if self.folder not in _WARNED:
            _WARNED.add(self.folder)
            _log.warning(message)


def _verified(data: bytes | None) -> bytes | None:
    """The content after the checksum; None if it is damaged."""
    size = _DIGEST().digest_size
    if data is None or _DIGEST(memoryview(data)[size:]).digest() != data[:size]:
        return None
    return data[size:]


def read_own(file: Path) -> bytes | None:
    """Read a file, which counts as used now; None if it is not the user's alone. Raises OSError."""
    with _own(file) as handle:
        if handle is None:
            return None
        with open(handle, "rb", closefd=False) as opened:
            return opened.read()


def read_own_into(file: Path, *parts: memoryview) -> bool:
    """Read a file, which counts as used now, into these bytes; raises OSError.

    Returns whether it is the user's alone and has just as many.
    """
    size = sum(part.nbytes for part in parts)
    with _own(file) as handle:
        return handle is not None and os.fstat(handle).st_size == size and os.preadv(handle, parts, 0) == size


def read_ahead(file: Path) -> None:
    """Have the system read a file into its cache meanwhile; errors come when it is read."""
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError), _own(file) as handle:
            if handle is not None:
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_WILLNEED)


@contextlib.contextmanager
def _own(file: Path) -> Iterator[int | None]:
    """Open a file, which counts as used now; None if it is not the user's alone. Raises OSError."""
    handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & _OTHERS_WRITE:
            yield None
        else:
            os.utime(handle)
            yield handle
    finally:
        os.close(handle)

"""The library of CPU kernels of this machine: compiled when it is first needed, then kept in the user's cache folder.

It is compared with XLA, and measured against it, once, when it is compiled (`cpu_checks.py`). If it cannot be compiled,
differs, or cannot be kept, operations run as plain XLA, and the reason is logged once.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxinfer.disk_cache import KeptFiles, cache_folder
from jaxinfer.disk_cache.processor import cpu_fields, cpu_model
from jaxinfer.pallas_kernels.cpu.build import (
    FOLDER,
    LEVELS,
    BuildError,
    Compiler,
    build,
    build_digest,
    find_compiler,
    handlers,
    levels_of,
    run,
    source_files,
)
from jaxinfer.pallas_kernels.cpu.library import Library, load_library
from jaxinfer.progress import long_work

VARIABLE = "JAXINFER_CPU_LIBRARY"
"""The environment variable by which a process has no library ("0"), or one whose limits are the default, so that they
do not depend on what the machine did when they were measured ("unmeasured"); "1" as without it."""
_SETTINGS = ("", "1", "0", "unmeasured")

FOLDER_VARIABLE = "JAXINFER_CPU_LIBRARY_FOLDER"
"""The environment variable that names a folder for libraries, instead of one in the user's cache folder."""

MAX_BYTES = 256 << 20
"""Bytes of all libraries together; the least recently used are deleted first."""
NEEDED_BYTES = 32 << 20
"""Bytes that the disk must have left for compiling to begin."""
BUILD_SECONDS = 120.0
"""How long compiling may take, and how long the check."""
RETRY_SECONDS = 24 * 3600.0
"""How long a failure of the compiler or the check is remembered before it is tried again. Differences are for good."""

_CHECKS = "jaxinfer.compiled.cpu_checks"

_log = logging.getLogger("jaxinfer.compiled")
_lock = threading.Lock()
_states: list["LibraryState"] = []


@dataclasses.dataclass(frozen=True, kw_only=True)
class LibraryState:
    """The library of this process, or why there is none.

    Attributes:
      library: None: XLA runs alone.
      reason: why there is none; empty if this process does without.
      file: where it is kept.
      compiler: what compiled it.
      operations: that were compared with XLA.
      verdicts: of each instruction set: "verified"; "differs"; "unverified", as this CPU lacks it or has a better one.
    """

    library: Library | None = None
    reason: str = ""
    file: Path | None = None
    compiler: str = ""
    operations: tuple[str, ...] = ()
    verdicts: dict[str, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        """Name the library in one line, or say why there is none."""
        if self.library is None:
            return f"none: {self.reason}" if self.reason else "none"
        return f"{self.library.level}, by {self.compiler}"


def cpu_library() -> Library | None:
    """Return this machine's library, loaded into this process; compile it if needed. None: XLA runs alone."""
    return library_state().library


def library_state() -> LibraryState:
    """Return the library of this process, or why there is none: that of the first call, for all later ones."""
    with _lock:
        if not _states:
            state = find_library()
            if state.reason:
                _log.warning("CPU kernels are not used, XLA runs instead: %s", state.reason)
            _states.append(state)
        return _states[0]


def library_files() -> KeptFiles:
    """Return the folder of libraries, each by its digest, and of what is known of them."""
    given = os.environ.get(FOLDER_VARIABLE)
    return KeptFiles(Path(given) if given else cache_folder() / "cpu_kernels", max_bytes=MAX_BYTES)


def find_library(*, folder: Path = FOLDER, seconds: float = BUILD_SECONDS) -> LibraryState:
    """Find the library in the cache folder, or compile it.

    Args:
      folder: of the rooms whose sources are compiled.
      seconds: how long compiling may take, and the check; another process that does it is waited for as long.
    Raises: ValueError for an unknown setting in the environment.
    """
    possible = sys.platform == "linux" and jax.default_backend() == "cpu" and _setting() != "0"
    if not possible or not handlers(folder):
        return LibraryState()
    try:
        return _Maker(find_compiler(), folder, seconds).state()
    except (BuildError, OSError) as error:
        return LibraryState(reason=str(error))


def _setting() -> str:
    """Return what the environment says of the library."""
    setting = os.environ.get(VARIABLE, "")
    if setting not in _SETTINGS:
        raise ValueError(f"{VARIABLE} must be 1, 0 (no library) or unmeasured, got {setting!r}.")
    return setting


class _Maker:
    """Finds the library that a compiler makes of a folder, or has it made."""

    def __init__(self, compiler: Compiler, folder: Path, seconds: float):
        self.compiler, self.folder, self.seconds = compiler, folder, seconds
        self.files = library_files()
        self.measures = _setting() != "unmeasured"
        self.name = self._record_name()

    def state(self) -> LibraryState:
        """Return the library, or why there is none. Raises OSError if nothing can be kept, or the wait is too long."""
        if (state := self._kept()) is not None:
            return state
        total = sum(file.suffix == ".cc" for file in source_files(self.folder))
        with long_work("compiling CPU kernels", total=total) as work, self.files.locked(seconds=2 * self.seconds):
            if (state := self._kept()) is not None:  # by a process that held the lock
                return state
            if (free := shutil.disk_usage(self.files.folder).free) < NEEDED_BYTES:
                raise OSError(f"the disk of {self.files.folder} has {free >> 20} MB left; free some")
            record = self._made(
                lambda done: work.update(done=done), lambda: work.update(what="checking CPU kernels", done=total)
            )
            self.files.write(self.name, json.dumps(record).encode())
            state = self._kept()
        return state or LibraryState(reason="the library cannot be loaded")

    def _made(self, done: Callable[[int], None], checking: Callable[[], None]) -> dict[str, Any]:
        """Compile, keep and check the library. Returns its record, or that of a failure. Raises OSError."""
        record: dict[str, Any] = {"compiler": self.compiler.version, "time": time.time()}
        try:
            level = next(level for level in levels_of(_cpu_flags()) if self.compiler.accepts(level))
            digest = build_digest(self.compiler, level, _cpu(), self.folder)
            if self.files.get(digest) is None:
                content = build(self.compiler, level, seconds=self.seconds, folder=self.folder, done=done)
                self.files.write(digest, content)
            record |= {"digest": digest, "level": level, "functions": handlers(self.folder)}
            checking()
            return record | self._checked(record)
        except BuildError as error:
            if "digest" in record:
                self.files.remove(record["digest"])
            return record | {"failure": str(error)}

    def _checked(self, record: dict[str, Any]) -> dict[str, Any]:
        """Return what `cpu_checks` sees of a library, from a process of its own. Raises BuildError."""
        request = {"folder": str(self.files.folder), "measure": self.measures, **record}
        root = str(Path(__file__).parents[2])
        environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
        environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": _without_dumps(os.environ.get("XLA_FLAGS", ""))}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        try:
            (text,) = run(
                [[sys.executable, "-m", _CHECKS, json.dumps(request)]], seconds=self.seconds, environment=environment
            )
        except BuildError as error:
            raise BuildError(f"the kernels cannot be checked: {error}") from error
        return json.loads(text.splitlines()[-1])

    def _kept(self) -> LibraryState | None:
        """Return what is kept: a library, which is loaded, or why there is none. None: it must be made."""
        if (text := self.files.get(self.name)) is None:
            return None
        record = json.loads(text)
        if "failure" in record:
            return LibraryState(reason=record["failure"]) if time.time() - record["time"] < RETRY_SECONDS else None
        seen = {"compiler": record["compiler"], "operations": tuple(record["operations"])}
        level, differences = record["level"], record["differences"]
        verdict = "differs" if differences else "verified" if record["operations"] else "unverified"
        verdicts = dict.fromkeys(LEVELS, "unverified") | {level: verdict}
        if differences:
            reason = f"{level} kernels by {record['compiler']} differ from XLA's results: {'; '.join(differences[:3])}"
            return LibraryState(reason=reason, verdicts=verdicts, **seen)
        library = Library(
            digest=record["digest"],
            level=level,
            functions=tuple(record["functions"]),
            limits=tuple(sorted(record["limits"].items())),
        )
        if (content := self.files.get(library.digest)) is None:
            return None
        try:
            load_library(library, content)
        except OSError as error:
            _log.info("the library of CPU kernels is compiled anew, since it cannot be loaded: %s", error)
            with contextlib.suppress(OSError):
                self.files.remove(library.digest)
            return None
        return LibraryState(library=library, file=self.files.folder / library.digest, verdicts=verdicts, **seen)

    def _record_name(self) -> str:
        """Return the name of the record: a digest of what is compiled, and of the code that calls and checks it."""
        digest = hashlib.sha256(build_digest(self.compiler, "generic", _cpu(), self.folder).encode())
        for file in sorted(FOLDER.rglob("*.py")):
            digest.update(file.read_bytes())
        digest.update(Path(__file__).with_name("cpu_checks.py").read_bytes())
        digest.update(str(self.measures).encode())
        return digest.hexdigest()


def _without_dumps(flags: str) -> str:
    return " ".join(flag for flag in flags.split() if not flag.startswith("--xla_dump"))


def _cpu() -> tuple[str, ...]:
    """Describe the processor."""
    return (cpu_model(), *_cpu_flags())


def _cpu_flags() -> list[str]:
    return cpu_fields().get("flags", "").split()

"""The library of CPU kernels of this machine: compiled when it is first needed, then kept in the user's cache folder.

If it cannot be compiled, or cannot be kept, operations run as plain XLA, and the reason is logged once.
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
from pathlib import Path
from typing import Any

import jax

from jaxinfer.disk_cache import KeptFiles, cache_folder
from jaxinfer.disk_cache.processor import cpu_fields, cpu_model
from jaxinfer.pallas_kernels.cpu.build import (
    FOLDER,
    BuildError,
    Compiler,
    build,
    build_digest,
    find_compiler,
    handlers,
    levels_of,
    source_files,
)
from jaxinfer.pallas_kernels.cpu.library import Library, load_library
from jaxinfer.progress import long_work

VARIABLE = "JAXINFER_CPU_LIBRARY"
"""The environment variable by which a process runs without a library ("0")."""

MAX_BYTES = 256 << 20
"""Bytes of all libraries together; the least recently used are deleted first."""
BUILD_SECONDS = 120.0
"""How long compiling may take."""
LOCK_SECONDS = 180.0
"""How long to wait for another process that compiles the same."""
RETRY_SECONDS = 24 * 3600.0
"""How long a failure is remembered, before it is tried again."""

_log = logging.getLogger("jaxinfer.compiled")
_lock = threading.Lock()
_state: list["State"] = []


@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """The library of this process, or why there is none, and where it is kept."""

    library: Library | None = None
    reason: str = ""
    file: Path | None = None


def cpu_library() -> Library | None:
    """Return this machine's library, loaded into this process; compile it if needed. None: XLA runs alone."""
    return library_state().library


def library_state() -> State:
    """Return the library of this process, or why there is none. All calls return the first one's result."""
    with _lock:
        if not _state:
            state = _find()
            if state.reason:
                _log.warning("CPU kernels are not used, XLA runs instead: %s", state.reason)
            _state.append(state)
        return _state[0]


def _find() -> State:
    """Return the kept library, or compile it."""
    if sys.platform != "linux" or jax.default_backend() != "cpu" or os.environ.get(VARIABLE) == "0" or not handlers():
        return State()
    try:
        return _kept_or_built(find_compiler())
    except BuildError as error:
        return State(reason=str(error))
    except OSError as error:
        return State(reason=f"nothing can be kept in {_files().folder}: {error}")


def _kept_or_built(compiler: Compiler) -> State:
    files = _files()
    name = _record_name(compiler)
    if (state := _kept(files, name)) is not None:
        return state
    total = sum(file.suffix == ".cc" for file in source_files())
    with long_work("compiling CPU kernels", total=total) as work, files.locked(seconds=LOCK_SECONDS):
        if (state := _kept(files, name)) is not None:  # by a process that held the lock
            return state
        record = _made(files, compiler, lambda done: work.update(done=done))
        files.write(name, json.dumps(record).encode())
    state = _kept(files, name)
    assert state is not None, "it was just written"
    return state


def _made(files: KeptFiles, compiler: Compiler, done: Any) -> dict[str, Any]:
    """Compile the library and keep it. Returns its record, or that of a failure. Raises OSError if nothing is kept."""
    if (free := shutil.disk_usage(files.folder).free) < MAX_BYTES:
        raise OSError(f"the disk has {free >> 20} MB left")
    try:
        level = next(level for level in levels_of(_cpu_flags()) if compiler.accepts(level))
        content = build(compiler, level, seconds=BUILD_SECONDS, done=done)
    except BuildError as error:
        return {"failure": str(error), "time": time.time()}
    digest = build_digest(compiler, level, _cpu())
    files.write(digest, content)
    return {"digest": digest, "level": level, "functions": handlers(), "limits": []}


def _kept(files: KeptFiles, name: str) -> State | None:
    """Return what is kept under a name: a library, which is loaded, or a failure. None: it must be made."""
    if (text := files.get(name)) is None:
        return None
    record = json.loads(text)
    if "failure" in record:
        return State(reason=record["failure"]) if time.time() - record["time"] < RETRY_SECONDS else None
    if (content := files.get(record["digest"])) is None:
        return None
    limits = tuple((dtype, rows) for dtype, rows in record["limits"])
    library = Library(digest=record["digest"], level=record["level"], limits=limits)
    try:
        load_library(library, content, record["functions"])
    except OSError as error:
        _log.info("the library of CPU kernels is compiled anew, since it cannot be loaded: %s", error)
        with contextlib.suppress(OSError):
            files.remove(record["digest"])
        return None
    return State(library=library, file=files.folder / record["digest"])


def _files() -> KeptFiles:
    return KeptFiles(cache_folder() / "cpu_kernels", max_bytes=MAX_BYTES)


def _record_name(compiler: Compiler) -> str:
    """Return the name of a record: a digest of what the library is made of, and of the code that calls it."""
    digest = hashlib.sha256(build_digest(compiler, "generic", _cpu()).encode())
    for file in sorted(FOLDER.rglob("*.py")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _cpu() -> tuple[str, ...]:
    """Describe the processor."""
    return (cpu_model(), *_cpu_flags())


def _cpu_flags() -> list[str]:
    return cpu_fields().get("flags", "").split()

"""The library of CPU kernels of this machine: compiled when it is first needed, then kept in the user's cache folder.

A process decides once whether it has the library, so that its results never change midway. If the library is not kept
yet, another process compiles it (`cpu_build.py`), which outlives this one. This process waits a few seconds for it, and
otherwise runs on plain XLA; the next one finds it.

The library is compared with XLA, and measured against it, once, when it is compiled (`cpu_checks.py`). If it cannot be
compiled, differs, or cannot be kept, operations run as plain XLA, and the reason is logged once.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import msgspec

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
"""The environment variable that says what a process does about the library. "0": it has none. "1": it waits until the
library is compiled, and tries again what failed before. "unmeasured": like "1", but with the default limits, so that
they do not depend on how fast the machine was when they were measured. Unset: it waits for `START_SECONDS`."""
_SETTINGS = ("", "1", "0", "unmeasured")

LEVEL_VARIABLE = "JAXINFER_CPU_LEVEL"
"""The environment variable that names an instruction set (`build.LEVELS`) to compile for, instead of the CPU's best."""

FOLDER_VARIABLE = "JAXINFER_CPU_LIBRARY_FOLDER"
"""The environment variable that names a folder for libraries, instead of one in the user's cache folder."""

MAX_BYTES = 256 << 20
"""Bytes of all libraries together; the least recently used are deleted first."""
NEEDED_BYTES = 32 << 20
"""Bytes that the disk must have left for compiling to begin."""
START_SECONDS = 5.0
"""How long a process waits for a library that another process compiles."""
CPU_SECONDS = 600.0
"""CPU seconds that one run of the compiler may use, and the check. Wall time does not count: machines may be busy."""
GIVE_UP_SECONDS = 3600.0
"""Wall seconds after which a compiler or a check counts as hanging."""
RETRY_SECONDS = 24 * 3600.0
"""How long an error of the compiler or the check is remembered before it is tried again. Differences are for good."""

_BUILD = "jaxinfer.compiled.cpu_build"
_CHECKS = "jaxinfer.compiled.cpu_checks"

_COMPILED_QUICKLY = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
"""XLA's older code generator for fusions compiles in a third of the time, which is most of what a comparison takes."""

_log = logging.getLogger("jaxinfer.compiled")
_lock = threading.Lock()
_states: list["LibraryState"] = []
_builders: list[subprocess.Popen[bytes]] = []


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
    """The library, loaded into this process; compile it if needed. None: XLA runs alone."""
    return library_state().library


def library_state() -> LibraryState:
    """The library of this process, or why there is none: that of the first call, for all later ones."""
    with _lock:
        if not _states:
            state = find_library()
            if state.reason:
                _log.warning("XLA runs instead of CPU kernels: %s", state.reason)
            _states.append(state)
        return _states[0]


def begin_library(*, folder: Path = FOLDER) -> None:
    """Have the library compiled in the background unless it is kept, while a model is converted, for example."""
    with _lock:
        if _states or _builders or _setting() or not _possible(folder):
            return
        with contextlib.suppress(Exception):  # `library_state` says why
            maker = _Maker(find_compiler(), folder, _forced_level())
            if maker.kept() is None:
                maker.begin()


def library_files() -> KeptFiles:
    """The folder of libraries, each by its digest, and of what is known of them."""
    given = os.environ.get(FOLDER_VARIABLE)
    return KeptFiles(Path(given) if given else cache_folder() / "cpu_kernels", max_bytes=MAX_BYTES)


def find_library(*, folder: Path = FOLDER) -> LibraryState:
    """Find the library in the cache folder, or have it compiled.

    folder: of the rooms whose sources are compiled.
    Raises: ValueError for an unknown setting in the environment.
    """
    setting = _setting()
    if setting == "0" or not _possible(folder):
        return LibraryState()
    return _state(folder, wait=None if setting else START_SECONDS)


def build_library(*, folder: Path = FOLDER) -> LibraryState:
    """Compile the library, with progress, unless it is kept; return it, or why there is none."""
    return _state(folder, wait=None) if _possible(folder) else LibraryState()


def forget_failures() -> None:
    """Delete what is remembered of failures, so that the next process tries again."""
    files = library_files()
    for name in files.sizes():
        if (record := _Record.read(files, name)) is not None and record.failure:
            files.remove(name)


def _possible(folder: Path) -> bool:
    return sys.platform == "linux" and jax.default_backend() == "cpu" and bool(handlers(folder))


def _state(folder: Path, wait: float | None) -> LibraryState:
    """The library, or why there is none. wait: seconds for another process; None: compile it in this one."""
    level = _forced_level()
    try:
        maker = _Maker(find_compiler(), folder, level)
        if wait is None:
            return maker.make()
        return maker.kept() or maker.wait(wait)
    except Exception as error:  # kernels are optional: no mistake of theirs stops a process
        _log.debug("no CPU kernels", exc_info=True)
        return LibraryState(reason=str(error) or type(error).__name__)


def _setting() -> str:
    """Return what the environment says of the library."""
    setting = os.environ.get(VARIABLE, "")
    if setting not in _SETTINGS:
        raise ValueError(f"{VARIABLE} must be 1, 0 (no library) or unmeasured, got {setting!r}.")
    return setting


def _forced_level() -> str | None:
    """The level that the environment asks for, if any."""
    level = os.environ.get(LEVEL_VARIABLE) or None
    if level is not None and level not in LEVELS:
        raise ValueError(f"{LEVEL_VARIABLE} must be one of {', '.join(LEVELS)}, got {level!r}.")
    return level


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Record:
    """Facts about a library that are kept next to its code, as JSON.

    Attributes:
      failure: why it could not be compiled or checked, since `time`; then the rest is empty.
      operations, differences: what `cpu_checks` saw. limits: as of `Library`.
    """

    compiler: str
    time: float
    failure: str = ""
    digest: str = ""
    level: str = ""
    functions: tuple[str, ...] = ()
    operations: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()
    limits: dict[str, int] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, files: KeptFiles, name: str) -> "_Record | None":
        """Read a record; None if it is not there, or is something else."""
        if (text := files.get(name)) is None or not text.startswith(b"{"):
            return None
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.MsgspecError:
            return None

    @property
    def expired(self) -> bool:
        """Whether this is a failure that may be tried again."""
        return bool(self.failure) and time.time() - self.time >= RETRY_SECONDS


class _Maker:
    """Finds the library that a compiler makes of a folder, or has it made."""

    def __init__(self, compiler: Compiler, folder: Path, level: str | None):
        self.compiler, self.folder, self.level = compiler, folder, level
        self.files = library_files()
        self.measures = _setting() != "unmeasured"
        self.name = self._record_name()

    def kept(self) -> LibraryState | None:
        """Return what is kept: a library, which is loaded, or why there is none. None: it must be made."""
        record = _Record.read(self.files, self.name)
        if record is None or record.expired:
            return None
        if record.failure:
            return LibraryState(
                reason=f"{record.failure} (tried again after a day, or with {VARIABLE}=1)", compiler=record.compiler
            )
        return self._loaded(record)

    def make(self) -> LibraryState:
        """Return the library, or why there is none. Compile it here if it is not kept, or failed before.

        Raises OSError if nothing can be kept, or another process makes it for too long.
        """
        if (state := self.kept()) is not None and not state.reason:
            return state
        total = sum(file.suffix == ".cc" for file in source_files(self.folder))
        with long_work("compiling CPU kernels", total=total) as work, self.files.locked(seconds=GIVE_UP_SECONDS):
            if (state := self.kept()) is not None and (not state.reason or state.verdicts):  # by who held the lock
                return state
            if (free := shutil.disk_usage(self.files.folder).free) < NEEDED_BYTES:
                raise OSError(f"the disk of {self.files.folder} has {free >> 20} MB left; free some")
            self._keep(
                self._made(
                    lambda done: work.update(done=done), lambda: work.update(what="checking CPU kernels", done=total)
                )
            )
            if (state := self.kept()) is None:
                failure = "the library cannot be loaded here; is memory mounted without execution?"
                self._keep(_Record(compiler=self.compiler.version, time=time.time(), failure=failure))
                state = LibraryState(reason=failure)
        return state

    def wait(self, seconds: float) -> LibraryState:
        """Have another process make the library, and wait for it for so long."""
        builder = next((builder for builder in _builders if builder.poll() is None), None) or self.begin()
        with contextlib.suppress(subprocess.TimeoutExpired):
            builder.wait(seconds)
        reason = "they are still compiling, for the next start"
        return self.kept() or LibraryState(reason=reason)

    def begin(self) -> "subprocess.Popen[bytes]":
        """Start a process that makes the library."""
        self.files.make()
        builder = subprocess.Popen(
            [sys.executable, "-P", "-m", _BUILD, str(self.folder)],
            cwd=self.files.folder,
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # it outlives this process, and its Ctrl-C
        )
        threading.Thread(target=builder.wait, name="jaxinfer-cpu-kernels", daemon=True).start()  # reaps it
        _builders.append(builder)
        return builder

    def _keep(self, record: _Record) -> None:
        self.files.write(self.name, msgspec.json.encode(record))

    def _made(self, done: Callable[[int], None], checking: Callable[[], None]) -> _Record:
        """Compile, keep and check the library. Returns its record, or that of an error worth remembering.

        Raises OSError, and BuildError for what may be otherwise at the next start.
        """
        record = _Record(compiler=self.compiler.version, time=time.time())
        try:
            level = self._level()
            digest = build_digest(self.compiler, level, _cpu(), self.folder)
            if self.files.get(digest) is None:
                content = build(
                    self.compiler,
                    level,
                    cpu_seconds=CPU_SECONDS,
                    seconds=GIVE_UP_SECONDS,
                    folder=self.folder,
                    done=done,
                )
                self.files.write(digest, content)
            record = dataclasses.replace(record, digest=digest, level=level, functions=handlers(self.folder))
            checking()
            return dataclasses.replace(record, **self._checked(record))
        except BuildError as error:
            if not error.lasting:
                raise
            if record.digest:
                self.files.remove(record.digest)
            return _Record(compiler=record.compiler, time=record.time, failure=str(error))

    def _level(self) -> str:
        """The best level that the CPU, and the compiler, has; or the one that the environment asks for."""
        levels = levels_of(_cpu_flags())
        if self.level is not None:
            if self.level not in levels:
                raise BuildError(f"{LEVEL_VARIABLE}={self.level}: this CPU has {', '.join(levels)}")
            levels = (self.level,)
        accepted = next((level for level in levels if self.compiler.accepts(level)), None)
        if accepted is None:
            raise BuildError(f"{self.compiler.command[0]} compiles for none of {', '.join(levels)}", lasting=True)
        return accepted

    def _checked(self, record: _Record) -> dict[str, Any]:
        """Return what `cpu_checks` sees of a library. Raises BuildError."""
        compared = self._check("compare", record, _COMPILED_QUICKLY)
        seen: dict[str, Any] = {name: tuple(value) for name, value in compared.items()}
        if self.measures and seen["operations"] and not seen["differences"]:
            seen["limits"] = self._check("measure", record)
        return seen

    def _check(self, what: str, record: _Record, *flags: str) -> dict[str, Any]:
        """Run a part of `cpu_checks` in a process of its own, with these flags of XLA. Raises BuildError."""
        request = {"what": what, "folder": str(self.files.folder)}
        request |= {"digest": record.digest, "level": record.level, "functions": record.functions}
        try:
            (text,) = run(
                [[sys.executable, "-P", "-m", _CHECKS, json.dumps(request)]],
                cpu_seconds=CPU_SECONDS,
                seconds=GIVE_UP_SECONDS,
                environment=self._environment(*flags),
                folder=self.files.folder,
            )
        except BuildError as error:
            raise BuildError(f"the kernels cannot be checked: {error}", lasting=error.lasting) from error
        return _last_line(text)

    def _environment(self, *flags: str) -> dict[str, str]:
        """The environment of a process of ours: it imports this package, on the CPU, and nothing of the folder
        that this process runs in. flags: of XLA, before those of this process."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
        all_flags = " ".join((*flags, os.environ.get("XLA_FLAGS", "")))
        environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": _without_dumps(all_flags)}
        root = str(Path(__file__).parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        return environment

    def _loaded(self, record: _Record) -> LibraryState | None:
        """Load the library of a record. None: it is not there, or cannot be loaded."""
        verdict = "differs" if record.differences else "verified" if record.operations else "unverified"
        verdicts = dict.fromkeys(LEVELS, "unverified") | {record.level: verdict}
        seen = {"compiler": record.compiler, "operations": record.operations, "verdicts": verdicts}
        if record.differences:
            differences = "; ".join(record.differences[:3])
            reason = f"{record.level} kernels by {record.compiler} differ from XLA's results: {differences}"
            return LibraryState(reason=reason, **seen)
        library = Library(
            digest=record.digest,
            level=record.level,
            functions=record.functions,
            limits=tuple(sorted(record.limits.items())),
        )
        if (content := self.files.get(library.digest)) is None:
            return None
        try:
            load_library(library, content)
        except OSError as error:
            _log.info("the library of CPU kernels is compiled again, since it cannot be loaded: %s", error)
            with contextlib.suppress(OSError):
                self.files.remove(library.digest)
            return None
        return LibraryState(library=library, file=self.files.folder / library.digest, **seen)

    def _record_name(self) -> str:
        """The name of the record: a digest of what is compiled, and of all that the checks depend on."""
        digest = hashlib.sha256(build_digest(self.compiler, self.level or "generic", _cpu(), self.folder).encode())
        for file in sorted(FOLDER.rglob("*.py")):
            digest.update(file.read_bytes())
        digest.update(Path(__file__).with_name("cpu_checks.py").read_bytes())
        conditions: list[object] = [self.level, self.measures]
        if self.measures:  # how fast XLA is depends on these
            cores = len(os.sched_getaffinity(0))
            conditions += [cores, os.environ.get("NPROC"), _without_dumps(os.environ.get("XLA_FLAGS", ""))]
        digest.update(repr(conditions).encode())
        return digest.hexdigest()


def _last_line(text: str) -> dict[str, Any]:
    """The JSON that a check prints last. Raises BuildError if there is none."""
    try:
        return json.loads(text.splitlines()[-1])
    except (IndexError, json.JSONDecodeError) as error:
        raise BuildError("the check printed no result") from error


def _without_dumps(flags: str) -> str:
    return " ".join(flag for flag in flags.split() if not flag.startswith("--xla_dump"))


def _cpu() -> tuple[str, ...]:
    """Describe the processor."""
    return (cpu_model(), *_cpu_flags())


def _cpu_flags() -> list[str]:
    return cpu_fields().get("flags", "").split()

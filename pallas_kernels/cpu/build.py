"""Compiles the CPU kernels by the C++ compiler that is on this machine."""

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import os
import re
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import jax

FOLDER = Path(__file__).parents[1]
"""The folder of the rooms, which includes are relative to."""

COMPILERS = ("c++", "g++", "clang++")
"""Names of C++ compilers, in the order in which they are looked for."""

OPTIONS = (
    "-std=c++17",
    # As fast as -O3 here, in three quarters of its time: what is hot is written as vectors.
    *("-O2", "-ftree-vectorize", "-fvect-cost-model=dynamic", "-fno-exceptions"),
    *("-fPIC", "-fno-semantic-interposition", "-w"),
)

_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq")
_VNNI = (*_AVX512, "avx512vnni")
_BF16 = (*_VNNI, "avx512bf16")
LEVELS: dict[str, tuple[str, ...]] = {
    "amx": (*_BF16, "amx-tile", "amx-int8", "amx-bf16"),
    "avx512_bf16": _BF16,
    "avx512_vnni": _VNNI,
    "avx512": _AVX512,
    "avx2": _AVX2,
    "generic": (),
}
"""Instruction sets, the best first: what they need of the CPU, as names of the compiler's options -m."""

_LINUX_NAMES = {
    "avx512vnni": "avx512_vnni",
    "avx512bf16": "avx512_bf16",
    "amx-tile": "amx_tile",
    "amx-int8": "amx_int8",
    "amx-bf16": "amx_bf16",
}
"""Names in /proc/cpuinfo where they differ from the compiler's."""

_ANSWER = 120.0
"""Wall seconds in which a compiler must answer what takes it none, on a machine however busy."""

_HANDLER = re.compile(r"^JAXINFER_HANDLER\((jaxinfer_\w+)", re.MULTILINE)
_EXPORTS = b"{ global: jaxinfer_*; local: *; };\n"


_PASSING = re.compile("killed|no space|memory|time limit", re.IGNORECASE)
"""In an error of a compiler: it may be otherwise the next time."""
_PASSING_SIGNALS = tuple(-number for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGXCPU))


class BuildError(RuntimeError):
    """The kernels cannot be compiled here; the message says why, in one line.

    lasting: whether it will be so the next time, too, as errors in a source are, and a full disk is not.
    """

    def __init__(self, message: str, *, lasting: bool = False):
        super().__init__(message)
        self.lasting = lasting


@dataclasses.dataclass(frozen=True)
class Compiler:
    """A C++ compiler: the command that runs it, and the first line of what it says of its version."""

    command: tuple[str, ...]
    version: str

    def accepts(self, level: str) -> bool:
        """Return whether it can compile for a level. Raises BuildError if it does not answer."""
        try:
            run([[*self.command, *level_options(level), "-fsyntax-only", "-x", "c++", os.devnull]], seconds=_ANSWER)
        except BuildError as error:
            if error.lasting:
                return False
            raise
        return True


def find_compiler() -> Compiler:
    """Find the compiler that $CXX names, else the first of `COMPILERS` on the PATH. Raises BuildError without any."""
    try:
        given = shlex.split(os.environ.get("CXX", ""))
    except ValueError as error:
        raise BuildError(f"CXX={os.environ['CXX']} is no command: {error}") from error
    if given:
        path = shutil.which(given[0])
        if path is None:
            raise BuildError(f"CXX={given[0]} is not there: name a C++ compiler, or unset it")
        command = (path, *given[1:])
    else:
        path = next(filter(None, map(shutil.which, COMPILERS)), None)
        if path is None:
            raise BuildError("there is no C++ compiler: install g++ or clang++, or name one in CXX")
        command = (path,)
    (text,) = run([[*command, "--version"]], seconds=_ANSWER)
    return Compiler(command, text.partition("\n")[0].strip())


def level_options(level: str) -> tuple[str, ...]:
    """The compiler's options for a level."""
    return tuple(f"-m{name}" for name in LEVELS[level])


def levels_of(cpu_flags: Sequence[str]) -> tuple[str, ...]:
    """The levels that a CPU has, the best first. cpu_flags: as Linux lists them."""
    has = set(cpu_flags)
    return tuple(level for level, names in LEVELS.items() if all(_LINUX_NAMES.get(name, name) in has for name in names))


def source_files(folder: Path = FOLDER) -> list[Path]:
    """The C++ files of a folder of rooms: headers and sources."""
    return sorted(file for pattern in ("cpu/*", "*/cpu/*") for file in folder.glob(pattern) if _is_source(file))


def _is_source(file: Path) -> bool:
    return file.suffix in (".h", ".cc")


def handlers(folder: Path = FOLDER) -> tuple[str, ...]:
    """The names of the functions that XLA can call."""
    texts = (file.read_text() for file in source_files(folder) if file.suffix == ".cc")
    return tuple(sorted(name for text in texts for name in _HANDLER.findall(text)))


def ffi_version() -> str:
    """The version of XLA's foreign functions in the headers of the jaxlib that is installed."""
    text = Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h").read_text()
    return ".".join(re.findall(r"^#define XLA_FFI_API_(?:MAJOR|MINOR) (\d+)$", text, re.MULTILINE))


def build_digest(compiler: Compiler, level: str, cpu: Sequence[str], folder: Path = FOLDER) -> str:
    """The name of what `build` makes: a digest of all that it depends on. cpu: describes the processor."""
    digest = hashlib.sha256()
    for file in source_files(folder):
        content = file.read_bytes()
        digest.update(f"{file.relative_to(folder)} {len(content)}\n".encode())
        digest.update(content)
    options = (*OPTIONS, *level_options(level))
    for text in (
        *compiler.command,
        compiler.version,
        *options,
        level,
        *cpu,
        importlib.metadata.version("jaxlib"),
        ffi_version(),
    ):
        digest.update(f"{text}\n".encode())
    return digest.hexdigest()


def build(
    compiler: Compiler,
    level: str,
    *,
    seconds: float,
    cpu_seconds: float | None = None,
    folder: Path = FOLDER,
    options: Sequence[str] = (),
    done: Callable[[int], None] = lambda files: None,
) -> bytes:
    """Compile all sources, at the same time, and link them.

    Args:
      compiler: that of `find_compiler`. level: one of `LEVELS`.
      seconds, cpu_seconds: as of `run`, for all together and for each run of the compiler.
      folder: of the rooms.
      options: further options of the compiler.
      done: is told how many files are compiled.
    Returns: the shared object. Raises: BuildError.
    """
    sources = [file for file in source_files(folder) if file.suffix == ".cc"]
    includes = (f"-I{jax.ffi.include_dir()}", f"-I{folder}", f"-I{FOLDER}")
    command = (*compiler.command, *OPTIONS, *level_options(level), *options)
    try:
        with tempfile.TemporaryDirectory(prefix="jaxinfer-") as temporary:
            objects = [str(Path(temporary, f"{file.stem}.o")) for file in sources]
            run(
                [
                    [*command, *includes, "-c", str(file), "-o", compiled]
                    for file, compiled in zip(sources, objects, strict=True)
                ],
                seconds=seconds,
                cpu_seconds=cpu_seconds,
                done=done,
            )
            exports, library = Path(temporary, "exports"), Path(temporary, "library.so")
            exports.write_bytes(_EXPORTS)
            link = [*command, "-shared", f"-Wl,--version-script={exports}", "-o", str(library), *objects]
            run([link], seconds=seconds)
            return library.read_bytes()
    except OSError as error:
        raise BuildError(f"the kernels cannot be compiled: {error}") from error


def run(
    commands: Sequence[Sequence[str]],
    *,
    seconds: float,
    cpu_seconds: float | None = None,
    done: Callable[[int], None] = lambda ended: None,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> list[str]:
    """Run commands at the same time, and return what each wrote to stdout.

    Args:
      commands: each a program and its arguments.
      seconds: wall seconds that they may take together. cpu_seconds: CPU seconds that each may use.
      done: is told how many have ended.
      environment: the variables that they see; None: those of this process.
      folder: that they run in; None: this process's.
    Raises: BuildError for one that cannot start, fails, or takes too long; no process is left then.
    """
    limit: list[str] = []
    if cpu_seconds is not None:  # by a shell, whose limit is there before the command is
        limit = ["/bin/sh", "-c", f'ulimit -t {cpu_seconds:.0f}; exec "$@"', "sh"]
    try:
        with contextlib.ExitStack() as stack:
            return _outputs(stack, commands, limit, seconds, done, environment, folder)
    except OSError as error:
        raise BuildError(f"{commands[0][0]} cannot run: {error}") from error


def _outputs(
    stack: contextlib.ExitStack,
    commands: Sequence[Sequence[str]],
    limit: Sequence[str],
    seconds: float,
    done: Callable[[int], None],
    environment: Mapping[str, str] | None,
    folder: Path | None,
) -> list[str]:
    outputs, errors = ([stack.enter_context(_file()) for _ in commands] for _ in range(2))
    processes = [
        stack.enter_context(_started([*limit, *command], output, error, environment, folder))
        for command, output, error in zip(commands, outputs, errors, strict=True)
    ]
    end, pause = time.monotonic() + seconds, 0.001
    while True:
        ended = sum(process.poll() is not None for process in processes)
        done(ended)
        for i, process in enumerate(processes):
            _check(commands[i], process, errors[i])
        if ended == len(processes):
            return [_text(file) for file in outputs]
        if time.monotonic() > end:
            raise BuildError(f"{commands[0][0]} took longer than {seconds:.0f} s")
        time.sleep(pause)
        pause = min(1.5 * pause, 0.05)


def _file() -> IO[str]:
    return tempfile.TemporaryFile("w+", errors="replace")


@contextlib.contextmanager
def _started(
    command: Sequence[str], stdout: IO[str], stderr: IO[str], environment: Mapping[str, str] | None, folder: Path | None
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command in a group of its own, which is ended with what it started unless it has ended."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        env=environment,
        cwd=folder,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _check(command: Sequence[str], process: subprocess.Popen[bytes], stderr: IO[str]) -> None:
    """Raise BuildError if a command has failed, with the line in which it says what is wrong."""
    if not process.poll():
        return
    lines = [line.strip() for line in _text(stderr).splitlines() if line.strip()]
    ended = f"signal {-process.returncode}" if process.returncode < 0 else f"status {process.returncode}"
    reason = next((line for line in lines if "error" in line), lines[-1] if lines else ended)
    passing = process.returncode in _PASSING_SIGNALS or _PASSING.search(reason) is not None
    raise BuildError(f"{command[0]} fails: {reason}", lasting=not passing)


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()

"""Libraries of CPU kernels for tests: this machine's, and those of the lesser instruction sets that its CPU has."""

import functools
import hashlib
from pathlib import Path

import pytest

from jaxinfer.compiled.cpu_library import LibraryState, library_files, library_state
from jaxinfer.disk_cache.processor import cpu_fields
from jaxinfer.pallas_kernels.cpu.build import (
    LEVELS,
    BuildError,
    build,
    build_digest,
    find_compiler,
    handlers,
    levels_of,
)
from jaxinfer.pallas_kernels.cpu.library import Library, load_library

LEVELS_OF_TESTS = [
    pytest.param(None, id="this machine's"),
    *(pytest.param(level, marks=pytest.mark.slow) for level in LEVELS),
]
"""Parameters of tests: instruction sets; None: the best that the CPU has."""

EMULATED_AMX = "emulated AMX"
"""A level of tests alone: kernels for AMX, whose instructions are plain C++, on a CPU of the next lesser level."""
EMULATED_LEVEL = "avx512_bf16"
EMULATION = Path(__file__).with_name("emulated_amx.h")

LEVELS_OF_PRODUCTS = [*LEVELS_OF_TESTS, pytest.param(EMULATED_AMX, marks=pytest.mark.slow)]
"""Parameters of tests of what uses AMX where it is."""


def has_compiler() -> bool:
    """Return whether there is a C++ compiler."""
    try:
        find_compiler()
    except BuildError:
        return False
    return True


def machine_state() -> LibraryState:
    """Return the library of this machine and what is known of it; skip the test if there is no compiler to have one.

    With a compiler it must be there: otherwise a mistake in a source would leave its tests out.
    """
    state = library_state()
    if state.library is not None:
        return state
    if not state.reason:
        pytest.skip("this process does without CPU kernels")
    try:
        find_compiler()
    except BuildError as error:
        pytest.skip(str(error))
    pytest.fail(state.reason)


@functools.cache
def library_of(level: str | None) -> Library:
    """Return the library for a level, compiled once for all workers; skip the test if it cannot run here."""
    if level is None:
        library = machine_state().library
        assert library is not None
        return library
    if level == EMULATED_AMX:
        return _built(EMULATED_LEVEL, EMULATION)
    return _built(level)


def _built(level: str, included: Path | None = None) -> Library:
    """Return the library for a level, with a header before each source."""
    flags = cpu_fields().get("flags", "").split()
    if level not in levels_of(flags):
        pytest.skip(f"this CPU has no {level}")
    try:
        compiler = find_compiler()
    except BuildError as error:
        pytest.skip(str(error))
    if not compiler.accepts(level):
        pytest.skip(f"the compiler knows no {level}")
    digest, options = build_digest(compiler, level, flags), []
    if included is not None:
        digest = hashlib.sha256(digest.encode() + included.read_bytes()).hexdigest()
        options = ["-include", str(included)]
    library = Library(digest=digest, level=level, functions=handlers())
    files = library_files()
    with files.locked(seconds=3600):
        if (content := files.get(library.digest)) is None:
            content = build(compiler, level, seconds=3600, options=options)
            files.write(library.digest, content)
    load_library(library, content)
    return library

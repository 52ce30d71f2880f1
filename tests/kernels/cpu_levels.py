"""Libraries of CPU kernels for tests: this machine's, and those of the lesser instruction sets that its CPU has."""

import functools

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
    flags = cpu_fields().get("flags", "").split()
    if level not in levels_of(flags):
        pytest.skip(f"this CPU has no {level}")
    try:
        compiler = find_compiler()
    except BuildError as error:
        pytest.skip(str(error))
    if not compiler.accepts(level):
        pytest.skip(f"the compiler knows no {level}")
    library = Library(digest=build_digest(compiler, level, flags), level=level, functions=handlers())
    files = library_files()
    with files.locked(seconds=300):
        if (content := files.get(library.digest)) is None:
            content = build(compiler, level, seconds=200)
            files.write(library.digest, content)
    load_library(library, content)
    return library

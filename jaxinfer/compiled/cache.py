"""All executables of one model: compiled ahead or in the background, found by their sizes."""

import contextlib
import contextvars
import functools
import os
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from jaxinfer.compiled.background import Step, Turns, compile_in_background
from jaxinfer.compiled.cpu_library import cpu_library
from jaxinfer.compiled.executables import ExecutableStore
from jaxinfer.compiled.interruptible import run_all
from jaxinfer.compiled.mappings import check_mappings
from jaxinfer.compiled.program import Program, Sizes
from jaxinfer.compiled.spec import ProgramSpec
from jaxinfer.pallas_kernels.choices import Call, recorded_calls, supported
from jaxinfer.pallas_kernels.cpu.library import Library, use_library
from jaxinfer.pallas_kernels.dispatch import allow_kernels
from jaxinfer.progress import LongWork, current_progress, long_work, showing

_forbidding: contextvars.ContextVar[frozenset["ProgramCache[Any]"]] = contextvars.ContextVar(
    "forbidding", default=frozenset()
)
"""The caches that may not compile for this thread or task."""

BACKGROUND_DELAY = 1.0
"""Seconds before the background begins: a script that ends with its first answer does not wait for more programs."""


class CompileMissError(RuntimeError):
    """A program was needed that was not compiled ahead, while compiling was forbidden."""


class ProgramCache[Buckets]:
    """Finds the executable for some sizes, reading it from disk or compiling it if needed.

    Args:
      specs: the programs, each with its own class of sizes.
      mesh: the devices they are divided over, or None for one device.
      kernels: whether operations may run as kernels.
      store: where executables are kept between processes; None: nowhere.
      turns: shared by caches whose calls go before the background of all; None: its own.

    Attributes:
      misses: the number of programs that were made when a call needed them, rather than ahead of time.
      turns: who compiles first. When they have been stopped, nothing is compiled ahead or in the background.
    """

    def __init__(
        self,
        specs: Iterable[ProgramSpec[Any, Buckets]],
        *,
        mesh: jax.sharding.Mesh | None = None,
        kernels: bool = True,
        store: ExecutableStore | None = None,
        turns: Turns | None = None,
    ):
        self._specs = {spec.sizes: spec for spec in specs}
        self._mesh, self._kernels, self._store = mesh, kernels, store
        self._programs: dict[Sizes, Program] = {}
        self._locks: dict[Sizes, threading.Lock] = {}
        self._progress = current_progress()  # the owner's, also for calls in other threads
        self.misses, self.turns = 0, turns or Turns()

    def get(self, sizes: Sizes) -> Program:
        """Return the program for these sizes; a missing one is compiled before any in the background.

        Raises CompileMissError under `forbid_compile` if it is missing, MappingsError.
        """
        if sizes not in self._programs:
            if self in _forbidding.get():
                known = sorted(str(other) for other in list(self._programs) if type(other) is type(sizes))
                raise CompileMissError(
                    f"Program {sizes.program!r} is not compiled for {sizes} and compiling is forbidden; "
                    f"compiled: {known or 'none'}. Compile it ahead of time."
                )
            self.misses += 1
            with self._compiling([sizes]):
                self._compile(sizes)
        return self._programs[sizes]

    def compile_ahead(self, buckets: Buckets, *, workers: int | None = None) -> int:
        """Compile all that calls can ask for within these buckets, several at a time; returns how many were missing.

        XLA compiles without the GIL; tracing holds it. Ctrl-C ends the call at once; what XLA was compiling is finished
        in the background, and a later call finds it. So does the end of `turns`, if there are several workers.

        Raises StoppedError, MappingsError.
        """
        missing = self._missing(buckets)
        if missing:
            with self._compiling(missing) as work:

                def compile_one(sizes: Sizes) -> None:
                    self.turns.check()
                    self._compile(sizes)
                    work.advance()

                if workers == 1:
                    for sizes in missing:
                        compile_one(sizes)
                else:
                    run_all(compile_one, missing, workers or os.cpu_count() or 1, self.turns.check)
        return len(missing)

    def compile_in_background(self, buckets: Buckets) -> None:
        """Compile all that calls can ask for within these buckets, one at a time, until `turns` are stopped.

        An error ends it with a warning: calls compile what they need. Arguments of the programs stay in memory until
        the one that is being compiled is done: specs should have shapes in place of arrays.
        """
        missing = self._missing(buckets)

        def next_step(tried: set[Sizes]) -> tuple[Sizes, Step] | None:
            sizes = next((sizes for sizes in missing if sizes not in self._programs), None)
            if sizes is None or any(failed not in self._programs for failed in tried):
                return None
            why = f"{sizes.program}({sizes}) could not be compiled in the background"
            failure = f"Programs are compiled only when a request needs them, since {why}"
            return sizes, Step(functools.partial(self._compile, sizes), failure)

        if missing:
            compile_in_background(self.turns, next_step, delay=BACKGROUND_DELAY)

    def _missing(self, buckets: Buckets) -> list[Sizes]:
        """Return what calls can ask for within these buckets and is not compiled."""
        reachable = (sizes for spec in self._specs.values() for sizes in spec.reachable(buckets))
        return [sizes for sizes in dict.fromkeys(reachable) if sizes not in self._programs]

    def calls(self, buckets: Buckets) -> list[Call]:
        """Trace all that calls can ask for within these buckets, and return the operations that leave a choice.

        Equal calls are in it once. Nothing is compiled.
        """
        calls: dict[tuple[str, str], Call] = {}
        with use_library(self._library()), allow_kernels(self._kernels):
            for spec in self._specs.values():
                for sizes in spec.reachable(buckets):
                    with recorded_calls() as recorded:
                        spec.lower(sizes, self._mesh)
                    calls |= {(call.operation, call.shapes): call for call in recorded}
            return [call for call in calls.values() if len(supported(call)) > 1]

    @property
    def cpu_kernels(self) -> str | None:
        """The instruction set of the CPU kernels that programs are traced with; None: plain XLA, or a GPU."""
        library = self._library()
        return library and library.level

    def _library(self) -> Library | None:
        """The CPU kernels that programs are traced with."""
        return cpu_library() if self._kernels else None

    @contextlib.contextmanager
    def _compiling(self, missing: list[Sizes]) -> Iterator[LongWork]:
        """Show that these are compiled, while the background begins nothing."""
        what = "compiling programs" if len(missing) > 1 else f"compiling {missing[0].program}({missing[0]})"
        with self.turns.first(), showing(self._progress), long_work(what, total=len(missing)) as work:
            self._library()  # before threads need it
            yield work

    def _compile(self, sizes: Sizes) -> None:
        with self._locks.setdefault(sizes, threading.Lock()):
            if sizes not in self._programs:
                check_mappings()
                self._programs[sizes] = self._specs[type(sizes)].compile(
                    sizes, mesh=self._mesh, kernels=self._kernels, store=self._store
                )

    @contextlib.contextmanager
    def forbid_compile(self) -> Iterator[None]:
        """Make a missing program an error instead of a pause, for this thread or task alone."""
        before = _forbidding.set(_forbidding.get() | {self})
        try:
            yield
        finally:
            _forbidding.reset(before)

    def __contains__(self, sizes: Sizes) -> bool:
        return sizes in self._programs

    def __iter__(self) -> Iterator[Program]:
        return iter(list(self._programs.values()))  # others may be added meanwhile

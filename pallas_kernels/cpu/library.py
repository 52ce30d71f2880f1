"""The library of CPU kernels that programs are traced with: which build, and how operations call its functions.

A library is C++ of the rooms' `cpu/` folders, compiled on this machine (`build.py`; `jaxinfer/compiled/cpu_library.py`
keeps it). The one in use is a context of JAX's traces, so that it is in the key of every executable. Targets of foreign
functions have the digest of their build in their names: several builds can be in one process, and an executable that
was kept never runs another one's code.
"""

import contextlib
import ctypes
import dataclasses
import os
import threading
from typing import Any

import jax
import numpy as np

from jaxinfer.pallas_kernels.target import UnsupportedError

DEFAULT_ROWS = 32
"""Rows up to which a product is the library's, where nothing was measured."""

_lock = threading.Lock()
_loaded: set[str] = set()
_library = jax.make_user_context(None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Library:
    """A build of the CPU kernels, as plain data.

    Attributes:
      digest: names the code: sources, compiler, its options, versions of what it was built against.
      level: the instruction set it is compiled for (`build.LEVELS`).
      functions: the handlers that it has.
      limits: (dtype of the stored matrix, most rows of x that it multiplies faster than XLA), as measured.
    """

    digest: str
    level: str
    functions: tuple[str, ...]
    limits: tuple[tuple[str, int], ...] = ()

    def most_rows(self, dtype: jax.typing.DTypeLike) -> int:
        """The most rows of x that this library multiplies by a matrix stored in a dtype (uint16: int4)."""
        return dict(self.limits).get(np.dtype(dtype).name, DEFAULT_ROWS)

    def target(self, function: str) -> str:
        """The name under which XLA knows a function of this build."""
        return f"{function}_{self.digest[:12]}"


def use_library(library: Library | None) -> contextlib.AbstractContextManager[None]:
    """Run operations by this library's kernels, in what this thread traces inside; None: by XLA alone."""
    return _library(library)


def library_or_none() -> Library | None:
    """The library in use, if any."""
    return _library.value


def most_rows(dtype: jax.typing.DTypeLike) -> int:
    """The most rows of x that the library in use multiplies by a matrix stored in a dtype; without one, none."""
    library = library_or_none()
    return 0 if library is None else library.most_rows(dtype)


def ffi_call(
    function: str, results: Any, *args: jax.Array, aliases: dict[int, int] | None = None, **static: Any
) -> Any:
    """Call a function of the library in use.

    Args:
      function: the handler's symbol, such as "jaxinfer_linear".
      results: a pytree of `jax.ShapeDtypeStruct`s.
      args: arrays. static: attributes, which are numpy scalars or text.
      aliases: positions of arguments, and those of the results that may overwrite them.
    Returns: arrays like `results`.
    Raises: UnsupportedError if the library has no such function.
    """
    library = library_or_none()
    assert library is not None, "foreign functions are called where a library is in use"
    if function not in library.functions:
        raise UnsupportedError(f"the library of CPU kernels has no {function}")
    name = library.target(function)
    return jax.ffi.ffi_call(name, results, vmap_method="sequential", input_output_aliases=aliases)(*args, **static)


def load_library(library: Library, content: bytes) -> None:
    """Load a build into this process, once, and tell XLA of its functions.

    The content goes through memory, so that what is loaded is what was read, wherever programs may lie.

    Args:
      library: what it is. content: the shared object.
    Raises: OSError if it cannot be loaded, or lacks a function.
    """
    with _lock:
        if library.digest in _loaded:
            return
        shared = _load(f"jaxinfer_{library.digest[:12]}", content)
        try:
            handlers = {function: getattr(shared, function) for function in library.functions}
        except AttributeError as error:
            raise OSError(str(error)) from error
        for function, handler in handlers.items():
            jax.ffi.register_ffi_target(library.target(function), jax.ffi.pycapsule(handler), platform="cpu")
        _loaded.add(library.digest)


def _load(name: str, content: bytes) -> ctypes.CDLL:
    handle = os.memfd_create(name)
    try:
        with open(handle, "wb", closefd=False) as opened:
            opened.write(content)
        return ctypes.CDLL(
            f"/proc/self/fd/{handle}"
        )  # stays open: glibc takes a path that it knows for the same library
    except BaseException:
        os.close(handle)
        raise

"""Chooses which implementation of an operation runs. The only module that asks about platforms.

An `Operation` has implementations in order of preference. Those of a platform (a Mosaic kernel or cuDNN on "cuda", an
order of loops that suits caches on "cpu") come before those that run everywhere: XLA's, which may be composed of other
operations, and the reference. Kernels of a CPU run where a library of them is in use (`cpu/`). An implementation that
does not support a shape or dtype raises `UnsupportedError`, which names the constraint; the next one then runs. That a
GPU's kernel refuses is logged once.

Measurements on the device (`choices.py`) come before the order.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, get_abstract_mesh

from jaxinfer.pallas_kernels.choices import Call, example_arguments, preferred
from jaxinfer.pallas_kernels.cpu.library import library_or_none
from jaxinfer.pallas_kernels.implementation import Implementation
from jaxinfer.pallas_kernels.target import (
    FEATURES,
    UnsupportedError,
    gpu_or_none,
    interpreting,
    is_ahead_of_time,
    target_gpu,
)

_ALL = "all operations"

_log = logging.getLogger("jaxinfer.kernels")
_disabled = jax.make_user_context(frozenset())
_platform = jax.make_user_context(None)
_refusals: ContextVar[dict[str, str] | None] = ContextVar("refusals", default=None)
_used: ContextVar[dict[str, dict[Implementation, None]] | None] = ContextVar("used", default=None)


class Operation:
    """An operation that models call: `operation(*args, **static)`.

    Attributes:
      name: for the log, `without_kernels`, and measured choices.
      implementations: in order of preference. The last one runs on every platform and takes all arguments.
      example: makes arguments to measure with from their shapes (`choices.measure`).
    """

    def __init__(
        self, name: str, *implementations: Implementation, example: Callable[..., tuple[Any, ...]] = example_arguments
    ):
        self.name, self.implementations, self.example = name, implementations, example

    def __call__(self, *args: Any, **static: Any) -> Any:
        """Compute the operation by the first implementation that supports platform and arguments.

        Args:
          args: pytrees of arrays. static: hashable options.
        """
        platforms = _platforms()
        candidates = self.candidates(platforms[0])
        if len(candidates) > 1:
            candidates = preferred(Call(self.name, candidates, args, static, self.example))
        refusal = None
        for implementation in candidates:
            if refusal is not None and implementation.platform != "cuda":
                _note_refusal(self.name, refusal)
                refusal = None
            try:
                result = self._callable(implementation, platforms, static)(*args)
            except UnsupportedError as error:
                refusal = None if implementation.platform != "cuda" or interpreting() else str(error)
            else:
                _note_implementation(self.name, implementation)
                return result
        raise AssertionError(f"{self.name} has no implementation for {platforms[0]}")

    def candidates(self, platform: str) -> tuple[Implementation, ...]:
        """The implementations for a platform, in order of preference."""
        kernels = None if self.disabled else _platform_of_kernels(platform)
        return tuple(
            candidate
            for candidate in self.implementations
            if (candidate.platform == kernels if candidate.is_kernel else candidate.platform in (None, platform))
        )

    @property
    def disabled(self) -> bool:
        """Whether `without_kernels` names it."""
        return not _disabled.value.isdisjoint((self.name, _ALL))

    def _callable(
        self, implementation: Implementation, platforms: tuple[str, ...], static: dict[str, Any]
    ) -> Callable[..., Any]:
        """The function to call: the implementation, or one that chooses among platforms when it is lowered."""
        implementation.check()
        differs = len(platforms) > 1 and self.candidates(platforms[1])[0] is not implementation
        if interpreting() or not (differs or implementation.platform == "cuda"):
            return functools.partial(implementation.call, **static)
        return _jitted(self, implementation, platforms if differs else (), tuple(static.items()))


@functools.cache
def _jitted(
    operation: Operation,
    implementation: Implementation,
    platforms: tuple[str, ...],
    static: tuple[tuple[str, Any], ...],
) -> Callable[..., Any]:
    """An implementation under `jit`, with that of the second of two platforms beside it, if any are given.

    A program calls an operation once per layer. `jax.jit` traces and lowers equal calls only once, which takes a
    fifteenth of the time for twenty layers.
    """
    call = functools.partial(implementation.call, **dict(static))

    def on(platform: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def run_on(*args: Any) -> Any:
            with _platform(platform):  # also what it calls is for this platform
                return run(*args)

        return run_on

    def by_platform(*args: Any) -> Any:
        if not platforms:
            return call(*args)
        first, second = platforms
        on_second = on(second, functools.partial(operation, **dict(static)))
        return lax.platform_dependent(*args, **{second: on_second}, default=on(first, call))

    by_platform.__name__ = implementation.call.__name__
    return jax.jit(by_platform)


def _platforms() -> tuple[str, ...]:
    """The platforms that a program traced now may be lowered for, the likely one first."""
    if _platform.value is not None:
        return (_platform.value,)
    if interpreting() or (gpu_or_none() is None and jax.default_backend() == "cpu"):
        return ("cpu",)
    if is_ahead_of_time():
        return ("cuda",)
    return ("cuda" if gpu_or_none() is not None else jax.default_backend(), "cpu")


def _platform_of_kernels(platform: str) -> str | None:
    """The platform whose kernels a program traced now for `platform` may contain, if any.

    The interpreter runs a GPU's kernels on a CPU.
    """
    if interpreting():
        return "cuda"
    if platform == "cpu":
        return "cpu" if library_or_none() is not None and not _is_partitioned() else None
    return platform if platform == "cuda" and kernels_available() else None


def without_kernels(*names: str) -> contextlib.AbstractContextManager[None]:
    """Disable the kernels of the named operations (of all, if none is named) for what this thread traces inside."""
    return _disabled(frozenset(names or (_ALL,)))


def allow_kernels(allowed: bool) -> contextlib.AbstractContextManager[None]:
    """Leave kernels enabled for what this thread traces inside, or disable them all."""
    return contextlib.nullcontext() if allowed else without_kernels()


@contextlib.contextmanager
def recorded_refusals() -> Iterator[dict[str, str]]:
    """Collect why kernels refused what is traced inside, by operation."""
    refusals: dict[str, str] = {}
    token = _refusals.set(refusals)
    try:
        yield refusals
    finally:
        _refusals.reset(token)


@contextlib.contextmanager
def recorded_implementations() -> Iterator[dict[str, dict[Implementation, None]]]:
    """Collect the implementations of what is traced inside, by operation, in the order of their first calls."""
    used: dict[str, dict[Implementation, None]] = {}
    token = _used.set(used)
    try:
        yield used
    finally:
        _used.reset(token)


def kernels_available() -> bool:
    """Return whether a program traced now may contain GPU kernels: JAX 0.11, compute capability 9.0 or newer.

    Meshes with automatic (GSPMD) axes have none, because XLA cannot partition a kernel. Inside `shard_map`, kernels run
    on each device.
    """
    if _is_partitioned():
        return False
    if (gpu := gpu_or_none()) is None:
        return False
    if not gpu.has("mosaic"):
        major, minor = gpu.capability
        _warn_once(f"{gpu.name} (sm_{major}{minor}) runs plain XLA: {FEATURES['mosaic'].missing}")
        return False
    return _jax_lowers_kernels()


def _is_partitioned() -> bool:
    """Return whether XLA divides what is traced now over devices: the mesh has automatic axes."""
    mesh = get_abstract_mesh()
    axes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return any(size > 1 for size, kind in axes if kind is AxisType.Auto)


def _note_refusal(operation: str, reason: str) -> None:
    _warn_once(f"{operation} runs as plain XLA on {target_gpu().name}: {reason}")
    if (refusals := _refusals.get()) is not None:
        refusals[operation] = reason


def _note_implementation(operation: str, implementation: Implementation) -> None:
    if (used := _used.get()) is not None:
        used.setdefault(operation, {})[implementation] = None


@functools.cache
def _jax_lowers_kernels() -> bool:
    """Return whether this JAX does. Mosaic changes with every release: 0.12 infers no layout for some kernels."""
    if jax.__version_info__ < (0, 12):
        return True
    _warn_once(f"kernels need JAX 0.11, this is {jax.__version__}: using plain XLA instead")
    return False


@functools.cache
def _warn_once(message: str) -> None:
    _log.warning(message)

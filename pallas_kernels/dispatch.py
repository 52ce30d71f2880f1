"""Chooses what an operation runs: its Mosaic GPU kernel if the GPU and the shapes allow it, otherwise its fallback.

A fallback is plain JAX: a reference (`*_reference`), or a composition of other dispatched operations (`*_fallback`).
This is the only module that asks about platforms. A kernel that does not support a shape or dtype raises
`UnsupportedError`, which names the constraint; the operation then runs its fallback and logs that once.
"""

import contextlib
import functools
import logging
import re
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
from jax import lax
from jax._src.interpreters import mlir  # no public way to give a primitive a lowering
from jax.sharding import AxisType, get_abstract_mesh

from jaxinfer.pallas_kernels.gpu import GPU
from jaxinfer.pallas_kernels.mosaic import plgpu, primitives

_MIN_CAPABILITY = (9, 0)  # of Mosaic's asynchronous copies (TMA), clusters and barriers

_ALL = "all operations"

_log = logging.getLogger("jaxinfer.kernels")
_interpreting = False
_INTERPRETED = GPU(name="interpreter", capability=(9, 0), sms=132, shared_bytes=227 << 10)  # an H100
_disabled = jax.make_user_context(frozenset())
_target = jax.make_user_context(None)
_refusals: ContextVar[dict[str, str] | None] = ContextVar("refusals", default=None)


class UnsupportedError(NotImplementedError):
    """A kernel does not support these arguments; the message names the constraint and the value."""


def dispatch[T](name: str, kernel: Callable[..., T], fallback: Callable[..., T], *args: Any, **static: Any) -> T:
    """Run `kernel(*args, **static)` on a GPU that supports it, `fallback(*args, **static)` everywhere else.

    Args:
      name: the operation, for the log and `without_kernels`.
      kernel, fallback: module-level functions with results of the same types.
      args: pytrees of arrays. static: hashable options.
    """
    if not _disabled.value.isdisjoint((name, _ALL)):
        return fallback(*args, **static)
    if _interpreting:
        with contextlib.suppress(UnsupportedError):
            return kernel(*args, **static)
    elif kernels_available():
        try:
            return _jitted(kernel, fallback, tuple(static.items()))(*args)
        except UnsupportedError as error:
            _warn_once(f"{name} runs as plain XLA on {target_gpu().name}: {error}")
            if (refusals := _refusals.get()) is not None:
                refusals[name] = str(error)
    return fallback(*args, **static)


@functools.cache
def _jitted(kernel: Callable, fallback: Callable, static: tuple[tuple[str, Any], ...]) -> Callable:
    """Both implementations under one `jit`; lowering picks the one for the target platform.

    A program calls an operation once per layer. `jax.jit` traces and lowers equal calls only once, which takes a
    fifteenth of the time for twenty layers.
    """

    def plain(*args: Any) -> Any:
        with without_kernels():  # not for CUDA: what the fallback calls has no kernels to ask
            return fallback(*args, **dict(static))

    def kernel_or_fallback(*args: Any) -> Any:
        return lax.platform_dependent(*args, cuda=functools.partial(kernel, **dict(static)), default=plain)

    kernel_or_fallback.__name__ = kernel.__name__
    return jax.jit(kernel_or_fallback)


def without_kernels(*names: str) -> contextlib.AbstractContextManager[None]:
    """Disable the kernels of the named operations (of all, if none is named) for what this thread traces inside."""
    return _disabled(frozenset(names or (_ALL,)))


@contextlib.contextmanager
def recorded_refusals() -> Iterator[dict[str, str]]:
    """Why kernels refused what is traced inside, by operation."""
    refusals: dict[str, str] = {}
    token = _refusals.set(refusals)
    try:
        yield refusals
    finally:
        _refusals.reset(token)


def targeting(gpu: GPU) -> contextlib.AbstractContextManager[None]:
    """Choose kernels and tile sizes for this GPU, which need not be here, in what this thread traces inside."""
    return _target(gpu)


def target_gpu() -> GPU:
    """The GPU that a kernel is traced for: that of `targeting`, or else this machine's first."""
    gpu = _target_gpu()
    assert gpu is not None, "kernels are traced for a GPU: here, by `targeting`, or `interpreted`"
    return gpu


def require_wgmma() -> None:
    """Raise UnsupportedError if the GPU has no `wgmma`."""
    if not target_gpu().has_wgmma:
        raise UnsupportedError("it needs wgmma, which only sm_90 has")


def require_shared_bytes(needed: int) -> None:
    """Raise UnsupportedError if a thread block cannot have this much shared memory."""
    if needed > (available := target_gpu().shared_bytes):
        raise UnsupportedError(f"a thread block needs {needed} bytes of shared memory and has {available}")


def for_gpu() -> bool:
    """Whether a program traced now is for an NVIDIA GPU: one that is here, or that of `targeting`."""
    return _target_gpu() is not None


def kernels_available() -> bool:
    """Whether a program traced now may contain Mosaic kernels: JAX 0.11, GPU of compute capability 9.0 or newer.

    Meshes with automatic (GSPMD) axes get the fallbacks, because XLA cannot partition a kernel. Inside `shard_map`,
    kernels run on each device.
    """
    mesh = get_abstract_mesh()
    axes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    if any(size > 1 for size, kind in axes if kind is AxisType.Auto):
        return False
    if (gpu := _target_gpu()) is None:
        return False
    if gpu.capability < _MIN_CAPABILITY:
        major, minor = gpu.capability
        _warn_once(f"{gpu.name} (sm_{major}{minor}) runs plain XLA: kernels need sm_90 or newer")
        return False
    return _jax_lowers_kernels()


def _target_gpu() -> GPU | None:
    return _target.value or (_INTERPRETED if _interpreting else _local_gpu())


@functools.cache
def _local_gpu() -> GPU | None:
    """This machine's first NVIDIA GPU."""
    device = jax.devices()[0]
    capability = re.fullmatch(r"(\d+)\.(\d+)", getattr(device, "compute_capability", ""))  # AMD: "gfx942"
    if capability is None:
        return None
    return GPU(
        name=device.device_kind,
        capability=(int(capability[1]), int(capability[2])),
        sms=device.core_count,
        shared_bytes=device.shared_memory_per_block_optin,
    )


@functools.cache
def _jax_lowers_kernels() -> bool:
    """Mosaic changes with every release: under JAX 0.12, layout inference fails for some kernels."""
    if jax.__version_info__ < (0, 12):
        return True
    _warn_once(f"kernels need JAX 0.11, this is {jax.__version__}: using plain XLA instead")
    return False


@functools.cache
def _warn_once(message: str) -> None:
    _log.warning(message)


def interpreting() -> bool:
    """Whether kernels are being traced for the interpreter, which needs a different form of a few operations."""
    return _interpreting


@contextlib.contextmanager
def interpreted(*, detect_races: bool = True) -> Iterator[None]:
    """Run every kernel in Mosaic's interpreter, on any platform. Slow; for tests and dry runs.

    Functions that `jax.jit` has already compiled are not affected.
    """
    global _interpreting
    _register_mma()
    before, _interpreting = _interpreting, True
    params = plgpu.InterpretGPUParams(detect_races=detect_races, inline_mgpu="ignore")
    try:
        with plgpu.force_gpu_interpret_mode(params):
            yield
    finally:
        _interpreting = before


@functools.cache
def _register_mma() -> None:
    """Give JAX's Mosaic interpreter a rule for `plgpu.mma`, which it lacks."""

    def mma(acc: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        return acc + lax.dot(a, b, preferred_element_type=acc.dtype)

    rule = mlir.lower_fun(mma, multiple_results=False)
    mlir.register_lowering(primitives.mma_p, rule, platform="cpu")

"""Which code an operation runs: its Mosaic kernel where the GPU has it and the shapes allow it, else its definition.

The one place that asks about platforms. A kernel that does not take some shape or dtype raises `UnsupportedError`,
which names the constraint; the operation then runs its definition and says so once in the log.
"""

import contextlib
import functools
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax import lax
from jax._src.interpreters import mlir  # no public way to give a primitive a lowering
from jax._src.pallas.mosaic_gpu import primitives as mosaic_primitives
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType, get_abstract_mesh

_HOPPER_OR_NEWER = re.compile(r"\b(H100|H200|H800|H20|GH200|B100|B200|B300|GB200|GB300)\b")

_ALL = "all operations"

_log = logging.getLogger("jaxinfer.kernels")
_interpreting = False
_switched_off = jax.make_user_context(frozenset())


class UnsupportedError(NotImplementedError):
    """A kernel does not take these arguments; the message names the constraint and the value."""


def dispatch[T](name: str, kernel: Callable[..., T], definition: Callable[..., T], *args: Any, **static: Any) -> T:
    """`kernel(*args, **static)` on a GPU that runs kernels, the same of `definition` everywhere else.

    Args:
      name: the operation, for the log.
      kernel, definition: functions of a module, with results of the same types.
      args: pytrees of arrays. static: hashable options.
    """
    if not _switched_off.value.isdisjoint((name, _ALL)):
        return definition(*args, **static)
    if _interpreting:
        with contextlib.suppress(UnsupportedError):
            return kernel(*args, **static)
    elif kernels_available():
        try:
            return _jitted(kernel, definition, tuple(static.items()))(*args)
        except UnsupportedError as error:
            _say_once(f"{name} runs as plain XLA: {error}")
    return definition(*args, **static)


@functools.cache
def _jitted(kernel: Callable, definition: Callable, static: tuple[tuple[str, Any], ...]) -> Callable:
    """Both, for whichever platform a program is lowered for.

    A program calls an operation once a layer: under `jax.jit` equal calls are traced and lowered once, which takes a
    fifteenth of the time for twenty layers.
    """

    def either(*args: Any) -> Any:
        return lax.platform_dependent(
            *args,
            cuda=functools.partial(kernel, **dict(static)),
            default=functools.partial(definition, **dict(static)),
        )

    either.__name__ = kernel.__name__
    return jax.jit(either)


def without_kernels(*names: str) -> contextlib.AbstractContextManager[None]:
    """Run the definitions of these operations, or of all if none is named, in what this thread traces within."""
    return _switched_off(frozenset(names or (_ALL,)))


def kernels_available() -> bool:
    """Whether a program traced now may hold Mosaic kernels: for one GPU of compute capability 9.0 or more, by JAX 0.11.

    A mesh whose axes XLA shards by itself gets the definitions: XLA cannot divide a kernel. Inside `shard_map` each
    device has its own, and kernels run.
    """
    mesh = get_abstract_mesh()
    divided = (size > 1 for size, kind in zip(mesh.axis_sizes, mesh.axis_types, strict=True) if kind is AxisType.Auto)
    if any(divided):
        return False
    if mesh.abstract_device is not None:  # a GPU that is compiled for ahead of time
        return _HOPPER_OR_NEWER.search(mesh.abstract_device.device_kind) is not None and _jax_lowers_kernels()
    return _local_gpu_runs_kernels() and _jax_lowers_kernels()


def device_kind() -> str:
    """The kind of device that a program traced now is for ("NVIDIA H200", "cpu")."""
    target = get_abstract_mesh().abstract_device
    return target.device_kind if target is not None else jax.devices()[0].device_kind


@functools.cache
def _jax_lowers_kernels() -> bool:
    """Mosaic changes from release to release: under JAX 0.12 some kernels find no layouts for their registers."""
    if jax.__version_info__ < (0, 12):
        return True
    _say_once(f"kernels are for JAX 0.11, this is {jax.__version__}: plain XLA runs instead")
    return False


@functools.cache
def _local_gpu_runs_kernels() -> bool:
    if jax.default_backend() != "gpu":
        return False
    device = jax.devices()[0]
    capability = getattr(device, "compute_capability", "0.0")
    if float(capability) >= 9.0:
        return True
    _say_once(f"{device.device_kind} has compute capability {capability}, kernels need 9.0: plain XLA runs instead")
    return False


@functools.cache
def _say_once(message: str) -> None:
    _log.warning(message)


def interpreting() -> bool:
    """Whether kernels are traced for the interpreter: for the few steps that it knows in another form only."""
    return _interpreting


@contextlib.contextmanager
def interpreted(*, detect_races: bool = True) -> Iterator[None]:
    """Run every kernel in Mosaic's interpreter, on any platform: slow, for tests and dry runs.

    What was compiled before by `jax.jit` stays as it was.
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
    """JAX's interpreter of Mosaic has no rule for `plgpu.mma`, which is a plain product."""

    def product(acc: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        return acc + lax.dot(a, b, preferred_element_type=acc.dtype)

    rule = mlir.lower_fun(product, multiple_results=False)
    mlir.register_lowering(mosaic_primitives.mma_p, rule, platform="cpu")

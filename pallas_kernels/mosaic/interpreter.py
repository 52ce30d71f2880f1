"""Mosaic's interpreter: kernels on any platform, slowly; for tests and dry runs."""

import contextlib
import functools
from collections.abc import Iterator

import jax
from jax import lax
from jax._src.interpreters import mlir  # no public way to give a primitive a lowering

from jaxinfer.pallas_kernels.mosaic import plgpu, primitives
from jaxinfer.pallas_kernels.target import set_interpreting


@contextlib.contextmanager
def interpreted(*, detect_races: bool = True) -> Iterator[None]:
    """Run every kernel in Mosaic's interpreter, in every thread and on any platform. Slow; for tests and dry runs.

    Functions that `jax.jit` has already compiled are not affected.
    """
    _register_mma()
    params = plgpu.InterpretGPUParams(detect_races=detect_races, inline_mgpu="ignore")
    plgpu.set_gpu_interpret_mode(params)  # in every thread: services compile in threads of their own
    try:
        with set_interpreting():
            yield
    finally:
        plgpu.set_gpu_interpret_mode(None)  # pyright: ignore[reportArgumentType]


@functools.cache
def _register_mma() -> None:
    """Give JAX's Mosaic interpreter a rule for `plgpu.mma`, which it lacks."""

    def mma(acc: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        return acc + lax.dot(a, b, preferred_element_type=acc.dtype)

    rule = mlir.lower_fun(mma, multiple_results=False)
    mlir.register_lowering(primitives.mma_p, rule, platform="cpu")

"""One executable: a pure function at one shape, and what it costs."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from pallas_kernels.dispatch import without_kernels

Bucket = tuple[tuple[str, int], ...]
"""The padded sizes an executable was compiled for: (("batch", 8), ("pages", 32)); hashable, in a fixed order."""


def bucket_text(bucket: Bucket) -> str:
    """`batch=8, pages=32`."""
    return ", ".join(f"{name}={size}" for name, size in bucket)


def round_up(size: int, sizes: Sequence[int]) -> int:
    """The smallest of the ascending `sizes` that holds `size`. Raises ValueError if none does."""
    for candidate in sizes:
        if candidate >= size:
            return candidate
    raise ValueError(f"{size} is larger than the largest bucket, {sizes[-1]}.")


def powers(factor: int, first: int, last: int) -> tuple[int, ...]:
    """first, factor * first, factor^2 * first, ... and `last` itself, ascending.

    >>> powers(4, 16, 512)
    (16, 64, 256, 512)
    """
    sizes = []
    while first < last:
        sizes.append(first)
        first *= factor
    return (*sizes, last)


@dataclasses.dataclass(kw_only=True)
class Cost:
    """What one executable was seen to cost. Bytes are those of one device.

    Attributes:
      argument_bytes: weights, caches and inputs. output_bytes: results. alias_bytes: of these, written in place.
      temp_bytes: workspace while it runs.
      compile_seconds: tracing, lowering and compiling (or reading the persistent cache).
      calls, steps: timed calls, and the steps in them (several where a program has a loop).
      total_seconds: of the timed calls, from dispatch, or from the results of the call before if that came later, to
        results on the host: right on average, though single calls of steps that overlap are not.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    compile_seconds: float
    calls: int = 0
    steps: int = 0
    total_seconds: float = 0.0

    @property
    def workspace_bytes(self) -> int:
        """What a call takes beside its arguments."""
        return self.temp_bytes + self.output_bytes - self.alias_bytes

    @property
    def step_seconds(self) -> float | None:
        """A step, on average; None before the first."""
        return self.total_seconds / self.steps if self.steps else None

    def record(self, seconds: float, *, steps: int = 1) -> None:
        """Add one timed call."""
        self.calls += 1
        self.steps += steps
        self.total_seconds += seconds


class Program:
    """A compiled executable under a name and a bucket, callable with arrays of exactly its shapes."""

    def __init__(self, name: str, bucket: Bucket, executable: jax.stages.Compiled, compile_seconds: float):
        self.name, self.bucket, self.executable = name, bucket, executable
        memory = executable.memory_analysis()
        assert memory is not None, "every backend of ours reports its memory"
        self.cost = Cost(
            argument_bytes=memory.argument_size_in_bytes,
            output_bytes=memory.output_size_in_bytes,
            alias_bytes=memory.alias_size_in_bytes,
            temp_bytes=memory.temp_size_in_bytes,
            compile_seconds=compile_seconds,
        )

    def __call__(self, *args: Any) -> Any:
        return self.executable(*args)

    def __repr__(self) -> str:
        return f"Program({self.name}: {bucket_text(self.bucket)})"


def compile_program(
    name: str,
    bucket: Bucket,
    function: Callable,
    args: tuple,
    *,
    donate: tuple[int, ...] = (),
    out_shardings: Any = None,
    compiler_options: dict[str, str | bool | int] | None = None,
    mesh: jax.sharding.Mesh | None = None,
    kernels: bool = True,
) -> Program:
    """Compile `function` for the shapes, dtypes and shardings of `args` (arrays or `jax.ShapeDtypeStruct`s).

    Arguments at the positions in `donate` are overwritten by the results of the same shape.
    `out_shardings` places the results (a pytree prefix; None leaves it to the compiler). `mesh`: the devices that XLA
    divides the program over, which operations ask for (a kernel cannot be divided). `kernels`: whether they may run as
    kernels.
    """
    start = time.perf_counter()
    with contextlib.ExitStack() as stack:
        if mesh is not None:
            stack.enter_context(jax.sharding.use_abstract_mesh(mesh.abstract_mesh))
        if not kernels:
            stack.enter_context(without_kernels())
        lowered = jax.jit(function, donate_argnums=donate, out_shardings=out_shardings).lower(*args)
    executable = lowered.compile(compiler_options=compiler_options)
    return Program(name, bucket, executable, time.perf_counter() - start)

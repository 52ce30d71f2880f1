"""What a program is, before it is compiled: one object says it all."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from jaxinfer.compiled.program import Program
from pallas_kernels.dispatch import without_kernels

Sizes = Mapping[str, int]
"""The padded sizes of one executable: {"batch": 8, "pages": 32}."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramSpec[Buckets]:
    """A pure function, the shapes it takes, and the sizes it is compiled for.

    Attributes:
      name: how calls and cost records name the program.
      function: the function to compile, for given sizes.
      arguments: its arguments, for given sizes: pytrees of arrays or `jax.ShapeDtypeStruct`s, with their shardings.
      reachable: the sizes that calls can ask for, given the buckets in use.
      donate: positions of arguments that results of the same shape overwrite.
      out_shardings: where results are placed, a pytree prefix; None leaves it to the compiler.
      compiler_options: XLA's options, for given sizes.
    """

    name: str
    function: Callable[[Sizes], Callable[..., Any]]
    arguments: Callable[[Sizes], tuple[Any, ...]]
    reachable: Callable[[Buckets], Iterable[dict[str, int]]]
    donate: tuple[int, ...] = ()
    out_shardings: Any = None
    compiler_options: Callable[[Sizes], dict[str, str | bool | int]] = lambda sizes: {}

    def lower(self, sizes: Sizes) -> jax.stages.Lowered:
        """Trace for these sizes, in the context of the caller: its mesh, and whether it lets kernels run."""
        jitted = jax.jit(self.function(sizes), donate_argnums=self.donate, out_shardings=self.out_shardings)
        return jitted.lower(*self.arguments(sizes))

    def compile(self, sizes: Sizes, *, mesh: jax.sharding.Mesh | None = None, kernels: bool = True) -> Program:
        """Compile for these sizes.

        Args:
          sizes: one of `reachable`.
          mesh: the devices that XLA divides the program over, which operations ask for (a kernel cannot be divided).
          kernels: whether operations may run as kernels.
        """
        start = time.perf_counter()
        with contextlib.ExitStack() as stack:
            if mesh is not None:
                stack.enter_context(jax.sharding.use_abstract_mesh(mesh.abstract_mesh))
            if not kernels:
                stack.enter_context(without_kernels())
            lowered = self.lower(sizes)
        executable = lowered.compile(compiler_options=self.compiler_options(sizes))
        return Program(self.name, tuple(sizes.items()), executable, time.perf_counter() - start)

"""What a program is, before it is compiled: one object says it all."""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax

from jaxinfer.compiled.executables import ExecutableStore
from jaxinfer.compiled.program import Program, bucket_text
from jaxinfer.disk_cache import keys
from pallas_kernels.dispatch import without_kernels

_log = logging.getLogger("jaxinfer.compiled")

Sizes = Mapping[str, int]
"""The padded sizes of one executable: {"batch": 8, "pages": 32}."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramSpec[Buckets]:
    """A pure function, the shapes it takes, and the sizes it is compiled for.

    Attributes:
      name: how calls and cost records name the program.
      build: makes the function to compile, from `static` and sizes. To be kept on disk it must be a function at the
        top of a module, so that it cannot depend on anything else.
      static: all that the function depends on beside its arguments: plain values and frozen dataclasses of them.
      arguments: its arguments, for given sizes: pytrees of arrays or `jax.ShapeDtypeStruct`s, with their shardings.
      reachable: the sizes that calls can ask for, given the buckets in use.
      donate: positions of arguments that results of the same shape overwrite.
      out_shardings: where results are placed, a pytree prefix; None leaves it to the compiler.
      compiler_options: XLA's options, for given sizes.
    """

    name: str
    build: Callable[[Any, Sizes], Callable[..., Any]]
    static: Any = None
    arguments: Callable[[Sizes], tuple[Any, ...]]
    reachable: Callable[[Buckets], Iterable[dict[str, int]]]
    donate: tuple[int, ...] = ()
    out_shardings: Any = None
    compiler_options: Callable[[Sizes], dict[str, str | bool | int]] = lambda sizes: {}

    def function(self, sizes: Sizes) -> Callable[..., Any]:
        """The function to compile, for these sizes."""
        return self.build(self.static, sizes)

    def lower(self, sizes: Sizes) -> jax.stages.Lowered:
        """Trace for these sizes, in the context of the caller: its mesh, and whether it lets kernels run."""
        jitted = jax.jit(self.function(sizes), donate_argnums=self.donate, out_shardings=self.out_shardings)
        return jitted.lower(*self.arguments(sizes))

    def key(self, sizes: Sizes) -> dict[str, Any]:
        """All that the executable depends on, in the context of the caller. Raises `keys.NoKeyError`."""
        return {
            "program": self.name,
            "sizes": dict(sizes),
            "function": keys.describe_function(self.build),
            "static": keys.describe(self.static),
            "arguments": keys.describe_tree(self.arguments(sizes)),
            "donate": list(self.donate),
            "out_shardings": keys.describe_tree(self.out_shardings),
            "compiler_options": dict(self.compiler_options(sizes)),
            **keys.environment_key(),
        }

    def compile(
        self,
        sizes: Sizes,
        *,
        mesh: jax.sharding.Mesh | None = None,
        kernels: bool = True,
        store: ExecutableStore | None = None,
    ) -> Program:
        """Compile for these sizes, or read what was compiled for them before.

        Args:
          sizes: one of `reachable`.
          mesh: the devices that XLA divides the program over, which operations ask for (a kernel cannot be divided).
          kernels: whether operations may run as kernels.
          store: where executables are kept; None: nowhere.
        """
        start = time.perf_counter()
        with contextlib.ExitStack() as stack:
            if mesh is not None:
                stack.enter_context(jax.sharding.use_abstract_mesh(mesh.abstract_mesh))
            if not kernels:
                stack.enter_context(without_kernels())
            executable, kept = self._executable(sizes, mesh, store)
        return Program(self.name, tuple(sizes.items()), executable, time.perf_counter() - start, kept=kept)

    def _executable(
        self, sizes: Sizes, mesh: jax.sharding.Mesh | None, store: ExecutableStore | None
    ) -> tuple[jax.stages.Compiled, bool]:
        """The executable, and whether it was kept."""
        key = None
        if store is not None:
            try:
                key = self.key(sizes)
            except keys.NoKeyError as error:
                store.refuse(self.name, str(error))
        if key and store and (found := store.load(key, self.arguments(sizes), self.donate, mesh)):
            return found, True
        shown, start = f"{self.name}({bucket_text(tuple(sizes.items()))})", time.perf_counter()
        _log.info("compiling %s", shown)
        executable = self.lower(sizes).compile(compiler_options=dict(self.compiler_options(sizes)))
        _log.info("compiled %s in %.1f s", shown, time.perf_counter() - start)
        if key and store:
            store.save(key, executable)
        return executable, False

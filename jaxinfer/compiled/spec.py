"""Specification of a program before it is compiled, in one object."""

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxinfer.compiled.choices import stored_choices
from jaxinfer.compiled.cpu_library import cpu_library
from jaxinfer.compiled.executables import ExecutableStore
from jaxinfer.compiled.interruptible import interruptible
from jaxinfer.compiled.options import COMMON
from jaxinfer.compiled.program import Program, Sizes
from jaxinfer.disk_cache import keys
from jaxinfer.pallas_kernels.choices import use_choices
from jaxinfer.pallas_kernels.cpu.library import use_library
from jaxinfer.pallas_kernels.dispatch import allow_kernels

_log = logging.getLogger("jaxinfer.compiled")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramSpec[S: Sizes, Buckets]:
    """A pure function, the shapes it takes, and the sizes it is compiled for.

    Attributes:
      sizes: the class of its sizes, which names the program.
      build: makes the function to compile, from `static` and sizes. To be kept on disk it must be a function at the
        top of a module, so that it cannot depend on anything else.
      static: everything the function depends on beside its arguments: plain values and frozen dataclasses of them.
      arguments: its arguments, for given sizes: pytrees of arrays or `jax.ShapeDtypeStruct`s, with their shardings.
      reachable: the sizes that calls can ask for, given the buckets in use.
      donate: positions of arguments that results of the same shape overwrite.
      out_shardings: where results are placed, a pytree prefix, for given sizes; None: on a mesh whole on every device.
      compiler_options: XLA's options beside those of every program, for given sizes.
    """

    sizes: type[S]
    build: Callable[[Any, S], Callable[..., Any]]
    static: Any = None
    arguments: Callable[[S], tuple[Any, ...]]
    reachable: Callable[[Buckets], Iterable[S]]
    donate: tuple[int, ...] = ()
    out_shardings: Callable[[S], Any] = lambda sizes: None
    compiler_options: Callable[[S], dict[str, str | bool | int]] = lambda sizes: {}

    @property
    def name(self) -> str:
        """The program's name in logs and records of costs."""
        return self.sizes.program

    def function(self, sizes: S) -> Callable[..., Any]:
        """Build the function to compile, for these sizes."""
        return self.build(self.static, sizes)

    def options(self, sizes: S) -> dict[str, str | bool | int]:
        """All of XLA's options, for these sizes."""
        return {**COMMON, **self.compiler_options(sizes)}

    def lower(self, sizes: S, mesh: Mesh | None = None) -> jax.stages.Lowered:
        """Trace for these sizes; on a mesh for each device's part, with the exchanges that the program asks for.

        The caller's context says whether kernels may run.
        """
        function, arguments, placed = self.function(sizes), self.arguments(sizes), self.out_shardings(sizes)
        if mesh is None:
            return jax.jit(function, donate_argnums=self.donate, out_shardings=placed).lower(*arguments)
        out_specs = jax.tree.map(_spec, placed, is_leaf=lambda x: x is None)
        out_shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), out_specs)
        divided = _divide(function, mesh, arguments, out_specs)
        return jax.jit(divided, donate_argnums=self.donate, out_shardings=out_shardings).lower(*arguments)

    def key(self, sizes: S) -> dict[str, Any]:
        """Return everything the executable depends on, in the caller's context. Raises `keys.NoKeyError`."""
        return {
            "program": self.name,
            "sizes": keys.describe(dict(sizes.bucket)),
            "function": keys.describe_function(self.build),
            "static": keys.describe(self.static),
            "arguments": keys.describe_tree(self.arguments(sizes)),
            "donate": keys.describe(self.donate),
            "out_shardings": keys.describe_tree(self.out_shardings(sizes)),
            "compiler_options": keys.describe(self.options(sizes)),
            **keys.environment_key(),
        }

    def compile(
        self,
        sizes: S,
        *,
        mesh: Mesh | None = None,
        kernels: bool = True,
        store: ExecutableStore | None = None,
    ) -> Program:
        """Compile for these sizes, or read a kept executable.

        Args:
          sizes: one of `reachable`.
          mesh: the devices that the program is divided over, by its arguments' shardings.
          kernels: whether operations may run as kernels.
          store: where executables are kept; None: nowhere.
        """
        start = time.perf_counter()
        library = cpu_library() if kernels else None
        with use_choices(stored_choices()), use_library(library), allow_kernels(kernels):
            executable, kept = self._executable(sizes, mesh, store)
        return Program(sizes, executable, time.perf_counter() - start, kept=kept)

    def _executable(
        self, sizes: S, mesh: Mesh | None, store: ExecutableStore | None
    ) -> tuple[jax.stages.Compiled, bool]:
        """The executable, and whether it was kept."""
        key = None
        if store is not None:
            try:
                key = self.key(sizes)
            except Exception as error:  # ours, or from the description of another package's value
                store.refuse(self.name, str(error))
        if key and store and (kept := store.load(key, self.arguments(sizes), self.donate, mesh)):
            return kept, True
        shown, start = f"{self.name}({sizes})", time.perf_counter()
        _log.info("compiling %s", shown)
        lowered, options = self.lower(sizes, mesh), self.options(sizes)
        executable = interruptible(lambda: lowered.compile(compiler_options=options))
        _log.info("compiled %s in %.1f s", shown, time.perf_counter() - start)
        if key and store:
            store.save(key, executable)
        return executable, False


def shapes_of(arrays: Iterable[Any]) -> list[jax.ShapeDtypeStruct]:
    """Return the shapes of arrays, with where they live.

    Specs have these in place of weights: a program may be compiled for a while after its model is closed, whose memory
    is then free.
    """
    return [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for x in arrays]


def _spec(x: Any) -> PartitionSpec:
    """Return how an argument or result is divided; whole on every device unless it, or its sharding, says otherwise."""
    sharding = x if isinstance(x, jax.sharding.Sharding) else getattr(x, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec()


def _divide(function: Callable[..., Any], mesh: Mesh, arguments: tuple[Any, ...], out_specs: Any) -> Callable[..., Any]:
    """The function that runs on every device's part of its arguments.

    Empty arrays are made inside: Shardy crashes on them (`ManualComputationUnusedInputsPattern`, jaxlib 0.11.2).
    """
    leaves, tree = jax.tree.flatten(arguments)
    empty = [x.size == 0 for x in leaves]

    def on_each(*parts: jax.Array) -> Any:
        given = iter(parts)
        return function(
            *tree.unflatten(
                [
                    jnp.zeros(x.shape, x.dtype) if is_empty else next(given)
                    for x, is_empty in zip(leaves, empty, strict=True)
                ]
            )
        )

    specs = tuple(_spec(x) for x, is_empty in zip(leaves, empty, strict=True) if not is_empty)
    mapped = jax.shard_map(on_each, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False)

    @functools.wraps(function)
    def divided(*args: Any) -> Any:
        return mapped(*(x for x, is_empty in zip(jax.tree.leaves(args), empty, strict=True) if not is_empty))

    return divided

"""One executable: a pure function at one shape, and the memory it needs."""

import dataclasses
import functools
from typing import Any, ClassVar

import jax

Bucket = tuple[tuple[str, int], ...]
"""Sizes as records of costs have them: (("batch", 8), ("pages", 32)), in the order of their program."""


def bucket_text(bucket: Bucket) -> str:
    """Format a bucket as `batch=8, pages=32`."""
    return ", ".join(f"{name}={size}" for name, size in bucket)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The padded sizes of one executable, by which it is found. Every program has a subclass with its own sizes.

    Attributes:
      program: the program's name, in logs and in the record of costs.
    """

    program: ClassVar[str]

    @property
    def bucket(self) -> Bucket:
        """The name and value of each size."""
        return tuple((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))

    def __str__(self) -> str:
        return bucket_text(self.bucket)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """The memory of one executable, in bytes per device.

    Attributes:
      argument_bytes: weights, caches and inputs.
      output_bytes: results.
      alias_bytes: the part of the results that is written in place.
      temp_bytes: workspace while it runs.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int

    @property
    def workspace_bytes(self) -> int:
        """The memory of a call beside its arguments."""
        return self.temp_bytes + self.output_bytes - self.alias_bytes


class Program:
    """A compiled executable of some sizes, callable with arrays of exactly its shapes.

    Attributes:
      sizes: the sizes it was compiled for.
      name: the program's name in records of costs.
      bucket: its sizes in records of costs.
      compile_seconds: seconds to trace, lower and compile it, or to read what was kept.
      kept: whether it was read from disk rather than compiled.
    """

    def __init__(
        self,
        sizes: Sizes,
        executable: jax.stages.Compiled,
        compile_seconds: float,
        *,
        kept: bool = False,
    ):
        self.sizes, self.name, self.bucket, self.executable = sizes, sizes.program, sizes.bucket, executable
        self.compile_seconds, self.kept = compile_seconds, kept

    @functools.cached_property
    def memory(self) -> MemoryUse:
        """The memory it needs, which XLA takes some milliseconds to sum up."""
        memory = self.executable.memory_analysis()
        assert memory is not None, "every backend of ours reports its memory"
        return MemoryUse(
            argument_bytes=memory.argument_size_in_bytes,
            output_bytes=memory.output_size_in_bytes,
            alias_bytes=memory.alias_size_in_bytes,
            temp_bytes=memory.temp_size_in_bytes,
        )

    def __call__(self, *args: Any) -> Any:
        return self.executable(*args)

    def __repr__(self) -> str:
        return f"Program({self.name}: {self.sizes})"

"""One executable: a pure function at one shape, and what it costs."""

import dataclasses
from typing import Any

import jax

Bucket = tuple[tuple[str, int], ...]
"""The padded sizes an executable was compiled for: (("batch", 8), ("pages", 32)); hashable, in a fixed order."""


def bucket_text(bucket: Bucket) -> str:
    """`batch=8, pages=32`."""
    return ", ".join(f"{name}={size}" for name, size in bucket)


@dataclasses.dataclass(kw_only=True)
class Cost:
    """What one executable was seen to cost. Bytes are those of one device.

    Attributes:
      argument_bytes: weights, caches and inputs.
      output_bytes: results.
      alias_bytes: the part of the results that is written in place.
      temp_bytes: workspace while it runs.
      compile_seconds: tracing, lowering and compiling, or reading what was kept.
      calls: timed calls.
      passes: passes through the model in them (several where a program has a loop).
      total_seconds: of the timed calls, from dispatch, or from the results of the call before if that came later, to
        results on the host: right on average, though single calls of steps that overlap are not.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    compile_seconds: float
    calls: int = 0
    passes: int = 0
    total_seconds: float = 0.0

    @property
    def workspace_bytes(self) -> int:
        """What a call takes beside its arguments."""
        return self.temp_bytes + self.output_bytes - self.alias_bytes

    def record(self, seconds: float, *, passes: int = 1) -> None:
        """Add one timed call."""
        self.calls += 1
        self.passes += passes
        self.total_seconds += seconds


class Program:
    """A compiled executable under a name and a bucket, callable with arrays of exactly its shapes.

    Attributes:
      kept: whether it was read from disk rather than compiled.
    """

    def __init__(
        self,
        name: str,
        bucket: Bucket,
        executable: jax.stages.Compiled,
        compile_seconds: float,
        *,
        kept: bool = False,
    ):
        self.name, self.bucket, self.executable, self.kept = name, bucket, executable, kept
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

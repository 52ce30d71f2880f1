"""Measured limits of the device: memory read and copy bandwidth, and matmul FLOP/s by dtype."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks.gpu.timing import Effort, interleave, steady_state
from benchmarks.report import Report


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """Bandwidths in bytes per second, and FLOP/s (two per multiply-add) by the dtype of the operands."""

    read: float
    copy: float
    flops: dict[str, float]

    def seconds(self, read_bytes: int, flops: int, dtype: str) -> float:
        """Compute the roofline: the time for reading the bytes or doing the FLOPs, whichever is longer."""
        return max(read_bytes / self.read, flops / self.flops[dtype])


def measure(report: Report, effort: Effort) -> Ceilings:
    """Measure all ceilings: the best median of several programs each."""
    read_bytes, copy_bytes, side = (1 << 20, 1 << 20, 256) if effort.dry else (8 << 30, 4 << 30, 8192)
    read = read_bytes / _best(report, "read", _reads(read_bytes), effort)
    copy = 2 * copy_bytes / _best(report, "copy", _copies(copy_bytes), effort)
    flops = {
        name: 2 * side**3 / _best(report, f"{name} matmul", _matmul(side, name), effort)
        for name in ("bfloat16", "int8")
    }
    limits = Ceilings(read, copy, flops)
    report.row(part="rates", what="read", rate=round(read / 1e12, 3), unit="TB/s")
    report.row(part="rates", what="copy", rate=round(copy / 1e12, 3), unit="TB/s, read and written")
    for name, rate in flops.items():
        report.row(part="rates", what=f"{name} matmul", rate=round(rate / 1e12, 1), unit="TFLOP/s")
    return limits


def _best(report: Report, what: str, ways: dict[str, Callable[[], jax.Array]], effort: Effort) -> float:
    timings = interleave({name: steady_state(launch, 1, effort) for name, launch in ways.items()}, effort.rounds)
    for name, timing in timings.items():
        report.row(
            part="ceilings", what=what, way=name, ms=round(1e3 * timing.seconds, 4), spread=round(timing.spread, 3)
        )
    return min(timing.seconds for timing in timings.values())


def _reads(size: int) -> dict[str, Callable[[], jax.Array]]:
    """Make reductions of a large array: of the whole array, and of rows as long as a matrix's."""
    words = jax.random.bits(jax.random.key(0), (size // 4,), jnp.uint32)
    reductions = {
        "max of all": lambda x: jnp.max(x),
        "sum of all": lambda x: jnp.sum(x, dtype=jnp.uint32),
        "sums of rows": lambda x: jnp.sum(x.reshape(-1, 4096), axis=1, dtype=jnp.uint32),
        "sums of long rows": lambda x: jnp.sum(x.reshape(-1, 1 << 16), axis=1, dtype=jnp.uint32),
    }
    return {name: _bound(reduction, words) for name, reduction in reductions.items()}


def _copies(size: int) -> dict[str, Callable[[], jax.Array]]:
    words = jax.random.bits(jax.random.key(0), (size // 4,), jnp.uint32)
    return {"x + 1": _bound(lambda x: x + jnp.uint32(1), words)}


def _matmul(side: int, dtype: str) -> dict[str, Callable[[], jax.Array]]:
    """Make a matmul of random numbers; a GPU multiplies zeros faster."""
    keys = jax.random.split(jax.random.key(0))
    bits = [jax.random.bits(key, (side, side), jnp.uint8).astype(jnp.int8) for key in keys]
    if dtype == "int8":
        return {"x y^T": _bound(lambda x, y: jax.lax.dot_general(x, y, _LAST, preferred_element_type=jnp.int32), *bits)}
    x, y = (x.astype(dtype) / 64 for x in bits)
    return {"x y^T": _bound(lambda x, y: jax.lax.dot_general(x, y, _LAST), x, y)}


_LAST = (((1,), (1,)), ((), ()))


def _bound(function: Callable[..., jax.Array], *args: jax.Array) -> Callable[[], jax.Array]:
    compiled = jax.jit(function)
    return lambda: compiled(*args)

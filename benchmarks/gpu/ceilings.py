"""Measured limits of the device: memory read and copy bandwidth, and matmul FLOP/s by dtype."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Self

import jax
import jax.numpy as jnp

from benchmarks.gpu.items import Context, Item
from benchmarks.gpu.rows import Row, Rows
from benchmarks.gpu.timing import Effort, interleave, steady_state

TERA = 1e12


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """Bandwidths in bytes per second, and FLOP/s (two per multiply-add) by the dtype of the operands."""

    read: float
    copy: float
    flops: dict[str, float]

    @classmethod
    def from_rows(cls, rows: Iterable[Row]) -> Self:
        """Find what this run has measured. Raises LookupError if that is not all."""
        rates = {row["what"]: TERA * row["rate"] for row in rows if row["part"] == "rates"}
        if missing := {"read", "copy", "bfloat16", "int8"} - rates.keys():
            raise LookupError(f"the ceilings of {', '.join(sorted(missing))} were not measured")
        return cls(rates["read"], rates["copy"], {name: rates[name] for name in ("bfloat16", "int8")})

    def seconds(self, read_bytes: int, flops: int, dtype: str) -> float:
        """Compute the roofline: the time for reading the bytes or doing the FLOPs, whichever is longer."""
        return max(read_bytes / self.read, flops / self.flops[dtype])


def items(context: Context) -> list[Item]:
    """List the ceilings: the best median of several programs each."""
    effort = context.effort
    read, copy, side = (1 << 20, 1 << 20, 256) if effort.dry else (8 << 30, 4 << 30, 8192)

    def item(what: str, amount: int, unit: str, ways: Callable[[], dict[str, Callable[[], jax.Array]]]) -> Item:
        return Item(what, functools.partial(_measure, context.rows, what, amount, unit, ways, effort))

    return [
        item("read", read, "TB/s", lambda: _reads(read)),
        item("copy", 2 * copy, "TB/s, read and written", lambda: _copies(copy)),
        *(
            item(dtype, 2 * side**3, "TFLOP/s of a matmul", functools.partial(_matmul, side, dtype))
            for dtype in ("bfloat16", "int8")
        ),
    ]


def _measure(
    rows: Rows,
    what: str,
    amount: int,
    unit: str,
    ways: Callable[[], dict[str, Callable[[], jax.Array]]],
    effort: Effort,
) -> None:
    """Measure the rate at which the fastest way handles an amount of bytes or FLOPs."""
    timings = interleave({name: steady_state(launch, 1, effort) for name, launch in ways().items()}, effort.rounds)
    for name, timing in timings.items():
        milliseconds = round(1e3 * timing.seconds, 4)
        rows.row(part="ceilings", what=what, way=name, ms=milliseconds, spread=round(timing.spread, 3))
    rate = amount / min(timing.seconds for timing in timings.values())
    rows.row(part="rates", what=what, rate=float(f"{rate / TERA:.4g}"), unit=unit)


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

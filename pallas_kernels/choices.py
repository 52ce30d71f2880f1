"""Measured choices: which implementation of an operation is the fastest on a device, by shape.

Without a measurement an operation runs the first implementation of its list. `measure` times all that take a call's
arguments; a `Choices` in use puts the fastest first. A program depends on the choices it is traced with, so they are a
context of JAX's traces: part of the key of every executable that is kept, and two starts with the same choices compute
the same numbers.
"""

import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.pallas_kernels.implementation import Implementation
from jaxinfer.pallas_kernels.target import UnsupportedError

CLEARLY_FASTER = 0.8
"""Times the seconds of the first implementation: what another must take less than, since measurements are noisy."""

_recorded: ContextVar[list["Call"] | None] = ContextVar("recorded", default=None)


@dataclasses.dataclass(frozen=True)
class Choices:
    """The implementations that were measured to be the fastest.

    Attributes:
      entries: (operation, shapes, implementation's name), sorted.
    """

    entries: tuple[tuple[str, str, str], ...] = ()

    @classmethod
    def from_table(cls, table: Mapping[str, Mapping[str, str]]) -> "Choices":
        """The choices of {operation: {shapes: implementation's name}}."""
        return cls(tuple(sorted((op, key, name) for op, names in table.items() for key, name in names.items())))

    @functools.cached_property
    def _by_call(self) -> dict[tuple[str, str], str]:
        return {(operation, shapes): name for operation, shapes, name in self.entries}

    def order(self, call: "Call") -> tuple[Implementation, ...]:
        """A call's implementations, the one that was measured to be the fastest first."""
        chosen = self._by_call.get((call.operation, call.shapes))
        return tuple(sorted(call.candidates, key=lambda candidate: candidate.name != chosen))


_choices = jax.make_user_context(Choices())


def use_choices(choices: Choices) -> contextlib.AbstractContextManager[None]:
    """Choose by these measurements in what this thread traces inside."""
    return _choices(choices)


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A call of an operation that has several implementations here.

    Attributes:
      operation: its name. candidates: the implementations, in order of preference.
      args, static: the arguments, of which the shapes and dtypes matter.
      example: makes arguments to measure with from their shapes.
    """

    operation: str
    candidates: tuple[Implementation, ...]
    args: tuple[Any, ...]
    static: dict[str, Any]
    example: Callable[..., tuple[Any, ...]]

    @functools.cached_property
    def shapes(self) -> str:
        """The arguments as text: "bfloat16[1,4096], float32[4096,4096], None; eps=1e-05"."""
        leaves = jax.tree.leaves(self.args, is_leaf=lambda leaf: leaf is None)
        arrays = ", ".join("None" if x is None else f"{x.dtype.name}[{','.join(map(str, x.shape))}]" for x in leaves)
        static = ", ".join(f"{name}={value}" for name, value in sorted(self.static.items()))
        return f"{arrays}; {static}" if static else arrays


def preferred(call: Call) -> tuple[Implementation, ...]:
    """The candidates of a call in the order in which they are tried, and record the call if somebody asks."""
    if (calls := _recorded.get()) is not None:
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), call.args)  # a trace must not be kept
        calls.append(dataclasses.replace(call, args=shapes))
    return _choices.value.order(call) if _choices.value.entries else call.candidates


@contextlib.contextmanager
def recorded_calls() -> Iterator[list[Call]]:
    """Collect the calls, in what is traced inside, for which there is a choice."""
    calls: list[Call] = []
    token = _recorded.set(calls)
    try:
        yield calls
    finally:
        _recorded.reset(token)


def supported(call: Call) -> tuple[Implementation, ...]:
    """The candidates that take a call's arguments.

    Not a composition where XLA has another way to compute the whole on this platform: its parts are measured on their
    own. It stays beside a kernel in C++, which takes the place of its parts.
    """

    def takes(candidate: Implementation) -> bool:
        try:
            jax.eval_shape(functools.partial(candidate.call, **call.static), *call.args)
        except UnsupportedError:
            return False
        return True

    candidates = tuple(candidate for candidate in call.candidates if takes(candidate))
    whole = tuple(candidate for candidate in candidates if candidate.name != "composed")
    return whole if any(candidate.platform == "cpu" and not candidate.is_kernel for candidate in whole) else candidates


def fastest(call: Call, seconds: Mapping[str, float]) -> str:
    """The implementation to run: the first in the order of preference, unless another is clearly faster."""
    first = next(candidate.name for candidate in call.candidates if candidate.name in seconds)
    best = min(seconds, key=lambda name: seconds[name])
    return best if seconds[best] < CLEARLY_FASTER * seconds[first] else first


def measure(call: Call, *, rounds: int = 5, seconds: float = 0.05) -> dict[str, float]:
    """Time a call's candidates on this device, in turns.

    Args:
      call: the call, with arguments or their shapes.
      rounds: turns of each candidate.
      seconds: how long a candidate runs in a turn, at least.
    Returns the median seconds of a call by the implementation's name, of those that take the arguments.
    """
    args = jax.block_until_ready(jax.jit(lambda: call.example(*call.args))())
    programs = {
        candidate.name: jax.jit(functools.partial(candidate.call, **call.static)) for candidate in supported(call)
    }
    for program in programs.values():
        jax.block_until_ready(program(*args))  # compiles
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(rounds):
        for name, program in programs.items():
            times[name].append(_time(program, args, seconds))
    return {name: statistics.median(taken) for name, taken in times.items()}


def _time(program: Any, args: Sequence[Any], seconds: float) -> float:
    """Measure the seconds of a call, from as many as take this long together."""
    calls, begin = 0, time.perf_counter()
    while (taken := time.perf_counter() - begin) < seconds:
        jax.block_until_ready(program(*args))
        calls += 1
    return taken / calls


def example_arguments(*shapes: Any) -> tuple[Any, ...]:
    """Return arguments of these shapes: small floats, and 0 for whole numbers, which is a valid page or position."""

    def fill(shape: Any) -> jax.Array:
        if jnp.issubdtype(shape.dtype, jnp.floating):
            return (0.1 * jnp.sin(jnp.arange(shape.size))).reshape(shape.shape).astype(shape.dtype)
        return jnp.zeros(shape.shape, shape.dtype)

    return jax.tree.map(fill, shapes)

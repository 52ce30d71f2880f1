"""`zeros`: the initial arrays, made on the device in one call, whatever the number of layers."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.compiled import ProgramSpec, Sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Zeros(Sizes):
    """No sizes: the shapes are in `static`."""

    program = "zeros"


def build(static: Any, sizes: Zeros) -> Callable[..., Any]:
    """Build the function without arguments that returns zeros of these shapes."""

    def zeros() -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.sharding.shard_shape(x.shape), x.dtype), static)

    return zeros


def spec(shapes: Any) -> ProgramSpec[Zeros, Any]:
    """The spec for these shapes, a pytree of `jax.ShapeDtypeStruct`s, which say where the arrays will live."""
    return ProgramSpec(
        sizes=Zeros,
        build=build,
        static=shapes,
        arguments=lambda sizes: (),
        reachable=lambda buckets: (Zeros(),),
        out_shardings=lambda sizes: jax.tree.map(lambda x: x.sharding, shapes),
    )

"""x W^T in plain JAX."""

import jax
from jax import lax


def matmul(x: jax.Array, weight: jax.Array, *, accumulator: jax.typing.DTypeLike | None = None) -> jax.Array:
    """x W^T: [..., K], [N, K] -> [..., N] in dtype `accumulator`, or else in x's."""
    return lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=accumulator)

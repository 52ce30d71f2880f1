"""x W^T in a form that XLA:CPU is faster with."""

import jax
import jax.numpy as jnp

from jaxinfer.pallas_kernels.matmul.reference import matmul
from jaxinfer.pallas_kernels.target import UnsupportedError


def padded_to_two_rows(
    x: jax.Array, weight: jax.Array, *, accumulator: jax.typing.DTypeLike | None = None
) -> jax.Array:
    """Multiply a single row, not in float32, as two rows.

    For a single row XLA:CPU has a fast path only in float32; in other dtypes it multiplies element by element.
    """
    if x.size != x.shape[-1] or x.dtype == jnp.float32:
        raise UnsupportedError("only a single row in another dtype than float32 is padded")
    rows = jnp.pad(x.reshape(1, -1), ((0, 1), (0, 0)))
    return matmul(rows, weight, accumulator=accumulator)[0].reshape(*x.shape[:-1], -1)

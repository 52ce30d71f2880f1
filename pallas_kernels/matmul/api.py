"""x W^T: every product with a weight that XLA computes."""

import jax

from jaxinfer.pallas_kernels.dispatch import Operation
from jaxinfer.pallas_kernels.implementation import reference, xla
from jaxinfer.pallas_kernels.matmul import reference as plain
from jaxinfer.pallas_kernels.matmul.xla import padded_to_two_rows

_matmul = Operation("matmul", xla(padded_to_two_rows, platform="cpu"), reference(plain.matmul))


def matmul(x: jax.Array, weight: jax.Array, accumulator: jax.typing.DTypeLike | None = None) -> jax.Array:
    """x W^T.

    Args:
      x: [..., K]. weight: [N, K].
      accumulator: the dtype of sums and result; None: x's dtype.
    Returns: [..., N].
    """
    return _matmul(x, weight, accumulator=accumulator)

"""The parts of choosing a token that read a whole vocabulary."""

import jax

from jaxinfer.pallas_kernels.dispatch import Operation
from jaxinfer.pallas_kernels.implementation import reference, xla
from jaxinfer.pallas_kernels.sampling import fallbacks
from jaxinfer.pallas_kernels.sampling import reference as plain

_max_and_argmax = Operation(
    "max_and_argmax", xla(fallbacks.max_and_argmax, platform="cpu"), reference(plain.max_and_argmax)
)
_top_k = Operation("top_k", xla(fallbacks.top_k, platform="cpu"), reference(plain.top_k))
_threshold = Operation("threshold", reference(plain.threshold))


def max_and_argmax(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The best score of each row, or a NaN if there is one, and its index; of equal ones the first.

    Args:
      scores: float32 [B, V].
    Returns: float32 [B], int32 [B].
    """
    return _max_and_argmax(scores)


def top_k(scores: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The best scores of each row, best first, and their indices; of equal ones the first.

    Args:
      scores: float32 or int32 [..., V]. A NaN counts as the best, or with its sign bit as the worst.
      count: at most V.
    Returns: scores [..., count], int32 [..., count].
    """
    return _top_k(scores, count=count)


def threshold(keys: jax.Array, weights: jax.Array, target: jax.Array, *, axes: tuple[str, ...] = ()) -> jax.Array:
    """The largest t for which the weights of all keys >= t sum to `target` or more: the cut of top-k or top-p.

    Args:
      keys: int32 [B, V]. weights: float32 [B, V], not negative. target: float32 [B].
      axes: the mesh axes over which the keys of a row are split; each device gets the same result.
    Returns: int32 [B].
    """
    return _threshold(keys, weights, target, axes=axes)

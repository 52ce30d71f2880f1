"""The operations of a mixture of experts (DeepSpeed Inference, section V-C). Letters as in the package's docstring."""

import jax
import jax.numpy as jnp

from jaxinfer.pallas_kernels.dispatch import Operation
from jaxinfer.pallas_kernels.implementation import mosaic, reference, xla
from jaxinfer.pallas_kernels.moe import mosaic as kernels
from jaxinfer.pallas_kernels.moe import reference as plain
from jaxinfer.pallas_kernels.moe import xla as fallbacks
from jaxinfer.pallas_kernels.moe.routing import Routing

__all__ = ["Routing", "grouped_matmul", "permute", "top_k_gating", "unpermute"]

_top_k_gating = Operation("top_k_gating", mosaic(kernels.top_k_gating), reference(plain.top_k_gating))
_permute = Operation("permute", mosaic(kernels.permute), reference(plain.permute))
_unpermute = Operation("unpermute", mosaic(kernels.unpermute), reference(plain.unpermute))
_grouped_matmul = Operation("grouped_matmul", mosaic(kernels.grouped_matmul, "wgmma"), xla(fallbacks.grouped_matmul))


def top_k_gating(logits: jax.Array, k: int, *, capacity: int | None = None, normalize: bool = True) -> Routing:
    """Route each token to the k experts with its highest logits; ties go to the expert of lower index.

    Args:
      logits: [N, E]; converted to float32. Infinite ones count as the largest finite numbers, NaN as the lowest, so
        that every field of the result is finite and in its range whatever the logits are.
      k: experts per token, all different.
      capacity: None keeps every choice, R = N * k. A number gives each expert that many rows, R = E * capacity; later
        tokens' choices that do not fit are dropped.
      normalize: the k weights of a token sum to 1 (Mixtral; Qwen-MoE's norm_topk_prob=true): the softmax over its k
        logits. Otherwise each is the softmax over all experts (norm_topk_prob=false). Dropping a choice does not change
        the other weights.
    Raises: ValueError if k is not in 1..E or the capacity is below 1.
    """
    experts = logits.shape[1]
    if not 1 <= k <= experts:
        raise ValueError(f"top_k_gating needs 1 <= k <= {experts} experts, got k={k}.")
    if capacity is not None and capacity < 1:
        raise ValueError(f"top_k_gating needs a capacity of at least 1, got {capacity}.")
    logits = logits.astype(jnp.float32)
    return _top_k_gating(logits, k=k, capacity=capacity, normalize=normalize)


def permute(x: jax.Array, routing: Routing) -> jax.Array:
    """Copy tokens to rows sorted by expert: [N, D] -> [R, D]. Empty rows, of no token in 0..N-1, are zero."""
    return _permute(x, routing)


def unpermute(y: jax.Array, routing: Routing) -> jax.Array:
    """Sum each token's rows by their weights, in float32: [R, D] -> [N, D] in y's dtype. Empty rows are not read."""
    return _unpermute(y, routing)


def grouped_matmul(x: jax.Array, weights: jax.Array, offsets: jax.Array, sizes: jax.Array) -> jax.Array:
    """x[r] W[e]^T for each row r of each expert e.

    Args:
      x: [R, K]. weights: [E, N, K].
      offsets, sizes: int32 [E], as in `Routing`: rows offsets[e] to offsets[e] + sizes[e] - 1 are expert e's. The
        experts' rows ascend and do not overlap.
    Returns: [R, N] in x's dtype, accumulated in float32. Rows of no expert are arbitrary.
    """
    return _grouped_matmul(x, weights, offsets, sizes)

"""The operations of a mixture of experts (DeepSpeed Inference, section V-C). Letters as in the package's docstring."""

import jax
import jax.numpy as jnp

from jaxinfer.pallas_kernels.activations import activate_outputs
from jaxinfer.pallas_kernels.dispatch import Operation
from jaxinfer.pallas_kernels.implementation import composed, ffi, mosaic, reference, xla
from jaxinfer.pallas_kernels.moe import cpu, in_place
from jaxinfer.pallas_kernels.moe import mosaic as kernels
from jaxinfer.pallas_kernels.moe import reference as plain
from jaxinfer.pallas_kernels.moe import xla as fallbacks
from jaxinfer.pallas_kernels.moe.routing import GroupScore, Routing, Rule, Scoring
from jaxinfer.pallas_kernels.weights import Weights

__all__ = ["expert_mlp", "grouped_matmul", "permute", "top_k_gating", "unpermute"]

_top_k_gating = Operation("top_k_gating", mosaic(kernels.top_k_gating), reference(plain.top_k_gating))
_permute = Operation("permute", mosaic(kernels.permute), reference(plain.permute))
_unpermute = Operation("unpermute", mosaic(kernels.unpermute), reference(plain.unpermute))
_grouped_matmul = Operation("grouped_matmul", mosaic(kernels.grouped_matmul, "wgmma"), xla(fallbacks.grouped_matmul))


def top_k_gating(
    logits: jax.Array,
    k: int,
    *,
    valid: jax.Array | None = None,
    capacity: int | None = None,
    normalize: bool = True,
    scoring: Scoring = "softmax",
    selection_bias: jax.Array | None = None,
    groups: int = 1,
    groups_per_token: int = 1,
    group_score: GroupScore = "max",
    scale: float = 1.0,
) -> Routing:
    """Route each token to the k best experts; ties go to the expert of lower index.

    Args:
      logits: [N, E]; converted to float32. Infinite ones count as the largest finite numbers, NaN as the lowest, so
        that every field of the result is finite and in its range whatever the logits are.
      k: experts per token, all different.
      valid: bool [N], which tokens are no padding. The weights of the others are 0, they take none of the capacity, and
        they have no experts read that no valid token has. None: all.
      capacity: None keeps every choice, R = N * k. A number gives each expert that many rows, R = E * capacity; later
        tokens' choices that do not fit are dropped.
      normalize: the k weights of a token sum to `scale` (Mixtral; Qwen-MoE's norm_topk_prob=true); of softmax scores
        that is the softmax over its k logits, of sigmoids each is divided by their sum + 1e-20. Otherwise each is the
        score among all experts (norm_topk_prob=false). Dropping a choice does not change the other weights.
      scoring: an expert's score is its share of the softmax over all experts, or the sigmoid of its logit.
      selection_bias: float32 [E], added to the scores for choosing experts and groups, and never to the weights
        (DeepSeek V3's e_score_correction_bias).
      groups: of E / groups consecutive experts each. A token's experts are of the `groups_per_token` best of them.
      group_score: of a group's experts, the largest score (DeepSeek V2) or the sum of the two largest (V3).
      scale: multiplies the weights at last (routed_scaling_factor).
    Raises: ValueError if k is not in 1..E, the capacity is below 1, scoring or group_score is unknown, the groups do
      not divide the experts, or those that are chosen have fewer than k (top_2_sum: fewer than 2 each).
    """
    rule = Rule(
        k=k,
        capacity=capacity,
        normalize=normalize,
        scoring=scoring,
        groups=groups,
        groups_per_token=groups_per_token,
        group_score=group_score,
        scale=scale,
    )
    rule.check(logits.shape[1])
    return _top_k_gating(logits.astype(jnp.float32), selection_bias, valid, rule=rule)


def permute(x: jax.Array, routing: Routing) -> jax.Array:
    """Copy tokens to rows sorted by expert: [N, D] -> [R, D]. Empty rows, of no token in 0..N-1, are zero."""
    return _permute(x, routing)


def unpermute(y: jax.Array, routing: Routing) -> jax.Array:
    """Sum each token's rows by their weights, in float32: [R, D] -> [N, D] in y's dtype. Empty rows are not read."""
    return _unpermute(y, routing)


def grouped_matmul(x: jax.Array, weights: Weights, offsets: jax.Array, sizes: jax.Array) -> jax.Array:
    """x[r] W[e]^T for each row r of each expert e.

    Args:
      x: [R, K]. weights: E matrices of N by K, in any format; rows of x are quantised for int8.
      offsets, sizes: int32 [E], as in `Routing`: rows offsets[e] to offsets[e] + sizes[e] - 1 are expert e's. The
        experts' rows ascend and do not overlap.
    Returns: [R, N] in x's dtype, accumulated in float32. Rows of no expert are arbitrary.
    """
    return _grouped_matmul(x, weights, offsets, sizes)


def expert_mlp(
    x: jax.Array,
    routing: Routing,
    gate_up: Weights,
    down: Weights,
    gate_up_bias: jax.Array | None = None,
    down_bias: jax.Array | None = None,
    *,
    activation: str,
    gated: bool,
) -> jax.Array:
    """Sum over each token's experts of weight * (act(x W^T + b) V^T + c).

    Args:
      x: [N, D]. routing: of its tokens.
      gate_up: W, E matrices of 2F by D whose outputs alternate (gate, up), so that the hidden values are
        act(gate) * up; without `gated` of F by D.
      down: V, E matrices of D by F. gate_up_bias, down_bias: float32 [E, outputs], b and c.
      activation: a name that `activate` knows.
    Returns: [N, D] in x's dtype. Experts without tokens are not read.
    Raises: ValueError for an activation that `activate` does not know.
    """
    return _expert_mlp(x, routing, gate_up, down, gate_up_bias, down_bias, activation=activation, gated=gated)


def _composed_mlp(
    x: jax.Array,
    routing: Routing,
    gate_up: Weights,
    down: Weights,
    gate_up_bias: jax.Array | None,
    down_bias: jax.Array | None,
    *,
    activation: str,
    gated: bool,
) -> jax.Array:
    """Copy tokens to rows by expert, multiply these twice, and combine them. Arguments as of `expert_mlp`."""

    def linear(rows: jax.Array, weights: Weights, bias: jax.Array | None) -> jax.Array:
        y = grouped_matmul(rows, weights, routing.offsets, routing.sizes)
        if bias is None:
            return y
        expert = jnp.sum(routing.offsets <= jnp.arange(len(rows))[:, None], axis=1) - 1
        return y + bias[expert].astype(y.dtype)

    hidden = activate_outputs(linear(permute(x, routing), gate_up, gate_up_bias), activation, gated=gated)
    return unpermute(linear(hidden, down, down_bias), routing)


_expert_mlp = Operation(
    "expert_mlp", ffi(cpu.expert_mlp), xla(in_place.expert_mlp, platform="cpu"), composed(_composed_mlp)
)

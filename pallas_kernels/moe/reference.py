"""The operations of a mixture of experts in plain JAX: what every implementation computes."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.pallas_kernels.activations import activate_outputs
from jaxinfer.pallas_kernels.moe.routing import Routing, Rule, finite, limit_capacity, sort_choices
from jaxinfer.pallas_kernels.weights import Weights, dequantize, is_int8, quantize_rows


def top_k_gating(
    logits: jax.Array, selection_bias: jax.Array | None = None, valid: jax.Array | None = None, *, rule: Rule
) -> Routing:
    """Route each token to its experts. Arguments as of `api`."""
    num_experts = logits.shape[1]
    logits = finite(logits)
    experts = lax.top_k(_ranking(logits, selection_bias, rule), rule.k)[1].astype(jnp.int32)
    kept = None if valid is None else jnp.broadcast_to(valid[:, None], experts.shape)
    routing = sort_choices(experts, _weights(logits, experts, rule), kept, num_experts)
    return routing if rule.capacity is None else limit_capacity(routing, rule.capacity)


def _ranking(logits: jax.Array, selection_bias: jax.Array | None, rule: Rule) -> jax.Array:
    """Return what orders the experts of each token, [N, E]: -inf for those of groups that are not chosen.

    Without a bias logits order as their scores do, without the ties of scores that underflow or saturate.
    """
    scores = jax.nn.sigmoid(logits) if rule.scoring == "sigmoid" else jax.nn.softmax(logits)
    if selection_bias is not None:
        scores = finite(scores + selection_bias)
    ranking = logits if selection_bias is None else scores
    if not rule.limits_groups:
        return ranking
    by_group = (len(logits), rule.groups, -1)
    if rule.group_score == "max":
        group_scores = jnp.max(ranking.reshape(by_group), axis=-1)
    else:
        group_scores = jnp.sum(lax.top_k(scores.reshape(by_group), 2)[0], axis=-1)
    chosen = lax.top_k(group_scores, rule.groups_per_token)[1]
    allowed = jnp.any(chosen[..., None] == jnp.arange(rule.groups), axis=1)
    return jnp.where(allowed[..., None], ranking.reshape(by_group), -jnp.inf).reshape(ranking.shape)


def _weights(logits: jax.Array, experts: jax.Array, rule: Rule) -> jax.Array:
    """Compute the weights of the chosen experts, [N, k].

    They are made of logits, not of the biased scores: score + bias - bias would leave nothing of a small score.
    """
    chosen = jnp.take_along_axis(logits, experts, axis=1)
    if rule.scoring == "sigmoid":
        weights = jax.nn.sigmoid(chosen)
        total = jnp.sum(weights, axis=1, keepdims=True) + 1e-20 if rule.normalize else 1.0  # 1e-20: as DeepSeek V3
    else:
        rivals = chosen if rule.normalize else logits
        peak = jnp.max(rivals, axis=1, keepdims=True)
        weights, total = jnp.exp(chosen - peak), jnp.sum(jnp.exp(rivals - peak), axis=1, keepdims=True)
    return weights / total * rule.scale


def permute(x: jax.Array, routing: Routing) -> jax.Array:
    """Copy tokens to their rows. Arguments as of `api`."""
    return _rows_or_zero(x, routing.tokens)


def _rows_or_zero(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Return these rows of x; zero where there is no such row."""
    return x.at[rows].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def unpermute(y: jax.Array, routing: Routing) -> jax.Array:
    """Sum each token's rows by their weights. Arguments as of `api`."""

    def weighted(choice: int) -> jax.Array:
        return routing.weights[:, choice, None] * _rows_or_zero(y, routing.rows[:, choice]).astype(jnp.float32)

    total = weighted(0)
    for choice in range(1, routing.rows.shape[1]):
        total += weighted(choice)
    return total.astype(y.dtype)


def grouped_matmul(x: jax.Array, weights: Weights, offsets: jax.Array, sizes: jax.Array) -> jax.Array:
    """Multiply each row by its expert's matrix; rows of no expert by that of another. Arguments as of `api`."""
    del sizes
    row = jnp.arange(len(x))
    expert = jnp.sum(offsets <= row[:, None], axis=1) - 1
    return _product(x, weights, expert).astype(x.dtype)


def _product(x: jax.Array, weights: Weights, expert: jax.Array) -> jax.Array:
    """x[r] W[expert[r]]^T in float32: [R, K] -> [R, N]; rows are quantised for int8 weights."""
    if is_int8(weights):
        assert weights.scale is not None
        q, q_scale = quantize_rows(x)
        sums = jnp.einsum("rk,rnk->rn", q, weights.weight[expert], preferred_element_type=jnp.int32)
        return sums.astype(jnp.float32) * q_scale * weights.scale[expert]
    matrices = dequantize(jax.tree.map(lambda leaf: leaf[expert], weights), jnp.float32)
    return jnp.einsum("rk,rnk->rn", x.astype(jnp.float32), matrices, precision="highest")


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
    """Sum the weighted outputs of each token's experts, choice by choice. Arguments as of `api`."""

    def outputs(expert: jax.Array) -> jax.Array:
        y = _product(x, gate_up, expert) + (0.0 if gate_up_bias is None else gate_up_bias[expert])
        hidden = activate_outputs(y, activation, gated=gated)
        return _product(hidden, down, expert) + (0.0 if down_bias is None else down_bias[expert])

    choices = [outputs(expert) for expert in routing.experts.T]
    return jnp.einsum("nk,knd->nd", routing.weights, jnp.stack(choices)).astype(x.dtype)

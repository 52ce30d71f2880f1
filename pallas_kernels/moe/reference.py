"""The operations of a mixture of experts in plain JAX: what every implementation computes."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.pallas_kernels.moe.routing import Routing, finite, limit_capacity


def top_k_gating(logits: jax.Array, *, k: int, capacity: int | None, normalize: bool) -> Routing:
    """Route each token to its experts. Arguments as of `api`."""
    tokens, num_experts = logits.shape
    logits = finite(logits)
    values, experts = lax.top_k(logits, k)
    probs = jnp.exp(values - values[:, :1])
    total = jnp.sum(probs if normalize else jnp.exp(logits - values[:, :1]), axis=1, keepdims=True)
    choices = experts.reshape(-1)
    sizes = jnp.zeros(num_experts, jnp.int32).at[choices].add(1)
    offsets = jnp.cumsum(sizes) - sizes
    order = jnp.argsort(choices, stable=True).astype(jnp.int32)  # row -> choice
    rows = jnp.zeros_like(choices).at[order].set(jnp.arange(tokens * k, dtype=jnp.int32), unique_indices=True)
    routing = Routing(experts, probs / total, rows.reshape(tokens, k), order // k, offsets, sizes)
    return routing if capacity is None else limit_capacity(routing, capacity)


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


def grouped_matmul(x: jax.Array, weights: jax.Array, offsets: jax.Array, sizes: jax.Array) -> jax.Array:
    """Multiply each row by its expert's matrix; rows of no expert by that of another. Arguments as of `api`."""
    del sizes
    row = jnp.arange(len(x))
    expert = jnp.sum(offsets <= row[:, None], axis=1) - 1
    sums = jnp.einsum("rk,rnk->rn", x, weights[expert], preferred_element_type=jnp.float32)
    return sums.astype(x.dtype)

"""Where the tokens of a mixture of experts go."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Routing(NamedTuple):
    """Where each token's k choices go: R rows, sorted by expert and within an expert by token.

    Attributes:
      experts: int32 [N, k], the chosen experts, the highest logit first.
      weights: float32 [N, k], the weight of each expert's output; 0 if the choice was dropped.
      rows: int32 [N, k], the row of each choice; R if it was dropped.
      tokens: int32 [R], the token of each row; N if the row is empty.
      offsets: int32 [E], the first row of each expert, ascending.
      sizes: int32 [E], the number of rows of each expert: offsets[e] to offsets[e] + sizes[e] - 1.
    """

    experts: jax.Array
    weights: jax.Array
    rows: jax.Array
    tokens: jax.Array
    offsets: jax.Array
    sizes: jax.Array


_MAX_LOGIT = float(jnp.finfo(jnp.float32).max)


def finite(logits: jax.Array) -> jax.Array:
    """Return the logits with NaN and infinities as finite numbers: NaN is the lowest."""
    return jnp.where(logits >= -_MAX_LOGIT, jnp.minimum(logits, _MAX_LOGIT), -_MAX_LOGIT)


def limit_capacity(routing: Routing, capacity: int) -> Routing:
    """Give every expert `capacity` rows and drop the choices that do not fit."""
    (tokens, k), experts = routing.experts.shape, len(routing.sizes)
    positions = routing.rows - routing.offsets[routing.experts]  # among the expert's rows
    kept = positions < capacity
    rows = jnp.where(kept, routing.experts * capacity + positions, experts * capacity)
    token_of_choice = jnp.repeat(jnp.arange(tokens, dtype=jnp.int32), k)
    return Routing(
        experts=routing.experts,
        weights=jnp.where(kept, routing.weights, 0.0),
        rows=rows,
        tokens=jnp.full(experts * capacity, tokens, jnp.int32).at[rows.reshape(-1)].set(token_of_choice, mode="drop"),
        offsets=jnp.arange(experts, dtype=jnp.int32) * capacity,
        sizes=jnp.minimum(routing.sizes, capacity),
    )

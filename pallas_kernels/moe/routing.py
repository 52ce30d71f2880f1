"""Where the tokens of a mixture of experts go, and by which rule."""

import dataclasses
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

Scoring = Literal["softmax", "sigmoid"]
GroupScore = Literal["max", "top_2_sum"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """By which rule a router chooses and weighs the k experts of a token. Attributes as of `api.top_k_gating`."""

    k: int
    capacity: int | None = None
    normalize: bool = True
    scoring: Scoring = "softmax"
    groups: int = 1
    groups_per_token: int = 1
    group_score: GroupScore = "max"
    scale: float = 1.0

    def check(self, experts: int) -> None:
        """Raise ValueError if the rule cannot choose among so many experts."""
        if not 1 <= self.k <= experts:
            raise ValueError(f"top_k_gating needs 1 <= k <= {experts} experts, got k={self.k}.")
        if self.capacity is not None and self.capacity < 1:
            raise ValueError(f"top_k_gating needs a capacity of at least 1, got {self.capacity}.")
        if self.scoring not in get_args(Scoring):
            raise ValueError(f"scoring must be softmax or sigmoid, got {self.scoring!r}.")
        if self.group_score not in get_args(GroupScore):
            raise ValueError(f"group_score must be max or top_2_sum, got {self.group_score!r}.")
        if self.groups < 1 or experts % self.groups:
            raise ValueError(f"{experts} experts do not divide into groups={self.groups}.")
        if not 1 <= self.groups_per_token <= self.groups:
            raise ValueError(f"groups_per_token must be in 1..{self.groups} groups, got {self.groups_per_token}.")
        size = experts // self.groups
        if self.k > self.groups_per_token * size:
            raise ValueError(f"{self.groups_per_token} groups of {size} experts are fewer than k={self.k} experts.")
        if self.limits_groups and self.group_score == "top_2_sum" and size < 2:
            raise ValueError(f"group_score top_2_sum needs groups of at least 2 experts, got groups={self.groups}.")

    @property
    def limits_groups(self) -> bool:
        """Whether a token's experts are of some of the groups only."""
        return self.groups_per_token < self.groups


class Routing(NamedTuple):
    """Where each token's k choices go: R rows, sorted by expert and within an expert by token.

    Attributes:
      experts: int32 [N, k], the chosen experts, the best first.
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
    """Compute the logits with NaN and infinities as finite numbers: NaN is the lowest."""
    return jnp.where(logits >= -_MAX_LOGIT, jnp.minimum(logits, _MAX_LOGIT), -_MAX_LOGIT)


def sort_choices(experts: jax.Array, weights: jax.Array, kept: jax.Array | None, num_experts: int) -> Routing:
    """Compute the routing of choices: a row for each kept one, sorted by expert.

    Args:
      experts: int32 [N, k], in 0..num_experts - 1 where the choice is kept.
      weights: float32 [N, k]; those of choices that are not kept become 0.
      kept: bool [N, k]; None: all.
    """
    tokens, k = experts.shape
    if kept is not None:
        weights = jnp.where(kept, weights, 0.0)
    choices = (experts if kept is None else jnp.where(kept, experts, num_experts)).reshape(-1)
    sizes = jnp.zeros(num_experts, jnp.int32).at[choices].add(1, mode="drop")
    offsets = jnp.cumsum(sizes) - sizes
    order = jnp.argsort(choices, stable=True).astype(jnp.int32)  # row -> choice
    rows = jnp.zeros_like(choices).at[order].set(jnp.arange(tokens * k, dtype=jnp.int32), unique_indices=True)
    token_of_row = order // k
    if kept is not None:  # rows of the others come last, and are empty
        rows = jnp.where(choices < num_experts, rows, tokens * k)
        token_of_row = jnp.where(jnp.arange(tokens * k) < jnp.sum(sizes), token_of_row, tokens)
    return Routing(experts, weights, rows.reshape(tokens, k), token_of_row, offsets, sizes)


def limit_capacity(routing: Routing, capacity: int) -> Routing:
    """Give every expert `capacity` rows and drop the choices that do not fit."""
    (tokens, k), experts = routing.experts.shape, len(routing.sizes)
    positions = routing.rows - routing.offsets[routing.experts]  # among the expert's rows
    kept = (positions < capacity) & (routing.rows < tokens * k)
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

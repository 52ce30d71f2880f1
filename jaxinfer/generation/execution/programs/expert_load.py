"""Counts of the experts that routers chose, for each row of a pass."""

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.models import TokenRows

if TYPE_CHECKING:
    from jaxinfer.pallas_kernels.moe import Routing


class ExpertCounts(NamedTuple):
    """The choices of the tokens of each row, B rows in all; L layers have E experts.

    Attributes:
      tokens: int32 [B, L, E], tokens sent to each expert.
      dropped: int32 [B, L], how many choices did not fit.
    """

    tokens: jax.Array
    dropped: jax.Array


def no_counts(rows: int, layers: int, experts: int) -> ExpertCounts:
    """Return counts of nothing."""
    return ExpertCounts(jnp.zeros((rows, layers, experts), jnp.int32), jnp.zeros((rows, layers), jnp.int32))


def count_experts(routings: "list[Routing]", groups: tuple[TokenRows, ...]) -> ExpertCounts:
    """Count the choices of a pass over these groups, for the rows of all groups one after another."""
    layers = [_counts_of_layer(routing, groups) for routing in routings]
    return jax.tree.map(lambda *x: jnp.stack(x, axis=1), *layers)


def _counts_of_layer(routing: "Routing", groups: tuple[TokenRows, ...]) -> ExpertCounts:
    """Return int32 [B, E] and [B]."""
    valid = jnp.concatenate([group.positions.reshape(-1) for group in groups]) >= 0
    rows, first = [], 0
    for group in groups:
        batch, tokens = group.ids.shape
        rows.append(jnp.repeat(first + jnp.arange(batch), tokens))
        first += batch
    row = jnp.concatenate(rows)
    count = valid[:, None].astype(jnp.int32)
    full = (routing.rows == len(routing.tokens)).astype(jnp.int32)
    return ExpertCounts(
        jnp.zeros((first, len(routing.sizes)), jnp.int32).at[row[:, None], routing.experts].add(count),
        jnp.zeros(first, jnp.int32).at[row].add(jnp.sum(count * full, axis=1)),
    )

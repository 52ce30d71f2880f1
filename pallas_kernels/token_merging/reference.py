"""Token merging in plain JAX: what every implementation computes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# Scores of pairs with padding, beyond those of all others, which are cosines: a token of A that is padding is merged
# first; one of B is chosen last.
FIRST, LAST = 2.0, -2.0


class _Choice(NamedTuple):
    """The tokens that are merged, and the outputs that they become a part of. Every output starts as one token.

    Attributes:
      kept: int32 [B, n - r], the token that each output starts as.
      merged: int32 [B, r], the tokens that are removed. into: int32 [B, r], the output that each becomes a part of.
    """

    kept: jax.Array
    merged: jax.Array
    into: jax.Array


def merge_tokens(
    x: jax.Array, size: jax.Array, metric: jax.Array, *, r: int, protected: int, protect_isolated: float | None
) -> tuple[jax.Array, jax.Array]:
    """Merge `r` tokens of each row. Arguments as of `api`."""
    unit = normalized(metric)
    if protect_isolated is None:
        return _means(x, size, _most_similar(unit, size, r, protected))
    return _means(x, size, _highest_energy(unit, size, r, protected, margin=protect_isolated))


def normalized(metric: jax.Array) -> jax.Array:
    """Scale rows to length 1, in the metric's dtype: their dot products are cosine similarities."""
    exact = metric.astype(jnp.float32)
    square = jnp.sum(exact * exact, axis=-1, keepdims=True)
    return (exact * lax.rsqrt(square + 1e-12)).astype(metric.dtype)


def _cosines(a: jax.Array, b: jax.Array) -> jax.Array:
    """Multiply rows of length 1: [B, i, m], [B, j, m] -> float32 [B, i, j]."""
    return jnp.einsum("bim,bjm->bij", a, b, precision="highest", preferred_element_type=jnp.float32)


def _most_similar(unit: jax.Array, size: jax.Array, r: int, protected: int) -> _Choice:
    """Choose as ToMe: the `r` tokens of A that are most similar to a token of B."""
    scores = _cosines(unit[:, ::2], unit[:, 1::2])
    scores = jnp.where(size[:, None, 1::2] > 0, scores, LAST)
    scores = jnp.where(size[:, ::2, None] > 0, scores, FIRST)
    a, b = jnp.arange(0, unit.shape[1], 2), jnp.arange(1, unit.shape[1], 2)
    scores = jnp.where((a[:, None] < protected) | (b < protected), -jnp.inf, scores)
    _, merged = lax.top_k(jnp.max(scores, axis=2), r)
    into = jnp.argmax(jnp.take_along_axis(scores, merged[..., None], axis=1), axis=2)
    is_merged = jnp.any(merged[..., None] == jnp.arange(len(a)), axis=1)
    rest = jnp.sort(jnp.where(is_merged, len(a), jnp.arange(len(a))), axis=1)[:, :-r]
    kept = jnp.concatenate([2 * rest, jnp.broadcast_to(b, (len(unit), len(b)))], axis=1)
    return _Choice(kept, 2 * merged, rest.shape[1] + into)


def _highest_energy(unit: jax.Array, size: jax.Array, r: int, protected: int, *, margin: float) -> _Choice:
    """Choose as PiToMe: pairs of the `2 r` tokens of highest energy, less two for every token of padding removed."""
    place = jnp.arange(unit.shape[1])
    mergeable = (size > 0) & (place >= protected)
    cosines = _cosines(unit, unit)
    terms = jnp.where(cosines >= margin, cosines, jnp.exp(cosines - margin) - 1)
    # Sums in place of means: all of a row would be divided by the same number.
    energy = jnp.sum(jnp.where(mergeable[:, None] & (place != place[:, None]), terms, 0.0), axis=2)
    energy = jnp.where(mergeable, energy, jnp.where(place < protected, -jnp.inf, jnp.inf))
    _, order = lax.top_k(energy, 2 * r)  # padding before all others
    padding = jnp.minimum(jnp.sum(energy == jnp.inf, axis=1, keepdims=True), r)  # removed: the first `padding` slots

    slot = jnp.arange(r)
    rank_of_a = jnp.where(slot < padding, slot, 2 * slot - padding)
    merged, partners = (jnp.take_along_axis(order, rank, axis=1) for rank in (rank_of_a, rank_of_a + 1))
    scores = _cosines(_rows(unit, merged), _rows(unit, partners))
    into = jnp.argmax(jnp.where((slot < padding)[:, None], -jnp.inf, scores), axis=2)

    # Sorts the tokens that are left alone by their place, the partners after them by their slot.
    is_merged = jnp.any(merged[..., None] == place, axis=1)
    is_partner = (partners[..., None] == place) & (slot >= padding)[..., None]  # [B, r, n]
    last = jnp.max(jnp.where(is_partner, len(place) + slot[:, None], 0), axis=1)
    kept = jnp.argsort(jnp.where(is_merged, 2 * len(place), jnp.maximum(place, last)), axis=1)[:, :-r]
    return _Choice(kept, merged, kept.shape[1] - r + into)


def _means(x: jax.Array, size: jax.Array, choice: _Choice) -> tuple[jax.Array, jax.Array]:
    """The size-weighted mean of each output's tokens, and its size.

    A product with a matrix of few columns, in place of a scatter, whose order could change the sums on a GPU. A token
    that is left alone has a weight of exactly 1.
    """
    kept_size, merged_size = (jnp.take_along_axis(size, index, axis=1) for index in (choice.kept, choice.merged))
    outputs = jnp.arange(choice.kept.shape[1])
    sizes = jnp.where(choice.into[:, None] == outputs[:, None], merged_size[:, None], 0.0)  # [B, n - r, r]
    new_size = kept_size + jnp.sum(sizes, axis=2)
    total = jnp.where(new_size > 0, new_size, 1.0)[..., None]
    kept, merged = (_rows(x, index).astype(jnp.float32) for index in (choice.kept, choice.merged))
    added = jnp.einsum("bkr,brd->bkd", sizes / total, merged, precision="highest")
    return (kept_size[..., None] / total * kept + added).astype(x.dtype), new_size


def _rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[b, index[b]]: [B, n, d], [B, k] -> [B, k, d]."""
    return jnp.take_along_axis(x, index[..., None], axis=1)

"""The n-gram proposer: speculative tokens are those that followed an earlier occurrence of the text's last tokens."""

import jax
import jax.numpy as jnp

MAX_NGRAM = 4
MIN_NGRAM = 3
"""How many tokens at a text's end must have occurred before, for a proposal of the tokens that followed them."""


def propose(history: jax.Array, length: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Propose the tokens that followed the longest, then latest, earlier occurrence of the text's last tokens.

    If the text repeats itself up to its end, the proposal repeats it further.

    Args:
      history: int32 [B, C]; the first `length` [B] tokens are known.
      count: tokens to propose.

    Returns: int32 [B, count], and how many are real: `count`, or 0 where the last tokens are new. int32 [B].
    """
    end = length[:, None] - 1  # the last known token
    place = jnp.arange(history.shape[1])
    same = place < end  # earlier places whose last n tokens match those at the end
    matched = jnp.zeros(history.shape, jnp.int32)
    for back in range(MAX_NGRAM):
        recent = jnp.take_along_axis(history, jnp.maximum(end - back, 0), axis=1)
        same &= (jnp.roll(history, back, axis=1) == recent) & (place >= back)
        matched += same
    score = jnp.where(matched >= MIN_NGRAM, matched * history.shape[1] + place, -1)
    best = jnp.argmax(score, axis=1)[:, None]
    repeats = jnp.max(score, axis=1) >= 0
    period = jnp.maximum(end - best, 1)
    tokens = jnp.take_along_axis(history, best + 1 + jnp.arange(count) % period, axis=1)
    return tokens, jnp.where(repeats, count, 0)

"""Tokens that may turn out wrong: the states stay before them, and the next pass replays those that were right.

A pass over a token and W guesses moves a slot's state by that token alone, and keeps what the rule took of the guesses
(`Window`). The first position of the next pass says how many of them were right. So nothing is rolled back, no layer
has to be told, and a state is read and written once in a pass, however many guesses there are.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.pallas_kernels.delta_rule.recurrent_state import RecurrentState, Window

Inputs = tuple[jax.Array, jax.Array, jax.Array]
"""qkv, decay and beta of rows of tokens, as in `api.gated_delta_rule`."""
Rule = Callable[..., tuple[jax.Array, RecurrentState]]
"""The rule over (inputs, states, slot, positions), and with `kept` if not all tokens move the states."""


def over_window(
    rule: Rule, inputs: Inputs, cache: RecurrentState, slot: jax.Array, positions: jax.Array, *, speculates: bool
) -> tuple[jax.Array, RecurrentState]:
    """Run the rule over rows whose slots may have a window, as `api.gated_delta_rule` says."""
    window, states = cache.window, cache._replace(window=None)
    assert window is not None
    size, first = positions.shape[1], positions[:, 0]
    row = jnp.where(first >= 0, slot, len(window.start))  # of padding: none
    if size > 1 and not speculates:
        output, states = rule(inputs, states, slot, positions)  # which the tokens of a prompt alone have moved so far
        return output, states._replace(window=window._replace(start=window.start.at[row].set(0, mode="drop")))
    start, kept = window.start, window[1:]
    right = jnp.where((first >= 0) & (start[slot] > 0), jnp.maximum(first - start[slot], 0), 0)  # of the last guesses

    def replay(states: RecurrentState) -> tuple[jax.Array, RecurrentState]:
        places, real = jnp.arange(kept[0].shape[1] + size), jnp.sum(positions >= 0, axis=1)
        together = tuple(_join(old[slot], new, right) for old, new in zip(kept, inputs, strict=True))
        there = jnp.where(places < (right + real)[:, None], (first - right)[:, None] + places, -1)
        output, states = rule(together, states, slot, there, right + jnp.minimum(real, 1))
        return jnp.take_along_axis(output, (right[:, None] + jnp.arange(size))[..., None, None], axis=1), states

    def plain(states: RecurrentState) -> tuple[jax.Array, RecurrentState]:
        return rule(inputs, states, slot, positions)

    output, states = replay(states) if speculates else lax.cond(jnp.any(right > 0), replay, plain, states)
    # Else what is written below is not known to come after what was read: XLA copies the windows of all slots.
    output, kept = lax.optimization_barrier((output, kept))
    if speculates:
        guesses = (x[:, 1:].astype(old.dtype) for old, x in zip(kept, inputs, strict=True))
        kept = tuple(old.at[row].set(x, mode="drop") for old, x in zip(kept, guesses, strict=True))
    return output, states._replace(window=Window(start.at[row].set(first + 1, mode="drop"), *kept))


def _join(old: jax.Array, new: jax.Array, count: jax.Array) -> jax.Array:
    """The first `count` [B] of old [B, W, ...], then new [B, T, ...], then what has no meaning: [B, W + T, ...]."""
    both = jnp.concatenate([old, new.astype(old.dtype)], axis=1)
    places, count = jnp.arange(both.shape[1]), count[:, None]
    source = jnp.where(places < count, places, jnp.minimum(places - count + old.shape[1], both.shape[1] - 1))
    return jnp.take_along_axis(both, source.reshape(*source.shape, *[1] * (both.ndim - 2)), axis=1)

"""The definition of the gated delta rule: one token after the other, in float32."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.pallas_kernels.delta_rule.recurrent_state import RecurrentState


def gated_delta_rule(
    qkv: jax.Array,
    decay: jax.Array,
    beta: jax.Array,
    conv_weight: jax.Array,
    cache: RecurrentState,
    slot: jax.Array,
    positions: jax.Array,
    kept: jax.Array | None = None,
    *,
    key_dim: int,
) -> tuple[jax.Array, RecurrentState]:
    """Compute `api.gated_delta_rule` without a window, row by row.

    kept: int32 [B], how many of a row's tokens move its state; the others only read what it would be. None: all.
    """
    conv_weight = conv_weight.astype(jnp.float32)
    kept = jnp.full(slot.shape, qkv.shape[1]) if kept is None else kept

    def token(carry: tuple[jax.Array, jax.Array], inputs: tuple[jax.Array, ...]):
        conv, state = carry
        x, g, b, position = inputs
        window = jnp.concatenate([conv, x.astype(conv.dtype)[None]])  # [L, Hk, F]
        q, k, v = split(jnp.einsum("lhf,hfl->hf", window.astype(jnp.float32), conv_weight), state.shape, key_dim)
        decayed = jnp.exp(g)[:, None, None] * state
        error = v - jnp.einsum("hkv,hk->hv", decayed, k)
        new = decayed + jnp.einsum("hk,hv->hkv", k, b[:, None] * error)
        real = position >= 0
        return (jnp.where(real, window[1:], conv), jnp.where(real, new, state)), jnp.einsum("hkv,hk->hv", new, q)

    def row(carry: RecurrentState, inputs: tuple[jax.Array, ...]):
        at, moves, places, *tokens = inputs
        begins = places[0] == 0
        before = jax.tree.map(lambda x: jnp.where(begins, 0, x[at]).astype(x.dtype), carry)
        moving = jnp.arange(len(places)) < moves
        after, output = lax.scan(token, (before.conv, before.state), (*tokens, jnp.where(moving, places, -1)))
        _, of_guesses = lax.scan(token, after, (*tokens, jnp.where(moving, -1, places)))
        new = RecurrentState(carry.conv.at[at].set(after[0]), carry.state.at[at].set(after[1]))
        return new, jnp.where(moving[:, None, None], output, of_guesses)

    cache, output = lax.scan(row, cache, (slot, kept, positions, qkv, decay, beta))
    return output, cache


def split(x: jax.Array, shape: tuple[int, ...], key_dim: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Split what the convolution gives into queries, keys [..., Hv, K] and values [..., Hv, V].

    Queries and keys have length 1, and queries are scaled by K ** -0.5.

    Args:
      x: float32 [..., Hk, F], of each key head its query, its key and its values.
      shape: [Hv, K, V].
    """
    q, k, v = split_by_key_heads(x, key_dim)
    group = shape[0] // x.shape[-2]
    q, k = (jnp.repeat(y, group, axis=-2) for y in (q, k))
    return q, k, v.reshape(*x.shape[:-2], shape[0], shape[-1])


def split_by_key_heads(x: jax.Array, key_dim: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Split as `split`, without repeating queries and keys [..., Hk, K]; values [..., Hk, Hv / Hk V]."""
    q, k, v = jnp.split(jax.nn.silu(x), (key_dim, 2 * key_dim), axis=-1)
    q, k = (y * lax.rsqrt(jnp.sum(y * y, axis=-1, keepdims=True) + 1e-6) for y in (q, k))
    return q * key_dim**-0.5, k, v

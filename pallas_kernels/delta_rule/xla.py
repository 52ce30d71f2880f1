"""The gated delta rule in plain JAX: chunks of tokens by products of matrices, and single tokens in one step."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.pallas_kernels.delta_rule.recurrent_state import RecurrentState
from jaxinfer.pallas_kernels.delta_rule.reference import split

CHUNK = 64
"""Tokens whose products are computed together: the fewest that fill matrix units."""


def gated_delta_rule(
    qkv: jax.Array,
    decay: jax.Array,
    beta: jax.Array,
    conv_weight: jax.Array,
    cache: RecurrentState,
    slot: jax.Array,
    positions: jax.Array,
    *,
    key_dim: int,
) -> tuple[jax.Array, RecurrentState]:
    """Compute `api.gated_delta_rule`."""
    real, shape = positions >= 0, cache.state.shape[1:]
    begins = positions[:, 0] == 0
    if qkv.shape[1] == 1:
        before = jax.tree.map(lambda x: _from_zero(x[slot], begins), cache)
        x, conv = _convolve(before.conv, qkv, conv_weight, real)
        q, k, v = (y[:, 0] for y in split(x, shape, key_dim))
        output, state = _step(before.state, q, k, v, decay[:, 0], beta[:, 0], real[:, 0])
        new = RecurrentState(conv, state)
        return output[:, None], jax.tree.map(lambda old, x: old.at[slot].set(x), cache, new)

    def convolve(conv: jax.Array, row: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        at, is_first, inputs, is_real = row
        before = _from_zero(conv[at][None], is_first[None])
        x, after = _convolve(before, inputs[None], conv_weight, is_real[None])
        return conv.at[at].set(after[0]), x[0]

    conv, x = lax.scan(convolve, cache.conv, (slot, begins, qkv, real))
    output, state = _chunks(cache.state, slot, begins, real, *split(x, shape, key_dim), decay, beta)
    return output, RecurrentState(conv, state)


def _from_zero(x: jax.Array, begins: jax.Array) -> jax.Array:
    """Take zeros for rows that begin, bool [B], instead of what the slot's last sequence has left."""
    return jnp.where(begins.reshape(-1, *[1] * (x.ndim - 1)), 0, x).astype(x.dtype)


def _convolve(before: jax.Array, inputs: jax.Array, weight: jax.Array, real: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The causal convolution of rows, float32 [B, T, Hk, F], and the inputs that the next tokens of each need.

    Args:
      before: [B, L - 1, Hk, F]. inputs: [B, T, Hk, F].
      weight: [Hk, F, L].
      real: bool [B, T], which tokens are no padding.
    """
    length, tokens = weight.shape[-1], inputs.shape[1]
    window = jnp.concatenate([before, inputs.astype(before.dtype)], axis=1)
    weight = weight.astype(jnp.float32)
    terms = (window[:, j : j + tokens].astype(jnp.float32) * weight[..., j] for j in range(length))
    last = jnp.sum(real, axis=1)[:, None] + jnp.arange(length - 1)
    return sum(terms), jnp.take_along_axis(window, last[:, :, None, None], axis=1)  # type: ignore[return-value]


def _step(
    state: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, beta: jax.Array, real: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One token of each row: outputs [B, Hv, V] and new states, as in the definition."""
    decayed = jnp.exp(decay)[..., None, None] * state
    error = v - jnp.sum(decayed * k[..., None], axis=-2)
    new = decayed + k[..., None] * (beta[..., None] * error)[..., None, :]
    return jnp.sum(new * q[..., None], axis=-2), jnp.where(real[:, None, None, None], new, state)


def _chunks(
    states: jax.Array,
    slot: jax.Array,
    begins: jax.Array,
    real: jax.Array,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    decay: jax.Array,
    beta: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Run rows of many tokens: outputs [B, T, Hv, V] and the new states [S, Hv, K, V] (arXiv:2412.06464, section 3.3).

    All that does not depend on the state is computed for all chunks together. Then the state goes through the chunks.
    """
    rows, tokens = real.shape
    count = -(-tokens // CHUNK)
    size = -(-tokens // count)

    def chunked(x: jax.Array, fill: float = 0.0) -> jax.Array:
        x = jnp.where(real.reshape(*real.shape, *[1] * (x.ndim - 2)), x, fill)  # padding moves nothing
        x = jnp.pad(x, [(0, 0), (0, count * size - tokens)] + [(0, 0)] * (x.ndim - 2))
        return jnp.swapaxes(x.reshape(rows * count, size, *x.shape[2:]), 1, 2)  # [N, Hv, C, ...]

    q, k, v, decay, beta = (chunked(x.astype(jnp.float32)) for x in (q, k, v, decay, beta))
    total = jnp.cumsum(decay, axis=-1)
    lower = jnp.tril(jnp.ones((size, size), bool))
    between = jnp.exp(jnp.where(lower, total[..., :, None] - total[..., None, :], -jnp.inf))  # from j to i >= j
    scaled, grown = beta[..., None] * k, jnp.exp(total)[..., None]
    system = jnp.where(jnp.eye(size, dtype=bool), 1.0, _matmul(scaled, k, transposed=True) * between)
    targets = jnp.concatenate([beta[..., None] * v, scaled * grown], axis=-1)
    solved = lax.linalg.triangular_solve(system, targets, left_side=True, lower=True, unit_diagonal=True)
    values, keys = jnp.split(solved, (v.shape[-1],), axis=-1)
    seen = _matmul(q, k, transposed=True) * between
    queries, ends = q * grown, jnp.exp(total[..., -1:])
    keys_left = k * jnp.exp(total[..., -1:] - total)[..., None]
    first = (begins[:, None] & (jnp.arange(count) == 0)).reshape(-1)

    def chunk(states: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        at, is_first, values, keys, seen, queries, end, keys_left = inputs
        state = jnp.where(is_first, 0.0, states[at])
        new = values - _matmul(keys, state)
        output = _matmul(queries, state) + _matmul(seen, new)
        after = end[..., None] * state + _matmul(jnp.swapaxes(keys_left, -1, -2), new)
        return states.at[at].set(after), output

    parts = (jnp.repeat(slot, count), first, values, keys, seen, queries, ends, keys_left)
    states, output = lax.scan(chunk, states, parts)
    output = jnp.swapaxes(output, 1, 2).reshape(rows, count * size, *output.shape[1:2], output.shape[-1])
    return output[:, :tokens], states


def _matmul(x: jax.Array, y: jax.Array, *, transposed: bool = False) -> jax.Array:
    """x y in float32, or x y^T: small differences of large sums decide."""
    return jnp.matmul(x, jnp.swapaxes(y, -1, -2) if transposed else y, precision=lax.Precision.HIGHEST)

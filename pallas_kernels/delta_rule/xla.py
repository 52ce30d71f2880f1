"""The gated delta rule in plain JAX: chunks of tokens by products of matrices, and single tokens in one step."""

from typing import NamedTuple

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
    kept: jax.Array | None = None,
    *,
    key_dim: int,
) -> tuple[jax.Array, RecurrentState]:
    """Compute `api.gated_delta_rule` without a window; `kept` as in the reference, for rows of different slots."""
    real, begins = positions >= 0, positions[:, 0] == 0
    x, conv = convolve(qkv, conv_weight, cache.conv, slot, positions, kept)
    inputs = (*split(x, cache.state.shape[1:], key_dim), decay, beta)
    if qkv.shape[1] == 1:
        before = _from_zero(cache.state[slot], begins)
        output, state = _step(before, real[:, 0], *(x[:, 0] for x in inputs))
        return output[:, None], RecurrentState(conv, cache.state.at[slot].set(state))
    if kept is not None:
        output, state = _with_guesses(cache.state, slot, begins, real, kept, *inputs)
    else:
        output, state = _chunks(cache.state, slot, begins, real, *inputs)
    return output, RecurrentState(conv, state)


def convolve(
    qkv: jax.Array,
    conv_weight: jax.Array,
    conv: jax.Array,
    slot: jax.Array,
    positions: jax.Array,
    kept: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The convolution of rows, float32 [B, T, Hk, F], and the inputs of all slots with the new ones.

    Arguments as of `gated_delta_rule`. conv: [S, L - 1, Hk, F].
    """
    begins, count = positions[:, 0] == 0, jnp.sum(positions >= 0, axis=1) if kept is None else kept
    if kept is not None or qkv.shape[1] == 1:  # rows of different slots
        x, after = _convolve(_from_zero(conv[slot], begins), qkv, conv_weight, count)
        return x, conv.at[slot].set(after)

    def row(conv: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        at, *of_row = inputs
        is_first, tokens, length = (x[None] for x in of_row)
        x, after = _convolve(_from_zero(conv[at][None], is_first), tokens, conv_weight, length)
        return conv.at[at].set(after[0]), x[0]

    conv, x = lax.scan(row, conv, (slot, begins, qkv, count))
    return x, conv


def _from_zero(x: jax.Array, begins: jax.Array) -> jax.Array:
    """Take zeros for rows that begin, bool [B], instead of what the slot's last sequence has left."""
    return jnp.where(begins.reshape(-1, *[1] * (x.ndim - 1)), 0, x).astype(x.dtype)


def _convolve(before: jax.Array, inputs: jax.Array, weight: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The causal convolution of rows, float32 [B, T, Hk, F], and the inputs that the next tokens of each need.

    Args:
      before: [B, L - 1, Hk, F]. inputs: [B, T, Hk, F].
      weight: [Hk, F, L].
      count: int32 [B], how many tokens come before the next: all that are no padding, or no guesses.
    """
    length, tokens = weight.shape[-1], inputs.shape[1]
    window = jnp.concatenate([before, inputs.astype(before.dtype)], axis=1)
    weight = weight.astype(jnp.float32)
    terms = (window[:, j : j + tokens].astype(jnp.float32) * weight[..., j] for j in range(length))
    last = count[:, None] + jnp.arange(length - 1)
    return sum(terms), jnp.take_along_axis(window, last[:, :, None, None], axis=1)  # type: ignore[return-value]


def _step(
    state: jax.Array, real: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, beta: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One token of each row: outputs [B, Hv, V] and new states, as in the definition."""
    decayed = jnp.exp(decay)[..., None, None] * state
    error = v - jnp.sum(decayed * k[..., None], axis=-2)
    new = decayed + k[..., None] * (beta[..., None] * error)[..., None, :]
    return jnp.sum(new * q[..., None], axis=-2), jnp.where(real[:, None, None, None], new, state)


class _Products(NamedTuple):
    """All that a chunk of tokens computes without its state (arXiv:2412.06464, section 3.3), float32.

    Attributes:
      values: [..., C, V], what the tokens would write to a state of zeros.
      keys: [..., C, K], how much of that the state has already.
      seen: [..., C, C], what each token reads of the others.
      queries: [..., C, K], what it reads of the state.
      end: [..., 1], what is left of the state after the chunk.
      keys_left: [..., C, K], where the state then has what the tokens wrote.
    """

    values: jax.Array
    keys: jax.Array
    seen: jax.Array
    queries: jax.Array
    end: jax.Array
    keys_left: jax.Array


def _products(
    q: jax.Array, k: jax.Array, v: jax.Array, decay: jax.Array, beta: jax.Array, moves: jax.Array | None = None
) -> _Products:
    """The products of tokens [..., C, K or V], decay and beta [..., C]. moves: which move the state; None: all."""
    size, total = k.shape[-2], jnp.cumsum(decay, axis=-1)
    lower = jnp.tril(jnp.ones((size, size), bool))
    between = jnp.exp(jnp.where(lower, total[..., :, None] - total[..., None, :], -jnp.inf))  # from j to i >= j
    scaled, grown = beta[..., None] * k, jnp.exp(total)[..., None]
    system = jnp.where(jnp.eye(size, dtype=bool), 1.0, _matmul(scaled, k, transposed=True) * between)
    targets = jnp.concatenate([beta[..., None] * v, scaled * grown], axis=-1)
    solved = lax.linalg.triangular_solve(system, targets, left_side=True, lower=True, unit_diagonal=True)
    values, keys = jnp.split(solved, (v.shape[-1],), axis=-1)
    end = total[..., -1:]
    if moves is not None:
        end = jnp.sum(jnp.where(moves, decay, 0.0), axis=-1, keepdims=True)
        total = jnp.where(moves, total, jnp.inf)  # nothing of the others is left
    keys_left = k * jnp.exp(end - total)[..., None]
    return _Products(values, keys, _matmul(q, k, transposed=True) * between, q * grown, jnp.exp(end), keys_left)


def _move(state: jax.Array, products: _Products) -> tuple[jax.Array, jax.Array]:
    """The state [..., K, V] after a chunk, and its outputs [..., C, V]."""
    values, keys, seen, queries, end, keys_left = products
    new = values - _matmul(keys, state)
    output = _matmul(queries, state) + _matmul(seen, new)
    return end[..., None] * state + _matmul(jnp.swapaxes(keys_left, -1, -2), new), output


def _in_chunks(x: jax.Array, real: jax.Array, count: int) -> jax.Array:
    """Divide rows [B, T, Hv, ...] into chunks: float32 [B * count, Hv, C, ...]. Padding is 0 and moves nothing."""
    rows, tokens = real.shape
    size = -(-tokens // count)
    x = jnp.where(real.reshape(*real.shape, *[1] * (x.ndim - 2)), x.astype(jnp.float32), 0.0)
    x = jnp.pad(x, [(0, 0), (0, count * size - tokens)] + [(0, 0)] * (x.ndim - 2))
    return jnp.swapaxes(x.reshape(rows * count, size, *x.shape[2:]), 1, 2)


def _chunks(
    states: jax.Array, slot: jax.Array, begins: jax.Array, real: jax.Array, *inputs: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Run rows of many tokens: outputs [B, T, Hv, V] and the new states [S, Hv, K, V].

    The products of all chunks are computed together. Then the state goes through the chunks.

    inputs: q, k, v, decay, beta: [B, T, Hv, ...].
    """
    rows, tokens = real.shape
    count = -(-tokens // CHUNK)
    products = _products(*(_in_chunks(x, real, count) for x in inputs))
    first = (begins[:, None] & (jnp.arange(count) == 0)).reshape(-1)

    def chunk(states: jax.Array, part: tuple[jax.Array, jax.Array, _Products]) -> tuple[jax.Array, jax.Array]:
        at, is_first, of_chunk = part
        after, output = _move(jnp.where(is_first, 0.0, states[at]), of_chunk)
        return states.at[at].set(after), output

    states, output = lax.scan(chunk, states, (jnp.repeat(slot, count), first, products))
    output = jnp.swapaxes(output, 1, 2).reshape(rows, -1, *states.shape[1:2], states.shape[-1])
    return output[:, :tokens], states


def _with_guesses(
    states: jax.Array, slot: jax.Array, begins: jax.Array, real: jax.Array, kept: jax.Array, *inputs: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Run rows of different slots, each as one chunk; `kept` [B] of its tokens move the state. Returns as `_chunks`."""
    moves = jnp.arange(real.shape[1]) < kept[:, None]
    products = _products(*(_in_chunks(x, real, 1) for x in inputs), moves=moves[:, None])
    after, output = _move(_from_zero(states[slot], begins), products)
    return jnp.swapaxes(output, 1, 2), states.at[slot].set(after)


def _matmul(x: jax.Array, y: jax.Array, *, transposed: bool = False) -> jax.Array:
    """x y in float32, or x y^T: small differences of large sums decide."""
    return jnp.matmul(x, jnp.swapaxes(y, -1, -2) if transposed else y, precision=lax.Precision.HIGHEST)

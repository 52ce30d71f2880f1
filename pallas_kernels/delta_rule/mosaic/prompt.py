"""Rows of many tokens by two kernels: `chunk.py` for all chunks of 64 together, then `chain.py` through the states.

XLA computes the convolution before, the lengths of queries and keys, and the sums of decays.
"""

import jax
import jax.numpy as jnp

from jaxinfer.pallas_kernels.delta_rule.mosaic.chain import COLUMNS, Order, Tokens, pass_states, shared_bytes
from jaxinfer.pallas_kernels.delta_rule.mosaic.chunk import chunk_matrices
from jaxinfer.pallas_kernels.delta_rule.mosaic.tiles import CHUNK
from jaxinfer.pallas_kernels.delta_rule.recurrent_state import RecurrentState
from jaxinfer.pallas_kernels.delta_rule.reference import split_by_key_heads
from jaxinfer.pallas_kernels.delta_rule.xla import convolve
from jaxinfer.pallas_kernels.mosaic.refs import gmem
from jaxinfer.pallas_kernels.target import UnsupportedError, require_shared_bytes

_KEYS = 64  # a multiple of them: the rows of an mma by all four warps
_MOST_KEYS = 128


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
    """Compute `api.gated_delta_rule` without a window; `kept` as in the reference, for rows of different slots.

    Raises UnsupportedError.
    """
    (rows, tokens), (_, heads, _, value_dim) = positions.shape, cache.state.shape
    if key_dim % 8:
        raise UnsupportedError(f"a state must have a multiple of 8 keys, got {key_dim}")
    if key_dim > _MOST_KEYS:
        raise UnsupportedError(f"a state must have at most {_MOST_KEYS} keys, got {key_dim}")
    if value_dim % COLUMNS:
        raise UnsupportedError(f"a state must have a multiple of {COLUMNS} columns, got {value_dim}")
    if kept is not None and tokens > CHUNK:
        raise UnsupportedError(f"rows with guesses must have at most {CHUNK} tokens, got {tokens}")
    require_shared_bytes(shared_bytes(key_dim + -key_dim % _KEYS))
    real = positions >= 0
    x, conv = convolve(qkv, conv_weight, cache.conv, slot, positions, kept)
    q, k, v = (_in_chunks(y, real) for y in split_by_key_heads(x, key_dim))
    q, k = (jnp.pad(y, ((0, 0), (0, 0), (0, -key_dim % _KEYS))) for y in (q, k))
    v = v.reshape(len(v), heads, value_dim)
    decay, beta = (_by_heads(_in_chunks(y, real)) for y in (decay, beta))
    moves = real if kept is None else real & (jnp.arange(tokens) < kept[:, None])
    moves = _by_heads(_in_chunks(moves[..., None], real)) > 0
    total, end = jnp.cumsum(decay, axis=-1), jnp.sum(jnp.where(moves, decay, 0.0), axis=-1)
    system, seen = chunk_matrices(q, k, jnp.stack([total, beta], axis=2))
    left = jnp.where(moves, jnp.exp(end[..., None] - total), 0.0)
    tokens_of_chunks = Tokens(
        q=gmem(q),
        k=gmem(k),
        keys=gmem(jnp.moveaxis(k.reshape(-1, CHUNK, *k.shape[1:]), 1, -1)),
        v=gmem(v),
        system=gmem(system),
        seen=gmem(seen),
        factors=gmem(jnp.stack([jnp.exp(total), left], axis=2)),
        end=gmem(jnp.exp(end)),
    )
    output, state = pass_states(tokens_of_chunks, _order(slot, positions), cache.state)
    output = output.reshape(rows, -1, heads, value_dim)[:, :tokens]
    return jnp.where(real[..., None, None], output, 0.0), RecurrentState(conv, state)


def _in_chunks(x: jax.Array, real: jax.Array) -> jax.Array:
    """Pad rows [B, T, ...] to whole chunks: float32 [N 64, ...]. Padding is 0 and moves nothing."""
    x = jnp.where(real.reshape(*real.shape, *[1] * (x.ndim - 2)), x.astype(jnp.float32), 0.0)
    x = jnp.pad(x, [(0, 0), (0, -real.shape[1] % CHUNK)] + [(0, 0)] * (x.ndim - 2))
    return x.reshape(-1, *x.shape[2:])


def _by_heads(x: jax.Array) -> jax.Array:
    """Lay out numbers [N 64, Hv] as [N, Hv, 64]."""
    return jnp.swapaxes(x.reshape(-1, CHUNK, x.shape[-1]), 1, 2)


def _order(slot: jax.Array, positions: jax.Array) -> Order:
    """Sort the chunks of rows by slot; the first row of a slot takes its state through all of them."""
    real, first = positions >= 0, positions[:, 0]
    used = _in_chunks(real, real).reshape(len(slot), -1, CHUNK)[..., 0] > 0  # [B, chunks of a row]
    of_chunk = jnp.where(used, slot[:, None], jnp.iinfo(jnp.int32).max).reshape(-1)
    earlier = jnp.tril(slot[:, None] == slot, -1) & real[:, 0]
    leads = real[:, 0] & ~jnp.any(earlier, axis=1)
    start, stop = (jnp.sum(before, axis=1) for before in (of_chunk < slot[:, None], of_chunk <= slot[:, None]))
    bounds = jnp.where(leads[:, None], jnp.stack([start, stop], axis=1), 0)
    return Order(*(gmem(x) for x in (jnp.argsort(of_chunk), bounds.astype(jnp.int32), slot, first)))

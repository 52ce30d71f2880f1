"""The online softmax: what a tile of keys and values adds to it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.pallas_kernels.attention.mosaic.decode.int8 import TileScales, broadcast_to_keys
from jaxinfer.pallas_kernels.attention.mosaic.decode.plan import LOG2E, TILE_D, TILE_KV, Inputs, Plan, Scratch
from jaxinfer.pallas_kernels.mosaic import pl, plgpu
from jaxinfer.pallas_kernels.mosaic.layout import broadcast, full, iota, load, load_broadcast
from jaxinfer.pallas_kernels.mosaic.refs import Ref

_MASKED = -1e30  # finite, so that sums over masked keys alone get the weight exp(_MASKED - score) = 0


class Softmax(NamedTuple):
    """The online softmax of n queries."""

    m_i: jax.Array  # [n]: maximum of the scores
    l_i: jax.Array  # [n]: sum of exp2(score - m_i)
    acc: list[jax.Array]  # sum of exp2(score - m_i) * value, [TILE_D, n] for each tile of features


class KeyTile(NamedTuple):
    """A tile of keys and values in shared memory.

    Attributes:
      k, v: [keys, K]. head: the KV head.
      new_start: index in the tile of the row's first new token; may lie outside of the tile.
      scales: of the keys and of the values of an int8 cache.
      has_new: whether the tile may contain new tokens, so that a causal mask is needed.
    """

    k: Ref
    v: Ref
    head: jax.Array
    new_start: jax.Array
    scales: tuple[TileScales, TileScales] | None
    has_new: bool


def initial_softmax(plan: Plan, queries: "pl.Slice") -> Softmax:
    """The softmax of some queries over no keys."""
    layout, count = plan.layouts.acc, int(queries.size)
    m_i, l_i = (full((count,), value, jnp.float32, layout.reduce(0)) for value in (_MASKED, 0.0))
    return Softmax(m_i, l_i, [full((TILE_D, count), 0.0, jnp.float32, layout) for _ in plan.feature_tiles])


def attend(plan: Plan, inputs: Inputs, s: Scratch, keys: KeyTile, queries: "pl.Slice", state: Softmax) -> Softmax:
    """Add a tile of keys to the online softmax of some queries."""
    layouts = plan.layouts
    scores = full((TILE_KV, *state.m_i.shape), 0, jnp.float32, layouts.acc)
    for features in plan.feature_tiles:
        q = load(s.q.at[queries, features].T, layouts.rhs)
        scores = plgpu.mma(scores, load(keys.k.at[:, features], layouts.lhs), q)
    if keys.scales is not None:
        scores *= broadcast_to_keys(plan, keys.scales[0].new, scores.shape, layouts.acc)
    scores = _scale_and_mask(plan, inputs, keys, queries, scores)

    m_new = jnp.maximum(state.m_i, jnp.max(scores, axis=0))
    alpha = jnp.exp2(state.m_i - m_new)
    p = jnp.exp2(scores - broadcast(m_new, scores.shape, 1))
    l_i = state.l_i * alpha + jnp.sum(p, axis=0)
    if keys.scales is not None:
        p *= broadcast_to_keys(plan, keys.scales[1].new, p.shape, layouts.acc)
    s.p.at[queries].T[...] = p.astype(plan.dtype)
    plgpu.commit_smem()
    p = load(s.p.at[queries].T, layouts.rhs)
    acc = [
        plgpu.mma(x * broadcast(alpha, x.shape, 1), load(keys.v.at[:, features].T, layouts.lhs), p)
        for x, features in zip(state.acc, plan.feature_tiles, strict=True)
    ]
    return Softmax(m_new, l_i, acc)


def _scale_and_mask(plan: Plan, inputs: Inputs, keys: KeyTile, queries: "pl.Slice", scores: jax.Array) -> jax.Array:
    """Return scaled, capped, biased and masked scores of q k^T, as exponents of 2."""
    layout = plan.layouts.acc
    if plan.softcap is None:
        scores *= plan.scale * LOG2E
    else:  # softcap * tanh(x / softcap) by exp2, since the hardware's tanh has only 11 bits
        exp_2x = jnp.exp2(scores * (2 * LOG2E * plan.scale / plan.softcap))
        scores = plan.softcap * LOG2E - 2 * plan.softcap * LOG2E / (exp_2x + 1.0)
    if not (plan.alibi or plan.window or keys.has_new):
        return scores
    key = iota(scores.shape, 0, layout)
    query = queries.start + iota(scores.shape, 1, layout)
    distance = key - lax.div(query, plan.group) - keys.new_start  # key's position - query's position
    if inputs.slopes is not None:
        slopes = load_broadcast(inputs.slopes.at[keys.head, queries], scores.shape, 1, layout)
        scores += slopes * distance.astype(jnp.float32)
    if keys.has_new:
        scores = jnp.where(distance <= 0, scores, _MASKED)
    if plan.window is not None:
        scores = jnp.where(distance > -plan.window, scores, _MASKED)
    return scores

"""The consumer warpgroups: the online softmax of 64 rows of queries each, over the tiles of keys and values."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.pallas_kernels.attention.mosaic.prefill.plan import (
    LOG2E,
    TILE_Q,
    Block,
    Inputs,
    Plan,
    Scratch,
    key_ring,
    row_layout,
)
from jaxinfer.pallas_kernels.mosaic import pl, plgpu
from jaxinfer.pallas_kernels.mosaic.layout import broadcast, full, iota, load
from jaxinfer.pallas_kernels.mosaic.refs import Ref
from jaxinfer.pallas_kernels.mosaic.ring import Ring
from jaxinfer.pallas_kernels.target import interpreting

# A power of two, so that its product with any factor is exact: while a row has seen only masked keys, its weights are
# exp2(x - x) = 1, even if the compiler fuses the product and the difference without rounding in between.
_MASKED = np.float32(-(2.0**100))


class _Rows(NamedTuple):
    """The rows' numbers that masks and biases need, [64]; None if they do not.

    Loaded only if used: layout inference does not terminate on a vector that nothing constrains.
    """

    positions: jax.Array | None
    slopes: jax.Array | None


class _Softmax(NamedTuple):
    """The online softmax of the rows."""

    m_i: jax.Array  # [64]: maximum of a row's scores so far
    l_i: jax.Array  # [64]: sum of exp2(score - m_i)
    acc: jax.Array  # [64, K]: sum of exp2(score - m_i) * value


def consume(plan: Plan, inputs: Inputs, scratch: Scratch, block: Block, out: Ref) -> None:
    """Attend with the queries of this warpgroup, and write its part of the result."""
    s = scratch
    if plan.tiles.consumers == 2:
        plgpu.set_max_registers(200 if plan.int8 else 232, action="increase")
    plgpu.barrier_wait(s.q_full)
    plgpu.barrier_wait(s.bounds_full)
    ring = key_ring(plan, s.bounds)
    positions = None
    if plan.causal or plan.window is not None or plan.alibi:
        positions = _load_row_positions(plan, s.positions, block.warpgroup)
    rows = _Rows(positions, None if s.slopes is None else load(s.slopes, row_layout()))

    def iteration(i: jax.Array, state: _Softmax) -> _Softmax:
        return _attend(plan, s, block, ring, rows, i, state)

    m_i = full((TILE_Q,), -jnp.inf, jnp.float32, row_layout())
    l_i = full((TILE_Q,), 0, jnp.float32, row_layout())
    acc = full((TILE_Q, plan.head_dim), 0, jnp.float32, plgpu.Layout.WGMMA)
    state = lax.fori_loop(ring.start, ring.stop, iteration, _Softmax(m_i, l_i, acc))
    _write(plan, s.q.at[block.warpgroup], block, state, out)


def _load_row_positions(plan: Plan, positions: Ref, warpgroup: jax.Array) -> jax.Array:
    """Load the position of each row's token; rows without a token get an arbitrary one.

    One number at a time, since no layout can repeat a vector; the first keys are in flight meanwhile.
    """
    token = lax.rem(iota((TILE_Q,), 0, row_layout()), plan.consumer_tokens)
    zeros = full((TILE_Q,), 0, jnp.int32, row_layout())

    def put(t: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.where(token == t, positions[warpgroup, t], x)

    return lax.fori_loop(0, plan.consumer_tokens, put, zeros)


def _attend(plan: Plan, s: Scratch, block: Block, ring: Ring, rows: _Rows, i: jax.Array, state: _Softmax) -> _Softmax:
    """Add tile i of keys and values to the online softmax.

    wgmma is asynchronous, but `_matmul` and `_accumulate` return its result, so its operands (a stage, p) are no longer
    read once they have returned. Releasing the stage and the next store to p come after that. Only the producer refills
    a stage, after all consumers have released it.
    """
    q, p_smem = s.q.at[block.warpgroup], s.p.at[block.warpgroup]
    stage = ring.stage(i)
    plgpu.barrier_wait(s.k_full.at[stage])
    scores = _matmul(q, s.k.at[stage].T)
    ring.release(i, s.k_empty.at[stage])
    scores, factor = _scale_and_mask(plan, s.bounds, rows, i, scores)
    m_new = jnp.maximum(state.m_i, jnp.max(scores, axis=1) * np.float32(factor))
    alpha = jnp.exp2(state.m_i - m_new)
    p = jnp.exp2(scores * np.float32(factor) - broadcast(m_new, scores.shape, 0))
    l_i = state.l_i * alpha + jnp.sum(p, axis=1)
    p_smem[...] = p.astype(p_smem.dtype)
    plgpu.commit_smem()  # makes this warpgroup's stores visible to its own wgmma
    plgpu.barrier_wait(s.v_full.at[stage])
    acc = _accumulate(state.acc * broadcast(alpha, state.acc.shape, 0), p_smem, s.v.at[stage])
    ring.release(i, s.v_empty.at[stage])
    return _Softmax(m_new, l_i, acc)


def _scale_and_mask(plan: Plan, bounds: Ref, rows: _Rows, i: jax.Array, scores: jax.Array) -> tuple[jax.Array, float]:
    """Return (scores, factor) such that masked scores * factor are exponents of 2."""
    factor = plan.scale * LOG2E
    if plan.softcap is not None:
        scores, factor = jnp.tanh(scores * np.float32(plan.scale / plan.softcap)), plan.softcap * LOG2E
    if rows.slopes is None:
        return _mask(plan, bounds, rows, i, scores), factor
    distance = (_keys(plan, i, scores.shape) - _row_positions(rows, scores.shape)).astype(jnp.float32)
    biased = scores * np.float32(factor) + broadcast(rows.slopes, scores.shape, 0) * distance
    return _mask(plan, bounds, rows, i, biased), 1.0


def _mask(plan: Plan, bounds: Ref, rows: _Rows, i: jax.Array, scores: jax.Array) -> jax.Array:
    """Put _MASKED where a query does not see a key of tile i. Most tiles are visible to all and need no mask."""

    def apply_mask(scores: jax.Array) -> jax.Array:
        key = _keys(plan, i, scores.shape)
        visible = key <= (_row_positions(rows, scores.shape) if plan.causal else bounds[2])
        if plan.window is not None:
            visible &= key > _row_positions(rows, scores.shape) - plan.window
        return jnp.where(visible, scores, _MASKED)

    tile_kv = plan.tiles.tile_kv
    all_visible = (i + 1) * tile_kv - 1 <= bounds[0 if plan.causal else 2]
    if plan.window is not None:
        all_visible &= i * tile_kv > bounds[1] - plan.window
    return lax.cond(all_visible, lambda scores: scores, apply_mask, scores)


def _keys(plan: Plan, i: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The position of each score's key in tile i."""
    return i * plan.tiles.tile_kv + iota(shape, 1, plgpu.Layout.WGMMA)


def _row_positions(rows: _Rows, shape: tuple[int, ...]) -> jax.Array:
    """The position of each score's query."""
    assert rows.positions is not None  # loaded by `consume`
    return broadcast(rows.positions, shape, 0)


def _write(plan: Plan, q: Ref, block: Block, state: _Softmax, out: Ref) -> None:
    """Write acc / l_i, by way of the queries' SMEM, which nothing reads any more."""
    inverse = 1.0 / jnp.where(state.l_i == 0, np.float32(1), state.l_i)  # l_i is 0 if there were no tiles
    q[...] = (state.acc * broadcast(inverse, state.acc.shape, 0)).astype(q.dtype)
    plgpu.commit_smem()
    tokens = plan.consumer_tokens
    for h in range(plan.heads):
        target = out.at[block.row, pl.ds(block.first_token + block.warpgroup * tokens, tokens), block.head + h]
        plgpu.copy_smem_to_gmem(q.at[pl.ds(h * tokens, tokens)], target)
    plgpu.wait_smem_to_gmem(0)


def _matmul(a: Ref, b: Ref) -> jax.Array:
    """Multiply operands in SMEM, in float32."""

    def multiply(acc: Ref) -> jax.Array:
        plgpu.wgmma(acc, a, b)
        return acc[...]  # waits for the wgmma

    return pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))  # pyright: ignore[reportPrivateImportUsage]


def _accumulate(acc: jax.Array, a: Ref, b: Ref) -> jax.Array:
    """acc + a b, in the registers of `acc`: a second accumulator of 256 columns would spill."""
    if interpreting():  # it does not support accumulators with an initial value
        return acc + _matmul(a, b)
    return pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))(plgpu.ACC.init(acc))  # pyright: ignore[reportPrivateImportUsage, reportReturnType]

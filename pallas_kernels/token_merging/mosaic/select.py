"""The kernel that selects which tokens are merged: the output of every token.

One warpgroup per batch row. It keeps 64 x 32 scores in registers, in the layout of an mma accumulator: a row of scores
is in one warp, and its maximum costs two shuffles. Ranks are found by counting instead of sorting.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.pallas_kernels.mosaic import pl, plgpu
from jaxinfer.pallas_kernels.mosaic.layout import broadcast, full, iota, load, load_broadcast, swizzled
from jaxinfer.pallas_kernels.mosaic.refs import Barrier, Ref, barrier, gmem, smem
from jaxinfer.pallas_kernels.target import require_shared_bytes
from jaxinfer.pallas_kernels.token_merging.mosaic.tiles import MMA_TOKENS, OTHER_BYTES, TILE
from jaxinfer.pallas_kernels.token_merging.reference import FIRST, LAST, normalized

_SHAPE = (TILE, MMA_TOKENS)  # scores: tokens of A by tokens of B


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The static parameters of a launch.

    Attributes:
      batch: rows. tokens: n. features: of the metric. dtype: of the metric.
      r: tokens to remove. protected: tokens at the start that are neither merged nor merged into.
    """

    batch: int
    tokens: int
    features: int
    dtype: Any
    r: int
    protected: int

    @property
    def evens(self) -> int:
        """Tokens of A."""
        return pl.cdiv(self.tokens, 2)

    @property
    def odds(self) -> int:
        """Tokens of B."""
        return self.tokens // 2

    @property
    def tiles(self) -> int:
        """Tiles of A, and of B."""
        return pl.cdiv(self.evens, TILE)

    @property
    def padded(self) -> int:
        """Tokens of A, and of B, in whole tiles."""
        return self.tiles * TILE

    @property
    def feature_tiles(self) -> int:
        """Tiles of the metric's features."""
        return pl.cdiv(self.features, TILE)

    @property
    def acc(self) -> Any:
        """Register layout of the scores."""
        return plgpu.Layout.MMA_ACC(self.dtype)


class _Inputs(NamedTuple):
    """Arrays in global memory.

    Attributes:
      unit: [B, evens, 2, features], the normalised metric: A and B as the halves of rows twice as long.
      size: float32 [B, 2, padded], the sizes of A and of B.
    """

    unit: Ref
    size: Ref


class _Scratch(NamedTuple):
    """Shared memory of a thread block, and its barrier.

    Attributes:
      unit: [2, feature_tiles, padded, TILE], the metric of A and of B.
      a_size, b_size: float32 [padded].
      best: float32 [padded], the highest score of each token of A. partner: int32 [padded], the token of B that has it.
      merged: int32 [padded], 1 for each token of A that is merged, else 0.
      full: the inputs have been copied.
    """

    unit: Ref
    a_size: Ref
    b_size: Ref
    best: Ref
    partner: Ref
    merged: Ref
    full: Barrier


def select(metric: jax.Array, size: jax.Array, r: int, protected: int) -> jax.Array:
    """Select the output of each token, int32 [B, 2 x padded]; arbitrary for padding.

    Args:
      metric: [B, n, m]. size: float32 [B, n]. r, protected: as of `api`.
    """
    batch, tokens, features = metric.shape
    plan = Plan(batch=batch, tokens=tokens, features=features, dtype=metric.dtype, r=r, protected=protected)
    require_shared_bytes(2 * plan.feature_tiles * plan.padded * TILE * plan.dtype.itemsize + OTHER_BYTES)
    # With an even number of tokens, A and B are the two halves of rows twice as long, without copies.
    unit = normalized(jnp.pad(metric, ((0, 0), (0, tokens % 2), (0, 0)))).reshape(batch, -1, 2, features)
    sizes = jnp.pad(size, ((0, 0), (0, 2 * plan.padded - tokens))).reshape(batch, plan.padded, 2).swapaxes(1, 2)
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan),
        out_type=jax.ShapeDtypeStruct((batch, plan.padded, 2), jnp.int32),
        scratch_types=[_scratch(plan)],
        grid=(batch,),
        grid_names=("row",),
        kernel_name="merge_choose",
    )
    return kernel(_Inputs(gmem(unit), gmem(sizes))).reshape(batch, 2 * plan.padded)


def _scratch(plan: Plan) -> _Scratch:
    """Declare the scratch of a thread block."""
    floats, integers = (smem((plan.padded,), dtype) for dtype in (jnp.float32, jnp.int32))
    return _Scratch(
        unit=smem((2, plan.feature_tiles, plan.padded, TILE), plan.dtype, swizzled()),
        a_size=floats,
        b_size=floats,
        best=floats,
        partner=integers,
        merged=integers,
        full=barrier(2 * (plan.feature_tiles + 1) * plan.tiles),
    )


def _kernel(plan: Plan, inputs: _Inputs, target: Ref, scratch: _Scratch) -> None:
    """Select in one batch row. target: int32 [B, padded, 2] in global memory, the outputs of tokens of A and of B."""
    _load(plan, inputs, scratch)
    _find_partners(plan, scratch)
    plgpu.commit_smem()
    _mark_merged(plan, scratch)
    plgpu.commit_smem()
    _write_targets(plan, target, scratch)


def _load(plan: Plan, inputs: _Inputs, scratch: _Scratch) -> None:
    """Copy the row's metric and sizes to shared memory."""
    row = lax.axis_index("row")

    @pl.loop(0, plan.tiles)
    def _(t: jax.Array) -> None:
        tokens = _tile(t)
        for half, size in enumerate((scratch.a_size, scratch.b_size)):
            plgpu.copy_gmem_to_smem(inputs.size.at[row, half, tokens], size.at[tokens], scratch.full)

        @pl.loop(0, plan.feature_tiles)
        def _(f: jax.Array) -> None:
            for half in range(2):
                source = inputs.unit.at[row, tokens, half, pl.ds(f * TILE, TILE)]
                plgpu.copy_gmem_to_smem(source, scratch.unit.at[half, f, tokens], scratch.full)

    plgpu.barrier_wait(scratch.full)


def _find_partners(plan: Plan, scratch: _Scratch) -> None:
    """Write `best` and `partner`: the token of B that each token of A is most similar to."""

    @pl.loop(0, plan.tiles)
    def _(t: jax.Array) -> None:
        def compare(u: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            best, partner = state
            scores = _scores(plan, scratch, t, u)
            i, j = _indices(plan, 0, t), _indices(plan, 1, u)
            allowed = (j < plan.odds) & (2 * j + 1 >= plan.protected) & (i < plan.evens) & (2 * i >= plan.protected)
            scores = jnp.where(allowed, scores, -jnp.inf)
            tile_best = jnp.max(scores, axis=1)
            is_best = scores == broadcast(tile_best, _SHAPE, 0)
            tile_partner = jnp.min(jnp.where(is_best, j, plan.padded), axis=1)
            return jnp.maximum(best, tile_best), jnp.where(tile_best > best, tile_partner, partner)

        init = _per_token(plan, -jnp.inf, jnp.float32), _per_token(plan, 0, jnp.int32)
        best, partner = lax.fori_loop(0, plan.padded // MMA_TOKENS, compare, init)
        scratch.best[_tile(t)], scratch.partner[_tile(t)] = best, partner


def _scores(plan: Plan, scratch: _Scratch, t: jax.Array, u: jax.Array) -> jax.Array:
    """Compute the similarities of tile `t` of A with tile `u` of B; those of padding are FIRST or LAST."""
    lhs, rhs = plgpu.Layout.MMA_LHS(plan.dtype), plgpu.Layout.MMA_RHS(plan.dtype)
    scores = full(_SHAPE, 0, jnp.float32, plan.acc)
    for f in range(plan.feature_tiles):
        a = load(scratch.unit.at[0, f, _tile(t)], lhs)
        b = load(scratch.unit.at[1, f, _mma_tile(u)].T, rhs)
        scores = plgpu.mma(scores, a, b)
    scores = jnp.where(load_broadcast(scratch.b_size.at[_mma_tile(u)], _SHAPE, 1, plan.acc) > 0, scores, LAST)
    return jnp.where(load_broadcast(scratch.a_size.at[_tile(t)], _SHAPE, 0, plan.acc) > 0, scores, FIRST)


def _mark_merged(plan: Plan, scratch: _Scratch) -> None:
    """Write `merged`: whether fewer than `r` tokens of A have a higher best score, or an equal one and come before."""

    @pl.loop(0, plan.tiles)
    def _(t: jax.Array) -> None:
        def count_before(u: jax.Array, rank: jax.Array) -> jax.Array:
            mine = load_broadcast(scratch.best.at[_tile(t)], _SHAPE, 0, plan.acc)
            other = load_broadcast(scratch.best.at[_mma_tile(u)], _SHAPE, 1, plan.acc)
            before = (other > mine) | ((other == mine) & (_indices(plan, 1, u) < _indices(plan, 0, t)))
            return rank + jnp.sum(jnp.where(before, 1, 0), axis=1)

        rank = lax.fori_loop(0, plan.padded // MMA_TOKENS, count_before, _per_token(plan, 0, jnp.int32))
        scratch.merged[_tile(t)] = jnp.where(rank < plan.r, 1, 0)


def _write_targets(plan: Plan, target: Ref, scratch: _Scratch) -> None:
    """Write each token's output: first what is left of A in order, then B."""
    row = lax.axis_index("row")

    @pl.loop(0, plan.tiles)
    def _(t: jax.Array) -> None:
        def count_merged(u: jax.Array, merged_before: jax.Array) -> jax.Array:
            before = _indices(plan, 1, u) < _indices(plan, 0, t)
            merged = load_broadcast(scratch.merged.at[_mma_tile(u)], _SHAPE, 1, plan.acc)
            return merged_before + jnp.sum(jnp.where(before, merged, 0), axis=1)

        iterations = (t + 1) * (TILE // MMA_TOKENS)
        merged_before = lax.fori_loop(0, iterations, count_merged, _per_token(plan, 0, jnp.int32))
        tokens, layout = _tile(t), plan.acc.reduce(1)
        merged, partner = (load(vector.at[tokens], layout) for vector in (scratch.merged, scratch.partner))
        i = iota((TILE,), 0, layout) + t * TILE
        first_of_b = plan.evens - plan.r
        target[row, tokens, 0] = jnp.where(merged == 1, first_of_b + partner, i - merged_before)
        target[row, tokens, 1] = first_of_b + i


def _tile(t: jax.Array) -> Any:
    """The slice of tokens of tile `t`."""
    return pl.ds(t * TILE, TILE)


def _mma_tile(u: jax.Array) -> Any:
    """The slice of tokens of tile `u`, the columns of an mma."""
    return pl.ds(u * MMA_TOKENS, MMA_TOKENS)


def _indices(plan: Plan, axis: int, tile: jax.Array) -> jax.Array:
    """Compute the tokens along an axis of a tile of scores, int32 of the scores' shape."""
    return iota(_SHAPE, axis, plan.acc) + tile * _SHAPE[axis]


def _per_token(plan: Plan, value: float, dtype: Any) -> jax.Array:
    """A number for each token of a tile of A: [TILE]."""
    return full((TILE,), value, dtype, plan.acc.reduce(1))

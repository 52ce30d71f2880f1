"""Token merging as two kernels.

The first selects the pairs, with one thread block per batch row, since the choice needs all tokens of a row. The second
multiplies the tokens by the merge matrix, with one thread block per batch row and 64 features. A matmul is
deterministic where a scatter's order could change the sums, and the matrix is built in registers.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.pallas_kernels.mosaic import pl, plgpu
from jaxinfer.pallas_kernels.mosaic.refs import Ref
from jaxinfer.pallas_kernels.target import UnsupportedError, require_shared_bytes
from jaxinfer.pallas_kernels.token_merging.reference import FIRST, LAST, normalized

TILE = 64  # tokens, or features, of a tile: 128 bytes in a 16-bit dtype, the widest swizzle
MMA_TOKENS = 32  # tokens per mma
MAX_TOKENS = 1024
_OTHER_BYTES = 24 << 10  # of shared memory: one tile of the result, vectors, alignment


def _swizzled() -> tuple[Any, ...]:
    """How a tile lies in shared memory."""
    return (plgpu.SwizzleTransform(128),)  # pyright: ignore[reportAbstractUsage]  # pyright takes it for abstract


def merge_tokens(
    x: jax.Array, size: jax.Array, metric: jax.Array, *, r: int, protected: int, protect_isolated: float | None
) -> tuple[jax.Array, jax.Array]:
    """Merge as the reference, except that weights (sizes) above 256 (float16: 2048) are rounded to x's dtype."""
    if protect_isolated is not None:
        raise UnsupportedError("the kernels choose pairs as ToMe does, without protect_isolated")
    dtypes = (jnp.bfloat16, jnp.float16)
    if x.dtype not in dtypes or metric.dtype not in dtypes:
        raise UnsupportedError(
            f"the kernels take bfloat16 or float16, got x in {x.dtype} and the metric in {metric.dtype}"
        )
    if x.shape[1] > MAX_TOKENS:
        raise UnsupportedError(f"the kernels take at most {MAX_TOKENS} tokens, got {x.shape[1]}")
    for name, features in (("x", x.shape[2]), ("the metric", metric.shape[2])):
        if features % 8:
            raise UnsupportedError(f"TMA needs rows of a multiple of 16 bytes, got {features} features of {name}")
    padded = 2 * TILE * pl.cdiv(x.shape[1], 2 * TILE)
    require_shared_bytes(padded * (TILE * x.dtype.itemsize + 8) + _OTHER_BYTES)  # of `_merge`
    return _merge(x, size, _select(metric, size, r, protected), r)


def _broadcast(ref: Ref, start: jax.Array | int, layout: Any, axis: int, shape: tuple[int, int]) -> jax.Array:
    """Load a slice of a vector from shared memory along `axis` of a matrix in registers, repeated along the other."""
    vector = plgpu.load(ref.at[pl.ds(start, shape[axis])], layout=layout.reduce(1 - axis), optimized=False)
    return lax.broadcast_in_dim(vector, shape, (axis,))


def _select(metric: jax.Array, size: jax.Array, r: int, protected: int) -> jax.Array:
    """The output of each token, int32 [B, 2 x n / 2 rounded up to tiles]; arbitrary for padding.

    One warpgroup per batch row. It keeps 64 x 32 scores in registers, in the layout of an mma accumulator: a row of
    scores is in one warp, and its maximum costs two shuffles. Ranks are found by counting instead of sorting.
    """
    batch, count, features = metric.shape
    # With an even number of tokens, A and B are the two halves of rows twice as long, without copies.
    unit = normalized(jnp.pad(metric, ((0, 0), (0, count % 2), (0, 0)))).reshape(batch, -1, 2, features)
    evens, odds = pl.cdiv(count, 2), count // 2
    tiles, feature_tiles, shape = pl.cdiv(evens, TILE), pl.cdiv(features, TILE), (TILE, MMA_TOKENS)
    rows = tiles * TILE
    require_shared_bytes(2 * feature_tiles * rows * TILE * unit.dtype.itemsize + _OTHER_BYTES)
    lhs, rhs, acc = (of(unit.dtype) for of in (plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS, plgpu.Layout.MMA_ACC))
    sizes = jnp.pad(size, ((0, 0), (0, 2 * rows - count))).reshape(batch, rows, 2).swapaxes(1, 2)

    def body(unit_g, size_g, target_g, unit_s, a_size_s, b_size_s, best_s, partner_s, merged_s, full):
        row = lax.axis_index("row")

        @pl.loop(0, tiles)
        def _(t):
            own = pl.ds(t * TILE, TILE)
            for half, size_s in enumerate((a_size_s, b_size_s)):
                plgpu.copy_gmem_to_smem(size_g.at[row, half, own], size_s.at[own], full)

            @pl.loop(0, feature_tiles)
            def _(f):
                for half in range(2):
                    source = unit_g.at[row, own, half, pl.ds(f * TILE, TILE)]
                    plgpu.copy_gmem_to_smem(source, unit_s.at[half, f, own], full)

        plgpu.barrier_wait(full)

        def index(axis, tile):
            return plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, shape, axis), acc) + tile * shape[axis]

        def row_vector(value, dtype):
            return plgpu.layout_cast(jnp.full(TILE, value, dtype), acc.reduce(1))

        @pl.loop(0, tiles)
        def find_partners(t):
            def iteration(u, state):
                best, partner = state
                scores = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), acc)
                for f in range(feature_tiles):
                    a = plgpu.load(unit_s.at[0, f, pl.ds(t * TILE, TILE)], layout=lhs, optimized=False)
                    b = plgpu.load(unit_s.at[1, f, pl.ds(u * MMA_TOKENS, MMA_TOKENS)].T, layout=rhs, optimized=False)
                    scores = plgpu.mma(scores, a, b)
                scores = jnp.where(_broadcast(b_size_s, u * MMA_TOKENS, acc, 1, shape) > 0, scores, LAST)
                scores = jnp.where(_broadcast(a_size_s, t * TILE, acc, 0, shape) > 0, scores, FIRST)
                i, j = index(0, t), index(1, u)
                allowed = (j < odds) & (2 * j + 1 >= protected) & (i < evens) & (2 * i >= protected)
                scores = jnp.where(allowed, scores, -jnp.inf)
                tile_best = jnp.max(scores, axis=1)
                is_best = scores == lax.broadcast_in_dim(tile_best, shape, (0,))
                tile_partner = jnp.min(jnp.where(is_best, j, rows), axis=1)
                return jnp.maximum(best, tile_best), jnp.where(tile_best > best, tile_partner, partner)

            init = row_vector(-jnp.inf, jnp.float32), row_vector(0, jnp.int32)
            best, partner = lax.fori_loop(0, rows // MMA_TOKENS, iteration, init)
            best_s[pl.ds(t * TILE, TILE)], partner_s[pl.ds(t * TILE, TILE)] = best, partner

        plgpu.commit_smem()

        @pl.loop(0, tiles)
        def select(t):
            def count_before(u, rank):
                own, other = (
                    _broadcast(best_s, tile * shape[axis], acc, axis, shape) for axis, tile in enumerate((t, u))
                )
                before = (other > own) | ((other == own) & (index(1, u) < index(0, t)))
                return rank + jnp.sum(jnp.where(before, 1, 0), axis=1)

            rank = lax.fori_loop(0, rows // MMA_TOKENS, count_before, row_vector(0, jnp.int32))
            merged_s[pl.ds(t * TILE, TILE)] = jnp.where(rank < r, 1, 0)

        plgpu.commit_smem()

        @pl.loop(0, tiles)
        def write_targets(t):
            def count_merged(u, merged_before):
                before = index(1, u) < index(0, t)
                merged = _broadcast(merged_s, u * MMA_TOKENS, acc, 1, shape)
                return merged_before + jnp.sum(jnp.where(before, merged, 0), axis=1)

            iterations = (t + 1) * (TILE // MMA_TOKENS)
            merged_before = lax.fori_loop(0, iterations, count_merged, row_vector(0, jnp.int32))
            own = pl.ds(t * TILE, TILE)
            merged, partner = (
                plgpu.load(ref.at[own], layout=acc.reduce(1), optimized=False) for ref in (merged_s, partner_s)
            )
            i = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (TILE,), 0), acc.reduce(1)) + t * TILE
            target_g[row, own, 0] = jnp.where(merged == 1, evens - r + partner, i - merged_before)
            target_g[row, own, 1] = evens - r + i

    target = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((batch, rows, 2), jnp.int32),
        scratch_types=[
            plgpu.SMEM((2, feature_tiles, rows, TILE), unit.dtype, transforms=_swizzled()),
            *(plgpu.SMEM((rows,), dtype) for dtype in (*[jnp.float32] * 3, jnp.int32, jnp.int32)),
            plgpu.Barrier(num_arrivals=2 * (feature_tiles + 1) * tiles),
        ],
        grid=(batch,),
        grid_names=("row",),
        kernel_name="merge_choose",
    )(unit, sizes)
    return target.reshape(batch, 2 * rows)


def _merge(x: jax.Array, size: jax.Array, target: jax.Array, r: int) -> tuple[jax.Array, jax.Array]:
    """The size-weighted means of the tokens with equal targets, and their sizes. target: int32 [B, n, padded]."""
    (batch, count, features), tokens = x.shape, target.shape[1]
    outputs, shape, weights_shape = count - r, (TILE, TILE), (TILE, MMA_TOKENS)
    size = jnp.pad(size, ((0, 0), (0, tokens - count)))  # padding tokens have weight 0, whatever their target
    lhs, rhs, acc = (of(x.dtype) for of in (plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS, plgpu.Layout.MMA_ACC))

    def body(x_g, size_g, target_g, y_g, new_size_g, x_s, size_s, target_s, y_s, new_size_s, full):
        row, features = lax.axis_index("row"), pl.ds(lax.axis_index("column") * TILE, TILE)

        @pl.loop(0, tokens // TILE)
        def _(t):
            own = pl.ds(t * TILE, TILE)
            plgpu.copy_gmem_to_smem(size_g.at[row, own], size_s.at[own], full)
            plgpu.copy_gmem_to_smem(target_g.at[row, own], target_s.at[own], full)
            plgpu.copy_gmem_to_smem(x_g.at[row, own, features], x_s.at[own], full)

        plgpu.barrier_wait(full)

        @pl.loop(0, pl.cdiv(outputs, TILE))
        def _(t):
            own = pl.ds(t * TILE, TILE)
            output = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, weights_shape, 0), lhs) + t * TILE

            def iteration(u, sums):
                weighted_sum, new_size = sums
                token_target, token_size = (
                    _broadcast(ref, u * MMA_TOKENS, lhs, 1, weights_shape) for ref in (target_s, size_s)
                )
                weights = jnp.where(token_target == output, token_size, 0.0)
                tokens = plgpu.load(x_s.at[pl.ds(u * MMA_TOKENS, MMA_TOKENS)], layout=rhs, optimized=False)
                return plgpu.mma(weighted_sum, weights.astype(x.dtype), tokens), new_size + jnp.sum(weights, axis=1)

            init = (
                plgpu.layout_cast(jnp.zeros(shape, jnp.float32), acc),
                plgpu.layout_cast(jnp.zeros(TILE, jnp.float32), lhs.reduce(1)),
            )
            weighted_sum, new_size = lax.fori_loop(0, tokens // MMA_TOKENS, iteration, init)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous tile has left y_s
            new_size_s[...] = jnp.where(new_size > 0, new_size, 1.0)  # padding only: the sum is 0
            plgpu.commit_smem()
            y_s[...] = (weighted_sum / _broadcast(new_size_s, 0, acc, 0, shape)).astype(x.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(y_s, y_g.at[row, own, features])

            @pl.when(lax.axis_index("column") == 0)
            def _():
                new_size_g[row, own] = new_size

        plgpu.wait_smem_to_gmem(0)

    y, new_size = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((batch, outputs, features), x.dtype),
            jax.ShapeDtypeStruct((batch, pl.cdiv(outputs, TILE) * TILE), jnp.float32),
        ),
        scratch_types=[
            plgpu.SMEM((tokens, TILE), x.dtype, transforms=_swizzled()),
            plgpu.SMEM((tokens,), jnp.float32),
            plgpu.SMEM((tokens,), jnp.int32),
            plgpu.SMEM(shape, x.dtype, transforms=_swizzled()),
            plgpu.SMEM((TILE,), jnp.float32),
            plgpu.Barrier(num_arrivals=3 * tokens // TILE),
        ],
        grid=(batch, pl.cdiv(features, TILE)),
        grid_names=("row", "column"),
        kernel_name="merge_average",
    )(x, size, target)
    return y, new_size[:, :outputs]

"""Merging similar tokens of an encoder: bipartite soft matching (ToMe, arXiv:2210.09461, section 3).

Tokens at even places (A) may go into tokens at odd places (B). Each of A finds the most similar of B, and the `r` most
similar of these pairs become size-weighted means. What remains is [the rest of A in order, B in order], so that the
next layer chooses among other pairs.

On a GPU two kernels do it. The first chooses, one block per batch row, since the choice needs all tokens of a row.
The second multiplies the tokens by the matrix that says which goes where, one block per batch row and 64 features: a
product has no scatter, whose order could change the sum, and the matrix is made in registers.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import UnsupportedError, dispatch

TILE = 64  # tokens, or features, that a block works on at once: 128 bytes in a half, the widest swizzle
STEP = 32  # tokens that are multiplied at once
MAX_TOKENS = 1024
_SHARED_BYTES = 200 << 10  # of a block's shared memory, for the tokens to choose among
_SWIZZLED = (plgpu.SwizzleTransform(128),)  # pyright: ignore[reportAbstractUsage]  # JAX's class is whole


def merge_tokens(
    x: jax.Array, size: jax.Array | None, metric: jax.Array, r: int, *, protected: int = 1
) -> tuple[jax.Array, jax.Array]:
    """Merge the `r` most similar pairs of tokens in every batch row.

    Args:
      x: [B, n, d], the tokens.
      size: float32 [B, n], how many original tokens each of them is the mean of; None: one.
      metric: [B, n, m], similar tokens have similar directions of it; in ToMe the keys, averaged over heads.
      r: how many tokens to lose; at most half of those that are not protected are lost.
      protected: the first so many tokens (the class token, prompts) neither go anywhere nor take others in.
    Returns [B, n - r, d] in x's dtype and its sizes, float32 [B, n - r]. Of equally similar pairs earlier ones merge.
    """
    batch, count, _ = x.shape
    size = jnp.ones((batch, count), jnp.float32) if size is None else size.astype(jnp.float32)
    r = min(r, (count - protected) // 2)
    if r <= 0:
        return x, size
    return dispatch("merge_tokens", _kernels, _definition, x, size, metric, r=r, protected=protected)


def _unit(metric: jax.Array) -> jax.Array:
    """Rows of length 1, in the metric's dtype: their products are cosines."""
    exact = metric.astype(jnp.float32)
    square = jnp.sum(exact * exact, axis=-1, keepdims=True)
    return (exact * lax.rsqrt(square + 1e-12)).astype(metric.dtype)


def _definition(
    x: jax.Array, size: jax.Array, metric: jax.Array, *, r: int, protected: int
) -> tuple[jax.Array, jax.Array]:
    unit, outputs = _unit(metric), x.shape[1] - r
    a, b = unit[:, ::2], unit[:, 1::2]
    scores = jnp.einsum("bim,bjm->bij", a, b, precision="highest", preferred_element_type=jnp.float32)
    i, j = jnp.arange(a.shape[1]), jnp.arange(b.shape[1])
    scores = jnp.where((2 * i[:, None] < protected) | (2 * j + 1 < protected), -jnp.inf, scores)
    best, goal = jnp.max(scores, axis=2), jnp.argmax(scores, axis=2)  # [B, A]
    mine, theirs = best[:, :, None], best[:, None]
    rank = jnp.sum((theirs > mine) | ((theirs == mine) & (i < i[:, None])), axis=2)  # a stable sort's place
    target = jnp.zeros(size.shape, jnp.int32)  # the output that each token goes to
    first = outputs - len(j)  # output of B
    target = target.at[:, ::2].set(jnp.where(rank < r, first + goal, jnp.cumsum(rank >= r, axis=1) - 1))
    target = target.at[:, 1::2].set(first + j)
    weights = jnp.where(target[:, None] == jnp.arange(outputs)[:, None], size[:, None], 0.0)  # [B, n - r, n]
    total = jnp.sum(weights, axis=2)
    weighted = jnp.einsum("bkn,bnd->bkd", weights, x.astype(jnp.float32), precision="highest")
    return (weighted / total[..., None]).astype(x.dtype), total


def _kernels(
    x: jax.Array, size: jax.Array, metric: jax.Array, *, r: int, protected: int
) -> tuple[jax.Array, jax.Array]:
    """As the definition, except that sizes above 256 (float16: 2048) weigh as what a half can hold of them."""
    halves = (jnp.bfloat16, jnp.float16)
    if x.dtype not in halves or metric.dtype not in halves:
        raise UnsupportedError(f"the kernels multiply halves, got x in {x.dtype} and the metric in {metric.dtype}")
    if x.shape[1] > MAX_TOKENS:
        raise UnsupportedError(f"a block holds at most {MAX_TOKENS} tokens, got {x.shape[1]}")
    for name, features in (("x", x.shape[2]), ("the metric", metric.shape[2])):
        if features % 8:
            raise UnsupportedError(f"TMA reads rows of whole 16 bytes, got {features} features of {name}")
    return _merge(x, size, _choose(metric, r, protected), r)


def _vector(ref: jax.Ref, start: jax.Array | int, layout: Any, axis: int, shape: tuple[int, int]):
    """A part of a vector in shared memory, along one axis of a matrix in registers."""
    part = plgpu.load(ref.at[pl.ds(start, shape[axis])], layout=layout.reduce(1 - axis), optimized=False)
    return lax.broadcast_in_dim(part, shape, (axis,))


def _choose(metric: jax.Array, r: int, protected: int) -> jax.Array:
    """The output that each token goes to, int32 [B, 2 x n / 2 rounded up to tiles]; of padding, anything.

    One warpgroup per batch row. It holds 64 x 32 pairs in registers, as a product leaves them: a row of pairs stays in
    one warp, and its maximum costs two shuffles. Instead of sorting, it counts the tokens before each.
    """
    batch, count, features = metric.shape
    # An even number of tokens: A and B are then the halves of rows twice as long, and need no copies.
    unit = _unit(jnp.pad(metric, ((0, 0), (0, count % 2), (0, 0)))).reshape(batch, -1, 2, features)
    evens, odds = pl.cdiv(count, 2), count // 2
    tiles, slabs, block = pl.cdiv(evens, TILE), pl.cdiv(features, TILE), (TILE, STEP)
    rows = tiles * TILE
    if (shared := 2 * slabs * rows * TILE * unit.dtype.itemsize) > _SHARED_BYTES:
        raise UnsupportedError(f"a block holds {_SHARED_BYTES} bytes, got {count} tokens of {features}: {shared}")
    lhs, rhs, pairs = (of(unit.dtype) for of in (plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS, plgpu.Layout.MMA_ACC))

    def body(unit_g, target_g, unit_s, best_s, goal_s, merged_s, arrived):
        row = lax.axis_index("row")

        @pl.loop(0, tiles)
        def _(t):
            @pl.loop(0, slabs)
            def _(slab):
                for half in range(2):
                    source = unit_g.at[row, pl.ds(t * TILE, TILE), half, pl.ds(slab * TILE, TILE)]
                    plgpu.copy_gmem_to_smem(source, unit_s.at[half, slab, pl.ds(t * TILE, TILE)], arrived)

        plgpu.barrier_wait(arrived)

        def index(axis, tile):
            return plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, block, axis), pairs) + tile * block[axis]

        def row_full(value, dtype):
            return plgpu.layout_cast(jnp.full(TILE, value, dtype), pairs.reduce(1))

        @pl.loop(0, tiles)
        def find_best(t):
            def among(u, found):
                best, goal = found
                scores = plgpu.layout_cast(jnp.zeros(block, jnp.float32), pairs)
                for slab in range(slabs):
                    a = plgpu.load(unit_s.at[0, slab, pl.ds(t * TILE, TILE)], layout=lhs, optimized=False)
                    b = plgpu.load(unit_s.at[1, slab, pl.ds(u * STEP, STEP)].T, layout=rhs, optimized=False)
                    scores = plgpu.mma(scores, a, b)
                i, j = index(0, t), index(1, u)
                allowed = (j < odds) & (2 * j + 1 >= protected) & (i < evens) & (2 * i >= protected)
                scores = jnp.where(allowed, scores, -jnp.inf)
                top = jnp.max(scores, axis=1)
                which = jnp.min(jnp.where(scores == lax.broadcast_in_dim(top, block, (0,)), j, rows), axis=1)
                return jnp.maximum(best, top), jnp.where(top > best, which, goal)

            nothing = row_full(-jnp.inf, jnp.float32), row_full(0, jnp.int32)
            best, goal = lax.fori_loop(0, rows // STEP, among, nothing)
            best_s[pl.ds(t * TILE, TILE)], goal_s[pl.ds(t * TILE, TILE)] = best, goal

        plgpu.commit_smem()

        @pl.loop(0, tiles)
        def choose(t):
            def count_before(u, rank):
                mine, theirs = (
                    _vector(best_s, tile * block[axis], pairs, axis, block) for axis, tile in enumerate((t, u))
                )
                before = (theirs > mine) | ((theirs == mine) & (index(1, u) < index(0, t)))
                return rank + jnp.sum(jnp.where(before, 1, 0), axis=1)

            rank = lax.fori_loop(0, rows // STEP, count_before, row_full(0, jnp.int32))
            merged_s[pl.ds(t * TILE, TILE)] = jnp.where(rank < r, 1, 0)

        plgpu.commit_smem()

        @pl.loop(0, tiles)
        def place(t):
            def count_gone(u, gone):
                before = index(1, u) < index(0, t)
                return gone + jnp.sum(jnp.where(before, _vector(merged_s, u * STEP, pairs, 1, block), 0), axis=1)

            gone = lax.fori_loop(0, (t + 1) * (TILE // STEP), count_gone, row_full(0, jnp.int32))
            part = pl.ds(t * TILE, TILE)
            merged, goal = (
                plgpu.load(ref.at[part], layout=pairs.reduce(1), optimized=False) for ref in (merged_s, goal_s)
            )
            i = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (TILE,), 0), pairs.reduce(1)) + t * TILE
            target_g[row, part, 0] = jnp.where(merged == 1, evens - r + goal, i - gone)
            target_g[row, part, 1] = evens - r + i

    target = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((batch, rows, 2), jnp.int32),
        scratch_types=[
            plgpu.SMEM((2, slabs, rows, TILE), unit.dtype, transforms=_SWIZZLED),
            *(plgpu.SMEM((rows,), dtype) for dtype in (jnp.float32, jnp.int32, jnp.int32)),
            plgpu.Barrier(num_arrivals=2 * slabs * tiles),
        ],
        grid=(batch,),
        grid_names=("row",),
        kernel_name="merge_choose",
    )(unit)
    return target.reshape(batch, 2 * rows)


def _merge(x: jax.Array, size: jax.Array, target: jax.Array, r: int) -> tuple[jax.Array, jax.Array]:
    """The size-weighted means of the tokens that share a target, and their sizes. target: [B, n, padded]."""
    (batch, count, features), tokens = x.shape, target.shape[1]
    outputs, block, weights_shape = count - r, (TILE, TILE), (TILE, STEP)
    size = jnp.pad(size, ((0, 0), (0, tokens - count)))  # padding weighs nothing, wherever it goes
    lhs, rhs, acc = (of(x.dtype) for of in (plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS, plgpu.Layout.MMA_ACC))

    def body(x_g, size_g, target_g, y_g, total_g, x_s, size_s, target_s, y_s, total_s, arrived):
        row, features = lax.axis_index("row"), pl.ds(lax.axis_index("column") * TILE, TILE)

        @pl.loop(0, tokens // TILE)
        def _(t):
            part = pl.ds(t * TILE, TILE)
            plgpu.copy_gmem_to_smem(size_g.at[row, part], size_s.at[part], arrived)
            plgpu.copy_gmem_to_smem(target_g.at[row, part], target_s.at[part], arrived)
            plgpu.copy_gmem_to_smem(x_g.at[row, part, features], x_s.at[part], arrived)

        plgpu.barrier_wait(arrived)

        @pl.loop(0, pl.cdiv(outputs, TILE))
        def _(t):
            part = pl.ds(t * TILE, TILE)
            output = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, weights_shape, 0), lhs) + t * TILE

            def add(u, sums):
                weighted, total = sums
                goes, weight = (_vector(ref, u * STEP, lhs, 1, weights_shape) for ref in (target_s, size_s))
                weights = jnp.where(goes == output, weight, 0.0)
                tokens = plgpu.load(x_s.at[pl.ds(u * STEP, STEP)], layout=rhs, optimized=False)
                return plgpu.mma(weighted, weights.astype(x.dtype), tokens), total + jnp.sum(weights, axis=1)

            nothing = (
                plgpu.layout_cast(jnp.zeros(block, jnp.float32), acc),
                plgpu.layout_cast(jnp.zeros(TILE, jnp.float32), lhs.reduce(1)),
            )
            weighted, total = lax.fori_loop(0, tokens // STEP, add, nothing)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the tile before
            total_s[...] = total
            plgpu.commit_smem()
            y_s[...] = (weighted / _vector(total_s, 0, acc, 0, block)).astype(x.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(y_s, y_g.at[row, part, features])

            @pl.when(lax.axis_index("column") == 0)
            def _():
                total_g[row, part] = total

        plgpu.wait_smem_to_gmem(0)

    y, total = plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((batch, outputs, features), x.dtype),
            jax.ShapeDtypeStruct((batch, pl.cdiv(outputs, TILE) * TILE), jnp.float32),
        ),
        scratch_types=[
            plgpu.SMEM((tokens, TILE), x.dtype, transforms=_SWIZZLED),
            plgpu.SMEM((tokens,), jnp.float32),
            plgpu.SMEM((tokens,), jnp.int32),
            plgpu.SMEM(block, x.dtype, transforms=_SWIZZLED),
            plgpu.SMEM((TILE,), jnp.float32),
            plgpu.Barrier(num_arrivals=3 * tokens // TILE),
        ],
        grid=(batch, pl.cdiv(features, TILE)),
        grid_names=("row", "column"),
        kernel_name="merge_average",
    )(x, size, target)
    return y, total[:, :outputs]

"""Token merging for encoders: bipartite soft matching (ToMe, arXiv:2210.09461, section 3).

Tokens at even positions (A) may be merged into tokens at odd positions (B). Each token of A finds its most similar
token of B, and the `r` most similar of these pairs become size-weighted means. The result is [the rest of A in order, B
in order], so that the next layer chooses among other pairs. Tokens of size 0 are padding: those of A are removed before
any other, and those of B receive no token as long as there is another place for it.

With `protect_isolated`, pairs are chosen by energy instead (PiToMe, arXiv:2405.16148).

On a GPU this takes two kernels. The first selects the pairs, with one thread block per batch row, since the choice
needs all tokens of a row. The second multiplies the tokens by the merge matrix, with one thread block per batch row and
64 features. A matmul is deterministic where a scatter's order could change the sums, and the matrix is built in
registers.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.pallas_kernels.dispatch import UnsupportedError, dispatch, require_shared_bytes
from jaxinfer.pallas_kernels.mosaic import pl, plgpu
from jaxinfer.pallas_kernels.refs import Ref

TILE = 64  # tokens, or features, of a tile: 128 bytes in a 16-bit dtype, the widest swizzle
MMA_TOKENS = 32  # tokens per mma
MAX_TOKENS = 1024
# Scores of pairs with padding, beyond those of all others, which are cosines: a token of A that is padding is merged
# first; one of B is chosen last.
_FIRST, _LAST = 2.0, -2.0
_OTHER_BYTES = 24 << 10  # of shared memory: one tile of the result, vectors, alignment


def _swizzled() -> tuple[Any, ...]:
    """How a tile lies in shared memory."""
    return (plgpu.SwizzleTransform(128),)  # pyright: ignore[reportAbstractUsage]  # pyright takes it for abstract


def merge_tokens(
    x: jax.Array,
    size: jax.Array | None,
    metric: jax.Array,
    r: int,
    *,
    protected: int = 1,
    protect_isolated: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Remove `r` tokens from every batch row, by merging them with similar ones.

    Args:
      x: [B, n, d], the tokens.
      size: float32 [B, n], how many original tokens each of them is the mean of; None: one. Tokens of size 0 are
        padding, at any place: finite, but no result depends on them.
      metric: [B, n, m], compared by cosine similarity; in ToMe the keys, averaged over heads.
      r: how many tokens to remove; limited to half of the tokens that are not protected.
      protected: the first `protected` tokens (class token, prompts) are neither merged nor merged into.
      protect_isolated: None: ToMe, which merges the `r` tokens of A that are most similar to one of B. A margin m:
        PiToMe, which spares isolated tokens. The energy of a token is the mean, over the other tokens that are neither
        protected nor padding, of f(cosine), with f(c) = c if c >= m, else exp(c - m) - 1. Of the 2 r tokens of highest
        energy in descending order, those at even places are merged into those at odd places. Runs as plain XLA.
    Returns [B, n - r, d] in x's dtype and its sizes, float32 [B, n - r]; zeros where the size is 0. Order: the other
    tokens in theirs, then those that may have received tokens: B, or by descending energy. Padding is removed first:
    of ToMe's A, or (PiToMe) in place of a pair each. Among equally similar pairs, earlier ones are merged first.
    """
    batch, count, _ = x.shape
    size = jnp.ones((batch, count), jnp.float32) if size is None else size.astype(jnp.float32)
    # Of the tokens from `protected` on, at least half, rounded down, are in A, and at least one is in B. So there are
    # always r tokens to remove that rank before the protected ones, and each has a place to go to.
    r = min(r, (count - protected) // 2)
    if r <= 0:
        return x, size
    options = {"r": r, "protected": protected, "protect_isolated": protect_isolated}
    return dispatch("merge_tokens", _kernels, _reference, x, size, metric, **options)


class _Choice(NamedTuple):
    """Which tokens are merged into which outputs. Every output starts as one token.

    Attributes:
      kept: int32 [B, n - r], the token that each output starts as.
      merged: int32 [B, r], the tokens that are removed. into: int32 [B, r], the output that each becomes a part of.
    """

    kept: jax.Array
    merged: jax.Array
    into: jax.Array


def _reference(
    x: jax.Array, size: jax.Array, metric: jax.Array, *, r: int, protected: int, protect_isolated: float | None
) -> tuple[jax.Array, jax.Array]:
    unit = _normalized(metric)
    if protect_isolated is None:
        return _means(x, size, _most_similar(unit, size, r, protected))
    return _means(x, size, _highest_energy(unit, size, r, protected, margin=protect_isolated))


def _normalized(metric: jax.Array) -> jax.Array:
    """Rows of length 1, in the metric's dtype: their dot products are cosine similarities."""
    exact = metric.astype(jnp.float32)
    square = jnp.sum(exact * exact, axis=-1, keepdims=True)
    return (exact * lax.rsqrt(square + 1e-12)).astype(metric.dtype)


def _cosines(a: jax.Array, b: jax.Array) -> jax.Array:
    """Between rows of length 1: [B, i, m], [B, j, m] -> float32 [B, i, j]."""
    return jnp.einsum("bim,bjm->bij", a, b, precision="highest", preferred_element_type=jnp.float32)


def _most_similar(unit: jax.Array, size: jax.Array, r: int, protected: int) -> _Choice:
    """ToMe: the `r` tokens of A that are most similar to a token of B."""
    scores = _cosines(unit[:, ::2], unit[:, 1::2])
    scores = jnp.where(size[:, None, 1::2] > 0, scores, _LAST)
    scores = jnp.where(size[:, ::2, None] > 0, scores, _FIRST)
    a, b = jnp.arange(0, unit.shape[1], 2), jnp.arange(1, unit.shape[1], 2)
    scores = jnp.where((a[:, None] < protected) | (b < protected), -jnp.inf, scores)
    _, merged = lax.top_k(jnp.max(scores, axis=2), r)
    into = jnp.argmax(jnp.take_along_axis(scores, merged[..., None], axis=1), axis=2)
    is_merged = jnp.any(merged[..., None] == jnp.arange(len(a)), axis=1)
    rest = jnp.sort(jnp.where(is_merged, len(a), jnp.arange(len(a))), axis=1)[:, :-r]
    kept = jnp.concatenate([2 * rest, jnp.broadcast_to(b, (len(unit), len(b)))], axis=1)
    return _Choice(kept, 2 * merged, rest.shape[1] + into)


def _highest_energy(unit: jax.Array, size: jax.Array, r: int, protected: int, *, margin: float) -> _Choice:
    """PiToMe: pairs among the `2 r` tokens of highest energy, less two for every token of padding that is removed."""
    place = jnp.arange(unit.shape[1])
    mergeable = (size > 0) & (place >= protected)
    cosines = _cosines(unit, unit)
    terms = jnp.where(cosines >= margin, cosines, jnp.exp(cosines - margin) - 1)
    # Sums in place of means: all of a row would be divided by the same number.
    energy = jnp.sum(jnp.where(mergeable[:, None] & (place != place[:, None]), terms, 0.0), axis=2)
    energy = jnp.where(mergeable, energy, jnp.where(place < protected, -jnp.inf, jnp.inf))
    _, order = lax.top_k(energy, 2 * r)  # padding before all others
    padding = jnp.minimum(jnp.sum(energy == jnp.inf, axis=1, keepdims=True), r)  # removed: the first `padding` slots

    slot = jnp.arange(r)
    rank_of_a = jnp.where(slot < padding, slot, 2 * slot - padding)
    merged, partners = (jnp.take_along_axis(order, rank, axis=1) for rank in (rank_of_a, rank_of_a + 1))
    scores = _cosines(_rows(unit, merged), _rows(unit, partners))
    into = jnp.argmax(jnp.where((slot < padding)[:, None], -jnp.inf, scores), axis=2)

    # Sorts the tokens that are left alone by their place, the partners after them by their slot.
    is_merged = jnp.any(merged[..., None] == place, axis=1)
    is_partner = (partners[..., None] == place) & (slot >= padding)[..., None]  # [B, r, n]
    last = jnp.max(jnp.where(is_partner, len(place) + slot[:, None], 0), axis=1)
    kept = jnp.argsort(jnp.where(is_merged, 2 * len(place), jnp.maximum(place, last)), axis=1)[:, :-r]
    return _Choice(kept, merged, kept.shape[1] - r + into)


def _means(x: jax.Array, size: jax.Array, choice: _Choice) -> tuple[jax.Array, jax.Array]:
    """The size-weighted mean of each output's tokens, and its size.

    A product with a matrix of few columns, in place of a scatter, whose order could change the sums on a GPU. A token
    that is left alone has a weight of exactly 1.
    """
    kept_size, merged_size = (jnp.take_along_axis(size, index, axis=1) for index in (choice.kept, choice.merged))
    outputs = jnp.arange(choice.kept.shape[1])
    sizes = jnp.where(choice.into[:, None] == outputs[:, None], merged_size[:, None], 0.0)  # [B, n - r, r]
    new_size = kept_size + jnp.sum(sizes, axis=2)
    total = jnp.where(new_size > 0, new_size, 1.0)[..., None]
    kept, merged = (_rows(x, index).astype(jnp.float32) for index in (choice.kept, choice.merged))
    added = jnp.einsum("bkr,brd->bkd", sizes / total, merged, precision="highest")
    return (kept_size[..., None] / total * kept + added).astype(x.dtype), new_size


def _rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[b, index[b]]: [B, n, d], [B, k] -> [B, k, d]."""
    return jnp.take_along_axis(x, index[..., None], axis=1)


def _kernels(
    x: jax.Array, size: jax.Array, metric: jax.Array, *, r: int, protected: int, protect_isolated: float | None
) -> tuple[jax.Array, jax.Array]:
    """Like `_reference`, except that weights (sizes) above 256 (float16: 2048) are rounded to x's dtype."""
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
    unit = _normalized(jnp.pad(metric, ((0, 0), (0, count % 2), (0, 0)))).reshape(batch, -1, 2, features)
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
                scores = jnp.where(_broadcast(b_size_s, u * MMA_TOKENS, acc, 1, shape) > 0, scores, _LAST)
                scores = jnp.where(_broadcast(a_size_s, t * TILE, acc, 0, shape) > 0, scores, _FIRST)
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

"""The GPU kernel of attention with many queries: over the pages of a cache, or over the keys of the rows themselves.

FlashAttention (Dao et al. 2022, arXiv:2205.14135, algorithm 1) in the form that suits Hopper (Shah et al. 2024,
arXiv:2407.08608, section 3.1): one warpgroup copies, one or two others compute. A block of threads takes the queries of
some heads that share a KV head, 64 rows of queries to a computing warpgroup, and goes over the keys block by block:

    copier:   pages of keys -> ring of K slots, pages of values -> ring of V slots, by TMA, as far ahead as slots allow
    computer: scores = Q K^T (wgmma), running maximum and sum in registers, weights -> SMEM, sums += weights V (wgmma)

What moves: every tile of 128 rows reads the pages between its first window and its last query once, from L2 mostly:
4 K bytes a key (2 K in int8) for 512 K FLOPs, so 128 FLOPs a byte. At 989 TFLOP/s that would be 7.7 TB/s of L2, more
than it gives (about 5.5 TB/s); at the 600 TFLOP/s that such kernels reach, 4.7. From HBM: the queries, the result, and
the pages once, if L2 holds those that are in use at a time.

`wgmma` with both operands in SMEM rather than `mma` from registers, which reaches about 60% of its rate. The weights
go through SMEM for it: 2 * 64 * block bytes each way per 256 * block * K FLOPs, an eighth of SMEM's time at K = 128.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import UnsupportedError, interpreting
from pallas_kernels.kv_pages import KVPages
from pallas_kernels.tuning import tuned

_ROWS = 64  # of queries to a warpgroup: what a wgmma takes
_MATRIX = plgpu.Layout.WGMMA
_COLUMN = plgpu.Layout.WGMMA.reduce(1)  # a number a row
_ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
_LOG2_E = math.log2(math.e)

# A power of two, so that its product with any factor is exact: weights of rows that see nothing yet are exp2(x - x) = 1
# even where the compiler fuses product and difference without rounding in between.
_HIDDEN = np.float32(-(2.0**100))


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How the kernel divides its work.

    The SMEM of a block of threads, in bytes: queries, 128 K a warpgroup; weights, 128 `block` a warpgroup; rings,
    4 K `block` a stage; in int8 besides 2 K `block`, where a block of keys and values waits to be converted.
    Registers: an accumulator takes K, scores `block` / 2; with two computing warpgroups each may have 232 a thread (200
    in int8) and the copier 40 (104), so one block of threads fills an SM.

    Attributes:
      block: keys at a time, 64 or 128. stages: blocks in each ring. warpgroups: 1 or 2 that compute.
    """

    block: int
    stages: int
    warpgroups: int


def tiles_for(tokens: int, heads: int, head_dim: int, *, int8: bool) -> Tiles:
    """The tile sizes for rows of `tokens` queries, `heads` of which share a tile."""
    key = f"{tokens} tokens, {heads} heads of {head_dim}{', int8' if int8 else ''}"
    if (measured := tuned("prefill_attention", key)) is not None:
        return Tiles(**measured)
    warpgroups = 1 if tokens * heads <= _ROWS or (int8 and head_dim == 256) else 2
    # As many keys at a time as fit, for the softmax's fixed costs, and at least two stages.
    if head_dim == 256:
        return Tiles(64, 2, warpgroups)  # 208 KiB; in int8 200 KiB
    if head_dim == 128:
        return Tiles(64, 3, warpgroups) if int8 else Tiles(128, 2, warpgroups)  # 160 KiB, 192 KiB
    return Tiles(128, 3, warpgroups)  # 144 KiB; in int8 160 KiB


class _Inputs(NamedTuple):
    """What is in GMEM; None where there is nothing of the kind."""

    q: Any  # [B, T, Hq, K]
    pages: KVPages
    page_table: Any  # int32 [B, P], None for a page a row
    positions: Any  # int32 [B * T]: in one dimension a copy may start anywhere
    lengths: Any  # int32 [B]
    slopes: Any  # float32 [Hq * tokens of a warpgroup]


class _Scratch(NamedTuple):
    """What is in SMEM, for W computing warpgroups of 64 rows. A row is a head and a token, a head's tokens in order."""

    q: Any  # [W, 64, K]; the result at the end
    k: Any  # [stages, block, K]
    v: Any
    weights: Any  # [W, 64, block]
    positions: Any  # int32 [W, 64], of the tokens: the first 64 / heads and then others
    slopes: Any  # float32 [64] or None
    bounds: Any  # int32 [3]: lowest and highest position of the tile's queries, last position of its keys (or -1)
    k_int8: Any  # int8 [block, K] or None
    v_int8: Any
    queries_in: Any  # the barriers: all that is copied but once has arrived
    bounds_in: Any
    k_in: Any  # a slot is full
    v_in: Any
    k_out: Any  # a slot is free
    v_out: Any
    k_int8_in: Any
    v_int8_in: Any


def prefill_attention(
    q: jax.Array,
    pages: KVPages,
    page_table: jax.Array | None,
    q_positions: jax.Array,
    lengths: jax.Array | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    alibi: tuple[float, ...] | None = None,
) -> jax.Array:
    """`paged_attention` as one kernel; with `lengths` every query sees keys after it as well.

    Args:
      q: [B, T, Hq, K], bfloat16 or float16, K of 64, 128 or 256.
      pages: in q's dtype or int8. A page holds 8, 16, 32, 64 or a multiple of 128 tokens; without a table any number.
      page_table: int32 [B, P]; None: page i is all that row i has. q_positions: int32 [B, T], negative for padding.
      lengths: int32 [B] or None; if given, a query sees the first `lengths` keys of its row.
      scale, window, softcap, alibi: as in `attention`.
    Returns: [B, T, Hq, K]; zeros where a whole tile of queries is padding.
    Raises: UnsupportedError for other dtypes and sizes.
    """
    batch, tokens, q_heads, head_dim = q.shape
    _, page_size, kv_heads, _ = pages.k.shape
    int8 = pages.k_scale is not None
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise UnsupportedError(f"prefill_attention takes bfloat16 or float16 queries, got {q.dtype}")
    if not int8 and pages.k.dtype != q.dtype:
        raise UnsupportedError(f"prefill_attention takes keys in int8 or {q.dtype} as the queries, got {pages.k.dtype}")
    if head_dim not in (64, 128, 256):
        raise UnsupportedError(f"prefill_attention takes a head_dim of 64, 128 or 256, got {head_dim}")
    heads = math.gcd(q_heads // kv_heads, 8)  # of a tile; 8 tokens at least, which a tile of SMEM has for rows
    tiles = tiles_for(tokens, heads, head_dim, int8=int8)
    rows = tiles.block if page_table is None else min(page_size, tiles.block)  # that a copy takes
    if page_table is not None and (page_size % rows or tiles.block % rows or rows % 8):
        raise UnsupportedError(
            f"prefill_attention takes pages of 8, 16, 32, 64 or a multiple of 128 tokens, got {page_size}"
        )
    chunk = _ROWS // heads
    slopes = None if alibi is None else np.repeat(np.asarray(alibi, np.float32) * np.float32(_LOG2_E), chunk)
    whole = pages._replace(k=_whole_eights(pages.k), v=_whole_eights(pages.v))
    inputs = _Inputs(_whole_eights(q), whole, page_table, q_positions.reshape(-1), lengths, slopes)
    options = {"tiles": tiles, "heads": heads, "rows": rows, "scale": scale, "window": window, "softcap": softcap}
    launch = plgpu.kernel(
        functools.partial(_attend, **options),
        kernel_name="prefill_attention",
        out_type=jax.ShapeDtypeStruct(inputs.q.shape, q.dtype),
        grid=(q_heads // heads, batch, pl.cdiv(tokens, tiles.warpgroups * chunk)),
        grid_names=("heads", "row", "tile"),
        num_threads=tiles.warpgroups + 1,
        thread_name="warpgroup",
        scratch_types=list(_scratch(tiles, inputs, heads, rows)),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    return launch(inputs)[:, :tokens]


def _whole_eights(x: jax.Array) -> jax.Array:
    """[B, T, ...] with T a multiple of 8 or less than it, as TMA's tiles of 8 rows must divide an array."""
    tokens = x.shape[1]
    if tokens < 8 or tokens % 8 == 0:
        return x
    return jnp.pad(x, ((0, 0), (0, -tokens % 8)) + ((0, 0),) * (x.ndim - 2))


def _swizzled(width: int, bits: int) -> tuple[Any, Any]:
    """Tiles of 8 rows by so many columns, whose rows TMA spreads over the banks of SMEM."""
    return plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(width * bits // 8)  # pyright: ignore[reportAbstractUsage]


def _scratch(tiles: Tiles, inputs: _Inputs, heads: int, rows: int) -> _Scratch:
    """The shapes of what is in SMEM."""
    dtype, head_dim = inputs.q.dtype, inputs.q.shape[-1]
    int8 = inputs.pages.k_scale is not None
    block, stages, computers = tiles.block, tiles.stages, tiles.warpgroups
    tiled = _swizzled(64, bits=16)  # what wgmma reads
    ring = plgpu.SMEM((stages, block, head_dim), dtype, transforms=tiled)
    waiting = (
        plgpu.SMEM((block, head_dim), jnp.int8, transforms=_swizzled(min(head_dim, 128), bits=8)) if int8 else None
    )
    copies = block // rows
    full = plgpu.Barrier(num_arrivals=1 if int8 else copies, num_barriers=stages)
    free = plgpu.Barrier(num_arrivals=computers, num_barriers=stages)
    arrived = plgpu.Barrier(num_arrivals=copies) if int8 else None
    return _Scratch(
        q=plgpu.SMEM((computers, _ROWS, head_dim), dtype, transforms=tiled),
        k=ring,
        v=ring,
        weights=plgpu.SMEM((computers, _ROWS, block), dtype, transforms=tiled),
        positions=plgpu.SMEM((computers, _ROWS), jnp.int32),
        slopes=None if inputs.slopes is None else plgpu.SMEM((_ROWS,), jnp.float32),
        bounds=plgpu.SMEM((3,), jnp.int32),
        k_int8=waiting,
        v_int8=waiting,
        queries_in=plgpu.Barrier(num_arrivals=computers * (heads + 1) + (inputs.slopes is not None)),
        bounds_in=plgpu.Barrier(num_arrivals=1),
        k_in=full,
        v_in=full,
        k_out=free,
        v_out=free,
        k_int8_in=arrived,
        v_int8_in=arrived,
    )


def _attend(
    inputs: _Inputs,
    out: Any,
    *scratch: Any,
    tiles: Tiles,
    heads: int,
    rows: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> None:
    """The kernel: `heads` query heads of one row, up to W * 64 / heads tokens of each; `rows` keys in a copy."""
    s = _Scratch(*scratch)
    block, computers = tiles.block, tiles.warpgroups
    int8 = inputs.pages.k_scale is not None
    head_dim, tokens = inputs.q.shape[-1], inputs.positions.shape[0] // inputs.q.shape[0]
    page_size, kv_heads = inputs.pages.k.shape[1:3]
    chunk = _ROWS // heads  # tokens of a warpgroup
    head = lax.axis_index("heads") * heads
    kv_head = lax.div(head, inputs.q.shape[2] // kv_heads)
    row, warpgroup = lax.axis_index("row"), lax.axis_index("warpgroup")
    # The last tiles come first: they have most keys, and short ones fill the SMs at the end.
    tile = pl.cdiv(tokens, computers * chunk) - 1 - lax.axis_index("tile")
    first_token = tile * (computers * chunk)

    def blocks() -> tuple[Any, Any]:
        """The blocks of keys from the first window on to the last key; none for a tile of padding."""
        start = 0 if window is None else lax.div(jnp.maximum(s.bounds[0] - window + 1, 0), block)
        return start, lax.div(s.bounds[2] + block, block)

    def copy_queries() -> None:
        for w in range(computers):
            token = first_token + w * chunk
            source = inputs.positions.at[pl.ds(row * tokens + token, _ROWS)]
            plgpu.copy_gmem_to_smem(source, s.positions.at[w], s.queries_in)
            for h in range(heads):
                source = inputs.q.at[row, pl.ds(token, chunk), head + h]
                plgpu.copy_gmem_to_smem(source, s.q.at[w, pl.ds(h * chunk, chunk)], s.queries_in)
        if inputs.slopes is not None:
            plgpu.copy_gmem_to_smem(inputs.slopes.at[pl.ds(head * chunk, _ROWS)], s.slopes, s.queries_in)

    def find_bounds() -> None:
        """One warpgroup reduces for all: a reduction to a scalar takes scratch space, which there is for one."""
        lowest, highest = np.int32(2**30), np.int32(-1)
        token = plgpu.layout_cast(lax.iota(jnp.int32, _ROWS), _COLUMN)
        for w in range(computers):
            positions = plgpu.load(s.positions.at[w], layout=_COLUMN, optimized=False)
            # What follows the tile's tokens is another tile's, what follows the row's is the next row's.
            real = (positions >= 0) & (token < chunk) & (token < tokens - first_token - w * chunk)
            lowest = jnp.minimum(lowest, jnp.min(jnp.where(real, positions, np.int32(2**30))))
            highest = jnp.maximum(highest, jnp.max(jnp.where(real, positions, -1)))
        s.bounds[0], s.bounds[1] = lowest, highest
        s.bounds[2] = highest if inputs.lengths is None else jnp.where(highest < 0, -1, inputs.lengths[row] - 1)
        plgpu.barrier_arrive(s.bounds_in)

    def positions_of_rows() -> Any:
        """Those of the tokens, once a head; what rows of no token get is of no matter.

        Number by number, as no layout repeats a vector; meanwhile the first keys are on their way.
        """
        token = lax.rem(plgpu.layout_cast(lax.iota(jnp.int32, _ROWS), _COLUMN), chunk)
        zeros = plgpu.layout_cast(jnp.zeros(_ROWS, jnp.int32), _COLUMN)
        return lax.fori_loop(0, chunk, lambda t, x: jnp.where(token == t, s.positions[warpgroup, t], x), zeros)

    def page_of(i: Any, part: int) -> tuple[Any, Any]:
        """The page and the place in it of a part of a block, or of the last part that is needed."""
        position = jnp.minimum(i * block + part * rows, lax.div(s.bounds[2], rows) * rows)
        if inputs.page_table is None:
            return row, position
        return inputs.page_table[row, lax.div(position, page_size)], lax.rem(position, page_size)

    def copy_block(i: Any, source: Any, target: Any, barrier: Any) -> None:
        for part in range(block // rows):
            page, place = page_of(i, part)
            here = source.at[page, pl.ds(place, rows), kv_head]
            plgpu.copy_gmem_to_smem(here, target.at[pl.ds(part * rows, rows)], barrier)

    def convert_block(i: Any, waiting: Any, scales: Any, target: Any) -> None:
        """int8 -> q's dtype, times each page's scale, 64 keys by 128 features at a time to need few registers."""
        width = min(head_dim, 128)
        for at in range(0, block, 64):
            scale_of = plgpu.layout_cast(jnp.zeros(64, jnp.float32), _COLUMN)
            key = plgpu.layout_cast(lax.iota(jnp.int32, 64), _COLUMN)
            for part in range(at // rows, pl.cdiv(at + 64, rows)):
                page, _ = page_of(i, part)
                scale_of = jnp.where(key >= part * rows - at, scales[page, kv_head], scale_of)
            for feature in range(0, head_dim, width):
                here = pl.ds(at, 64), pl.ds(feature, width)
                x = plgpu.load(waiting.at[here], layout=plgpu.Layout.WGMMA_UPCAST_2X)
                x = plgpu.layout_cast(x, _MATRIX).astype(jnp.float32)
                target.at[here][...] = (x * _across(scale_of, width)).astype(target.dtype)

    rings = (
        (inputs.pages.k, inputs.pages.k_scale, s.k, s.k_in, s.k_out, s.k_int8, s.k_int8_in),
        (inputs.pages.v, inputs.pages.v_scale, s.v, s.v_in, s.v_out, s.v_int8, s.v_int8_in),
    )

    @pl.when(warpgroup == computers)
    def copier() -> None:
        if computers == 2:
            plgpu.set_max_registers(104 if int8 else 40, action="decrease")
        copy_queries()
        plgpu.barrier_wait(s.queries_in)
        find_bounds()
        start, end = blocks()
        if int8:

            @pl.when(start < end)
            def _() -> None:
                for source, _, _, _, _, waiting, waiting_in in rings:
                    copy_block(start, source, waiting, waiting_in)

        def step(i: Any, _: None) -> None:
            slot = lax.rem(i - start, tiles.stages)
            for source, scales, ring, full, free, waiting, waiting_in in rings:
                if int8:
                    plgpu.barrier_wait(waiting_in)

                @pl.when(i - start >= tiles.stages)
                def _(free: Any = free) -> None:
                    plgpu.barrier_wait(free.at[slot])

                if not int8:
                    copy_block(i, source, ring.at[slot], full.at[slot])
                    continue
                convert_block(i, waiting, scales, ring.at[slot])
                plgpu.commit_smem()  # for wgmma, which does not see plain stores by itself
                plgpu.barrier_arrive(full.at[slot])

                # All of this warpgroup has read what waited: the commit was a barrier among its threads.
                @pl.when(i + 1 < end)
                def _(source: Any = source, waiting: Any = waiting, waiting_in: Any = waiting_in) -> None:
                    copy_block(i + 1, source, waiting, waiting_in)

        lax.fori_loop(start, end, step, None)

    def scores_of(i: Any, raw: Any, positions: Any, slopes: Any) -> tuple[Any, float]:
        """Scores whose product with the factor returned is in units of log 2, hidden ones at the bottom."""
        factor = scale * _LOG2_E
        if softcap is not None:
            raw, factor = jnp.tanh(raw * np.float32(scale / softcap)), softcap * _LOG2_E
        if slopes is None:
            return _hide(i, raw, positions), factor
        key = i * block + plgpu.broadcasted_iota(jnp.int32, raw.shape, 1, layout=_MATRIX)
        distance = (key - _across(positions, block)).astype(jnp.float32)
        return _hide(i, raw * np.float32(factor) + _across(slopes, block) * distance, positions), 1.0

    def _hide(i: Any, scores: Any, positions: Any) -> Any:
        def hide(scores: Any) -> Any:
            key = i * block + plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=_MATRIX)
            seen = key <= (s.bounds[2] if inputs.lengths is not None else _across(positions, block))
            if window is not None:
                seen &= key > _across(positions, block) - window
            return jnp.where(seen, scores, _HIDDEN)

        # Most blocks lie between the first query's window and itself, or what all see.
        visible = (i + 1) * block - 1 <= s.bounds[0 if inputs.lengths is None else 2]
        if window is not None:
            visible &= i * block > s.bounds[1] - window
        return lax.cond(visible, lambda scores: scores, hide, scores)

    @pl.when(warpgroup < computers)
    def computer() -> None:
        if computers == 2:
            plgpu.set_max_registers(200 if int8 else 232, action="increase")
        plgpu.barrier_wait(s.queries_in)
        plgpu.barrier_wait(s.bounds_in)
        start, end = blocks()
        # Without use for them: the compiler's search for layouts does not end with a vector that nothing constrains.
        positions = None
        if inputs.lengths is None or window is not None or inputs.slopes is not None:
            positions = positions_of_rows()
        slopes = None if s.slopes is None else plgpu.load(s.slopes, layout=_COLUMN, optimized=False)
        q, weights = s.q.at[warpgroup], s.weights.at[warpgroup]

        def release(slot: Any, i: Any) -> None:
            """Tell the copier that a slot is free, if it has a block left for it."""
            pl.when(i + tiles.stages < end)(lambda: plgpu.barrier_arrive(slot))

        # A wgmma runs on after its call, but `_product` and `_accumulate` return its result, so what it reads (a slot,
        # the weights) is free once they have returned: the release comes after that, and so does the next store of
        # weights. Only the copier refills a slot, after all computing warpgroups have released it.
        def step(i: Any, state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            highest, total, mixed = state
            slot = lax.rem(i - start, tiles.stages)
            plgpu.barrier_wait(s.k_in.at[slot])
            raw = _product(q, s.k.at[slot].T)
            release(s.k_out.at[slot], i)
            scores, factor = scores_of(i, raw, positions, slopes)
            higher = jnp.maximum(highest, jnp.max(scores, axis=1) * np.float32(factor))
            kept = jnp.exp2(highest - higher)
            exponents = jnp.exp2(scores * np.float32(factor) - _across(higher, block))
            total = total * kept + jnp.sum(exponents, axis=1)
            weights[...] = exponents.astype(weights.dtype)
            plgpu.commit_smem()  # of this warpgroup's stores, for its own wgmma
            plgpu.barrier_wait(s.v_in.at[slot])
            mixed = _accumulate(mixed * _across(kept, head_dim), weights, s.v.at[slot])
            release(s.v_out.at[slot], i)
            return higher, total, mixed

        lowest = plgpu.layout_cast(jnp.full(_ROWS, -jnp.inf, jnp.float32), _COLUMN)
        zeros = plgpu.layout_cast(jnp.zeros(_ROWS, jnp.float32), _COLUMN)
        mixed = plgpu.layout_cast(jnp.zeros((_ROWS, head_dim), jnp.float32), _MATRIX)
        _, total, mixed = lax.fori_loop(start, end, step, (lowest, zeros, mixed))
        share = 1.0 / jnp.where(total == 0, np.float32(1), total)  # 0 without any block
        q[...] = (mixed * _across(share, head_dim)).astype(q.dtype)  # this warpgroup's own rows, which none reads now
        plgpu.commit_smem()
        for h in range(heads):
            target = out.at[row, pl.ds(first_token + warpgroup * chunk, chunk), head + h]
            plgpu.copy_smem_to_gmem(q.at[pl.ds(h * chunk, chunk)], target)
        plgpu.wait_smem_to_gmem(0)


def _across(column: Any, width: int) -> Any:
    """[R] -> [R, width]."""
    return lax.broadcast_in_dim(column, (column.shape[0], width), (0,))


def _product(a: Any, b: Any) -> Any:
    """a b in float32, of references to SMEM."""

    def multiply(total: Any) -> Any:
        plgpu.wgmma(total, a, b)
        return total[...]  # waits for it

    return pl.run_scoped(multiply, _ACC((a.shape[0], b.shape[1]), jnp.float32))


def _accumulate(total: Any, a: Any, b: Any) -> Any:
    """total + a b, in the registers of `total`: a second accumulator of 256 columns would spill."""
    if interpreting():  # which knows no accumulator that starts from a value
        return total + _product(a, b)
    return pl.run_state(lambda reference: plgpu.wgmma(reference, a, b))(_ACC.init(total))

"""The prefill attention kernel: many queries over the pages of a KV cache, or over each row's own contiguous keys.

Warp-specialised FlashAttention for Hopper (Dao et al. 2022, arXiv:2205.14135, algorithm 1; Shah et al. 2024,
arXiv:2407.08608, section 3.1), with one producer warpgroup and one or two consumer warpgroups. A thread block takes
the queries of some heads that share a KV head, 64 rows of queries per consumer, and iterates over tiles of keys:

    producer: pages of keys and of values -> pipeline stages in SMEM, by TMA, as far ahead as there are empty stages
    consumer: S = Q K^T (wgmma), online softmax in registers, P -> SMEM, acc += P V (wgmma)

Memory traffic: each tile of 128 query rows reads the pages from its first window to its last query once, mostly from
L2: 4 K bytes a key (2 K in int8) for 512 K FLOPs, so 128 FLOPs a byte. At 989 TFLOP/s that would need 7.7 TB/s from
L2, more than it delivers (about 5.5 TB/s); at the 600 TFLOP/s that such kernels reach, it is 4.7 TB/s. HBM delivers
the queries, the result, and the pages once, if L2 holds the pages in use.

Both operands of `wgmma` are in SMEM; `mma` from registers reaches only about 60% of its rate. So P goes through SMEM:
2 * 64 * tile_kv bytes each way per 256 * tile_kv * K FLOPs, an eighth of SMEM's time at K = 128.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.pallas_kernels.kv_pages import KVPages
from jaxinfer.pallas_kernels.mosaic import pl, plgpu
from jaxinfer.pallas_kernels.mosaic.refs import Ref
from jaxinfer.pallas_kernels.mosaic.tuning import tuned
from jaxinfer.pallas_kernels.target import UnsupportedError, interpreting

_TILE_Q = 64  # rows of queries per consumer warpgroup: the M of a wgmma
_LOG2E = math.log2(math.e)

# A power of two, so that its product with any factor is exact: while a row has seen only masked keys, its weights are
# exp2(x - x) = 1, even if the compiler fuses the product and the difference without rounding in between.
_MASKED = np.float32(-(2.0**100))


def _row_layout() -> Any:
    """Of a vector with one number per row of an accumulator."""
    return plgpu.Layout.WGMMA.reduce(1)


def _eight_rows_layout() -> Any:
    """Of 8 rows of a swizzled tile: two rows per warp, four adjacent features per lane."""
    tiling = plgpu.Tiling(((8, 64), (2, 64), (4,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How the kernel partitions its work.

    SMEM of a thread block, in bytes: Q, 128 K per consumer; P, 128 `tile_kv` per consumer; keys and values, 4 K
    `tile_kv` per stage; for an int8 cache also 2 K `tile_kv`, where an int8 tile waits to be converted. Registers: acc
    takes K, the scores `tile_kv` / 2; with two consumers, each may have 232 a thread (200 for int8) and the producer
    40 (104), so one thread block fills an SM.

    Attributes:
      tile_kv: keys of a tile, 64 or 128. stages: pipeline stages. consumers: consumer warpgroups, 1 or 2.
    """

    tile_kv: int
    stages: int
    consumers: int


def choose_tiles(tokens: int, heads: int, head_dim: int, *, int8: bool) -> Tiles:
    """The tile sizes for rows of `tokens` tokens, where a tile of queries has `heads` heads."""
    key = f"{tokens} tokens, {heads} heads of {head_dim}{', int8' if int8 else ''}"
    if (measured := tuned("prefill_attention", key)) is not None:
        return Tiles(**measured)
    consumers = 1 if tokens * heads <= _TILE_Q or (int8 and head_dim == 256) else 2
    # As many keys per tile as fit, to amortise the fixed costs of the softmax, with at least two stages.
    if head_dim == 256:
        return Tiles(64, 2, consumers)  # 208 KiB; int8: 200 KiB
    if head_dim == 128:
        return Tiles(64, 3, consumers) if int8 else Tiles(128, 2, consumers)  # 160 KiB, 192 KiB
    return Tiles(128, 3, consumers)  # 144 KiB; int8: 160 KiB


class _Inputs(NamedTuple):
    """The arrays in GMEM; None for those that a call does not have."""

    q: Ref  # [B, T, Hq, K]
    pages: KVPages
    page_table: Ref  # int32 [B, P]; None: one page per row
    positions: Ref  # int32 [B * T]; one-dimensional, so that a copy may start anywhere
    lengths: Ref  # int32 [B]
    slopes: Ref  # float32 [Hq * tokens per consumer]


class _Scratch(NamedTuple):
    """SMEM and barriers, for W consumers of 64 rows. A row is one head of one token, ordered by head, then token."""

    q: Ref  # [W, 64, K]; the result at the end
    k: Ref  # [stages, tile_kv, K]
    v: Ref
    p: Ref  # softmax weights, [W, 64, tile_kv]
    positions: Ref  # int32 [W, 64]: the first 64 / heads are those of the consumer's tokens
    slopes: Ref  # float32 [64] or None
    bounds: Ref  # int32 [3]: minimum and maximum position of the tile's queries, last position of its keys (or -1)
    k_int8: Ref  # a tile waiting to be converted, int8 [tile_kv, K] or None
    v_int8: Ref
    q_full: Ref  # barrier: queries, positions and slopes have been copied
    bounds_full: Ref  # barrier: `bounds` has been written
    k_full: Ref  # barriers, one per stage: the stage has been filled
    v_full: Ref  # for a float cache also one for the producer: the last tile has been copied
    k_empty: Ref  # barriers, one per stage: all consumers have read the stage
    v_empty: Ref
    k_int8_full: Ref  # barrier: the int8 tile has been copied
    v_int8_full: Ref


def prefill_attention(
    q: jax.Array,
    pages: KVPages,
    page_table: jax.Array | None,
    q_positions: jax.Array,
    alibi: jax.Array | None = None,
    lengths: jax.Array | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """`paged_attention` as one kernel; with `lengths` the attention is not causal.

    Args:
      q: [B, T, Hq, K], bfloat16 or float16, K of 64, 128 or 256.
      pages: in q's dtype or int8. A page has 8, 16, 32, 64 or a multiple of 128 tokens; without a table any number.
      page_table: int32 [B, P]; None: page i holds all keys of row i. q_positions: int32 [B, T], negative for padding.
      lengths: int32 [B] or None; if given, a query sees the first `lengths` keys of its row, also later ones.
      alibi, scale, window, softcap: as in `attention`.
    Returns: [B, T, Hq, K]; zeros where a whole tile of queries is padding.
    Raises: UnsupportedError for other dtypes and sizes, and for a GPU without wgmma.
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
    heads = math.gcd(q_heads // kv_heads, 8)  # of a tile; leaves at least 8 tokens a head, the rows of an SMEM tile
    tiles = choose_tiles(tokens, heads, head_dim, int8=int8)
    copy_keys = tiles.tile_kv if page_table is None else min(page_size, tiles.tile_kv)
    if page_table is not None and (page_size % copy_keys or tiles.tile_kv % copy_keys or copy_keys % 8):
        raise UnsupportedError(
            f"prefill_attention takes pages of 8, 16, 32, 64 or a multiple of 128 tokens, got {page_size}"
        )
    wg_tokens = _TILE_Q // heads
    slopes = None if alibi is None else jnp.repeat(alibi * _LOG2E, wg_tokens)
    padded = pages._replace(k=_pad_to_8(pages.k), v=_pad_to_8(pages.v))
    inputs = _Inputs(_pad_to_8(q), padded, page_table, q_positions.reshape(-1), lengths, slopes)
    options = {"scale": scale, "window": window, "softcap": softcap}
    kernel = plgpu.kernel(
        functools.partial(_kernel, tiles=tiles, heads=heads, copy_keys=copy_keys, **options),
        kernel_name="prefill_attention",
        out_type=jax.ShapeDtypeStruct(inputs.q.shape, q.dtype),
        grid=(q_heads // heads, batch, pl.cdiv(tokens, tiles.consumers * wg_tokens)),
        grid_names=("heads", "row", "tile"),
        num_threads=tiles.consumers + 1,
        thread_name="warpgroup",
        scratch_types=list(_scratch(tiles, inputs, heads, copy_keys)),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    return kernel(inputs)[:, :tokens]


def _pad_to_8(x: jax.Array) -> jax.Array:
    """Pad [B, T, ...] to T a multiple of 8, unless T < 8: TMA's tiles of 8 rows must divide the array."""
    tokens = x.shape[1]
    if tokens < 8 or tokens % 8 == 0:
        return x
    return jnp.pad(x, ((0, 0), (0, -tokens % 8)) + ((0, 0),) * (x.ndim - 2))


def _swizzled(width: int, bits: int) -> tuple[Any, Any]:
    """Tiles of 8 rows by `width` columns, swizzled over the banks of SMEM."""
    return plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(width * bits // 8)  # pyright: ignore[reportAbstractUsage]


def _scratch(tiles: Tiles, inputs: _Inputs, heads: int, copy_keys: int) -> _Scratch:
    """The shapes of what is in SMEM."""
    dtype, head_dim = inputs.q.dtype, inputs.q.shape[-1]
    int8 = inputs.pages.k_scale is not None
    tile_kv, stages, consumers = tiles.tile_kv, tiles.stages, tiles.consumers
    tiled = _swizzled(64, bits=16)  # what wgmma reads
    kv = plgpu.SMEM((stages, tile_kv, head_dim), dtype, transforms=tiled)
    kv_int8 = (
        plgpu.SMEM((tile_kv, head_dim), jnp.int8, transforms=_swizzled(min(head_dim, 128), bits=8)) if int8 else None
    )
    copies = tile_kv // copy_keys
    full = plgpu.Barrier(num_arrivals=1 if int8 else copies, num_barriers=stages)
    empty = plgpu.Barrier(num_arrivals=consumers, num_barriers=stages)
    int8_full = plgpu.Barrier(num_arrivals=copies) if int8 else None
    return _Scratch(
        q=plgpu.SMEM((consumers, _TILE_Q, head_dim), dtype, transforms=tiled),
        k=kv,
        v=kv,
        p=plgpu.SMEM((consumers, _TILE_Q, tile_kv), dtype, transforms=tiled),
        positions=plgpu.SMEM((consumers, _TILE_Q), jnp.int32),
        slopes=None if inputs.slopes is None else plgpu.SMEM((_TILE_Q,), jnp.float32),
        bounds=plgpu.SMEM((3,), jnp.int32),
        k_int8=kv_int8,
        v_int8=kv_int8,
        q_full=plgpu.Barrier(num_arrivals=consumers * (heads + 1) + (inputs.slopes is not None)),
        bounds_full=plgpu.Barrier(num_arrivals=1),
        k_full=full,
        v_full=full if int8 else dataclasses.replace(full, num_barriers=stages + 1),
        k_empty=empty,
        v_empty=empty,
        k_int8_full=int8_full,
        v_int8_full=int8_full,
    )


def _kernel(
    inputs: _Inputs,
    out: Ref,
    *scratch: Ref,
    tiles: Tiles,
    heads: int,
    copy_keys: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> None:
    """The kernel's body: `heads` query heads of one row, up to W * 64 / heads tokens each; TMA copies `copy_keys` keys
    at a time."""
    s = _Scratch(*scratch)
    tile_kv, consumers = tiles.tile_kv, tiles.consumers
    int8 = inputs.pages.k_scale is not None
    head_dim, tokens = inputs.q.shape[-1], inputs.positions.shape[0] // inputs.q.shape[0]
    page_size, kv_heads = inputs.pages.k.shape[1:3]
    wg_tokens = _TILE_Q // heads  # tokens per consumer warpgroup
    head = lax.axis_index("heads") * heads
    kv_head = lax.div(head, inputs.q.shape[2] // kv_heads)
    row, warpgroup = lax.axis_index("row"), lax.axis_index("warpgroup")
    # The last tiles run first: they have the most keys, and short ones fill the SMs at the end.
    tile = pl.cdiv(tokens, consumers * wg_tokens) - 1 - lax.axis_index("tile")
    first_token = tile * (consumers * wg_tokens)

    def kv_tile_range() -> tuple[Any, Any]:
        """The tiles of keys from the first window to the last key; empty if all queries are padding."""
        start = 0 if window is None else lax.div(jnp.maximum(s.bounds[0] - window + 1, 0), tile_kv)
        return start, lax.div(s.bounds[2] + tile_kv, tile_kv)

    def copy_queries() -> None:
        for w in range(consumers):
            token = first_token + w * wg_tokens
            source = inputs.positions.at[pl.ds(row * tokens + token, _TILE_Q)]
            plgpu.copy_gmem_to_smem(source, s.positions.at[w], s.q_full)
            for h in range(heads):
                source = inputs.q.at[row, pl.ds(token, wg_tokens), head + h]
                plgpu.copy_gmem_to_smem(source, s.q.at[w, pl.ds(h * wg_tokens, wg_tokens)], s.q_full)
        if inputs.slopes is not None:
            plgpu.copy_gmem_to_smem(inputs.slopes.at[pl.ds(head * wg_tokens, _TILE_Q)], s.slopes, s.q_full)

    def compute_bounds() -> None:
        """Done by one warpgroup for all: reducing to a scalar needs scratch space, and there is only one."""
        min_position, max_position = np.int32(2**30), np.int32(-1)
        token = plgpu.layout_cast(lax.iota(jnp.int32, _TILE_Q), _row_layout())
        for w in range(consumers):
            positions = plgpu.load(s.positions.at[w], layout=_row_layout(), optimized=False)
            # The copied positions run on into the next tile's tokens and into the next row's.
            valid = (positions >= 0) & (token < wg_tokens) & (token < tokens - first_token - w * wg_tokens)
            min_position = jnp.minimum(min_position, jnp.min(jnp.where(valid, positions, np.int32(2**30))))
            max_position = jnp.maximum(max_position, jnp.max(jnp.where(valid, positions, -1)))
        s.bounds[0], s.bounds[1] = min_position, max_position
        last_key = max_position
        if inputs.lengths is not None:
            last_key = jnp.where(max_position < 0, -1, inputs.lengths[row] - 1)
        s.bounds[2] = last_key
        plgpu.barrier_arrive(s.bounds_full)

    def load_row_positions() -> Any:
        """The position of each row's token; rows without a token get an arbitrary one.

        One number at a time, since no layout can repeat a vector; the first keys are in flight meanwhile.
        """
        token = lax.rem(plgpu.layout_cast(lax.iota(jnp.int32, _TILE_Q), _row_layout()), wg_tokens)
        zeros = plgpu.layout_cast(jnp.zeros(_TILE_Q, jnp.int32), _row_layout())
        return lax.fori_loop(0, wg_tokens, lambda t, x: jnp.where(token == t, s.positions[warpgroup, t], x), zeros)

    def page_of(i: Any, copy: int) -> tuple[Any, Any]:
        """The page and the offset in it of one copy of tile i, or of the last copy that is needed."""
        position = jnp.minimum(i * tile_kv + copy * copy_keys, lax.div(s.bounds[2], copy_keys) * copy_keys)
        if inputs.page_table is None:
            return row, position
        return inputs.page_table[row, lax.div(position, page_size)], lax.rem(position, page_size)

    def copy_tile(i: Any, source: Any, target: Ref, barrier: Ref) -> None:
        for copy in range(tile_kv // copy_keys):
            page, offset = page_of(i, copy)
            keys = source.at[page, pl.ds(offset, copy_keys), kv_head]
            plgpu.copy_gmem_to_smem(keys, target.at[pl.ds(copy * copy_keys, copy_keys)], barrier)

    def dequantize_tile(i: Any, source: Ref, scales: Any, target: Ref) -> None:
        """int8 -> q's dtype, times each page's scale; 64 keys by 128 features at a time, to save registers."""
        width = min(head_dim, 128)
        for first_key in range(0, tile_kv, 64):
            scale_of = plgpu.layout_cast(jnp.zeros(64, jnp.float32), _row_layout())
            key = plgpu.layout_cast(lax.iota(jnp.int32, 64), _row_layout())
            for copy in range(first_key // copy_keys, pl.cdiv(first_key + 64, copy_keys)):
                page, _ = page_of(i, copy)
                scale_of = jnp.where(key >= copy * copy_keys - first_key, scales[page, kv_head], scale_of)
            for feature in range(0, head_dim, width):
                index = pl.ds(first_key, 64), pl.ds(feature, width)
                x = plgpu.load(source.at[index], layout=plgpu.Layout.WGMMA_UPCAST_2X)
                x = plgpu.layout_cast(x, plgpu.Layout.WGMMA).astype(jnp.float32)
                target.at[index][...] = (x * _broadcast(scale_of, width)).astype(target.dtype)

    def copy_keys_to_stage(i: Any, stage: Any) -> None:
        copy_tile(i, inputs.pages.k, s.k.at[stage], s.k_full.at[stage])

    def copy_values_to_stage(i: Any, stage: Any) -> None:
        """If the tile holds more than the last key, its copy is for the producer itself: see `clear_hidden_values`."""
        has_hidden = s.bounds[2] + 1 < (i + 1) * tile_kv
        full = s.v_full.at[jnp.where(has_hidden, tiles.stages, stage)]
        copy_tile(i, inputs.pages.v, s.v.at[stage], full)

    def clear_hidden_values(i: Any, stage: Any) -> None:
        """Put 0 after the last key of the last tile i: another request may have left NaN there, and 0 x NaN is NaN.

        Other tiles have no such slots, so they cost nothing more. For the last one the producer, which has nothing left
        to do, waits until the copy has landed, and tells the consumers itself. Keys need no such care, as hidden scores
        are replaced; nor does int8, since the scales are those of visible pages.
        """
        target, hidden_from = s.v.at[stage], s.bounds[2] + 1 - i * tile_kv

        @pl.when(hidden_from < tile_kv)
        def _() -> None:
            plgpu.barrier_wait(s.v_full.at[tiles.stages])

            @pl.loop(lax.div(hidden_from, 8), tile_kv // 8)
            def _(eight: Any) -> None:
                for feature in range(0, head_dim, 64):  # few at a time: the producer has 40 registers
                    part = target.at[pl.ds(pl.multiple_of(eight * 8, 8), 8), pl.ds(feature, 64)]
                    x = plgpu.load(part, layout=_eight_rows_layout(), optimized=False)
                    key = eight * 8 + plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=_eight_rows_layout())
                    part[...] = jnp.where(key < hidden_from, x, jnp.zeros_like(x))

            plgpu.commit_smem()  # makes plain stores visible to wgmma
            for _copy in range(tile_kv // copy_keys):  # as many arrivals as the copies would have made
                plgpu.barrier_arrive(s.v_full.at[stage])

    pipelines = (
        (copy_keys_to_stage, inputs.pages.k, inputs.pages.k_scale, s.k, s.k_full, s.k_empty, s.k_int8, s.k_int8_full),
        (copy_values_to_stage, inputs.pages.v, inputs.pages.v_scale, s.v, s.v_full, s.v_empty, s.v_int8, s.v_int8_full),
    )

    @pl.when(warpgroup == consumers)
    def producer() -> None:
        if consumers == 2:
            plgpu.set_max_registers(104 if int8 else 40, action="decrease")
        copy_queries()
        plgpu.barrier_wait(s.q_full)
        compute_bounds()
        start, end = kv_tile_range()
        if int8:

            @pl.when(start < end)
            def _() -> None:
                for _, source, _, _, _, _, staging, staging_full in pipelines:
                    copy_tile(start, source, staging, staging_full)

        def iteration(i: Any, _: None) -> None:
            stage = lax.rem(i - start, tiles.stages)
            for copy_to_stage, source, scales, stages, full, empty, staging, staging_full in pipelines:
                if int8:
                    plgpu.barrier_wait(staging_full)

                @pl.when(i - start >= tiles.stages)
                def _(empty: Ref = empty) -> None:
                    plgpu.barrier_wait(empty.at[stage])

                if not int8:
                    copy_to_stage(i, stage)
                    continue
                dequantize_tile(i, staging, scales, stages.at[stage])
                plgpu.commit_smem()  # makes plain stores visible to wgmma
                plgpu.barrier_arrive(full.at[stage])

                # The whole warpgroup has read the staging buffer: the commit was a barrier among its threads.
                @pl.when(i + 1 < end)
                def _(source: Any = source, staging: Ref = staging, staging_full: Ref = staging_full) -> None:
                    copy_tile(i + 1, source, staging, staging_full)

        lax.fori_loop(start, end, iteration, None)
        if not int8:
            pl.when(start < end)(lambda: clear_hidden_values(end - 1, lax.rem(end - 1 - start, tiles.stages)))

    def scale_and_mask(i: Any, scores: Any, positions: Any, slopes: Any) -> tuple[Any, float]:
        """(scores, factor) such that masked scores * factor are exponents of 2."""
        factor = scale * _LOG2E
        if softcap is not None:
            scores, factor = jnp.tanh(scores * np.float32(scale / softcap)), softcap * _LOG2E
        if slopes is None:
            return mask(i, scores, positions), factor
        key = i * tile_kv + plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
        distance = (key - _broadcast(positions, tile_kv)).astype(jnp.float32)
        return mask(i, scores * np.float32(factor) + _broadcast(slopes, tile_kv) * distance, positions), 1.0

    def mask(i: Any, scores: Any, positions: Any) -> Any:
        def apply_mask(scores: Any) -> Any:
            key = i * tile_kv + plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
            visible = key <= (s.bounds[2] if inputs.lengths is not None else _broadcast(positions, tile_kv))
            if window is not None:
                visible &= key > _broadcast(positions, tile_kv) - window
            return jnp.where(visible, scores, _MASKED)

        # Most tiles are visible to all queries and need no mask.
        all_visible = (i + 1) * tile_kv - 1 <= s.bounds[0 if inputs.lengths is None else 2]
        if window is not None:
            all_visible &= i * tile_kv > s.bounds[1] - window
        return lax.cond(all_visible, lambda scores: scores, apply_mask, scores)

    @pl.when(warpgroup < consumers)
    def consumer() -> None:
        if consumers == 2:
            plgpu.set_max_registers(200 if int8 else 232, action="increase")
        plgpu.barrier_wait(s.q_full)
        plgpu.barrier_wait(s.bounds_full)
        start, end = kv_tile_range()
        # Loaded only if used: layout inference does not terminate on a vector that nothing constrains.
        positions = None
        if inputs.lengths is None or window is not None or inputs.slopes is not None:
            positions = load_row_positions()
        slopes = None if s.slopes is None else plgpu.load(s.slopes, layout=_row_layout(), optimized=False)
        q, p_smem = s.q.at[warpgroup], s.p.at[warpgroup]

        def release(barrier: Ref, i: Any) -> None:
            """Tell the producer that tile i's stage is empty, if it has another tile for it."""
            pl.when(i + tiles.stages < end)(lambda: plgpu.barrier_arrive(barrier))

        # wgmma is asynchronous, but `_matmul` and `_accumulate` return its result, so its operands (a stage, p) are no
        # longer read once they have returned. Releasing the stage and the next store to p come after that. Only the
        # producer refills a stage, after all consumers have released it.
        # m_i: maximum of a row's scores so far; l_i: sum of exp2(score - m_i); acc: sum of exp2(score - m_i) * value.
        def iteration(i: Any, state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            m_i, l_i, acc = state
            stage = lax.rem(i - start, tiles.stages)
            plgpu.barrier_wait(s.k_full.at[stage])
            qk = _matmul(q, s.k.at[stage].T)
            release(s.k_empty.at[stage], i)
            scores, factor = scale_and_mask(i, qk, positions, slopes)
            m_new = jnp.maximum(m_i, jnp.max(scores, axis=1) * np.float32(factor))
            alpha = jnp.exp2(m_i - m_new)
            p = jnp.exp2(scores * np.float32(factor) - _broadcast(m_new, tile_kv))
            l_i = l_i * alpha + jnp.sum(p, axis=1)
            p_smem[...] = p.astype(p_smem.dtype)
            plgpu.commit_smem()  # makes this warpgroup's stores visible to its own wgmma
            plgpu.barrier_wait(s.v_full.at[stage])
            acc = _accumulate(acc * _broadcast(alpha, head_dim), p_smem, s.v.at[stage])
            release(s.v_empty.at[stage], i)
            return m_new, l_i, acc

        m_i = plgpu.layout_cast(jnp.full(_TILE_Q, -jnp.inf, jnp.float32), _row_layout())
        l_i = plgpu.layout_cast(jnp.zeros(_TILE_Q, jnp.float32), _row_layout())
        acc = plgpu.layout_cast(jnp.zeros((_TILE_Q, head_dim), jnp.float32), plgpu.Layout.WGMMA)
        _, l_i, acc = lax.fori_loop(start, end, iteration, (m_i, l_i, acc))
        inverse = 1.0 / jnp.where(l_i == 0, np.float32(1), l_i)  # l_i is 0 if there were no tiles
        q[...] = (acc * _broadcast(inverse, head_dim)).astype(q.dtype)  # its own rows, which nothing reads any more
        plgpu.commit_smem()
        for h in range(heads):
            target = out.at[row, pl.ds(first_token + warpgroup * wg_tokens, wg_tokens), head + h]
            plgpu.copy_smem_to_gmem(q.at[pl.ds(h * wg_tokens, wg_tokens)], target)
        plgpu.wait_smem_to_gmem(0)


def _broadcast(vector: Any, width: int) -> Any:
    """[R] -> [R, width]."""
    return lax.broadcast_in_dim(vector, (vector.shape[0], width), (0,))


def _matmul(a: Ref, b: Ref) -> Any:
    """a b in float32, for operands in SMEM."""

    def multiply(acc: Ref) -> Any:
        plgpu.wgmma(acc, a, b)
        return acc[...]  # waits for the wgmma

    return pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))  # pyright: ignore[reportPrivateImportUsage]


def _accumulate(acc: Any, a: Ref, b: Ref) -> Any:
    """acc + a b, in the registers of `acc`: a second accumulator of 256 columns would spill."""
    if interpreting():  # it does not support accumulators with an initial value
        return acc + _matmul(a, b)
    return pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))(plgpu.ACC.init(acc))  # pyright: ignore[reportPrivateImportUsage]

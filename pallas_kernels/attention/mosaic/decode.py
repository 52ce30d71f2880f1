"""The decode attention kernel: from the fused QKV projection of the newest tokens to the heads' outputs.

The fallback is several operations: norms of queries and keys, rotary embedding, writing to pages, attention. The kernel
does all of them in one launch ("Deep-Fusion" of region 2, DeepSpeed Inference, arXiv:2207.00032, section III-D). A
decoded token has few queries, so the time is that of reading its keys and values once.

    grid (row, KV head), with a cluster of S thread blocks for each, which split the row's keys (flash decoding)

A thread block prepares the queries itself (a few KiB of qkv, from L2), loads its split of the row's pages by TMA, one
head's slice of a page at a time, and keeps an online softmax in registers (Dao et al. 2022, arXiv:2205.14135). The
partial results of a cluster are exchanged through global memory: 4 S (K + 2) N bytes for N queries, which stay in L2.

The matmuls are transposed: S^T [keys, queries] = K q^T and O^T [features, queries] = V^T P^T. So keys and features are
the many rows of the tensor cores' left operand, and a token's few queries are the columns, of which 8 are enough.

New keys and values are in no page when the kernel starts. Every thread block computes them together with the queries;
the one whose tile of keys contains them inserts them into its copy of the page. They are written to the cache once the
whole cluster has finished reading. An int8 page whose scale grows is rescaled in that copy and written back whole.

Bytes: 2 Hkv K (context + tokens) elements a row, each read once by one thread block; everything else is small. A tile
of keys and values is 256 K bytes in bfloat16. Two thread blocks of 128 threads per SM with two or more tiles in flight
each keep 64 KiB or more in flight, twice what the H200's 4.8 TB/s require at a latency of 0.8 us.
"""

import dataclasses
import functools
import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.pallas_kernels.kv_pages import KVPages
from jaxinfer.pallas_kernels.mosaic import pl, plgpu
from jaxinfer.pallas_kernels.mosaic.cluster import check_cluster, meet
from jaxinfer.pallas_kernels.mosaic.refs import Ref
from jaxinfer.pallas_kernels.mosaic.tuning import tuned
from jaxinfer.pallas_kernels.target import UnsupportedError, require_shared_bytes, target_gpu

MAX_DECODE_TOKENS = 8
"""Maximum tokens of a row: the last sampled token and its draft tokens."""


_TILE_KV = 64  # keys of a tile: the rows of an mma by four warps
_TILE_Q = 32  # queries whose softmax is computed at once
_TILE_D = 64  # features of a head that are multiplied at once: the rows of an mma by four warps
_MASKED = -1e30  # finite, so that sums over masked keys alone get the weight exp(_MASKED - score) = 0
_LOG2E = math.log2(math.e)


def _qkv_layout() -> Any:
    """For rows of the QKV projection: of every 8 rows each warp holds 2, with 16 adjacent features across its lanes."""
    return plgpu.Layout.TILED(
        plgpu.Tiling(((8, 16), (2, 16), (1,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """How a row's keys are partitioned.

    Attributes:
      splits: thread blocks of the cluster among which a row's keys are split: 1 to 8.
      stages: pipeline stages of each thread block; a stage is a tile of keys and values.
    """

    splits: int
    stages: int


type _State = tuple[jax.Array, jax.Array, list[jax.Array]]
"""The online softmax of n queries. m_i [n]: maximum of the scores; l_i [n]: sum of exp2(score - m_i); acc: sum of
exp2(score - m_i) * value, [_TILE_D, n] for each tile of features."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
    """The static parameters of a call; names as in `decode_attention`."""

    batch: int
    tokens: int
    kv_heads: int
    group: int
    head_dim: int
    page_size: int
    max_pages: int  # of a row: the page table's second dimension
    dtype: np.dtype
    int8: bool  # whether the cache is int8
    rotary_half: int  # R / 2; 0 without rotary embedding
    norms: bool
    norm_eps: float
    scale: float
    window: int | None
    softcap: float | None
    alibi: bool

    @property
    def queries(self) -> int:
        """N: a row's queries of one KV head, token by token, padded to a multiple of 8."""
        return -(-self.tokens * self.group // 8) * 8

    @property
    def qkv_rows(self) -> int:
        """Rows of one token's queries, key and value of one KV head, padded to a multiple of 8."""
        return -(-(self.group + 2) // 8) * 8

    @property
    def copy_keys(self) -> int:
        """Keys of one TMA copy: a whole page, or a part of it."""
        return min(self.page_size, _TILE_KV)

    @property
    def rotary_slices(self) -> tuple[tuple[int, int], ...]:
        """(start, size) of the two halves of the rotated features, then of the others.

        All sizes divide K, as Mosaic's layout inference for shared memory requires.
        """
        rest = self.head_dim - 2 * self.rotary_half
        size = math.gcd(rest, self.head_dim)
        rotated = [(0, self.rotary_half), (self.rotary_half, self.rotary_half)] if self.rotary_half else []
        return (*rotated, *((start, size) for start in range(2 * self.rotary_half, self.head_dim, size or 1)))

    @property
    def query_tiles(self) -> list[Any]:
        """Slices of the queries, small enough to leave registers for everything else."""
        return [pl.ds(start, min(_TILE_Q, self.queries - start)) for start in range(0, self.queries, _TILE_Q)]

    @property
    def feature_tiles(self) -> list[Any]:
        """Slices of a head's features, one mma of four warps each, to save registers."""
        return [pl.ds(start, _TILE_D) for start in range(0, self.head_dim, _TILE_D)]

    @property
    def stage_bytes(self) -> int:
        """A tile of keys and values, in the cache's dtype."""
        return 2 * _TILE_KV * self.head_dim * (1 if self.int8 else 2)

    @property
    def other_bytes(self) -> int:
        """Shared memory besides the stages, with some margin for alignment, reductions and barriers."""
        rows = self.tokens * self.qkv_rows + 2 * self.queries + self.qkv_rows
        converted = 4 * _TILE_KV * self.head_dim if self.int8 else 0
        return 2 * rows * self.head_dim + 2 * self.queries * _TILE_KV + converted + (8 << 10)

    def layouts(self) -> SimpleNamespace:
        """Register layouts of the mma operands."""
        layout = plgpu.Layout
        return SimpleNamespace(
            acc=layout.MMA_ACC(self.dtype), lhs=layout.MMA_LHS(self.dtype), rhs=layout.MMA_RHS(self.dtype)
        )


def _tiles(plan: _Plan) -> Tiles:
    """The tuned tiles if there are any, else enough splits to occupy every SM, each with at least two tiles of keys."""
    context = plan.max_pages * plan.page_size
    key = f"b{plan.batch} t{plan.tokens} h{plan.kv_heads}x{plan.group} k{plan.head_dim} c{context}"
    if found := tuned("decode_attention", key + " int8" * plan.int8):
        return Tiles(**found)
    gpu, clusters = target_gpu(), plan.batch * plan.kv_heads
    splits = 1
    while splits < 8 and clusters * splits < gpu.sms and context >= 4 * _TILE_KV * splits:
        splits *= 2
    smem = gpu.shared_bytes_of(1 if clusters * splits <= gpu.sms else 2)
    return Tiles(splits=splits, stages=max(2, min(4, (smem - plan.other_bytes) // plan.stage_bytes)))


def _plan(
    qkv: jax.Array, pages: KVPages, page_table: jax.Array, rotary: Any, norms: Any, alibi: Any, **options: Any
) -> _Plan:
    """Raises UnsupportedError."""
    batch, tokens, width = qkv.shape
    kv_heads, head_dim = pages.k.shape[2:]
    plan = _Plan(
        batch=batch,
        tokens=tokens,
        kv_heads=kv_heads,
        group=width // (kv_heads * head_dim) - 2,
        head_dim=head_dim,
        page_size=pages.k.shape[1],
        max_pages=page_table.shape[1],
        dtype=qkv.dtype,
        int8=pages.k_scale is not None,
        rotary_half=0 if rotary is None else rotary[0].shape[-1],
        norms=norms is not None,
        alibi=alibi is not None,
        **options,
    )
    if tokens > MAX_DECODE_TOKENS:
        raise UnsupportedError(f"the kernel takes at most {MAX_DECODE_TOKENS} tokens a row, got {tokens} tokens")
    if plan.dtype not in (jnp.bfloat16, jnp.float16):
        raise UnsupportedError(f"the kernel takes bfloat16 and float16, got qkv in {plan.dtype}")
    if not plan.int8 and pages.k.dtype != plan.dtype:
        raise UnsupportedError(f"the cache must be in qkv's dtype {plan.dtype} or in int8, got {pages.k.dtype}")
    if head_dim not in (64, 128, 256):
        raise UnsupportedError(f"head_dim must be 64, 128 or 256, got {head_dim}")
    if plan.page_size % 8 or (_TILE_KV % plan.page_size and plan.page_size % _TILE_KV):
        raise UnsupportedError(f"page_size must be 8, 16, 32 or a multiple of 64, got {plan.page_size}")
    if plan.int8 and plan.page_size > _TILE_KV:
        raise UnsupportedError(f"page_size must be at most {_TILE_KV} in int8, got {plan.page_size}")
    if plan.rotary_half and (plan.rotary_half % 16 or head_dim % plan.rotary_half):
        raise UnsupportedError(f"rotary_dim / 2 must be a multiple of 16 that divides head_dim, got {plan.rotary_half}")
    if plan.queries > (max_queries := min(64, 8192 // head_dim)):  # registers for the accumulators
        raise UnsupportedError(f"tokens * group must be at most {max_queries}, got {tokens} * {plan.group}")
    return plan


def decode_attention(
    qkv: jax.Array,
    pages: KVPages,
    page_table: jax.Array,
    positions: jax.Array,
    rotary: tuple[jax.Array, jax.Array] | None,
    norms: tuple[jax.Array, jax.Array] | None,
    alibi: jax.Array | None,
    **options: Any,
) -> tuple[jax.Array, KVPages]:
    """`cached_attention` for up to MAX_DECODE_TOKENS tokens a row. Raises UnsupportedError."""
    kv_heads, head_dim = pages.k.shape[2:]
    plan = _plan(qkv, pages, page_table, rotary, norms, alibi, **options)
    tiles = _tiles(plan)
    check_cluster(tiles.splits)
    require_shared_bytes(tiles.stages * plan.stage_bytes + plan.other_bytes)
    inputs: dict[str, Any] = {"qkv": qkv.reshape(-1, head_dim), "table": page_table, "positions": positions}
    if rotary is not None:
        inputs["cos"], inputs["sin"] = (x.reshape(-1, plan.rotary_half) for x in rotary)
    if norms is not None:
        inputs["q_norm"], inputs["k_norm"] = norms
    if alibi is not None:
        slopes = jnp.tile(alibi.reshape(kv_heads, -1), plan.tokens) * _LOG2E
        inputs["slopes"] = jnp.pad(slopes, ((0, 0), (0, plan.queries - slopes.shape[1])))
    cache: dict[str, Any] = {"cache_k": pages.k, "cache_v": pages.v}
    if pages.k_scale is not None:
        cache |= {"cache_k_scale": pages.k_scale, "cache_v_scale": pages.v_scale}
    shapes = [x.shape for x in cache.values()]
    for name, x in cache.items():  # mutable refs, so that XLA updates the cache in place
        cache[name] = jax.new_ref(x.reshape(-1, kv_heads * head_dim) if x.ndim == 4 else x)
    inputs |= cache
    out = _outputs(plan, tiles)

    def decode_attention_kernel(*refs, **scratch):
        named = dict(zip((*inputs, *out), refs, strict=True))
        _kernel_body(plan, tiles, SimpleNamespace(**named, **scratch))

    heads = plgpu.kernel(
        decode_attention_kernel,
        out_type=list(out.values()),
        scratch_types=_scratch(plan, tiles),
        grid=(plan.batch, kv_heads),
        grid_names=("row", "head"),
        cluster=(tiles.splits,),
        cluster_names=("split",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*inputs.values())[0]
    written = (jax.freeze(ref).reshape(shape) for ref, shape in zip(cache.values(), shapes, strict=True))
    return heads.reshape(*qkv.shape[:2], -1), KVPages(*written)


def _outputs(plan: _Plan, tiles: Tiles) -> dict[str, jax.ShapeDtypeStruct]:
    """The result, and each split's partial results for the cluster: acc [K, N], and m_i and l_i [2, N]."""
    rows = plan.batch * plan.tokens * plan.kv_heads * plan.group
    out = {"heads": jax.ShapeDtypeStruct((rows, plan.head_dim), plan.dtype)}
    if tiles.splits > 1:
        shape = (plan.batch, plan.kv_heads, tiles.splits)
        out["partial_acc"] = jax.ShapeDtypeStruct((*shape, plan.head_dim, plan.queries), np.float32)
        out["partial_ml"] = jax.ShapeDtypeStruct((*shape, 2, plan.queries), np.float32)
    return out


def _scratch(plan: _Plan, tiles: Tiles) -> dict[str, Any]:
    """Shared memory and barriers of a thread block.

    qkv_rows: each token's queries, key and value. q_rows: all queries in a row each; at the end the result. q: the same
    queries, laid out for the tensor cores. k, v: pipeline stages of keys and values. p: the softmax weights. k_float,
    v_float: a tile of int8 keys and values, converted to the queries' dtype. max_abs: largest magnitude in each of
    `qkv_rows`. qkv_full, kv_full: barriers: the copies into `qkv_rows`, or into a stage, have landed. partials_full: a
    cluster barrier: all splits have written their partial results.
    """

    def swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
        size = min(128, _TILE_D * dtype.itemsize)  # so that feature tiles are whole swizzle tiles
        tiling = plgpu.TilingTransform((8, size // dtype.itemsize))  # pyright: ignore[reportAbstractUsage]
        swizzle = plgpu.SwizzleTransform(size)  # pyright: ignore[reportAbstractUsage]
        return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))

    tile = (_TILE_KV, plan.head_dim)
    cache_dtype = np.dtype(np.int8) if plan.int8 else plan.dtype
    scratch = {
        "qkv_rows": plgpu.SMEM((plan.tokens, plan.qkv_rows, plan.head_dim), plan.dtype),
        "q_rows": plgpu.SMEM((plan.queries + plan.qkv_rows, plan.head_dim), plan.dtype),
        "q": swizzled((plan.queries, plan.head_dim), plan.dtype),
        "k": swizzled((tiles.stages, *tile), cache_dtype),
        "v": swizzled((tiles.stages, *tile), cache_dtype),
        "p": swizzled((plan.queries, _TILE_KV), plan.dtype),
        "qkv_full": plgpu.Barrier(num_arrivals=plan.tokens),
        "kv_full": plgpu.Barrier(num_arrivals=2 * _TILE_KV // plan.copy_keys, num_barriers=tiles.stages),
    }
    if plan.int8:
        scratch |= {"k_float": swizzled(tile, plan.dtype), "v_float": swizzled(tile, plan.dtype)}
        scratch["max_abs"] = plgpu.SMEM((plan.tokens, plan.qkv_rows), np.dtype(np.float32))
    if tiles.splits > 1:
        scratch["partials_full"] = plgpu.ClusterBarrier(collective_axes=("split",), num_arrivals=1)
    return scratch


def _kernel_body(plan: _Plan, tiles: Tiles, refs: SimpleNamespace) -> None:
    """One thread block: its split of the keys of one row and KV head, then its part of the cluster's result."""
    index, head, split = (lax.axis_index(name) for name in ("row", "head", "split"))
    first = refs.positions[index, 0]
    last = functools.reduce(jnp.maximum, [refs.positions[index, t] for t in range(plan.tokens)])
    row = _Row(index=index, head=head, first=first, last=last, num_tokens=jnp.where(first < 0, 0, last + 1 - first))
    # The row's tiles of keys are start to end, from the first one in the window; this split's are begin to stop. A row
    # of padding has none.
    end = lax.div(last + _TILE_KV, _TILE_KV)
    start = jnp.int32(0) if plan.window is None else lax.div(jnp.maximum(first - (plan.window - 1), 0), _TILE_KV)
    count = end - start
    begin = start + lax.div(count * split, tiles.splits)
    stop = start + lax.div(count * (split + 1), tiles.splits)

    def fetch(tile: jax.Array, pages: list[jax.Array], stage: jax.Array) -> None:
        for i, page in enumerate(pages):
            offset = lax.rem(tile * _TILE_KV + i * plan.copy_keys, plan.page_size)
            cache_slice = _cache_slice(plan, row, page, offset, plan.copy_keys)
            for source, stages in ((refs.cache_k, refs.k), (refs.cache_v, refs.v)):
                target = stages.at[stage, pl.ds(i * plan.copy_keys, plan.copy_keys)]
                plgpu.copy_gmem_to_smem(source.at[cache_slice], target, refs.kv_full.at[stage])

    @pl.loop(0, plan.tokens)
    def _(token):
        qkv_start = ((index * plan.tokens + token) * plan.kv_heads + head) * (plan.group + 2)
        source = refs.qkv.at[pl.ds(qkv_start, plan.qkv_rows)]
        zeros = plgpu.OOBFillMode.ZEROS
        plgpu.copy_gmem_to_smem(source, refs.qkv_rows.at[token], refs.qkv_full, oob_mode=zeros)

    @pl.loop(begin, jnp.minimum(begin + tiles.stages, stop))
    def _(tile):
        fetch(tile, _pages_of(plan, refs, row, tile), tile - begin)

    plgpu.barrier_wait(refs.qkv_full)
    _prepare(plan, refs, index)

    def iteration(tile: jax.Array, state: list[_State], *, has_new: bool) -> list[_State]:
        stage = lax.rem(tile - begin, tiles.stages)
        # Pages and scales are read from global memory before they are needed, to hide the latency.
        next_pages = _pages_of(plan, refs, row, tile + tiles.stages)
        scales = _scales(plan, refs, row, tile, has_new=has_new) if plan.int8 else None
        plgpu.barrier_wait(refs.kv_full.at[stage])
        new_start = first - tile * _TILE_KV
        if scales is not None:
            k, v = _convert_int8(plan, refs, stage, new_start, row.num_tokens, scales, has_new=has_new)
        else:
            k, v = refs.k.at[stage], refs.v.at[stage]
            if has_new:
                _insert_new_tokens(plan, refs, k, v, new_start, row.num_tokens)
        keys = _KeyTile(k=k, v=v, head=head, new_start=new_start, scales=scales, has_new=has_new)
        state = [_attend(plan, refs, keys, queries, x) for queries, x in zip(plan.query_tiles, state, strict=True)]

        # Every warp has its part of the stage in registers before TMA refills it, because Mosaic begins a copy with a
        # barrier of the warpgroup (`auto_barriers`). For `p`, `k_float` and `v_float`, which the next tile overwrites,
        # waiting for its stage is one.
        @pl.when(tile + tiles.stages < stop)
        def _():
            fetch(tile + tiles.stages, next_pages, stage)

        return state

    def full(shape: tuple[int, ...], layout: Any, value: float = 0.0) -> jax.Array:
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    layout = plan.layouts().acc
    state = []
    for queries in plan.query_tiles:
        m_i, l_i = (full((queries.size,), layout.reduce(0), value) for value in (_MASKED, 0.0))
        state.append((m_i, l_i, [full((_TILE_D, queries.size), layout) for _ in plan.feature_tiles]))
    # First the tiles that all queries see in full, then those that contain the row's new tokens.
    first_new = jnp.clip(lax.div(jnp.maximum(first, 0), _TILE_KV), begin, stop)
    state = lax.fori_loop(begin, first_new, functools.partial(iteration, has_new=False), state)
    state = lax.fori_loop(first_new, stop, functools.partial(iteration, has_new=True), state)
    _finish(plan, tiles, refs, state)
    # The cluster has synchronised in `_finish`, so no thread block still reads these pages.
    if plan.int8:
        pl.loop(first_new, stop)(lambda tile: _store_pages(plan, refs, row, tile, lax.rem(tile - begin, tiles.stages)))
    else:
        pl.when(split == tiles.splits - 1)(functools.partial(_store_tokens, plan, refs, row))
    plgpu.wait_smem_to_gmem(0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Row:
    """A row of the batch and one KV head. first, last: positions of its `num_tokens` tokens; negative for padding."""

    index: jax.Array
    head: jax.Array
    first: jax.Array
    last: jax.Array
    num_tokens: jax.Array


def _page_of(plan: _Plan, refs: SimpleNamespace, row: _Row, position: jax.Array) -> jax.Array:
    """The page of a position; beyond the row's end the last page, whose keys nobody sees there."""
    return refs.table[row.index, lax.div(jnp.minimum(position, row.last), plan.page_size)]


def _pages_of(plan: _Plan, refs: SimpleNamespace, row: _Row, tile: jax.Array) -> list[jax.Array]:
    """The page of every TMA copy of a tile of keys."""
    return [_page_of(plan, refs, row, tile * _TILE_KV + start) for start in range(0, _TILE_KV, plan.copy_keys)]


def _cache_slice(plan: _Plan, row: _Row, page: jax.Array, offset: jax.Array, count: int) -> tuple[Any, Any]:
    """`count` tokens of a page, from `offset` on, as a slice of the cache [pages * page_size, Hkv * K]."""
    return pl.ds(page * plan.page_size + offset, count), pl.ds(row.head * plan.head_dim, plan.head_dim)


def _prepare(plan: _Plan, refs: SimpleNamespace, row: jax.Array) -> None:
    """Normalise and rotate the queries and keys of the new tokens; lay out the queries for the tensor cores."""
    shapes = [(plan.qkv_rows, size) for _, size in plan.rotary_slices]

    def broadcast(ref: Ref, shape: tuple[int, int]) -> jax.Array:
        """A vector of features, repeated for every row of `shape`."""
        vector = plgpu.load(ref, layout=_qkv_layout().reduce(0), optimized=False)
        return lax.broadcast_in_dim(vector, shape, (1,))

    @pl.loop(0, plan.tokens)
    def _(token):
        slices = [(slice(None), pl.ds(start, size)) for start, size in plan.rotary_slices]
        loaded = [plgpu.load(refs.qkv_rows.at[token].at[s], layout=_qkv_layout(), optimized=False) for s in slices]
        index = [plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=_qkv_layout()) for shape in shapes]
        xs = [x.astype(jnp.float32) for x in loaded]
        if plan.norms:
            mean_square = sum(jnp.sum(x * x, axis=1) for x in xs) * (1.0 / plan.head_dim)
            inverse = lax.rsqrt(mean_square + plan.norm_eps)
            for i, ((start, size), shape) in enumerate(zip(plan.rotary_slices, shapes, strict=True)):
                q_norm, k_norm = (broadcast(norm.at[pl.ds(start, size)], shape) for norm in (refs.q_norm, refs.k_norm))
                normalized = xs[i] * (
                    lax.broadcast_in_dim(inverse, shape, (0,)) * jnp.where(index[i] < plan.group, q_norm, k_norm)
                )
                xs[i] = normalized.astype(plan.dtype).astype(jnp.float32)
        if plan.rotary_half:
            cos, sin = (broadcast(x.at[row * plan.tokens + token], shapes[0]) for x in (refs.cos, refs.sin))
            xs[:2] = [xs[0] * cos - xs[1] * sin, xs[1] * cos + xs[0] * sin]
        stored = []
        for s, before, after, i in zip(slices, loaded, xs, index, strict=True):
            x = jnp.where(i <= plan.group, after.astype(plan.dtype), before)  # the value stays as it is
            if plan.int8:  # as in `write_pages`, what is not finite is stored as 0
                x = jnp.where((i < plan.group) | (jnp.maximum(x, -x) < jnp.inf), x, jnp.zeros_like(x))
            refs.qkv_rows.at[token].at[s][...] = x
            # This writes some rows past the queries; the next token overwrites them, or nothing reads them.
            refs.q_rows[pl.ds(token * plan.group, plan.qkv_rows), s[1]] = x
            stored.append(x.astype(jnp.float32))
        if plan.int8:
            max_abs = [jnp.max(jnp.maximum(x, -x), axis=1) for x in stored]
            refs.max_abs.at[token][...] = functools.reduce(jnp.maximum, max_abs)
        plgpu.commit_smem()

    for features in plan.feature_tiles:
        s = pl.ds(0, plan.queries), features
        refs.q.at[s].T[...] = plgpu.load(refs.q_rows.at[s].T, layout=plan.layouts().rhs, optimized=False)
    plgpu.commit_smem()


class _Scales(NamedTuple):
    """The int8 scales of a tile's pages. new: including the row's new tokens. ratio: old scale / new scale."""

    new: list[jax.Array]
    ratio: list[jax.Array]


def _scales(
    plan: _Plan, refs: SimpleNamespace, row: _Row, tile: jax.Array, *, has_new: bool
) -> tuple[_Scales, _Scales]:
    """The scales of keys and of values, by the rules of `write_pages`.

    They are computed again when the pages are stored, with the same result: a grown scale does not grow again.
    """
    both = []
    for kv, old_scales in enumerate((refs.cache_k_scale, refs.cache_v_scale)):
        scales = _Scales([], [])
        for i, page in enumerate(_pages_of(plan, refs, row, tile)):
            old = old_scales[page, row.head]
            if not has_new:
                scales.new.append(old)
                continue
            start = tile * _TILE_KV + i * plan.copy_keys
            # A page that starts with a new token, or after all of them, so that its scale is another request's and may
            # be NaN. It counts as 0, which also hides the keys and values that such a page of a tile holds.
            is_empty = row.first <= start

            def grow(token, scale, start=start, kv=kv):
                offset = row.first + token - start
                min_scale = jnp.maximum(refs.max_abs[token, plan.group + kv], 1e-30) / 127.0
                return jnp.where((offset >= 0) & (offset < plan.page_size), jnp.maximum(scale, min_scale), scale)

            new = lax.fori_loop(0, row.num_tokens, grow, jnp.where(is_empty, 0.0, old))
            scales.new.append(new)
            scales.ratio.append(jnp.where(is_empty | (new == old), 1.0, old / new))
        both.append(scales)
    return both[0], both[1]


def _broadcast_to_keys(plan: _Plan, values: list[jax.Array], shape: tuple[int, int], layout: Any) -> jax.Array:
    """One value per page of a tile -> an array [keys, ...] with the value of each key's page."""
    page = lax.div(plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout), plan.copy_keys)
    result = jnp.full(shape, values[0])
    for i, value in enumerate(values[1:], 1):
        result = jnp.where(page == i, value, result)
    return result


@dataclasses.dataclass(frozen=True, kw_only=True)
class _KeyTile:
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
    scales: tuple[_Scales, _Scales] | None
    has_new: bool


def _attend(plan: _Plan, refs: SimpleNamespace, keys: _KeyTile, queries: Any, state: _State) -> _State:
    """Add a tile of keys to the online softmax of some queries."""
    layouts = plan.layouts()
    shape = (_TILE_KV, queries.size)

    def load_lhs(ref: Ref) -> jax.Array:
        return plgpu.load(ref, layout=layouts.lhs, optimized=False)

    def broadcast(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return lax.broadcast_in_dim(x, shape, (1,))

    scores = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layouts.acc)
    for features in plan.feature_tiles:
        q = plgpu.load(refs.q.at[queries, features].T, layout=layouts.rhs, optimized=False)
        scores = plgpu.mma(scores, load_lhs(keys.k.at[:, features]), q)
    if keys.scales is not None:
        scores *= _broadcast_to_keys(plan, keys.scales[0].new, shape, layouts.acc)
    scores = _scale_and_mask(plan, refs, keys, queries, scores)

    m_i, l_i, acc = state
    m_new = jnp.maximum(m_i, jnp.max(scores, axis=0))
    alpha = jnp.exp2(m_i - m_new)
    p = jnp.exp2(scores - broadcast(m_new, shape))
    l_i = l_i * alpha + jnp.sum(p, axis=0)
    if keys.scales is not None:
        p *= _broadcast_to_keys(plan, keys.scales[1].new, shape, layouts.acc)
    refs.p.at[queries].T[...] = p.astype(plan.dtype)
    plgpu.commit_smem()
    p = plgpu.load(refs.p.at[queries].T, layout=layouts.rhs, optimized=False)
    acc = [
        plgpu.mma(x * broadcast(alpha, x.shape), load_lhs(keys.v.at[:, features].T), p)
        for x, features in zip(acc, plan.feature_tiles, strict=True)
    ]
    return m_new, l_i, acc


def _insert_new_tokens(
    plan: _Plan, refs: SimpleNamespace, k: Ref, v: Ref, new_start: jax.Array, num_tokens: jax.Array
) -> None:
    """Insert the row's new tokens, which are in no page yet, into a tile of keys and values from `new_start` on.

    What follows them becomes 0: another request may have left NaN there, which a weight of 0 does not hide. Only these
    last tiles hold such slots, and they go through registers here anyway, so it costs others nothing.
    """
    layout = plan.layouts().lhs
    for kv, ref in enumerate((k, v)):
        for features in plan.feature_tiles:
            x = plgpu.load(ref.at[:, features], layout=layout, optimized=False)
            key = plgpu.broadcasted_iota(jnp.int32, x.shape, 0, layout=layout)
            x = jnp.where(key < new_start + num_tokens, x, jnp.zeros_like(x))

            def insert(token, x, key=key, source=(plan.group + kv, features)):
                new = plgpu.load(refs.qkv_rows.at[token, *source], layout=layout.reduce(0), optimized=False)
                return jnp.where(key == new_start + token, lax.broadcast_in_dim(new, x.shape, (1,)), x)

            ref.at[:, features][...] = lax.fori_loop(0, num_tokens, insert, x)
    plgpu.commit_smem()


def _convert_int8(
    plan: _Plan,
    refs: SimpleNamespace,
    stage: jax.Array,
    new_start: jax.Array,
    num_tokens: jax.Array,
    scales: tuple[_Scales, _Scales],
    *,
    has_new: bool,
) -> tuple[Ref, Ref]:
    """Convert a tile of an int8 cache to the queries' dtype: the tensor cores' transposing loads need 16 bits.

    If the tile may contain new tokens (from `new_start` on), they are also inserted into the stage's int8 tile, and
    what it already holds is rescaled.
    """
    layout, shape = plgpu.Layout.WGMMA_UPCAST_2X, (_TILE_KV, _TILE_D)
    for kv, (stages, target) in enumerate(((refs.k, refs.k_float), (refs.v, refs.v_float))):
        for features in plan.feature_tiles:
            x = plgpu.load(stages.at[stage, :, features], layout=layout, optimized=False)
            if has_new:
                key = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
                scale, ratio = (_broadcast_to_keys(plan, values, shape, layout) for values in scales[kv])
                rescaled = x.astype(jnp.float32) * ratio

                def insert(token, x, key=key, scale=scale, source=(plan.group + kv, features)):
                    new = plgpu.load(refs.qkv_rows.at[token, *source], layout=layout.reduce(0), optimized=False)
                    new = lax.broadcast_in_dim(new.astype(jnp.float32), shape, (1,))
                    return jnp.where(key == new_start + token, new / scale, x)

                rescaled = lax.fori_loop(0, num_tokens, insert, rescaled)
                x = lax.round(rescaled, lax.RoundingMethod.TO_NEAREST_EVEN).astype(jnp.int8)
                stages.at[stage, :, features][...] = x
            target.at[:, features][...] = plgpu.layout_cast(x.astype(plan.dtype), plgpu.Layout.WGMMA)
    plgpu.commit_smem()
    return refs.k_float, refs.v_float


def _scale_and_mask(plan: _Plan, refs: SimpleNamespace, keys: _KeyTile, queries: Any, scores: jax.Array) -> jax.Array:
    """q k^T -> scaled, capped, biased and masked scores, as exponents of 2."""
    layout = plan.layouts().acc
    if plan.softcap is None:
        scores *= plan.scale * _LOG2E
    else:  # softcap * tanh(x / softcap) by exp2, since the hardware's tanh has only 11 bits
        exp_2x = jnp.exp2(scores * (2 * _LOG2E * plan.scale / plan.softcap))
        scores = plan.softcap * _LOG2E - 2 * plan.softcap * _LOG2E / (exp_2x + 1.0)
    if not (plan.alibi or plan.window or keys.has_new):
        return scores
    key = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=layout)
    query = queries.start + plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=layout)
    distance = key - lax.div(query, plan.group) - keys.new_start  # key's position - query's position
    if plan.alibi:
        slopes = plgpu.load(refs.slopes.at[keys.head, queries], layout=layout.reduce(0), optimized=False)
        scores += lax.broadcast_in_dim(slopes, scores.shape, (1,)) * distance.astype(jnp.float32)
    if keys.has_new:
        scores = jnp.where(distance <= 0, scores, _MASKED)
    if plan.window is not None:
        scores = jnp.where(distance > -plan.window, scores, _MASKED)
    return scores


def _finish(plan: _Plan, tiles: Tiles, refs: SimpleNamespace, state: list[_State]) -> None:
    """Combine the splits of the cluster, divide by l_i and write the heads' outputs."""
    row, head, split = (lax.axis_index(name) for name in ("row", "head", "split"))

    def divide(queries: Any, l_i: jax.Array, acc: list[jax.Array]) -> None:
        """acc / l_i of some queries, into shared memory."""
        inverse = jnp.where(l_i > 0, 1.0 / l_i, 0.0)  # 0 in a row of padding
        for features, x in zip(plan.feature_tiles, acc, strict=True):
            result = x * lax.broadcast_in_dim(inverse, x.shape, (1,))
            refs.q_rows.at[queries, features].T[...] = result.astype(plan.dtype)
        plgpu.commit_smem()

    def write(start: jax.Array, count: int) -> None:
        """Send `count` queries of one token to global memory."""
        token, query = lax.div(start, plan.group), lax.rem(start, plan.group)
        target = ((row * plan.tokens + token) * plan.kv_heads + head) * plan.group + query
        plgpu.copy_smem_to_gmem(refs.q_rows.at[pl.ds(start, count)], refs.heads.at[pl.ds(target, count)])

    if tiles.splits == 1:
        for queries, (_m_i, l_i, acc) in zip(plan.query_tiles, state, strict=True):
            divide(queries, l_i, acc)
        pl.loop(0, plan.tokens)(lambda token: write(token * plan.group, plan.group))
        return
    partial_acc, partial_ml = refs.partial_acc.at[row, head], refs.partial_ml.at[row, head]
    for queries, (m_i, l_i, acc) in zip(plan.query_tiles, state, strict=True):
        for features, x in zip(plan.feature_tiles, acc, strict=True):
            partial_acc.at[split, features, queries][...] = x
        partial_ml.at[split, 0, queries][...] = m_i
        partial_ml.at[split, 1, queries][...] = l_i
    meet(refs.partials_full)

    @pl.loop(split, plan.queries // 8, step=tiles.splits)  # each thread block finishes groups of eight queries
    def _(eight):
        layout, queries = plan.layouts().acc, pl.ds(8 * eight, 8)

        def load_splits(ref: Ref, index: Any, layout: Any) -> list[jax.Array]:
            parts = [ref.at[other, index, queries] for other in range(tiles.splits)]
            return [plgpu.load(x, layout=layout, optimized=False) for x in parts]

        m_parts, l_parts = (load_splits(partial_ml, i, layout.reduce(0)) for i in (0, 1))
        m_i = functools.reduce(jnp.maximum, m_parts)
        alphas = [jnp.exp2(x - m_i) for x in m_parts]

        def combine(parts: list[jax.Array]) -> jax.Array:
            broadcast = [
                alpha if x.ndim == 1 else lax.broadcast_in_dim(alpha, x.shape, (1,))
                for alpha, x in zip(alphas, parts, strict=True)
            ]
            return functools.reduce(jnp.add, (alpha * x for alpha, x in zip(broadcast, parts, strict=True)))

        l_i = combine(l_parts)
        acc = [combine(load_splits(partial_acc, features, layout)) for features in plan.feature_tiles]
        divide(queries, l_i, acc)
        count = jnp.minimum(plan.tokens * plan.group - queries.start, 8)
        pl.loop(0, count)(lambda query: write(queries.start + query, 1))


def _store_tokens(plan: _Plan, refs: SimpleNamespace, row: _Row) -> None:
    """Write the new tokens' keys and values to their pages."""

    @pl.loop(0, row.num_tokens)
    def _(token):
        position = row.first + token
        page, offset = _page_of(plan, refs, row, position), lax.rem(position, plan.page_size)
        target = _cache_slice(plan, row, page, offset, 1)
        for kv, cache in enumerate((refs.cache_k, refs.cache_v)):
            plgpu.copy_smem_to_gmem(refs.qkv_rows.at[token, pl.ds(plan.group + kv, 1)], cache.at[target])


def _store_pages(plan: _Plan, refs: SimpleNamespace, row: _Row, tile: jax.Array, stage: jax.Array) -> None:
    """Write back the int8 pages of a tile that contain new tokens, as `_convert_int8` made them, and their scales."""
    k_scales, v_scales = _scales(plan, refs, row, tile, has_new=True)
    for i, page in enumerate(_pages_of(plan, refs, row, tile)):
        start = tile * _TILE_KV + i * plan.copy_keys

        @pl.when((start <= row.last) & (row.first < start + plan.copy_keys))
        def _(i=i, page=page):
            for stages, cache in ((refs.k, refs.cache_k), (refs.v, refs.cache_v)):
                source = stages.at[stage, pl.ds(i * plan.copy_keys, plan.copy_keys)]
                plgpu.copy_smem_to_gmem(source, cache.at[_cache_slice(plan, row, page, jnp.int32(0), plan.copy_keys)])
            refs.cache_k_scale[page, row.head] = k_scales.new[i]
            refs.cache_v_scale[page, row.head] = v_scales.new[i]

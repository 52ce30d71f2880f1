"""Attention of generated tokens over the paged cache, from the projected qkv to the heads' outputs.

The definition is several operations: norms of queries and keys, rotation, storing in pages, attention. The kernel is
one launch for all of them ("Deep-Fusion" of region 2, DeepSpeed Inference, arXiv:2207.00032, section III-D): a
generated token has few queries, so that the time is that of reading its keys and values once.

    grid (row, KV head), a cluster of S blocks for each, which share the row's keys (flash decoding)

A block computes the queries itself (a slab of qkv of some KiB, from L2), reads its part of the row's pages by TMA, a
page's slice of one head at a time, and keeps a running softmax in registers (Dao et al. 2022, arXiv:2205.14135). The
partial sums of a cluster meet in global memory, 4 S (K + 2) N bytes for N queries, which stay in L2.

Products are transposed: S^T [keys, queries] = K q^T and O^T [features, queries] = V^T P^T, so that keys and features
are the many rows of the tensor cores' left operand, and the few queries of a token the columns: 8 are enough.

New keys and values are in no page when the kernel begins. Every block has them, computed beside the queries; the one
whose keys they are among puts them into its copy of the page, and the cache gets them when the cluster has read all. An
int8 page that a new token makes coarser is rescaled in that copy and written back whole.

Bytes: 2 Hkv K (context + tokens) elements a row, each read once by one block; all else is small. One block of keys and
values in bfloat16 is 256 K bytes, and two blocks of 128 threads per SM with two or more in flight each keep 64 KiB or
more on the way, twice what 4.8 TB/s of an H200 ask for at a latency of 0.8 us.
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
from jax._src.pallas.mosaic_gpu.helpers import inline_ptx
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import UnsupportedError
from pallas_kernels.kv_pages import KVPages
from pallas_kernels.tuning import tuned

MAX_DECODE_TOKENS = 8
"""Most tokens of a row: the last one chosen, and its drafts."""


_KEYS = 64  # of a block: the rows of four warps' products
_QUERIES = 32  # whose softmax is computed at once
_PIECE = 64  # features that are multiplied at once: likewise
_HIDDEN = -1e30  # finite, so that the weight of sums made of hidden keys alone, exp(_HIDDEN - score), is 0
_LOG2E = math.log2(math.e)
_SMS = 132
_SHARED = 227 << 10  # bytes a block can have
_ROWS = plgpu.Layout.TILED(plgpu.Tiling(((8, 16), (2, 16), (1,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """How a row's keys are divided.

    Attributes:
      splits: blocks of a cluster that share a row's keys: 1, 2, 4 or 8.
      stages: blocks of keys and values that one of them has in flight or in use.
    """

    splits: int
    stages: int


type _State = tuple[jax.Array, jax.Array, list[jax.Array]]
"""The running softmax of n queries: maxima [n], sums of weights [n], and of weighted values [_PIECE, n], by piece."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
    """What is static of a call; names as in `decode_attention`."""

    batch: int
    tokens: int
    kv_heads: int
    group: int
    head_dim: int
    page_size: int
    width: int  # of the page table
    dtype: np.dtype
    int8: bool  # the cache
    half: int  # R / 2; 0 without rotation
    norms: bool
    norm_eps: float
    scale: float
    window: int | None
    softcap: float | None
    alibi: bool

    @property
    def columns(self) -> int:
        """N: a row's queries of one KV head, of every token in turn, and what fills up the last eight."""
        return -(-self.tokens * self.group // 8) * 8

    @property
    def slab(self) -> int:
        """Rows of one token's queries, key and value, and what fills up the last eight."""
        return -(-(self.group + 2) // 8) * 8

    @property
    def copy_rows(self) -> int:
        """Keys of one TMA copy: a page's, or a part of it."""
        return min(self.page_size, _KEYS)

    @property
    def pieces(self) -> tuple[tuple[int, int], ...]:
        """(start, size) of the features that are rotated one with another, and of the others.

        All sizes divide K, which the compiler's choice of layouts for shared memory needs.
        """
        rest = self.head_dim - 2 * self.half
        size = math.gcd(rest, self.head_dim)
        turned = [(0, self.half), (self.half, self.half)] if self.half else []
        return (*turned, *((start, size) for start in range(2 * self.half, self.head_dim, size or 1)))

    @property
    def query_tiles(self) -> list[Any]:
        """The columns, as many at a time as leave registers for the rest."""
        return [pl.ds(start, min(_QUERIES, self.columns - start)) for start in range(0, self.columns, _QUERIES)]

    @property
    def feature_pieces(self) -> list[Any]:
        """A head's features, as many at a time as a product of four warps has rows: fewer registers."""
        return [pl.ds(start, _PIECE) for start in range(0, self.head_dim, _PIECE)]

    @property
    def stage_bytes(self) -> int:
        """Keys and values of a block, as they lie in the cache."""
        return 2 * _KEYS * self.head_dim * (1 if self.int8 else 2)

    @property
    def other_bytes(self) -> int:
        """Shared memory beside the stages, with some to spare for alignment, reductions and barriers."""
        rows = self.tokens * self.slab + 2 * self.columns + self.slab
        converted = 4 * _KEYS * self.head_dim if self.int8 else 0
        return 2 * rows * self.head_dim + 2 * self.columns * _KEYS + converted + (8 << 10)

    def layouts(self) -> SimpleNamespace:
        """Layouts of the products' operands in registers."""
        layout = plgpu.Layout
        return SimpleNamespace(
            acc=layout.MMA_ACC(self.dtype), lhs=layout.MMA_LHS(self.dtype), rhs=layout.MMA_RHS(self.dtype)
        )


def _tiles(plan: _Plan) -> Tiles:
    """Measured tiles if there are any, else enough splits to occupy every SM, each with two blocks of keys or more."""
    key = f"b{plan.batch} t{plan.tokens} h{plan.kv_heads}x{plan.group} k{plan.head_dim} c{plan.width * plan.page_size}"
    if found := tuned("decode_attention", key + " int8" * plan.int8):
        return Tiles(**found)
    blocks = plan.batch * plan.kv_heads
    splits = 1
    while splits < 8 and blocks * splits < _SMS and plan.width * plan.page_size >= 4 * _KEYS * splits:
        splits *= 2
    room = _SHARED if blocks * splits <= _SMS else _SHARED // 2
    return Tiles(splits=splits, stages=max(2, min(4, (room - plan.other_bytes) // plan.stage_bytes)))


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
        width=page_table.shape[1],
        dtype=qkv.dtype,
        int8=pages.k_scale is not None,
        half=0 if rotary is None else rotary[0].shape[-1],
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
    if plan.page_size % 8 or (_KEYS % plan.page_size and plan.page_size % _KEYS):
        raise UnsupportedError(f"page_size must be 8, 16, 32 or a multiple of 64, got {plan.page_size}")
    if plan.int8 and plan.page_size > _KEYS:
        raise UnsupportedError(f"page_size must be at most {_KEYS} in int8, got {plan.page_size}")
    if plan.half and (plan.half % 16 or head_dim % plan.half):
        raise UnsupportedError(f"rotary_dim / 2 must be a multiple of 16 that divides head_dim, got {plan.half}")
    if plan.columns > (most := min(64, 8192 // head_dim)):  # more sums than registers
        raise UnsupportedError(f"tokens * group must be at most {most}, got {tokens} * {plan.group}")
    return plan


def decode_attention(
    qkv: jax.Array,
    pages: KVPages,
    page_table: jax.Array,
    positions: jax.Array,
    rotary: tuple[jax.Array, jax.Array] | None,
    norms: tuple[jax.Array, jax.Array] | None,
    *,
    alibi: tuple[float, ...] | None,
    **options: Any,
) -> tuple[jax.Array, KVPages]:
    """`store_and_attend` for up to MAX_DECODE_TOKENS tokens a row. Raises UnsupportedError."""
    kv_heads, head_dim = pages.k.shape[2:]
    plan = _plan(qkv, pages, page_table, rotary, norms, alibi, **options)
    tiles = _tiles(plan)
    inputs: dict[str, Any] = {"qkv": qkv.reshape(-1, head_dim), "table": page_table, "positions": positions}
    if rotary is not None:
        inputs["cos"], inputs["sin"] = (x.reshape(-1, plan.half) for x in rotary)
    if norms is not None:
        inputs["q_norm"], inputs["k_norm"] = norms
    if alibi is not None:
        slopes = np.zeros((kv_heads, plan.columns), np.float32)
        slopes[:, : plan.tokens * plan.group] = np.tile(np.reshape(alibi, (kv_heads, -1)), plan.tokens)
        inputs["slopes"] = jnp.asarray(slopes * _LOG2E)
    cache: dict[str, Any] = {"cache_k": pages.k, "cache_v": pages.v}
    if pages.k_scale is not None:
        cache |= {"cache_k_scale": pages.k_scale, "cache_v_scale": pages.v_scale}
    shapes = [x.shape for x in cache.values()]
    for name, x in cache.items():  # references, which XLA passes on in place
        cache[name] = jax.new_ref(x.reshape(-1, kv_heads * head_dim) if x.ndim == 4 else x)
    inputs |= cache
    out = _outputs(plan, tiles)

    def decode_attention_kernel(*refs, **scratch):
        named = dict(zip((*inputs, *out), refs, strict=True))
        _block(plan, tiles, SimpleNamespace(**named, **scratch))

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
    """The result, and what the blocks of a cluster give one another: sums [K, N], and maximum and total [2, N]."""
    rows = plan.batch * plan.tokens * plan.kv_heads * plan.group
    found = {"heads": jax.ShapeDtypeStruct((rows, plan.head_dim), plan.dtype)}
    if tiles.splits > 1:
        shape = (plan.batch, plan.kv_heads, tiles.splits)
        found["sums"] = jax.ShapeDtypeStruct((*shape, plan.head_dim, plan.columns), np.float32)
        found["stats"] = jax.ShapeDtypeStruct((*shape, 2, plan.columns), np.float32)
    return found


def _scratch(plan: _Plan, tiles: Tiles) -> dict[str, Any]:
    """Shared memory and barriers of a block.

    slab: each token's queries, key and value. rows: the queries, side by side, and in the end the result. q: as rows,
    laid out for the tensor cores. k, v: the ring of keys and values. p: the softmax weights. k_float, v_float: keys and
    values of an int8 cache, converted. largest: of the slabs' features.
    """

    def swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
        size = min(128, _PIECE * dtype.itemsize)  # so that pieces are whole tiles
        tiling = plgpu.TilingTransform((8, size // dtype.itemsize))  # pyright: ignore[reportAbstractUsage]
        swizzle = plgpu.SwizzleTransform(size)  # pyright: ignore[reportAbstractUsage]
        return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))

    tile = (_KEYS, plan.head_dim)
    held = np.dtype(np.int8) if plan.int8 else plan.dtype
    found = {
        "slab": plgpu.SMEM((plan.tokens, plan.slab, plan.head_dim), plan.dtype),
        "rows": plgpu.SMEM((plan.columns + plan.slab, plan.head_dim), plan.dtype),
        "q": swizzled((plan.columns, plan.head_dim), plan.dtype),
        "k": swizzled((tiles.stages, *tile), held),
        "v": swizzled((tiles.stages, *tile), held),
        "p": swizzled((plan.columns, _KEYS), plan.dtype),
        "slab_here": plgpu.Barrier(num_arrivals=plan.tokens),
        "here": plgpu.Barrier(num_arrivals=2 * _KEYS // plan.copy_rows, num_barriers=tiles.stages),
    }
    if plan.int8:
        found |= {"k_float": swizzled(tile, plan.dtype), "v_float": swizzled(tile, plan.dtype)}
        found["largest"] = plgpu.SMEM((plan.tokens, plan.slab), np.dtype(np.float32))
    if tiles.splits > 1:
        found["met"] = plgpu.ClusterBarrier(collective_axes=("split",), num_arrivals=1)
    return found


def _block(plan: _Plan, tiles: Tiles, at: SimpleNamespace) -> None:
    """One block: its part of the keys of one KV head of one row, then its part of the cluster's result."""
    index, head, split = (lax.axis_index(name) for name in ("row", "head", "split"))
    first = at.positions[index, 0]
    last = functools.reduce(jnp.maximum, [at.positions[index, t] for t in range(plan.tokens)])
    row = _Row(index=index, head=head, first=first, last=last, real=jnp.where(first < 0, 0, last + 1 - first))
    # Blocks of keys: those of the row, from the first one in the window on, and mine. A row of padding has none.
    end = lax.div(last + _KEYS, _KEYS)
    start = jnp.int32(0) if plan.window is None else lax.div(jnp.maximum(first - (plan.window - 1), 0), _KEYS)
    count = end - start
    mine = start + lax.div(count * split, tiles.splits)
    stop = start + lax.div(count * (split + 1), tiles.splits)

    def fetch(block: jax.Array, pages: list[jax.Array], slot: jax.Array) -> None:
        for i, page in enumerate(pages):
            place = _place(plan, row, page, lax.rem(block * _KEYS + i * plan.copy_rows, plan.page_size), plan.copy_rows)
            for source, ring in ((at.cache_k, at.k), (at.cache_v, at.v)):
                target = ring.at[slot, pl.ds(i * plan.copy_rows, plan.copy_rows)]
                plgpu.copy_gmem_to_smem(source.at[place], target, at.here.at[slot])

    @pl.loop(0, plan.tokens)
    def _(token):
        begin = ((index * plan.tokens + token) * plan.kv_heads + head) * (plan.group + 2)
        plgpu.copy_gmem_to_smem(
            at.qkv.at[pl.ds(begin, plan.slab)], at.slab.at[token], at.slab_here, oob_mode=plgpu.OOBFillMode.ZEROS
        )

    @pl.loop(mine, jnp.minimum(mine + tiles.stages, stop))
    def _(block):
        fetch(block, _pages(plan, at, row, block), block - mine)

    plgpu.barrier_wait(at.slab_here)
    _prepare(plan, at, index)

    def step(block: jax.Array, state: list[_State], *, newest: bool) -> list[_State]:
        slot = lax.rem(block - mine, tiles.stages)
        ahead = _pages(plan, at, row, block + tiles.stages)  # asked for before they are needed, as are the scales
        scales = _scales(plan, at, row, block, newest=newest) if plan.int8 else None
        plgpu.barrier_wait(at.here.at[slot])
        here = first - block * _KEYS
        if scales is not None:
            k, v = _as_float(plan, at, slot, here, row.real, scales, newest=newest)
        else:
            k, v = at.k.at[slot], at.v.at[slot]
            if newest:
                _insert(plan, at, k, v, here, row.real)
        keys = _Keys(k=k, v=v, head=head, first=here, scales=scales, newest=newest)
        state = [_add(plan, at, keys, tile, x) for tile, x in zip(plan.query_tiles, state, strict=True)]

        @pl.when(block + tiles.stages < stop)
        def _():
            fetch(block + tiles.stages, ahead, slot)

        return state

    def zero(shape: tuple[int, ...], layout: Any, value: float = 0.0) -> jax.Array:
        return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

    acc = plan.layouts().acc
    state = []
    for tile in plan.query_tiles:
        highest, total = (zero((tile.size,), acc.reduce(0), value) for value in (_HIDDEN, 0.0))
        state.append((highest, total, [zero((_PIECE, tile.size), acc) for _ in plan.feature_pieces]))
    # Blocks of keys that all queries see, then those with the row's own tokens.
    seen = jnp.clip(lax.div(jnp.maximum(first, 0), _KEYS), mine, stop)
    state = lax.fori_loop(mine, seen, functools.partial(step, newest=False), state)
    state = lax.fori_loop(seen, stop, functools.partial(step, newest=True), state)
    _finish(plan, tiles, at, state)
    # All blocks of the cluster have met, so that none still reads these pages.
    if plan.int8:
        pl.loop(seen, stop)(lambda block: _store_pages(plan, at, row, block, lax.rem(block - mine, tiles.stages)))
    else:
        pl.when(split == tiles.splits - 1)(functools.partial(_store_tokens, plan, at, row))
    plgpu.wait_smem_to_gmem(0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Row:
    """A row of the batch and one KV head. first, last: positions of its tokens, negative in padding. real: how many."""

    index: jax.Array
    head: jax.Array
    first: jax.Array
    last: jax.Array
    real: jax.Array


def _page(plan: _Plan, at: SimpleNamespace, row: _Row, position: jax.Array) -> jax.Array:
    """The page of a position, or the row's last: what a block has beyond it are finite numbers, whose weight is 0."""
    return at.table[row.index, lax.div(jnp.minimum(position, row.last), plan.page_size)]


def _pages(plan: _Plan, at: SimpleNamespace, row: _Row, block: jax.Array) -> list[jax.Array]:
    """The page of every TMA copy of a block."""
    return [_page(plan, at, row, block * _KEYS + start) for start in range(0, _KEYS, plan.copy_rows)]


def _place(plan: _Plan, row: _Row, page: jax.Array, slot: jax.Array, count: int) -> tuple[Any, Any]:
    """Where `count` slots of a page lie in the cache, [pages * page_size, Hkv * K]."""
    return pl.ds(page * plan.page_size + slot, count), pl.ds(row.head * plan.head_dim, plan.head_dim)


def _prepare(plan: _Plan, at: SimpleNamespace, row: jax.Array) -> None:
    """Norm and rotate the slabs' queries and keys, and lay out the queries for the tensor cores."""
    shapes = [(plan.slab, size) for _, size in plan.pieces]

    def across(ref: Any, shape: tuple[int, int]) -> jax.Array:
        """A vector of features, for every row of a slab."""
        vector = plgpu.load(ref, layout=_ROWS.reduce(0), optimized=False)
        return lax.broadcast_in_dim(vector, shape, (1,))

    @pl.loop(0, plan.tokens)
    def _(token):
        places = [(slice(None), pl.ds(start, size)) for start, size in plan.pieces]
        values = [plgpu.load(at.slab.at[token].at[place], layout=_ROWS, optimized=False) for place in places]
        index = [plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=_ROWS) for shape in shapes]
        wide = [x.astype(jnp.float32) for x in values]
        if plan.norms:
            mean = sum(jnp.sum(x * x, axis=1) for x in wide) * (1.0 / plan.head_dim)
            inverse = lax.rsqrt(mean + plan.norm_eps)
            for i, ((start, size), shape) in enumerate(zip(plan.pieces, shapes, strict=True)):
                q_norm, k_norm = (across(norm.at[pl.ds(start, size)], shape) for norm in (at.q_norm, at.k_norm))
                normed = wide[i] * (
                    lax.broadcast_in_dim(inverse, shape, (0,)) * jnp.where(index[i] < plan.group, q_norm, k_norm)
                )
                wide[i] = normed.astype(plan.dtype).astype(jnp.float32)
        if plan.half:
            cos, sin = (across(x.at[row * plan.tokens + token], shapes[0]) for x in (at.cos, at.sin))
            wide[:2] = [wide[0] * cos - wide[1] * sin, wide[1] * cos + wide[0] * sin]
        stored = []
        for place, before, after, i in zip(places, values, wide, index, strict=True):
            x = jnp.where(i <= plan.group, after.astype(plan.dtype), before)
            at.slab.at[token].at[place][...] = x
            # What this writes beyond the queries, the next token writes over, or nobody reads.
            at.rows[pl.ds(token * plan.group, plan.slab), place[1]] = x
            stored.append(x.astype(jnp.float32))
        if plan.int8:
            largest = [jnp.max(jnp.maximum(x, -x), axis=1) for x in stored]
            at.largest.at[token][...] = functools.reduce(jnp.maximum, largest)
        plgpu.commit_smem()

    for piece in plan.feature_pieces:
        place = pl.ds(0, plan.columns), piece
        at.q.at[place].T[...] = plgpu.load(at.rows.at[place].T, layout=plan.layouts().rhs, optimized=False)
    plgpu.commit_smem()


class _Scales(NamedTuple):
    """The scales of a block's pages. now: with the row's new tokens. ratio: of those before to those now."""

    now: list[jax.Array]
    ratio: list[jax.Array]


def _scales(plan: _Plan, at: SimpleNamespace, row: _Row, block: jax.Array, *, newest: bool) -> tuple[_Scales, _Scales]:
    """Those of keys and of values, by the rules of `write_pages`.

    Computed once more when they are stored: scales that have grown do not grow again.
    """
    found = []
    for offset, scale in enumerate((at.cache_k_scale, at.cache_v_scale)):
        scales = _Scales([], [])
        for i, page in enumerate(_pages(plan, at, row, block)):
            held = scale[page, row.head]
            if not newest:
                scales.now.append(held)
                continue
            start = block * _KEYS + i * plan.copy_rows
            begins = (row.first <= start) & (start <= row.last)

            def needed(token, most, start=start, offset=offset):
                slot = row.first + token - start
                needs = jnp.maximum(at.largest[token, plan.group + offset], 1e-30) / 127.0
                return jnp.where((slot >= 0) & (slot < plan.page_size), jnp.maximum(most, needs), most)

            now = lax.fori_loop(0, row.real, needed, jnp.where(begins, 0.0, held))
            scales.now.append(now)
            scales.ratio.append(jnp.where(begins | (now == held), 1.0, held / now))
        found.append(scales)
    return found[0], found[1]


def _per_key(plan: _Plan, values: list[jax.Array], shape: tuple[int, int], layout: Any) -> jax.Array:
    """Values of a block's pages, for each of its keys: an array [keys, ...]."""
    page = lax.div(plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout), plan.copy_rows)
    found = jnp.full(shape, values[0])
    for i, value in enumerate(values[1:], 1):
        found = jnp.where(page == i, value, found)
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Keys:
    """A block of keys and values in shared memory.

    Attributes:
      k, v: [keys, K]. head: the KV head.
      first: the position of the row's first token, from the block's first key.
      scales: of keys and of values of an int8 cache.
      newest: whether the row's own tokens may be among the keys, so that some are hidden.
    """

    k: Any
    v: Any
    head: jax.Array
    first: jax.Array
    scales: tuple[_Scales, _Scales] | None
    newest: bool


def _add(plan: _Plan, at: SimpleNamespace, keys: _Keys, tile: Any, state: _State) -> _State:
    """Add a block of keys to the running softmax of some queries."""
    layouts = plan.layouts()
    shape = (_KEYS, tile.size)

    def operand(ref: Any) -> jax.Array:
        return plgpu.load(ref, layout=layouts.lhs, optimized=False)

    def across(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return lax.broadcast_in_dim(x, shape, (1,))

    scores = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layouts.acc)
    for piece in plan.feature_pieces:
        q = plgpu.load(at.q.at[tile, piece].T, layout=layouts.rhs, optimized=False)
        scores = plgpu.mma(scores, operand(keys.k.at[:, piece]), q)
    if keys.scales is not None:
        scores *= _per_key(plan, keys.scales[0].now, shape, layouts.acc)
    scores = _masked(plan, at, keys, tile, scores)

    highest, total, mixed = state
    higher = jnp.maximum(highest, jnp.max(scores, axis=0))
    kept = jnp.exp2(highest - higher)
    weights = jnp.exp2(scores - across(higher, shape))
    total = total * kept + jnp.sum(weights, axis=0)
    if keys.scales is not None:
        weights *= _per_key(plan, keys.scales[1].now, shape, layouts.acc)
    at.p.at[tile].T[...] = weights.astype(plan.dtype)
    plgpu.commit_smem()
    p = plgpu.load(at.p.at[tile].T, layout=layouts.rhs, optimized=False)
    mixed = [
        plgpu.mma(x * across(kept, x.shape), operand(keys.v.at[:, piece].T), p)
        for x, piece in zip(mixed, plan.feature_pieces, strict=True)
    ]
    return higher, total, mixed


def _insert(plan: _Plan, at: SimpleNamespace, k: Any, v: Any, first: jax.Array, real: jax.Array) -> None:
    """Put the row's `real` tokens, which no page has yet, into a block whose key `first` is the first of them."""
    layout = plan.layouts().lhs
    for offset, ref in enumerate((k, v)):
        for piece in plan.feature_pieces:
            held = plgpu.load(ref.at[:, piece], layout=layout, optimized=False)
            key = plgpu.broadcasted_iota(jnp.int32, held.shape, 0, layout=layout)

            def with_token(token, held, key=key, place=(plan.group + offset, piece)):
                new = plgpu.load(at.slab.at[token, *place], layout=layout.reduce(0), optimized=False)
                return jnp.where(key == first + token, lax.broadcast_in_dim(new, held.shape, (1,)), held)

            ref.at[:, piece][...] = lax.fori_loop(0, real, with_token, held)
    plgpu.commit_smem()


def _as_float(
    plan: _Plan,
    at: SimpleNamespace,
    slot: jax.Array,
    first: jax.Array,
    real: jax.Array,
    scales: tuple[_Scales, _Scales],
    *,
    newest: bool,
) -> tuple[Any, Any]:
    """A block of an int8 cache in the dtype of the queries: the tensor cores' transposing loads take 16 bits.

    In a block with the row's `real` tokens, from key `first` on, they are put into the ring too, and what it holds is
    rescaled.
    """
    layout, shape = plgpu.Layout.WGMMA_UPCAST_2X, (_KEYS, _PIECE)
    for offset, (ring, target) in enumerate(((at.k, at.k_float), (at.v, at.v_float))):
        for piece in plan.feature_pieces:
            x = plgpu.load(ring.at[slot, :, piece], layout=layout, optimized=False)
            if newest:
                key = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
                now, ratio = (_per_key(plan, values, shape, layout) for values in scales[offset])
                held = x.astype(jnp.float32) * ratio

                def with_token(token, held, key=key, now=now, place=(plan.group + offset, piece)):
                    new = plgpu.load(at.slab.at[token, *place], layout=layout.reduce(0), optimized=False)
                    new = lax.broadcast_in_dim(new.astype(jnp.float32), shape, (1,))
                    return jnp.where(key == first + token, new / now, held)

                held = lax.fori_loop(0, real, with_token, held)
                x = lax.round(held, lax.RoundingMethod.TO_NEAREST_EVEN).astype(jnp.int8)
                ring.at[slot, :, piece][...] = x
            target.at[:, piece][...] = plgpu.layout_cast(x.astype(plan.dtype), plgpu.Layout.WGMMA)
    plgpu.commit_smem()
    return at.k_float, at.v_float


def _masked(plan: _Plan, at: SimpleNamespace, keys: _Keys, tile: Any, scores: jax.Array) -> jax.Array:
    """Products of keys and queries as exponents of 2, those that are hidden as _HIDDEN."""
    acc = plan.layouts().acc
    if plan.softcap is None:
        scores *= plan.scale * _LOG2E
    else:  # softcap * tanh(x / softcap), as the hardware's tanh has 11 bits
        twice = jnp.exp2(scores * (2 * _LOG2E * plan.scale / plan.softcap))
        scores = plan.softcap * _LOG2E - 2 * plan.softcap * _LOG2E / (twice + 1.0)
    if not (plan.alibi or plan.window or keys.newest):
        return scores
    key = plgpu.broadcasted_iota(jnp.int32, scores.shape, 0, layout=acc)
    query = tile.start + plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=acc)
    distance = key - lax.div(query, plan.group) - keys.first  # of the key from the query; negative if before it
    if plan.alibi:
        slopes = plgpu.load(at.slopes.at[keys.head, tile], layout=acc.reduce(0), optimized=False)
        scores += lax.broadcast_in_dim(slopes, scores.shape, (1,)) * distance.astype(jnp.float32)
    if keys.newest:
        scores = jnp.where(distance <= 0, scores, _HIDDEN)
    if plan.window is not None:
        scores = jnp.where(distance > -plan.window, scores, _HIDDEN)
    return scores


def _finish(plan: _Plan, tiles: Tiles, at: SimpleNamespace, state: list[_State]) -> None:
    """Divide by the weights' sum and write the heads, after the blocks of a cluster have put theirs together."""
    row, head, split = (lax.axis_index(name) for name in ("row", "head", "split"))

    def divide(tile: Any, total: jax.Array, mixed: list[jax.Array]) -> None:
        """Into shared memory, for some of the queries."""
        inverse = jnp.where(total > 0, 1.0 / total, 0.0)  # 0 in a row of padding
        for piece, x in zip(plan.feature_pieces, mixed, strict=True):
            result = x * lax.broadcast_in_dim(inverse, x.shape, (1,))
            at.rows.at[tile, piece].T[...] = result.astype(plan.dtype)
        plgpu.commit_smem()

    def write(column: jax.Array, count: int) -> None:
        """Some of the queries of one token."""
        token, query = lax.div(column, plan.group), lax.rem(column, plan.group)
        target = ((row * plan.tokens + token) * plan.kv_heads + head) * plan.group + query
        plgpu.copy_smem_to_gmem(at.rows.at[pl.ds(column, count)], at.heads.at[pl.ds(target, count)])

    if tiles.splits == 1:
        for tile, (_highest, total, mixed) in zip(plan.query_tiles, state, strict=True):
            divide(tile, total, mixed)
        pl.loop(0, plan.tokens)(lambda token: write(token * plan.group, plan.group))
        return
    sums, stats = at.sums.at[row, head], at.stats.at[row, head]
    for tile, (highest, total, mixed) in zip(plan.query_tiles, state, strict=True):
        for piece, x in zip(plan.feature_pieces, mixed, strict=True):
            sums.at[split, piece, tile][...] = x
        stats.at[split, 0, tile][...] = highest
        stats.at[split, 1, tile][...] = total
    inline_ptx("fence.acq_rel.cluster;")
    plgpu.barrier_arrive(at.met)
    plgpu.barrier_wait(at.met)
    inline_ptx("fence.acq_rel.cluster;")

    @pl.loop(split, plan.columns // 8, step=tiles.splits)  # eight queries a block
    def _(eight):
        acc, tile = plan.layouts().acc, pl.ds(8 * eight, 8)

        def of_all(ref: Any, place: Any, layout: Any) -> list[jax.Array]:
            found = [ref.at[other, place, tile] for other in range(tiles.splits)]
            return [plgpu.load(x, layout=layout, optimized=False) for x in found]

        maxima, totals = (of_all(stats, i, acc.reduce(0)) for i in (0, 1))
        top = functools.reduce(jnp.maximum, maxima)
        factors = [jnp.exp2(x - top) for x in maxima]

        def weighted(parts: list[jax.Array]) -> jax.Array:
            wide = [
                factor if x.ndim == 1 else lax.broadcast_in_dim(factor, x.shape, (1,))
                for factor, x in zip(factors, parts, strict=True)
            ]
            return functools.reduce(jnp.add, (factor * x for factor, x in zip(wide, parts, strict=True)))

        divide(tile, weighted(totals), [weighted(of_all(sums, piece, acc)) for piece in plan.feature_pieces])
        queries = jnp.minimum(plan.tokens * plan.group - tile.start, 8)
        pl.loop(0, queries)(lambda query: write(tile.start + query, 1))


def _store_tokens(plan: _Plan, at: SimpleNamespace, row: _Row) -> None:
    """Write the keys and values of the row's tokens into their slots."""

    @pl.loop(0, row.real)
    def _(token):
        position = row.first + token
        place = _place(plan, row, _page(plan, at, row, position), lax.rem(position, plan.page_size), 1)
        for offset, cache in enumerate((at.cache_k, at.cache_v)):
            plgpu.copy_smem_to_gmem(at.slab.at[token, pl.ds(plan.group + offset, 1)], cache.at[place])


def _store_pages(plan: _Plan, at: SimpleNamespace, row: _Row, block: jax.Array, slot: jax.Array) -> None:
    """Write the pages of a block that have new tokens, whole, and their scales: `_as_float` has made them."""
    k_scales, v_scales = _scales(plan, at, row, block, newest=True)
    for i, page in enumerate(_pages(plan, at, row, block)):
        start = block * _KEYS + i * plan.copy_rows

        @pl.when((start <= row.last) & (row.first < start + plan.copy_rows))
        def _(i=i, page=page):
            for ring, cache in ((at.k, at.cache_k), (at.v, at.cache_v)):
                source = ring.at[slot, pl.ds(i * plan.copy_rows, plan.copy_rows)]
                plgpu.copy_smem_to_gmem(source, cache.at[_place(plan, row, page, jnp.int32(0), plan.copy_rows)])
            at.cache_k_scale[page, row.head] = k_scales.now[i]
            at.cache_v_scale[page, row.head] = v_scales.now[i]

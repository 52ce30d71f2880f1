"""The parts of a launch of the decode attention kernel: static parameters, arrays, scratch and thread blocks."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.pallas_kernels.mosaic import pl, plgpu
from jaxinfer.pallas_kernels.mosaic.layout import swizzled_tiles
from jaxinfer.pallas_kernels.mosaic.refs import Barrier, Index, Ref, barrier, cluster_barrier, gmem, smem
from jaxinfer.pallas_kernels.mosaic.ring import Ring
from jaxinfer.pallas_kernels.mosaic.tuning import tuned
from jaxinfer.pallas_kernels.target import target_gpu

TILE_KV = 64  # keys of a tile: the rows of an mma by four warps
TILE_D = 64  # features of a head that are multiplied at once: the rows of an mma by four warps
_TILE_Q = 32  # queries whose softmax is computed at once
LOG2E = math.log2(math.e)


class Layouts(NamedTuple):
    """Register layouts of the mma operands."""

    acc: Any
    lhs: Any
    rhs: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """How a row's keys are partitioned.

    Attributes:
      splits: thread blocks of the cluster among which a row's keys are split: 1 to 8.
      stages: pipeline stages of each thread block; a stage is a tile of keys and values.
    """

    splits: int
    stages: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
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
        return min(self.page_size, TILE_KV)

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
    def query_tiles(self) -> "list[pl.Slice]":
        """Slices of the queries, small enough to leave registers for everything else."""
        return [pl.ds(start, min(_TILE_Q, self.queries - start)) for start in range(0, self.queries, _TILE_Q)]

    @property
    def feature_tiles(self) -> "list[pl.Slice]":
        """Slices of a head's features, one mma of four warps each, to save registers."""
        return [pl.ds(start, TILE_D) for start in range(0, self.head_dim, TILE_D)]

    @property
    def stage_bytes(self) -> int:
        """A tile of keys and values, in the cache's dtype."""
        return 2 * TILE_KV * self.head_dim * (1 if self.int8 else 2)

    @property
    def other_bytes(self) -> int:
        """Shared memory besides the stages, with some margin for alignment, reductions and barriers."""
        rows = self.tokens * self.qkv_rows + 2 * self.queries + self.qkv_rows
        converted = 4 * TILE_KV * self.head_dim if self.int8 else 0
        return 2 * rows * self.head_dim + 2 * self.queries * TILE_KV + converted + (8 << 10)

    @property
    def layouts(self) -> Layouts:
        """Register layouts of the mma operands."""
        layout = plgpu.Layout
        return Layouts(layout.MMA_ACC(self.dtype), layout.MMA_LHS(self.dtype), layout.MMA_RHS(self.dtype))


def choose_tiles(plan: Plan) -> Tiles:
    """Choose the tuned tiles, else enough splits to occupy every SM, each with at least two tiles of keys."""
    context = plan.max_pages * plan.page_size
    key = f"b{plan.batch} t{plan.tokens} h{plan.kv_heads}x{plan.group} k{plan.head_dim} c{context}"
    if measured := tuned("decode_attention", key + " int8" * plan.int8):
        return Tiles(**measured)
    gpu, clusters = target_gpu(), plan.batch * plan.kv_heads
    splits = 1
    while splits < 8 and clusters * splits < gpu.sms and context >= 4 * TILE_KV * splits:
        splits *= 2
    available = gpu.shared_bytes_of(1 if clusters * splits <= gpu.sms else 2)
    return Tiles(splits=splits, stages=max(2, min(4, (available - plan.other_bytes) // plan.stage_bytes)))


class Rotary(NamedTuple):
    """The rotary embedding's angles, float32 [B * T, R / 2]."""

    cos: Ref
    sin: Ref


class Norms(NamedTuple):
    """The scales of the RMSNorms of queries and keys, [K]."""

    q: Ref
    k: Ref


class Scales(NamedTuple):
    """The scales of an int8 cache, float32 [pages, Hkv]."""

    k: Ref
    v: Ref


class Cache(NamedTuple):
    """The pages, which the kernel updates in place. C: q's dtype, or int8."""

    k: Ref  # C [pages * page_size, Hkv * K]
    v: Ref
    scales: Scales | None


class Inputs(NamedTuple):
    """The arrays in GMEM; None for those that a call does not have. D: the dtype of qkv."""

    qkv: Ref  # D [B * T * Hkv * (G + 2), K]: each token's G queries, key and value of every KV head
    page_table: Ref  # int32 [B, P]
    positions: Ref  # int32 [B, T]
    rotary: Rotary | None
    norms: Norms | None
    slopes: Ref | None  # float32 [Hkv, N]
    cache: Cache


class Partials(NamedTuple):
    """The partial results of each of S splits in GMEM, for the cluster."""

    acc: Ref  # float32 [B, Hkv, S, K, N]
    ml: Ref  # float32 [B, Hkv, S, 2, N]: m_i and l_i


class Outputs(NamedTuple):
    """The arrays that the kernel writes besides the cache."""

    heads: Ref  # D [B * T * Hkv * G, K]
    partials: Partials | None  # None with one split


def outputs(plan: Plan, tiles: Tiles) -> Outputs:
    """Declare the results of a launch."""
    rows = plan.batch * plan.tokens * plan.kv_heads * plan.group
    heads = gmem(jax.ShapeDtypeStruct((rows, plan.head_dim), plan.dtype))
    if tiles.splits == 1:
        return Outputs(heads, None)
    shape = (plan.batch, plan.kv_heads, tiles.splits)
    acc = jax.ShapeDtypeStruct((*shape, plan.head_dim, plan.queries), np.float32)
    ml = jax.ShapeDtypeStruct((*shape, 2, plan.queries), np.float32)
    return Outputs(heads, Partials(gmem(acc), gmem(ml)))


class Int8Scratch(NamedTuple):
    """SMEM for an int8 cache."""

    k: Ref  # a tile of keys, converted to D, [TILE_KV, K]
    v: Ref


class Scratch(NamedTuple):
    """SMEM and barriers of a thread block. N: `Plan.queries`; C: the dtype of the cache.

    The order of the arrays is that in SMEM, on which it depends how many registers the compiler takes.
    """

    k: Ref  # C [stages, TILE_KV, K]
    int8: Int8Scratch | None
    p: Ref  # the softmax weights, D [N, TILE_KV]
    q: Ref  # D [N, K]: all queries, laid out for the tensor cores
    q_rows: Ref  # D [N + qkv_rows, K]: the same queries, a row each; at the end the result
    qkv_rows: Ref  # D [T, qkv_rows, K]: each token's queries, key and value
    max_abs: Ref  # float32 [T, qkv_rows]: the largest magnitude of each of these; infinite also for NaN
    v: Ref  # C [stages, TILE_KV, K]
    qkv_full: Barrier  # the copies into `qkv_rows` have landed
    kv_full: Barrier  # one per stage: the copies of keys and values have landed
    partials_full: Barrier | None  # of the cluster: all splits have written their partial results


def scratch(plan: Plan, tiles: Tiles) -> Scratch:
    """Declare the scratch of a thread block."""

    def swizzled(shape: tuple[int, ...], dtype: np.dtype) -> Ref:
        row_bytes = min(128, TILE_D * dtype.itemsize)  # so that feature tiles are whole swizzle tiles
        return smem(shape, dtype, swizzled_tiles(dtype, row_bytes))

    tile = (TILE_KV, plan.head_dim)
    kv = swizzled((tiles.stages, *tile), np.dtype(np.int8) if plan.int8 else plan.dtype)
    int8 = None
    if plan.int8:
        int8 = Int8Scratch(swizzled(tile, plan.dtype), swizzled(tile, plan.dtype))
    return Scratch(
        k=kv,
        int8=int8,
        p=swizzled((plan.queries, TILE_KV), plan.dtype),
        q=swizzled((plan.queries, plan.head_dim), plan.dtype),
        q_rows=smem((plan.queries + plan.qkv_rows, plan.head_dim), plan.dtype),
        qkv_rows=smem((plan.tokens, plan.qkv_rows, plan.head_dim), plan.dtype),
        max_abs=smem((plan.tokens, plan.qkv_rows), np.float32),
        v=kv,
        qkv_full=barrier(plan.tokens),
        kv_full=barrier(2 * TILE_KV // plan.copy_keys, tiles.stages),
        partials_full=cluster_barrier("split") if tiles.splits > 1 else None,
    )


class Block(NamedTuple):
    """A thread block: one row of the batch, one KV head, and a split of its keys.

    first, last: positions of the row's `num_tokens` tokens; negative for padding.
    """

    row: jax.Array
    head: jax.Array
    split: jax.Array
    first: jax.Array
    last: jax.Array
    num_tokens: jax.Array


def this_block(plan: Plan, positions: Ref) -> Block:
    """The thread block that runs this."""
    row, head, split = (lax.axis_index(name) for name in ("row", "head", "split"))
    first = positions[row, 0]
    last = functools.reduce(jnp.maximum, [positions[row, t] for t in range(plan.tokens)])
    return Block(row, head, split, first, last, jnp.where(first < 0, 0, last + 1 - first))


def key_ring(plan: Plan, tiles: Tiles, block: Block) -> Ring:
    """The tiles of keys of this split: a part of the row's, from the first one in the window to the last.

    A row of padding has none.
    """
    end = lax.div(block.last + TILE_KV, TILE_KV)
    start = jnp.int32(0)
    if plan.window is not None:
        start = lax.div(jnp.maximum(block.first - (plan.window - 1), 0), TILE_KV)
    count = end - start
    begin = start + lax.div(count * block.split, tiles.splits)
    return Ring(tiles.stages, begin, start + lax.div(count * (block.split + 1), tiles.splits))


def page_of(plan: Plan, inputs: Inputs, block: Block, position: Index) -> jax.Array:
    """Compute the page of a position; beyond the row's end the last page, whose keys nobody sees there."""
    return inputs.page_table[block.row, lax.div(jnp.minimum(position, block.last), plan.page_size)]


def pages_of(plan: Plan, inputs: Inputs, block: Block, tile: Index) -> list[jax.Array]:
    """The page of every TMA copy of a tile of keys."""
    return [page_of(plan, inputs, block, tile * TILE_KV + start) for start in range(0, TILE_KV, plan.copy_keys)]


def cache_slice(plan: Plan, block: Block, page: jax.Array, offset: Index, count: int) -> "tuple[pl.Slice, pl.Slice]":
    """Return `count` tokens of a page, from `offset` on, as a slice of the cache [pages * page_size, Hkv * K]."""
    return pl.ds(page * plan.page_size + offset, count), pl.ds(block.head * plan.head_dim, plan.head_dim)

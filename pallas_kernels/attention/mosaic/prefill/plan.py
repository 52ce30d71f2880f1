"""The parts of a launch of the prefill attention kernel: static parameters, arrays, scratch and thread blocks."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.pallas_kernels.mosaic import pl, plgpu
from jaxinfer.pallas_kernels.mosaic.layout import swizzled_tiles
from jaxinfer.pallas_kernels.mosaic.refs import Barrier, Ref, barrier, smem
from jaxinfer.pallas_kernels.mosaic.ring import Ring
from jaxinfer.pallas_kernels.mosaic.tuning import tuned

TILE_Q = 64  # rows of queries per consumer warpgroup: the M of a wgmma
LOG2E = math.log2(math.e)


def row_layout() -> Any:
    """The layout of a vector with one number per row of an accumulator."""
    return plgpu.Layout.WGMMA.reduce(1)


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
    """Choose the tile sizes for rows of `tokens` tokens, where a tile of queries has `heads` heads."""
    key = f"{tokens} tokens, {heads} heads of {head_dim}{', int8' if int8 else ''}"
    if (measured := tuned("prefill_attention", key)) is not None:
        return Tiles(**measured)
    consumers = 1 if tokens * heads <= TILE_Q or (int8 and head_dim == 256) else 2
    # As many keys per tile as fit, to amortise the fixed costs of the softmax, with at least two stages.
    if head_dim == 256:
        return Tiles(64, 2, consumers)  # 208 KiB; int8: 200 KiB
    if head_dim == 128:
        return Tiles(64, 3, consumers) if int8 else Tiles(128, 2, consumers)  # 160 KiB, 192 KiB
    return Tiles(128, 3, consumers)  # 144 KiB; int8: 160 KiB


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The static parameters of a launch.

    Attributes:
      tokens: T, without padding. heads: query heads of a thread block, which share a KV head.
      copy_keys: keys of one TMA copy. page_size: tokens of a page; without a page table those of a row.
      dtype: of the queries. int8: whether the pages are.
      causal: whether queries see no later keys; else they see all up to their row's length.
      alibi: whether there are slopes. scale, window, softcap: as in `attention`.
    """

    tokens: int
    q_heads: int
    kv_heads: int
    head_dim: int
    heads: int
    tiles: Tiles
    copy_keys: int
    page_size: int
    dtype: np.dtype
    int8: bool
    causal: bool
    alibi: bool
    scale: float
    window: int | None
    softcap: float | None

    @property
    def consumer_tokens(self) -> int:
        """Tokens of a consumer warpgroup."""
        return TILE_Q // self.heads

    @property
    def block_tokens(self) -> int:
        """Tokens of a thread block."""
        return self.tiles.consumers * self.consumer_tokens

    @property
    def copies(self) -> int:
        """TMA copies of a tile of keys."""
        return self.tiles.tile_kv // self.copy_keys


class Scales(NamedTuple):
    """The scales of an int8 cache in GMEM, float32 [pages, Hkv]."""

    k: Ref
    v: Ref


class Inputs(NamedTuple):
    """The arrays in GMEM; None for those that a call does not have. D: q's dtype."""

    q: Ref  # D [B, T, Hq, K]
    k: Ref  # D or int8 [pages, page_size, Hkv, K]
    v: Ref
    scales: Scales | None
    page_table: Ref | None  # int32 [B, P]; None: one page per row
    positions: Ref  # int32 [B * T]; one-dimensional, so that a copy may start anywhere
    lengths: Ref | None  # int32 [B]; None: causal
    slopes: Ref | None  # float32 [Hq * tokens per consumer]


class Int8Scratch(NamedTuple):
    """A tile of an int8 cache, waiting to be converted."""

    k: Ref  # int8 [tile_kv, K]
    v: Ref
    k_full: Barrier  # the tile has been copied
    v_full: Barrier


class Scratch(NamedTuple):
    """SMEM and barriers, for W consumers of 64 rows. A row is one head of one token, ordered by head, then token."""

    q: Ref  # D [W, 64, K]; the result at the end
    k: Ref  # D [stages, tile_kv, K]
    v: Ref
    p: Ref  # softmax weights, D [W, 64, tile_kv]
    positions: Ref  # int32 [W, 64]: the first 64 / heads are those of the consumer's tokens
    slopes: Ref | None  # float32 [64]
    bounds: Ref  # int32 [3]: minimum and maximum position of the tile's queries, last position of its keys (or -1)
    int8: Int8Scratch | None
    q_full: Barrier  # queries, positions and slopes have been copied
    bounds_full: Barrier  # `bounds` has been written
    k_full: Barrier  # one per stage: the stage has been filled
    v_full: Barrier  # for a float cache also one for the producer: the last tile has been copied
    k_empty: Barrier  # one per stage: all consumers have read the stage
    v_empty: Barrier


def scratch(plan: Plan) -> Scratch:
    """Declare the scratch of a thread block."""
    dtype, head_dim = plan.dtype, plan.head_dim
    tile_kv, stages, consumers = plan.tiles.tile_kv, plan.tiles.stages, plan.tiles.consumers
    tiled = swizzled_tiles(dtype)  # what wgmma reads
    kv = smem((stages, tile_kv, head_dim), dtype, tiled)
    arrivals = 1 if plan.int8 else plan.copies
    empty = barrier(consumers, stages)
    int8 = None
    if plan.int8:
        tile = smem((tile_kv, head_dim), jnp.int8, swizzled_tiles(jnp.int8, min(head_dim, 128)))
        int8 = Int8Scratch(tile, tile, barrier(plan.copies), barrier(plan.copies))
    return Scratch(
        q=smem((consumers, TILE_Q, head_dim), dtype, tiled),
        k=kv,
        v=kv,
        p=smem((consumers, TILE_Q, tile_kv), dtype, tiled),
        positions=smem((consumers, TILE_Q), jnp.int32),
        slopes=smem((TILE_Q,), jnp.float32) if plan.alibi else None,
        bounds=smem((3,), jnp.int32),
        int8=int8,
        q_full=barrier(consumers * (plan.heads + 1) + plan.alibi),
        bounds_full=barrier(),
        k_full=barrier(arrivals, stages),
        v_full=barrier(arrivals, stages if plan.int8 else stages + 1),
        k_empty=empty,
        v_empty=empty,
    )


class Block(NamedTuple):
    """The queries of a thread block: `heads` heads of one row from `head` on, tokens from `first_token` on."""

    head: jax.Array
    kv_head: jax.Array
    row: jax.Array
    warpgroup: jax.Array
    first_token: jax.Array


def this_block(plan: Plan) -> Block:
    """Return which queries are those of the thread block that runs this."""
    head = lax.axis_index("heads") * plan.heads
    kv_head = lax.div(head, plan.q_heads // plan.kv_heads)
    row, warpgroup = lax.axis_index("row"), lax.axis_index("warpgroup")
    # The last tiles run first: they have the most keys, and short ones fill the SMs at the end.
    tile = pl.cdiv(plan.tokens, plan.block_tokens) - 1 - lax.axis_index("tile")
    return Block(head, kv_head, row, warpgroup, tile * plan.block_tokens)


def key_ring(plan: Plan, bounds: Ref) -> Ring:
    """The tiles of keys from the first window to the last key; there are none if all queries are padding."""
    tile_kv = plan.tiles.tile_kv
    start = 0 if plan.window is None else lax.div(jnp.maximum(bounds[0] - plan.window + 1, 0), tile_kv)
    return Ring(plan.tiles.stages, start, lax.div(bounds[2] + tile_kv, tile_kv))

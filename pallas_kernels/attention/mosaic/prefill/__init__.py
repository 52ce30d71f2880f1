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

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.pallas_kernels.attention.mosaic.prefill.consumer import consume
from jaxinfer.pallas_kernels.attention.mosaic.prefill.plan import (
    LOG2E,
    Inputs,
    Plan,
    Scales,
    Scratch,
    choose_tiles,
    scratch,
    this_block,
)
from jaxinfer.pallas_kernels.attention.mosaic.prefill.producer import produce
from jaxinfer.pallas_kernels.kv_pages import KVPages
from jaxinfer.pallas_kernels.mosaic import pl, plgpu
from jaxinfer.pallas_kernels.mosaic.refs import Ref, gmem
from jaxinfer.pallas_kernels.target import UnsupportedError


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
    options = {"scale": scale, "window": window, "softcap": softcap}
    plan = _plan(q, pages, page_table, causal=lengths is None, alibi=alibi is not None, **options)
    slopes = None if alibi is None else jnp.repeat(alibi * LOG2E, plan.consumer_tokens)
    scales = None
    if pages.k_scale is not None and pages.v_scale is not None:
        scales = Scales(gmem(pages.k_scale), gmem(pages.v_scale))
    inputs = Inputs(
        q=gmem(_pad_to_8(q)),
        k=gmem(_pad_to_8(pages.k)),
        v=gmem(_pad_to_8(pages.v)),
        scales=scales,
        page_table=gmem(page_table),
        positions=gmem(q_positions.reshape(-1)),
        lengths=gmem(lengths),
        slopes=gmem(slopes),
    )
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        kernel_name="prefill_attention",
        out_type=jax.ShapeDtypeStruct(inputs.q.shape, q.dtype),
        grid=(plan.q_heads // plan.heads, q.shape[0], pl.cdiv(plan.tokens, plan.block_tokens)),
        grid_names=("heads", "row", "tile"),
        num_threads=plan.tiles.consumers + 1,
        thread_name="warpgroup",
        scratch_types=[scratch(plan)],
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    return kernel(inputs)[:, : plan.tokens]


def _kernel(inputs: Inputs, out: Ref, scratch: Scratch, *, plan: Plan) -> None:
    """Run one of the warpgroups of a thread block."""
    block, consumers = this_block(plan), plan.tiles.consumers
    pl.when(block.warpgroup == consumers)(lambda: produce(plan, inputs, scratch, block))
    pl.when(block.warpgroup < consumers)(lambda: consume(plan, inputs, scratch, block, out))


def _plan(
    q: jax.Array, pages: KVPages, page_table: jax.Array | None, *, causal: bool, alibi: bool, **options: Any
) -> Plan:
    """Return the plan of a call. Raises UnsupportedError."""
    _, tokens, q_heads, head_dim = q.shape
    _, page_size, kv_heads, _ = pages.k.shape
    int8 = pages.k_scale is not None
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise UnsupportedError(f"prefill_attention takes bfloat16 or float16 queries, got {q.dtype}")
    if not int8 and pages.k.dtype != q.dtype:
        raise UnsupportedError(f"prefill_attention takes keys in int8 or {q.dtype} as the queries, got {pages.k.dtype}")
    if head_dim not in (64, 128, 256):
        raise UnsupportedError(f"prefill_attention takes a head_dim of 64, 128 or 256, got {head_dim}")
    heads = math.gcd(q_heads // kv_heads, 8)  # leaves at least 8 tokens a head, the rows of an SMEM tile
    tiles = choose_tiles(tokens, heads, head_dim, int8=int8)
    copy_keys = tiles.tile_kv if page_table is None else min(page_size, tiles.tile_kv)
    if page_table is not None and (page_size % copy_keys or tiles.tile_kv % copy_keys or copy_keys % 8):
        raise UnsupportedError(
            f"prefill_attention takes pages of 8, 16, 32, 64 or a multiple of 128 tokens, got {page_size}"
        )
    return Plan(
        tokens=tokens,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        heads=heads,
        tiles=tiles,
        copy_keys=copy_keys,
        page_size=page_size,
        dtype=q.dtype,
        int8=int8,
        causal=causal,
        alibi=alibi,
        **options,
    )


def _pad_to_8(x: jax.Array) -> jax.Array:
    """Pad [B, T, ...] to T a multiple of 8, unless T < 8: TMA's tiles of 8 rows must divide the array."""
    tokens = x.shape[1]
    if tokens < 8 or tokens % 8 == 0:
        return x
    return jnp.pad(x, ((0, 0), (0, -tokens % 8)) + ((0, 0),) * (x.ndim - 2))

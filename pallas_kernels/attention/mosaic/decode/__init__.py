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

from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.pallas_kernels.attention.mosaic.decode.kernel import run_block
from jaxinfer.pallas_kernels.attention.mosaic.decode.plan import (
    LOG2E,
    TILE_KV,
    Cache,
    Inputs,
    Norms,
    Outputs,
    Partials,
    Plan,
    Rotary,
    Scales,
    Scratch,
    choose_tiles,
    outputs,
    scratch,
)
from jaxinfer.pallas_kernels.kv_pages import KVPages
from jaxinfer.pallas_kernels.mosaic import plgpu
from jaxinfer.pallas_kernels.mosaic.cluster import check_cluster
from jaxinfer.pallas_kernels.mosaic.refs import Ref, gmem
from jaxinfer.pallas_kernels.target import UnsupportedError, require_shared_bytes

MAX_DECODE_TOKENS = 8
"""Maximum tokens of a row: the last sampled token and its draft tokens."""


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
    """Attend as `cached_attention`, for up to MAX_DECODE_TOKENS tokens a row. Raises UnsupportedError."""
    plan = _plan(qkv, pages, page_table, rotary, alibi, **options)
    tiles = choose_tiles(plan)
    check_cluster(tiles.splits)
    require_shared_bytes(tiles.stages * plan.stage_bytes + plan.other_bytes)
    inputs = _inputs(plan, qkv, pages, page_table, positions, rotary, norms, alibi)

    def kernel(inputs: Inputs, heads: Ref, partials: Partials | None, scratch: Scratch) -> None:
        run_block(plan, tiles, inputs, Outputs(heads, partials), scratch)

    heads, _ = plgpu.kernel(
        kernel,
        kernel_name="decode_attention_kernel",
        out_type=outputs(plan, tiles),
        scratch_types=[scratch(plan, tiles)],
        grid=(plan.batch, plan.kv_heads),
        grid_names=("row", "head"),
        cluster=(tiles.splits,),
        cluster_names=("split",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(inputs)
    refs = jax.tree.leaves(inputs.cache)
    cache = (jax.freeze(ref).reshape(x.shape) for ref, x in zip(refs, jax.tree.leaves(pages), strict=True))
    return heads.reshape(*qkv.shape[:2], -1), KVPages(*cache)


def _inputs(
    plan: Plan,
    qkv: jax.Array,
    pages: KVPages,
    page_table: jax.Array,
    positions: jax.Array,
    rotary: tuple[jax.Array, jax.Array] | None,
    norms: tuple[jax.Array, jax.Array] | None,
    alibi: jax.Array | None,
) -> Inputs:
    """The kernel's inputs."""
    slopes = None
    if alibi is not None:
        slopes = jnp.tile(alibi.reshape(plan.kv_heads, -1), plan.tokens) * LOG2E
        slopes = jnp.pad(slopes, ((0, 0), (0, plan.queries - slopes.shape[1])))
    return Inputs(
        qkv=gmem(qkv.reshape(-1, plan.head_dim)),
        page_table=gmem(page_table),
        positions=gmem(positions),
        rotary=None if rotary is None else Rotary(*(gmem(x.reshape(-1, plan.rotary_half)) for x in rotary)),
        norms=None if norms is None else Norms(*(gmem(x) for x in norms)),
        slopes=gmem(slopes),
        cache=_mutable(pages),
    )


def _mutable(pages: KVPages) -> Cache:
    """The pages as mutable refs, so that XLA updates them in place, with a row for each token."""
    k, v = (gmem(jax.new_ref(x.reshape(-1, x.shape[2] * x.shape[3]))) for x in (pages.k, pages.v))
    if pages.k_scale is None or pages.v_scale is None:
        return Cache(k, v, None)
    return Cache(k, v, Scales(*(gmem(jax.new_ref(x)) for x in (pages.k_scale, pages.v_scale))))


def _plan(qkv: jax.Array, pages: KVPages, page_table: jax.Array, rotary: Any, alibi: Any, **options: Any) -> Plan:
    """Return the plan of a call. Raises UnsupportedError."""
    batch, tokens, width = qkv.shape
    kv_heads, head_dim = pages.k.shape[2:]
    plan = Plan(
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
    if plan.page_size % 8 or (TILE_KV % plan.page_size and plan.page_size % TILE_KV):
        raise UnsupportedError(f"page_size must be 8, 16, 32 or a multiple of 64, got {plan.page_size}")
    if plan.int8 and plan.page_size > TILE_KV:
        raise UnsupportedError(f"page_size must be at most {TILE_KV} in int8, got {plan.page_size}")
    if plan.rotary_half and (plan.rotary_half % 16 or head_dim % plan.rotary_half):
        raise UnsupportedError(f"rotary_dim / 2 must be a multiple of 16 that divides head_dim, got {plan.rotary_half}")
    if plan.queries > (max_queries := min(64, 8192 // head_dim)):  # registers for the accumulators
        raise UnsupportedError(f"tokens * group must be at most {max_queries}, got {tokens} * {plan.group}")
    return plan

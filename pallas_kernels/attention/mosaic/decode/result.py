"""The heads' outputs: the splits of a cluster are combined, divided by l_i and written."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.pallas_kernels.attention.mosaic.decode.plan import Block, Outputs, Partials, Plan, Scratch, Tiles
from jaxinfer.pallas_kernels.attention.mosaic.decode.softmax import Softmax
from jaxinfer.pallas_kernels.mosaic import pl, plgpu
from jaxinfer.pallas_kernels.mosaic.cluster import meet, partial_results
from jaxinfer.pallas_kernels.mosaic.layout import broadcast
from jaxinfer.pallas_kernels.mosaic.refs import Index, Ref


def write_heads(plan: Plan, tiles: Tiles, out: Outputs, s: Scratch, block: Block, state: list[Softmax]) -> None:
    """Write this thread block's part of the row's result. When it returns, the whole cluster has read its keys."""
    if out.partials is None or s.partials_full is None:
        for queries, softmax in zip(plan.query_tiles, state, strict=True):
            _divide(plan, s, queries, softmax)
        pl.loop(0, plan.tokens)(lambda token: _write(plan, out, s, block, token * plan.group, plan.group))
        return
    partials = Partials(*(x.at[block.row, block.head] for x in out.partials))
    _write_partials(plan, partials, block, state)
    meet(s.partials_full)

    @pl.loop(block.split, plan.queries // 8, step=tiles.splits)  # each thread block finishes groups of eight queries
    def _(eight: jax.Array) -> None:
        queries = pl.ds(8 * eight, 8)
        _divide(plan, s, queries, _combine(plan, partials, queries))
        count = jnp.minimum(plan.tokens * plan.group - queries.start, 8)
        pl.loop(0, count)(lambda query: _write(plan, out, s, block, queries.start + query, 1))


def _divide(plan: Plan, s: Scratch, queries: "pl.Slice", softmax: Softmax) -> None:
    """acc / l_i of some queries, into shared memory."""
    inverse = jnp.where(softmax.l_i > 0, 1.0 / softmax.l_i, 0.0)  # 0 in a row of padding
    for features, x in zip(plan.feature_tiles, softmax.acc, strict=True):
        s.q_rows.at[queries, features].T[...] = (x * broadcast(inverse, x.shape, 1)).astype(plan.dtype)
    plgpu.commit_smem()


def _write(plan: Plan, out: Outputs, s: Scratch, block: Block, start: Index, count: int) -> None:
    """Send `count` queries of one token to global memory."""
    token, query = lax.div(start, plan.group), lax.rem(start, plan.group)
    target = ((block.row * plan.tokens + token) * plan.kv_heads + block.head) * plan.group + query
    plgpu.copy_smem_to_gmem(s.q_rows.at[pl.ds(start, count)], out.heads.at[pl.ds(target, count)])


def _write_partials(plan: Plan, partials: Partials, block: Block, state: list[Softmax]) -> None:
    """Write the split's softmax to global memory. partials: of this row and head."""
    for queries, (m_i, l_i, acc) in zip(plan.query_tiles, state, strict=True):
        for features, x in zip(plan.feature_tiles, acc, strict=True):
            partials.acc.at[block.split, features, queries][...] = x
        partials.ml.at[block.split, 0, queries][...] = m_i
        partials.ml.at[block.split, 1, queries][...] = l_i


def _combine(plan: Plan, partials: Partials, queries: "pl.Slice") -> Softmax:
    """The softmax of some queries over the keys of all splits. partials: of this row and head."""
    layout = plan.layouts.acc
    m_parts, l_parts = (list(partial_results(partials.ml, (i, queries), layout.reduce(0))) for i in (0, 1))
    m_i = functools.reduce(jnp.maximum, m_parts)
    alphas = [jnp.exp2(x - m_i) for x in m_parts]

    def combine(parts: list[jax.Array]) -> jax.Array:
        factors = [
            alpha if x.ndim == 1 else broadcast(alpha, x.shape, 1) for alpha, x in zip(alphas, parts, strict=True)
        ]
        return functools.reduce(jnp.add, (factor * x for factor, x in zip(factors, parts, strict=True)))

    def combine_features(ref: Ref, features: "pl.Slice") -> jax.Array:
        return combine(list(partial_results(ref, (features, queries), layout)))

    l_i = combine(l_parts)
    return Softmax(m_i, l_i, [combine_features(partials.acc, features) for features in plan.feature_tiles])

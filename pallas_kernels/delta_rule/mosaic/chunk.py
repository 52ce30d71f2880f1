"""The kernel that computes what a chunk of tokens needs no state for.

    grid (chunk, value head)

With the decay c(i) from the start of a chunk up to token i, it computes two matrices [64, 64]:

    system = (I + L)^-1 diag(beta), L(i, j) = beta(i) k(i) k(j) exp(c(i) - c(j)) below the diagonal
    seen(i, j) = q(i) k(j) exp(c(i) - c(j)), on and below the diagonal

The inverse of a diagonal block of 16 comes by substitution, column by column. Products join two blocks to one twice
as large, twice. Powers of L would take fewer steps, but where keys are alike they grow like binomials, and cancel.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.pallas_kernels.delta_rule.mosaic.tiles import CHUNK, layout, matrix, multiply
from jaxinfer.pallas_kernels.mosaic import pl, plgpu
from jaxinfer.pallas_kernels.mosaic.layout import broadcast, full, iota, load, load_broadcast
from jaxinfer.pallas_kernels.mosaic.refs import Barrier, Ref, barrier, gmem, smem

_BLOCK = 16  # tokens whose system is solved by substitution
_SHAPE = (CHUNK, CHUNK)


class Inputs(NamedTuple):
    """Arrays in global memory, float32.

    Attributes:
      q, k: [N 64, Hk, K].
      steps: [N, Hv, 2, 64], the sums of decays up to each token of its chunk, and the betas.
    """

    q: Ref
    k: Ref
    steps: Ref


class _Scratch(NamedTuple):
    """Shared memory of a thread block, and its barrier.

    Attributes:
      q, k: [64, K]. left, right: [64, 64], operands. steps: [2, 64].
      columns: [16, 64], those of the diagonal blocks, each with that of all blocks after the other.
      full: the inputs have been copied.
    """

    q: Ref
    k: Ref
    left: Ref
    right: Ref
    steps: Ref
    columns: Ref
    full: Barrier


def chunk_matrices(q: jax.Array, k: jax.Array, steps: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute `system` and `seen` of all chunks, float32 [N, Hv, 64, 64]. Arguments as in `Inputs`."""
    (chunks, heads, _, _), key_dim = steps.shape, k.shape[-1]
    scratch = _Scratch(
        q=matrix(CHUNK, key_dim),
        k=matrix(CHUNK, key_dim),
        left=matrix(*_SHAPE),
        right=matrix(*_SHAPE),
        steps=smem((2, CHUNK), jnp.float32),
        columns=smem((_BLOCK, CHUNK), jnp.float32),
        full=barrier(3),
    )
    of_chunks = jax.ShapeDtypeStruct((chunks, heads, *_SHAPE), jnp.float32)
    return plgpu.kernel(
        functools.partial(_kernel, heads // k.shape[1]),
        out_type=(of_chunks, of_chunks),
        scratch_types=[scratch],
        grid=(chunks, heads),
        grid_names=("chunk", "head"),
        kernel_name="delta_rule_chunk",
    )(Inputs(*(gmem(x) for x in (q, k, steps))))


def _kernel(group: int, inputs: Inputs, system: Ref, seen: Ref, scratch: _Scratch) -> None:
    """Compute the matrices of one chunk and value head. group: value heads of a key head."""
    chunk, head, s = lax.axis_index("chunk"), lax.axis_index("head"), scratch
    tokens, key_head = pl.ds(chunk * CHUNK, CHUNK), lax.div(head, group)
    plgpu.copy_gmem_to_smem(inputs.q.at[tokens, key_head], s.q, s.full)
    plgpu.copy_gmem_to_smem(inputs.k.at[tokens, key_head], s.k, s.full)
    plgpu.copy_gmem_to_smem(inputs.steps.at[chunk, head], s.steps, s.full)
    row, column = (iota(_SHAPE, axis, layout()) for axis in (0, 1))
    # Along rows from global memory, along columns from SMEM: Mosaic takes two loads of one vector for the same.
    to, beta = (load_broadcast(inputs.steps.at[chunk, head, i], _SHAPE, 0, layout()) for i in (0, 1))
    plgpu.barrier_wait(s.full)
    since, beta_since = (load_broadcast(s.steps.at[i], _SHAPE, 1, layout()) for i in (0, 1))
    between = jnp.exp(jnp.where(row >= column, to - since, -jnp.inf))
    seen[chunk, head] = multiply(s.q, s.k) * between
    lower = jnp.where(row > column, multiply(s.k, s.k) * between * beta, 0.0)
    inverse = _invert_blocks(s, lower, row, column)
    for size in (_BLOCK, 2 * _BLOCK):
        other = lax.div(row, size) > lax.div(column, size)
        joined = other & (lax.div(row, 2 * size) == lax.div(column, 2 * size))
        inverse = _join_blocks(s, inverse, jnp.where(joined, lower, 0.0))
    system[chunk, head] = inverse * beta_since


def _invert_blocks(s: _Scratch, lower: jax.Array, row: jax.Array, column: jax.Array) -> jax.Array:
    """Invert the diagonal blocks of 16 of I + lower. They are solved together, from the last column of each on."""
    block = lax.div(row, _BLOCK) * _BLOCK

    def extract(j: jax.Array, _: None) -> None:
        s.columns[j] = jnp.sum(jnp.where(column == block + j, lower, 0.0), axis=1)

    def solve(i: jax.Array, inverse: jax.Array) -> jax.Array:
        j = _BLOCK - 1 - i
        known = jnp.sum(inverse * load_broadcast(s.columns.at[j], _SHAPE, 1, layout()), axis=1)
        new = jnp.where(row == column, 1.0, 0.0) - broadcast(known, _SHAPE, 0)
        return jnp.where(column == block + j, new, inverse)

    lax.fori_loop(0, _BLOCK, extract, None)
    plgpu.commit_smem()
    return lax.fori_loop(0, _BLOCK, solve, full(_SHAPE, 0, jnp.float32, layout()))


def _join_blocks(s: _Scratch, inverse: jax.Array, lower: jax.Array) -> jax.Array:
    """The inverse with blocks twice as large: [[A, 0], [-B L A, B]], of blocks A and B with L below A."""
    s.left[...] = inverse
    s.right[...] = lower
    plgpu.commit_smem()
    transposed = load(s.left.T, layout())
    plgpu.commit_smem()  # all warps have read it
    s.left[...] = transposed
    plgpu.commit_smem()
    below = multiply(s.left, s.right)  # (L inverse)^T
    plgpu.commit_smem()
    s.left[...] = inverse
    s.right[...] = below
    plgpu.commit_smem()
    return inverse - multiply(s.left, s.right)

"""The kernel that takes states through the chunks of their rows.

    grid (row, value head, tile of columns)

The columns of a state do not depend on one another. A thread block has 64 of them in shared memory for all chunks of a
slot, also where these are several rows, and reads and writes them in global memory once. For each chunk it computes,
with the matrices of `chunk.py` and the decay c(i) from the chunk's start up to token i,

    new = system (v - exp(c) k S), what the tokens write
    o = exp(c) q S + seen new
    S = exp(c(end)) S + k^T (exp(c(end) - c) new)

All of it is transposed, so that each operand lies in shared memory along the axis that is summed over: Mosaic loads no
others. While a chunk is computed, TMA copies of the next one fill what it has been done with.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.pallas_kernels.delta_rule.mosaic.tiles import CHUNK, layout, matrix, multiply
from jaxinfer.pallas_kernels.mosaic import pl, plgpu
from jaxinfer.pallas_kernels.mosaic.layout import full, iota, load, load_broadcast, store
from jaxinfer.pallas_kernels.mosaic.refs import Barrier, Ref, barrier, gmem, smem

COLUMNS = 64
"""Columns of a state in a thread block: the rows of an mma by all four warps."""
_SHAPE = (COLUMNS, CHUNK)


class Tokens(NamedTuple):
    """The numbers that tokens of chunks bring, float32 in global memory.

    Attributes:
      q, k: [N 64, Hk, K], padded with zeros to a multiple of 64 keys. v: [N 64, Hv, V]. keys: [N, Hk, K, 64], k again.
      system, seen: [N, Hv, 64, 64].
      factors: [N, Hv, 2, 64]: exp(c), and exp(c(end) - c) or 0 for tokens that do not move the state.
      end: [N, Hv], exp(c(end)).
    """

    q: Ref
    k: Ref
    keys: Ref
    v: Ref
    system: Ref
    seen: Ref
    factors: Ref
    end: Ref


class Order(NamedTuple):
    """Which chunks move which states, int32 in global memory.

    Attributes:
      chunks: [N], the chunks of each slot one after the other.
      bounds: [B, 2], from where to where the chunks of a row's slot are in `chunks`; 0, 0: another row has them.
      slot, position: [B], of the row, and of its first token.
    """

    chunks: Ref
    bounds: Ref
    slot: Ref
    position: Ref


class _Scratch(NamedTuple):
    """Shared memory of a thread block, and its barriers.

    Attributes:
      k, q: [64, K]. keys: [K, 64]. v, system, seen: [64, 64]. factors: [2, 64].
      state: [64, K], transposed. left, right: [64, 64], operands.
      k_full: k has been copied. matrices_full: q, system, seen and factors. rest_full: v and keys. state_full: the
        state, to `keys`.
    """

    k: Ref
    q: Ref
    keys: Ref
    v: Ref
    system: Ref
    seen: Ref
    factors: Ref
    state: Ref
    left: Ref
    right: Ref
    k_full: Barrier
    matrices_full: Barrier
    rest_full: Barrier
    state_full: Barrier


def shared_bytes(key_dim: int) -> int:
    """The shared memory of a thread block."""
    return 4 * (4 * CHUNK * key_dim + 5 * CHUNK * CHUNK + 2 * CHUNK) + 1024  # and barriers, aligned


def pass_states(tokens: Tokens, order: Order, states: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Move states [S, Hv, K, V] through the chunks: outputs [N 64, Hv, V], and the new states in their place.

    The outputs of chunks that `order` leaves out are undefined.
    """
    heads, value_dim, key_dim = states.shape[1], states.shape[3], tokens.k.shape[-1]
    square, of_keys = matrix(CHUNK, CHUNK), matrix(CHUNK, key_dim)
    scratch = _Scratch(
        k=of_keys,
        q=of_keys,
        keys=matrix(key_dim, CHUNK),
        v=square,
        system=square,
        seen=square,
        factors=smem((2, CHUNK), jnp.float32),
        state=of_keys,
        left=square,
        right=square,
        k_full=barrier(),
        matrices_full=barrier(4),
        rest_full=barrier(2),
        state_full=barrier(),
    )
    state = jax.new_ref(states)
    output = plgpu.kernel(
        functools.partial(_kernel, heads // tokens.k.shape[1]),
        out_type=jax.ShapeDtypeStruct((tokens.k.shape[0], heads, value_dim), jnp.float32),
        scratch_types=[scratch],
        grid=(order.slot.shape[0], heads, value_dim // COLUMNS),
        grid_names=("row", "head", "column"),
        kernel_name="delta_rule_chain",
    )(tokens, order, gmem(state))
    return output, jax.freeze(state)


class _Block(NamedTuple):
    """The columns that a thread block computes, and its part of the arrays in global memory.

    Attributes:
      head, key_head: of the state. columns: the slice of its columns.
      output: [N 64, Hv, V].
    """

    tokens: Tokens
    head: jax.Array
    key_head: jax.Array
    columns: Any
    output: Ref

    def fetch_k(self, s: _Scratch, chunk: jax.Array) -> None:
        """Begin the copy of what a chunk needs first."""
        plgpu.copy_gmem_to_smem(self.tokens.k.at[_places(chunk), self.key_head], s.k, s.k_full)

    def fetch_matrices(self, s: _Scratch, chunk: jax.Array) -> None:
        """Begin the copies of what a chunk needs then."""
        t = self.tokens
        plgpu.copy_gmem_to_smem(t.q.at[_places(chunk), self.key_head], s.q, s.matrices_full)
        for source, target in ((t.system, s.system), (t.seen, s.seen), (t.factors, s.factors)):
            plgpu.copy_gmem_to_smem(source.at[chunk, self.head], target, s.matrices_full)

    def fetch_rest(self, s: _Scratch, chunk: jax.Array) -> None:
        """Begin the copies into what a chunk uses up to its end."""
        plgpu.copy_gmem_to_smem(self.tokens.v.at[_places(chunk), self.head, self.columns], s.v, s.rest_full)
        plgpu.copy_gmem_to_smem(self.tokens.keys.at[chunk, self.key_head], s.keys, s.rest_full)


def _kernel(group: int, tokens: Tokens, order: Order, states: Ref, output: Ref, s: _Scratch) -> None:
    """Take the columns of one state through its chunks. group: value heads of a key head."""
    row, head = lax.axis_index("row"), lax.axis_index("head")
    columns = pl.ds(lax.axis_index("column") * COLUMNS, COLUMNS)
    block = _Block(tokens, head, lax.div(head, group), columns, output)
    start, stop = order.bounds[row, 0], order.bounds[row, 1]
    slot = jnp.clip(order.slot[row], 0, states.shape[0] - 1)  # padding may have any

    @pl.when(start < stop)
    def _() -> None:
        first, place = order.chunks[start], states.at[slot, head, :, columns]
        rows = s.keys.at[pl.ds(0, place.shape[0])]
        plgpu.copy_gmem_to_smem(place, rows, s.state_full)
        block.fetch_k(s, first)
        block.fetch_matrices(s, first)
        _load_state(s, place.shape[0], order.position[row])
        block.fetch_rest(s, first)

        @pl.loop(start, stop)
        def _(i: jax.Array) -> None:
            _move(s, block, order.chunks[i], order.chunks[jnp.minimum(i + 1, stop - 1)], i + 1 < stop)

        s.keys[...] = load(s.state.T, layout())
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(rows, place)
        plgpu.wait_smem_to_gmem(0)


def _load_state(s: _Scratch, key_dim: int, position: jax.Array) -> None:
    """Transpose a state that is copied to `keys`. A select: what another sequence has left may be NaN."""
    plgpu.barrier_wait(s.state_full)
    before = load(s.keys.T, layout())
    begins = full(before.shape, position, jnp.int32, layout()) == 0
    s.state[...] = jnp.where(begins | (iota(before.shape, 1, layout()) >= key_dim), 0.0, before)
    plgpu.commit_smem()


def _move(s: _Scratch, block: _Block, chunk: jax.Array, following: jax.Array, goes_on: jax.Array) -> None:
    """Compute the outputs of a chunk and the state after it, and begin the copies of the chunk that follows, if any.

    A commit is also a barrier: all warps have read what the copies after it overwrite.
    """
    end = block.tokens.end[chunk, block.head]
    plgpu.barrier_wait(s.k_full)
    had = multiply(s.state, s.k)
    plgpu.barrier_wait(s.matrices_full)
    plgpu.barrier_wait(s.rest_full)
    grown, left = (load_broadcast(s.factors.at[i], _SHAPE, 1, layout()) for i in (0, 1))
    s.left[...] = load(s.v.T, layout()) - grown * had
    read = grown * multiply(s.state, s.q)
    plgpu.commit_smem()
    pl.when(goes_on)(lambda: block.fetch_k(s, following))
    new = multiply(s.left, s.system)
    s.right[...] = new
    plgpu.commit_smem()
    s.v[...] = multiply(s.right, s.seen, read)  # its place is free
    s.left[...] = left * new
    plgpu.commit_smem()
    pl.when(goes_on)(lambda: block.fetch_matrices(s, following))
    store(block.output.at[_places(chunk), block.head, block.columns], load(s.v.T, layout()))
    s.state[...] = multiply(s.left, s.keys, end * load(s.state, layout()))
    plgpu.commit_smem()
    pl.when(goes_on)(lambda: block.fetch_rest(s, following))


def _places(chunk: jax.Array) -> Any:
    """The slice of a chunk's tokens."""
    return pl.ds(chunk * CHUNK, CHUNK)

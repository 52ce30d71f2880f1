"""Gating as kernels: softmax, top-k, and the tables that map tokens to rows sorted by expert.

Tables replace the one-hot masks of the first MoE implementations (DeepSpeed Inference, section V-C): token -> experts,
token -> rows, row -> token. One kernel makes them all for up to 64 tokens; more tokens take two kernels, with a thread
block for each 64 tokens.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.pallas_kernels.moe.routing import Routing, finite, limit_capacity
from jaxinfer.pallas_kernels.mosaic import pl, plgpu
from jaxinfer.pallas_kernels.mosaic.refs import Ref
from jaxinfer.pallas_kernels.target import UnsupportedError, require_shared_bytes

# A thread block has a tile of tokens, with a row of logits in each warp's registers; a row's maximum takes
# five shuffles. For the scan, each thread owns one or two experts and counts over the tokens, so no two threads share a
# counter. The rest are loops over single choices that all threads run redundantly, reading and writing the same values
# at the same places. They read a batch before writing it, to wait for shared memory only once.

_TILE = 64  # tokens of a thread block
_MAX_EXPERTS = 256  # limited by a warp's registers and by a row of a TMA copy
_MAX_K = 16
_BATCH = 8  # choices that are read together
_TILES = 64  # tiles whose counts are in shared memory together


def _by_row() -> Any:
    """A row per warp, four adjacent elements per lane."""
    return plgpu.Layout.TILED(plgpu.Tiling(((4, 128), (4,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


class _Plan(NamedTuple):
    """Static sizes: `tile` tokens per thread block, `width` experts with padding."""

    tokens: int
    experts: int
    k: int
    tile: int
    width: int

    @property
    def choices(self) -> int:
        """Choices of a tile."""
        return self.tile * self.k

    @property
    def shared_bytes(self) -> int:
        """Of a thread block, at most: logits and scan, six vectors of choices, four more; 16 KiB for alignment."""
        return 4 * (2 * self.tile * self.width + 6 * self.choices + self.tile + 3 * self.width) + (16 << 10)

    def valid_tokens(self) -> jax.Array:
        """How many tokens of this thread block's tile are not padding."""
        return jnp.minimum(self.tokens - lax.axis_index("tile") * self.tile, self.tile)


def top_k_gating(logits: jax.Array, *, k: int, capacity: int | None, normalize: bool) -> Routing:
    """Route each token to its experts. Arguments as of `api`. Raises UnsupportedError."""
    tokens, num_experts = logits.shape
    if num_experts > _MAX_EXPERTS or num_experts % 4:
        raise UnsupportedError(f"top_k_gating takes up to {_MAX_EXPERTS} experts, a multiple of 4, got {num_experts}")
    if k > _MAX_K:
        raise UnsupportedError(f"top_k_gating takes up to {_MAX_K} experts per token, got {k}")
    tile = min(_TILE, 4 * pl.cdiv(tokens, 4))
    plan = _Plan(tokens, num_experts, k, tile, width=128 * pl.cdiv(num_experts, 128))
    require_shared_bytes(plan.shared_bytes)
    tiles = pl.cdiv(tokens, tile)
    kernel = functools.partial(plgpu.kernel, grid=(tiles,), grid_names=("tile",))
    integers = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    per_choice, per_expert = integers((tokens * k,)), integers((num_experts,))
    chosen = (per_choice, jax.ShapeDtypeStruct(per_choice.shape, jnp.float32))
    tables = (per_choice, per_choice, per_expert, per_expert)
    positions_and_counts = (per_choice, integers((tiles, plan.width)))
    gate = kernel(
        functools.partial(_gate, plan=plan, normalize=normalize),
        out_type=chosen + (tables if tiles == 1 else positions_and_counts),
        kernel_name="moe_gate",
    )
    # Mosaic swizzles the copy in tiles of 32 columns and 8 rows. With three dimensions, the first, here the tokens, is
    # not tiled and can have any size.
    padding = -num_experts % 32 if num_experts > 32 else 0
    experts, weights, *rest = gate(jnp.pad(logits, ((0, 0), (0, padding)))[:, None])
    if tiles > 1:
        place = functools.partial(_place, plan=plan, tiles=tiles)
        rest = kernel(place, out_type=tables, kernel_name="moe_place")(experts, *rest)
    rows, token_of_row, offsets, sizes = rest
    experts, weights, rows = (x.reshape(tokens, k) for x in (experts, weights, rows))
    routing = Routing(experts, weights, rows, token_of_row, offsets, sizes)
    return routing if capacity is None else limit_capacity(routing, capacity)


def _gate(logits_g: Ref, experts_g: Ref, weights_g: Ref, *results_g: Ref, plan: _Plan, normalize: bool) -> None:
    """Softmax and top-k of a tile; then the tables if it is the only tile, else the tile's positions and counts.

    results_g: rows, tokens, offsets, sizes (see `_assign_rows`), or positions int32 [N k] and counts int32
    [tiles, width].
    """
    tile = lax.axis_index("tile")
    single_tile = len(results_g) > 2

    @functools.partial(
        pl.run_scoped,
        logits=plgpu.SMEM((plan.tile, 1, plan.width), jnp.float32),
        logits_full=plgpu.Barrier(),
        scan=plgpu.SMEM((plan.tile, plan.width), jnp.int32),
        best_experts=plgpu.SMEM((plan.k, plan.tile), jnp.int32),
        raw_probs=plgpu.SMEM((plan.k, plan.tile), jnp.float32),
        inverse_sums=plgpu.SMEM((plan.tile,), jnp.float32),
        experts=plgpu.SMEM((plan.choices,), jnp.int32),
        weights=plgpu.SMEM((plan.choices,), jnp.float32),
        positions=plgpu.SMEM((plan.choices,), jnp.int32),
    )
    def _(logits, logits_full, scan, best_experts, raw_probs, inverse_sums, experts, weights, positions):
        source = logits_g.at[pl.ds(tile * plan.tile, plan.tile), pl.ds(0, 1), _padded_slice(plan.width)]
        plgpu.copy_gmem_to_smem(source, logits, logits_full, oob_mode=plgpu.OOBFillMode.ZEROS)
        plgpu.barrier_wait(logits_full)
        _top_k(logits, scan, best_experts, raw_probs, inverse_sums, plan, normalize)
        plgpu.commit_smem()
        counts = _scan(scan, plan)
        plgpu.commit_smem()

        def read(i):
            token, choice = i // plan.k, i % plan.k
            expert = best_experts[choice, token]
            return expert, raw_probs[choice, token] * inverse_sums[token], scan[token, expert]

        def write(i, values):
            experts[i], weights[i], positions[i] = values

        _for_each(plan.choices, read, write)
        _store(experts, experts_g, plan)
        _store(weights, weights_g, plan)
        if single_tile:
            _assign_rows(experts, positions, counts, jnp.zeros_like(counts), *results_g, plan=plan)
        else:
            _store(positions, results_g[0], plan)
            results_g[1][tile] = counts
            plgpu.wait_smem_to_gmem(0)


def _top_k(
    logits: Ref, chosen: Ref, best_experts: Ref, raw_probs: Ref, inverse_sums: Ref, plan: _Plan, normalize: bool
) -> None:
    """The k highest logits of each token.

    logits: f32 [tile, width]. Writes `chosen`: int32 [tile, width], 1 for each chosen expert, else 0; `best_experts`:
    int32 [k, tile]; `raw_probs`: f32 [k, tile], exp(logit - maximum); `inverse_sums`: f32 [tile], 1 / their sum. The
    weights are raw_probs * inverse_sums.
    """
    shape = (plan.tile, plan.width)
    column = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, shape, 1), _by_row())
    taken = -jnp.inf  # experts already taken and padding: below every logit
    remaining = jnp.where(column < plan.experts, finite(plgpu.load(logits.at[:, 0], layout=_by_row())), taken)

    def broadcast(vector):
        return lax.broadcast_in_dim(vector, shape, (0,))

    max_logit = jnp.max(remaining, axis=1)
    total = jnp.zeros_like(max_logit) if normalize else jnp.sum(jnp.exp(remaining - broadcast(max_logit)), axis=1)

    def take(choice, state):
        remaining, total = state
        logit = jnp.max(remaining, axis=1)
        expert = jnp.min(jnp.where(remaining == broadcast(logit), column, plan.experts - 1), axis=1)
        prob = jnp.exp(logit - max_logit)
        best_experts[choice], raw_probs[choice] = expert, prob
        return jnp.where(column == broadcast(expert), taken, remaining), total + prob if normalize else total

    remaining, total = lax.fori_loop(0, plan.k, take, (remaining, total))
    inverse_sums[...] = 1 / total
    chosen[...] = jnp.where((remaining == taken) & (column < plan.experts), 1, 0)


def _scan(chosen: Ref, plan: _Plan) -> jax.Array:
    """How many tokens of the tile chose each expert, [width]. Overwrites `chosen` (0 or 1) with the exclusive scan: how
    many earlier tokens chose the expert."""

    def count(token, counts):
        is_chosen = chosen[token]
        chosen[token] = counts
        return counts + is_chosen

    return lax.fori_loop(0, plan.valid_tokens(), count, jnp.zeros(plan.width, jnp.int32))


def _place(experts_g: Ref, positions_g: Ref, counts_g: Ref, *results_g: Ref, plan: _Plan, tiles: int) -> None:
    """The tables, from each tile's choices, positions and counts; every thread block sums the counts of all tiles."""
    tile = lax.axis_index("tile")

    @functools.partial(
        pl.run_scoped,
        experts=plgpu.SMEM((plan.choices,), jnp.int32),
        positions=plgpu.SMEM((plan.choices,), jnp.int32),
        counts=plgpu.SMEM((_TILES, plan.width), jnp.int32),
        choices_full=plgpu.Barrier(num_arrivals=2 * len(_copies(plan.choices))),
        counts_full=plgpu.Barrier(),
    )
    def _(experts, positions, counts, choices_full, counts_full):
        _load(experts_g, experts, choices_full, plan)
        _load(positions_g, positions, choices_full, plan)

        def iteration(i, state):
            source = counts_g.at[pl.ds(i * _TILES, _TILES), pl.ds(0, plan.width)]
            plgpu.copy_gmem_to_smem(source, counts, counts_full, oob_mode=plgpu.OOBFillMode.ZEROS)
            plgpu.barrier_wait(counts_full)

            def add_tile(t, state):
                total, before = state
                count, is_before = counts[t], (i * _TILES + t < tile).astype(jnp.int32)
                return total + count, before + count * is_before

            state = lax.fori_loop(0, _TILES, add_tile, state)
            plgpu.commit_smem()  # a barrier: all warps have read what the next copy overwrites
            return state

        zeros = jnp.zeros(plan.width, jnp.int32)
        total, before = lax.fori_loop(0, pl.cdiv(tiles, _TILES), iteration, (zeros, zeros))
        plgpu.barrier_wait(choices_full)
        _assign_rows(experts, positions, total, before, *results_g, plan=plan)


def _assign_rows(
    experts: Ref,
    positions: Ref,
    total: jax.Array,
    before: jax.Array,
    rows_g: Ref,
    tokens_g: Ref,
    offsets_g: Ref,
    sizes_g: Ref,
    *,
    plan: _Plan,
) -> None:
    """Write both tables of a tile.

    Args:
      experts, positions: int32 [choices], each choice's expert, and its index among the tile's choices of that expert.
      total, before: int32 [width], rows of each expert in all tiles, and in the tiles before this one.
    """
    tile = lax.axis_index("tile")

    @functools.partial(
        pl.run_scoped,
        rows=plgpu.SMEM((plan.choices,), jnp.int32),
        sizes=plgpu.SMEM((plan.width,), jnp.int32),
        offsets=plgpu.SMEM((plan.width,), jnp.int32),
        starts=plgpu.SMEM((plan.width,), jnp.int32),
    )
    def _(rows, sizes, offsets, starts):
        sizes[...] = total
        plgpu.commit_smem()

        def write_offsets(batch, row):
            indices = [batch * _BATCH + i for i in range(_BATCH)]
            for i, size in zip(indices, [sizes[i] for i in indices], strict=True):
                offsets[i] = row
                row += size
            return row

        lax.fori_loop(0, plan.width // _BATCH, write_offsets, jnp.int32(0))
        plgpu.commit_smem()
        starts[...] = offsets[...] + before
        plgpu.commit_smem()

        def read(i):
            return starts[experts[i]] + positions[i]

        def write(i, row):
            rows[i] = row
            tokens_g[row] = tile * plan.tile + i // plan.k

        _for_each(plan.valid_tokens() * plan.k, read, write)
        _store(rows, rows_g, plan)

        @pl.when(tile == 0)
        def _():
            for source, target in ((offsets, offsets_g), (sizes, sizes_g)):
                plgpu.copy_smem_to_gmem(source, target.at[_padded_slice(plan.width)])

        plgpu.wait_smem_to_gmem(0)


def _for_each(count: Any, read: Callable[[Any], Any], write: Callable[[Any, Any], None]) -> None:
    """write(i, read(i)) for every i below `count`."""

    def run(first, size):
        indices = [first + i for i in range(size)]
        for i, values in zip(indices, [read(i) for i in indices], strict=True):
            write(i, values)

    batches = count // _BATCH
    lax.fori_loop(0, batches, lambda batch, _: run(batch * _BATCH, _BATCH), None)
    lax.fori_loop(batches * _BATCH, count, lambda i, _: run(i, 1), None)


def _copies(size: int) -> list[tuple[int, int]]:
    """(start, size) of the copies of a vector; TMA copies at most 256 elements at once."""
    return [(start, min(256, size - start)) for start in range(0, size, 256)]


def _load(source_g: Ref, target_s: Ref, barrier: Ref, plan: _Plan) -> None:
    """Copy the tile's slice of a vector [N k] to shared memory."""
    first = lax.axis_index("tile") * plan.choices
    for start, size in _copies(plan.choices):
        source = source_g.at[pl.ds(first + start, size)]
        plgpu.copy_gmem_to_smem(source, target_s.at[pl.ds(start, size)], barrier, oob_mode=plgpu.OOBFillMode.ZEROS)


def _store(source_s: Ref, target_g: Ref, plan: _Plan) -> None:
    """Copy the tile's slice of a vector [N k] to global memory, except for padding tokens."""
    first = lax.axis_index("tile") * plan.choices
    if plan.tokens * plan.k % 4:  # TMA cannot write a vector that is not a multiple of 16 bytes
        count = plan.valid_tokens() * plan.k
        _for_each(count, lambda i: source_s[i], lambda i, value: _set(target_g, first + i, value))
        return
    plgpu.commit_smem()
    for start, size in _copies(plan.choices):
        plgpu.copy_smem_to_gmem(source_s.at[pl.ds(start, size)], target_g.at[pl.ds(first + start, size)])


def _padded_slice(width: int) -> "pl.Slice":
    """0 to `width`. It may end out of bounds, which JAX rejects for a constant start."""
    return pl.ds(pl.multiple_of(lax.axis_index("tile") * 0, 128), width)


def _set(ref: Ref, index: Any, value: Any) -> None:
    ref[index] = value

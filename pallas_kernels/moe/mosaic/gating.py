"""Gating as kernels: softmax, top-k, and the tables that map tokens to rows sorted by expert.

Tables replace the one-hot masks of the first MoE implementations (DeepSpeed Inference, section V-C): token -> experts,
token -> rows, row -> token. One kernel makes them all for up to 64 tokens; more tokens take two kernels, with a thread
block for each 64 tokens.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.pallas_kernels.moe.routing import Routing, Rule, finite, limit_capacity
from jaxinfer.pallas_kernels.mosaic import pl, plgpu
from jaxinfer.pallas_kernels.mosaic.layout import broadcast, iota
from jaxinfer.pallas_kernels.mosaic.refs import Barrier, Ref, barrier, copy_zero_filled, gmem, slice_past_end, smem
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The static parameters of a call.

    Attributes:
      tokens: N. experts: E. k: experts per token.
      normalize: whether a token's weights sum to 1.
      tile: tokens per thread block.
    """

    tokens: int
    experts: int
    k: int
    normalize: bool
    tile: int

    @property
    def tiles(self) -> int:
        """Tiles of tokens."""
        return pl.cdiv(self.tokens, self.tile)

    @property
    def width(self) -> int:
        """Experts with padding."""
        return 128 * pl.cdiv(self.experts, 128)

    @property
    def choices(self) -> int:
        """Choices of a tile."""
        return self.tile * self.k

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a thread block, at most.

        Logits and scan, six vectors of choices, four more; 16 KiB for alignment.
        """
        return 4 * (2 * self.tile * self.width + 6 * self.choices + self.tile + 3 * self.width) + (16 << 10)

    def valid_tokens(self) -> jax.Array:
        """Return how many tokens of this thread block's tile are not padding."""
        return jnp.minimum(self.tokens - lax.axis_index("tile") * self.tile, self.tile)


class _Tables(NamedTuple):
    """Arrays in global memory, as in `Routing`: int32 rows [N k], tokens [N k], offsets [E], sizes [E]."""

    rows: Ref
    tokens: Ref
    offsets: Ref
    sizes: Ref


class _TileCounts(NamedTuple):
    """Arrays in global memory, of which the second kernel makes the tables.

    Attributes:
      positions: int32 [N k], the index of each choice among its tile's choices of that expert.
      counts: int32 [tiles, width], the choices of each expert in each tile.
    """

    positions: Ref
    counts: Ref


class _GateResults(NamedTuple):
    """Arrays in global memory: each choice's expert, int32 [N k], and weight, float32 [N k].

    Also the tables if there is one tile, or else what they are made of.
    """

    experts: Ref
    weights: Ref
    tables: _Tables | None
    counts: _TileCounts | None


class _TableScratch(NamedTuple):
    """Shared memory for making the tables: int32 offsets [width], rows [choices], sizes [width], starts [width].

    The start of an expert is the row of its first choice in the tile.
    """

    offsets: Ref
    rows: Ref
    sizes: Ref
    starts: Ref


class _GateScratch(NamedTuple):
    """Shared memory of a thread block of the first kernel, and its barrier.

    Attributes:
      best_experts: int32 [k, tile]. raw_probs: float32 [k, tile]. inverse_sums: float32 [tile]. See `_top_k`.
      experts: int32 [choices]. weights: float32 [choices]. positions: int32 [choices].
      logits: float32 [tile, 1, width]. logits_full: they have been copied.
      scan: int32 [tile, width], whether each expert was chosen; then how many earlier tokens chose it.
    """

    best_experts: Ref
    experts: Ref
    inverse_sums: Ref
    logits: Ref
    logits_full: Barrier
    positions: Ref
    raw_probs: Ref
    scan: Ref
    weights: Ref


class _PlaceInputs(NamedTuple):
    """Arrays in global memory: each choice's expert, int32 [N k], and what the first kernel counted."""

    experts: Ref
    counts: _TileCounts


class _PlaceScratch(NamedTuple):
    """Shared memory of a thread block of the second kernel, and its barriers.

    Attributes:
      experts, positions: int32 [choices]. choices_full: they have been copied.
      counts: int32 [_TILES, width], those of some tiles. counts_full: they have been copied.
    """

    choices_full: Barrier
    counts: Ref
    counts_full: Barrier
    experts: Ref
    positions: Ref


def top_k_gating(
    logits: jax.Array, selection_bias: jax.Array | None = None, valid: jax.Array | None = None, *, rule: Rule
) -> Routing:
    """Route each token to its experts. Arguments as of `api`. Raises UnsupportedError."""
    (tokens, experts), k = logits.shape, rule.k
    if rule.scoring != "softmax" or selection_bias is not None or rule.limits_groups:
        raise UnsupportedError("top_k_gating takes softmax scores without a selection bias and groups")
    if experts > _MAX_EXPERTS or experts % 4:
        raise UnsupportedError(f"top_k_gating takes up to {_MAX_EXPERTS} experts, a multiple of 4, got {experts}")
    if k > _MAX_K:
        raise UnsupportedError(f"top_k_gating takes up to {_MAX_K} experts per token, got {k}")
    if valid is not None and rule.capacity is not None:
        raise UnsupportedError("top_k_gating takes no capacity beside padding")
    if valid is not None:  # padding goes where a valid token goes, so that no further expert is read
        logits = jnp.where(valid[:, None], logits, logits[jnp.argmax(valid)])
    tile = min(_TILE, 4 * pl.cdiv(tokens, 4))
    plan = Plan(tokens=tokens, experts=experts, k=k, normalize=rule.normalize, tile=tile)
    require_shared_bytes(plan.shared_bytes)
    # Mosaic swizzles the copy in tiles of 32 columns and 8 rows. With three dimensions, the first, here the tokens, is
    # not tiled and can have any size.
    padding = -experts % 32 if experts > 32 else 0
    gated = _launch_gate(plan, jnp.pad(logits, ((0, 0), (0, padding)))[:, None])
    tables = gated.tables
    if gated.counts is not None:
        tables = _launch_place(plan, _PlaceInputs(gated.experts, gated.counts))
    assert tables is not None
    chosen, weights, rows = (x.reshape(tokens, k) for x in (gated.experts, gated.weights, tables.rows))
    if valid is not None:
        weights = jnp.where(valid[:, None], weights, 0.0)
    routing = Routing(chosen, weights * rule.scale, rows, tables.tokens, tables.offsets, tables.sizes)
    return routing if rule.capacity is None else limit_capacity(routing, rule.capacity)


def _integers(*shape: int) -> Ref:
    """Declare an array in global memory, int32."""
    return gmem(jax.ShapeDtypeStruct(shape, jnp.int32))


def _tables(plan: Plan) -> _Tables:
    """Declare the tables."""
    choices = plan.tokens * plan.k
    return _Tables(_integers(choices), _integers(choices), _integers(plan.experts), _integers(plan.experts))


def _launch_gate(plan: Plan, logits: jax.Array) -> _GateResults:
    """Launch the first kernel."""
    choices, tile, vector = plan.tokens * plan.k, plan.tile, (plan.choices,)
    single = plan.tiles == 1
    results = _GateResults(
        experts=_integers(choices),
        weights=gmem(jax.ShapeDtypeStruct((choices,), jnp.float32)),
        tables=_tables(plan) if single else None,
        counts=None if single else _TileCounts(_integers(choices), _integers(plan.tiles, plan.width)),
    )
    scratch = _GateScratch(
        best_experts=smem((plan.k, tile), jnp.int32),
        experts=smem(vector, jnp.int32),
        inverse_sums=smem((tile,), jnp.float32),
        logits=smem((tile, 1, plan.width), jnp.float32),
        logits_full=barrier(),
        positions=smem(vector, jnp.int32),
        raw_probs=smem((plan.k, tile), jnp.float32),
        scan=smem((tile, plan.width), jnp.int32),
        weights=smem(vector, jnp.float32),
    )
    kernel = plgpu.kernel(
        functools.partial(_gate, plan),
        out_type=[results],
        scratch_types=[scratch],
        grid=(plan.tiles,),
        grid_names=("tile",),
        kernel_name="moe_gate",
    )
    return kernel(logits)[0]


def _launch_place(plan: Plan, inputs: _PlaceInputs) -> _Tables:
    """Launch the second kernel."""
    scratch = _PlaceScratch(
        choices_full=barrier(2 * len(_copies(plan.choices))),
        counts=smem((_TILES, plan.width), jnp.int32),
        counts_full=barrier(),
        experts=smem((plan.choices,), jnp.int32),
        positions=smem((plan.choices,), jnp.int32),
    )
    kernel = plgpu.kernel(
        functools.partial(_place, plan),
        out_type=[_tables(plan)],
        scratch_types=[scratch],
        grid=(plan.tiles,),
        grid_names=("tile",),
        kernel_name="moe_place",
    )
    return kernel(inputs)[0]


def _gate(plan: Plan, logits: Ref, results: _GateResults, scratch: _GateScratch) -> None:
    """Route the tokens of a tile; make the tables if it is the only tile, else its positions and counts.

    logits: float32 [N, 1, E, padded], in global memory.
    """
    tile = lax.axis_index("tile")
    source = logits.at[pl.ds(tile * plan.tile, plan.tile), pl.ds(0, 1), slice_past_end(plan.width, tile)]
    copy_zero_filled(source, scratch.logits, scratch.logits_full)
    plgpu.barrier_wait(scratch.logits_full)
    _top_k(plan, scratch)
    plgpu.commit_smem()
    counts = _scan(plan, scratch.scan)
    plgpu.commit_smem()

    def read(i: jax.Array) -> tuple[Any, ...]:
        token, choice = i // plan.k, i % plan.k
        expert = scratch.best_experts[choice, token]
        weight = scratch.raw_probs[choice, token] * scratch.inverse_sums[token]
        return expert, weight, scratch.scan[token, expert]

    def write(i: jax.Array, values: tuple[Any, ...]) -> None:
        scratch.experts[i], scratch.weights[i], scratch.positions[i] = values

    _for_each(plan.choices, read, write)
    _store(plan, scratch.experts, results.experts)
    _store(plan, scratch.weights, results.weights)
    if results.tables is not None:
        _make_tables(plan, scratch.experts, scratch.positions, counts, jnp.zeros_like(counts), results.tables)
    if results.counts is not None:
        _store(plan, scratch.positions, results.counts.positions)
        results.counts.counts[tile] = counts
        plgpu.wait_smem_to_gmem(0)


def _by_row() -> Any:
    """The register layout with a row per warp, four adjacent elements per lane."""
    return plgpu.Layout.TILED(plgpu.Tiling(((4, 128), (4,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def _top_k(plan: Plan, scratch: _GateScratch) -> None:
    """Find the k highest logits of each token.

    Writes `scan`, 1 for each chosen expert, else 0; `best_experts`; `raw_probs`, exp(logit - maximum); `inverse_sums`,
    1 / their sum. The weights are raw_probs * inverse_sums.
    """
    shape = (plan.tile, plan.width)
    column = iota(shape, 1, _by_row())
    taken = -jnp.inf  # experts already taken and padding: below every logit
    logits = finite(plgpu.load(scratch.logits.at[:, 0], layout=_by_row()))
    remaining = jnp.where(column < plan.experts, logits, taken)
    max_logit = jnp.max(remaining, axis=1)
    if plan.normalize:
        total = jnp.zeros_like(max_logit)
    else:
        total = jnp.sum(jnp.exp(remaining - broadcast(max_logit, shape, 0)), axis=1)

    def take(choice: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        remaining, total = state
        logit = jnp.max(remaining, axis=1)
        expert = jnp.min(jnp.where(remaining == broadcast(logit, shape, 0), column, plan.experts - 1), axis=1)
        prob = jnp.exp(logit - max_logit)
        scratch.best_experts[choice], scratch.raw_probs[choice] = expert, prob
        remaining = jnp.where(column == broadcast(expert, shape, 0), taken, remaining)
        return remaining, total + prob if plan.normalize else total

    remaining, total = lax.fori_loop(0, plan.k, take, (remaining, total))
    scratch.inverse_sums[...] = 1 / total
    scratch.scan[...] = jnp.where((remaining == taken) & (column < plan.experts), 1, 0)


def _scan(plan: Plan, chosen: Ref) -> jax.Array:
    """Return how many tokens of the tile chose each expert, [width].

    Overwrites `chosen` (0 or 1) with the exclusive scan: how many earlier tokens chose the expert.
    """

    def count(token: jax.Array, counts: jax.Array) -> jax.Array:
        is_chosen = chosen[token]
        chosen[token] = counts
        return counts + is_chosen

    return lax.fori_loop(0, plan.valid_tokens(), count, jnp.zeros(plan.width, jnp.int32))


def _place(plan: Plan, inputs: _PlaceInputs, tables: _Tables, scratch: _PlaceScratch) -> None:
    """Make the tables of a tile; every thread block sums the counts of all tiles."""
    _load(plan, inputs.experts, scratch.experts, scratch.choices_full)
    _load(plan, inputs.counts.positions, scratch.positions, scratch.choices_full)
    total, before = _sum_counts(plan, inputs.counts.counts, scratch)
    plgpu.barrier_wait(scratch.choices_full)
    _make_tables(plan, scratch.experts, scratch.positions, total, before, tables)


def _sum_counts(plan: Plan, counts: Ref, scratch: _PlaceScratch) -> tuple[jax.Array, jax.Array]:
    """Sum the choices of each expert in all tiles, and in those before this one: int32 [width]."""
    tile = lax.axis_index("tile")

    def add_tiles(i: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        source = counts.at[pl.ds(i * _TILES, _TILES), pl.ds(0, plan.width)]
        copy_zero_filled(source, scratch.counts, scratch.counts_full)
        plgpu.barrier_wait(scratch.counts_full)

        def add_tile(t: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            total, before = state
            count, is_before = scratch.counts[t], (i * _TILES + t < tile).astype(jnp.int32)
            return total + count, before + count * is_before

        state = lax.fori_loop(0, _TILES, add_tile, state)
        plgpu.commit_smem()  # a barrier: all warps have read what the next copy overwrites
        return state

    zeros = jnp.zeros(plan.width, jnp.int32)
    return lax.fori_loop(0, pl.cdiv(plan.tiles, _TILES), add_tiles, (zeros, zeros))


def _make_tables(
    plan: Plan, experts: Ref, positions: Ref, total: jax.Array, before: jax.Array, tables: _Tables
) -> None:
    """Write the tables of a tile.

    Args:
      experts, positions: int32 [choices], each choice's expert, and its index among the tile's choices of that expert.
      total, before: int32 [width], rows of each expert in all tiles, and in the tiles before this one.
    """

    def write(scratch: _TableScratch) -> None:
        scratch.sizes[...] = total
        plgpu.commit_smem()
        _write_offsets(plan, scratch)
        plgpu.commit_smem()
        scratch.starts[...] = scratch.offsets[...] + before
        plgpu.commit_smem()
        _write_tables(plan, experts, positions, tables, scratch)

    # Only now, since it takes the place of what the reductions before it needed.
    per_expert, per_choice = smem((plan.width,), jnp.int32), smem((plan.choices,), jnp.int32)
    pl.run_scoped(write, _TableScratch(offsets=per_expert, rows=per_choice, sizes=per_expert, starts=per_expert))


def _write_tables(plan: Plan, experts: Ref, positions: Ref, tables: _Tables, scratch: _TableScratch) -> None:
    """Write the rows and tokens of the tile's choices; the first thread block also writes offsets and sizes."""
    tile = lax.axis_index("tile")

    def read(i: jax.Array) -> Any:
        return scratch.starts[experts[i]] + positions[i]

    def write(i: jax.Array, row: Any) -> None:
        scratch.rows[i] = row
        tables.tokens[row] = tile * plan.tile + i // plan.k

    _for_each(plan.valid_tokens() * plan.k, read, write)
    _store(plan, scratch.rows, tables.rows)

    @pl.when(tile == 0)
    def _() -> None:
        for source, target in ((scratch.offsets, tables.offsets), (scratch.sizes, tables.sizes)):
            plgpu.copy_smem_to_gmem(source, target.at[slice_past_end(plan.width, tile)])

    plgpu.wait_smem_to_gmem(0)


def _write_offsets(plan: Plan, scratch: _TableScratch) -> None:
    """Write the first row of each expert: the sum of the sizes before it."""

    def write_batch(batch: jax.Array, row: Any) -> Any:
        indices = [batch * _BATCH + i for i in range(_BATCH)]
        for i, size in zip(indices, [scratch.sizes[i] for i in indices], strict=True):
            scratch.offsets[i] = row
            row += size
        return row

    lax.fori_loop(0, plan.width // _BATCH, write_batch, jnp.int32(0))


def _for_each(count: Any, read: Callable[[Any], Any], write: Callable[[Any, Any], None]) -> None:
    """Do write(i, read(i)) for every i below `count`."""

    def run(first: Any, size: int) -> None:
        indices = [first + i for i in range(size)]
        for i, values in zip(indices, [read(i) for i in indices], strict=True):
            write(i, values)

    batches = count // _BATCH
    lax.fori_loop(0, batches, lambda batch, _: run(batch * _BATCH, _BATCH), None)
    lax.fori_loop(batches * _BATCH, count, lambda i, _: run(i, 1), None)


def _copies(size: int) -> list[tuple[int, int]]:
    """Return (start, size) of the copies of a vector; TMA copies at most 256 elements at once."""
    return [(start, min(256, size - start)) for start in range(0, size, 256)]


def _load(plan: Plan, source: Ref, target: Ref, full: Barrier) -> None:
    """Copy the tile's slice of a vector [N k] to shared memory."""
    first = lax.axis_index("tile") * plan.choices
    for start, size in _copies(plan.choices):
        part = source.at[pl.ds(first + start, size)]
        copy_zero_filled(part, target.at[pl.ds(start, size)], full)


def _store(plan: Plan, source: Ref, target: Ref) -> None:
    """Copy the tile's slice of a vector [N k] to global memory, except for padding tokens."""
    first = lax.axis_index("tile") * plan.choices
    if plan.tokens * plan.k % 4:  # TMA cannot write a vector that is not a multiple of 16 bytes

        def write(i: jax.Array, value: Any) -> None:
            target[first + i] = value

        _for_each(plan.valid_tokens() * plan.k, lambda i: source[i], write)
        return
    plgpu.commit_smem()
    for start, size in _copies(plan.choices):
        plgpu.copy_smem_to_gmem(source.at[pl.ds(start, size)], target.at[pl.ds(first + start, size)])

"""Which experts each token goes to, and where its rows lie: softmax, top k and both tables.

The one-hot masks of the first MoE implementations become tables (DeepSpeed Inference, section V-C): token -> experts,
token -> rows, row -> token. On a GPU one kernel makes them all for up to 64 tokens; more tokens take two, of a block
for each 64.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import UnsupportedError, dispatch


class Routing(NamedTuple):
    """Where each token's k choices go: R rows, sorted by expert and within an expert by token.

    Attributes:
      experts: int32 [N, k], the chosen experts, the highest logit first.
      weights: float32 [N, k], what each expert's result counts; 0 where the choice was dropped.
      rows: int32 [N, k], the row of each choice; R where it was dropped.
      tokens: int32 [R], the token of each row; N where a row is empty.
      offsets: int32 [E], the first row of each expert, ascending.
      sizes: int32 [E], how many rows each expert has: offsets[e] to offsets[e] + sizes[e] - 1.
    """

    experts: jax.Array
    weights: jax.Array
    rows: jax.Array
    tokens: jax.Array
    offsets: jax.Array
    sizes: jax.Array


def top_k_gating(logits: jax.Array, k: int, *, capacity: int | None = None, normalize: bool = True) -> Routing:
    """Route each token to the k experts of its highest logits; of equal logits the lower expert's is taken first.

    Args:
      logits: [N, E]; taken in float32.
      k: choices of a token, all different.
      capacity: None takes every choice, R = N * k. A number gives each expert so many rows, R = E * capacity; the
        choices of later tokens that do not fit are dropped.
      normalize: the k weights of a token sum to 1 (Mixtral; Qwen-MoE's norm_topk_prob=true), which is the softmax over
        its k logits. Otherwise each is its probability among all experts (norm_topk_prob=false). Dropping changes
        no other weight.
    Raises: ValueError if k is not in 1..E or the capacity is below 1.
    """
    experts = logits.shape[1]
    if not 1 <= k <= experts:
        raise ValueError(f"top_k_gating needs 1 <= k <= {experts} experts, got k={k}.")
    if capacity is not None and capacity < 1:
        raise ValueError(f"top_k_gating needs a capacity of at least 1, got {capacity}.")
    logits = logits.astype(jnp.float32)
    return dispatch(
        "top_k_gating", _gating_kernel, _gating_definition, logits, k=k, capacity=capacity, normalize=normalize
    )


def _gating_definition(logits: jax.Array, *, k: int, capacity: int | None, normalize: bool) -> Routing:
    tokens, num_experts = logits.shape
    values, experts = lax.top_k(logits, k)
    total = jax.nn.logsumexp(values if normalize else logits, axis=1, keepdims=True)
    flat = experts.reshape(-1)
    sizes = jnp.zeros(num_experts, jnp.int32).at[flat].add(1)
    offsets = jnp.cumsum(sizes) - sizes
    order = jnp.argsort(flat, stable=True).astype(jnp.int32)  # row -> choice
    rows = jnp.zeros_like(flat).at[order].set(jnp.arange(tokens * k, dtype=jnp.int32), unique_indices=True)
    routing = Routing(experts, jnp.exp(values - total), rows.reshape(tokens, k), order // k, offsets, sizes)
    return routing if capacity is None else _limited(routing, capacity)


def _limited(routing: Routing, capacity: int) -> Routing:
    """The routing where every expert has `capacity` rows, and choices beyond them are dropped."""
    (tokens, k), experts = routing.experts.shape, len(routing.sizes)
    positions = routing.rows - routing.offsets[routing.experts]  # within the expert's run
    kept = positions < capacity
    rows = jnp.where(kept, routing.experts * capacity + positions, experts * capacity)
    owners = jnp.repeat(jnp.arange(tokens, dtype=jnp.int32), k)
    return Routing(
        experts=routing.experts,
        weights=jnp.where(kept, routing.weights, 0.0),
        rows=rows,
        tokens=jnp.full(experts * capacity, tokens, jnp.int32).at[rows.reshape(-1)].set(owners, mode="drop"),
        offsets=jnp.arange(experts, dtype=jnp.int32) * capacity,
        sizes=jnp.minimum(routing.sizes, capacity),
    )


# The kernels. A block has a tile of tokens, a row of logits in each warp's registers: its maximum takes five shuffles.
# Then each thread owns an expert or two and walks over the tokens, counting (the scan): no two threads touch one
# counter. What remains are loops over single choices that all threads run alike, reading and writing the same values
# at the same places; a batch is read before it is written, so that shared memory is waited for once.

_TILE = 64  # tokens of a block
_MAX_EXPERTS = 256  # what a warp's registers and a row of a TMA copy hold
_MAX_CHOICES = 16
_BATCH = 8  # choices that are read together
_TILES = 64  # tiles whose counts are in shared memory together

_BY_ROW = plgpu.Layout.TILED(plgpu.Tiling(((4, 128), (4,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
"""A row in each warp, four neighbours in each lane."""


class _Plan(NamedTuple):
    """Static sizes: `tile` tokens of a block, `width` experts with padding."""

    tokens: int
    experts: int
    k: int
    tile: int
    width: int

    @property
    def choices(self) -> int:
        """Choices of a tile."""
        return self.tile * self.k

    def present(self) -> jax.Array:
        """How many tokens of this block's tile are no padding."""
        return jnp.minimum(self.tokens - lax.axis_index("tile") * self.tile, self.tile)


def _gating_kernel(logits: jax.Array, *, k: int, capacity: int | None, normalize: bool) -> Routing:
    tokens, num_experts = logits.shape
    if num_experts > _MAX_EXPERTS or num_experts % 4:
        raise UnsupportedError(f"it takes up to {_MAX_EXPERTS} experts, a multiple of 4, got {num_experts}")
    if k > _MAX_CHOICES:
        raise UnsupportedError(f"it takes up to {_MAX_CHOICES} choices of a token, got {k}")
    tile = min(_TILE, 4 * pl.cdiv(tokens, 4))
    plan = _Plan(tokens, num_experts, k, tile, width=128 * pl.cdiv(num_experts, 128))
    tiles = pl.cdiv(tokens, tile)
    launch = functools.partial(plgpu.kernel, grid=(tiles,), grid_names=("tile",))
    integers = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    each_choice, each_expert = integers((tokens * k,)), integers((num_experts,))
    chosen = (each_choice, jax.ShapeDtypeStruct(each_choice.shape, jnp.float32))
    tables = (each_choice, each_choice, each_expert, each_expert)
    counted = (each_choice, integers((tiles, plan.width)))
    gate = launch(
        functools.partial(_gate, plan=plan, normalize=normalize),
        out_type=chosen + (tables if tiles == 1 else counted),
        kernel_name="moe_gate",
    )
    # Mosaic swizzles the copy, by 32 columns; of three dimensions it leaves the first alone, here any number of tokens.
    padding = -num_experts % 32 if num_experts > 32 else 0
    experts, weights, *rest = gate(jnp.pad(logits, ((0, 0), (0, padding)))[:, None])
    if tiles > 1:
        place = functools.partial(_place, plan=plan, tiles=tiles)
        rest = launch(place, out_type=tables, kernel_name="moe_place")(experts, *rest)
    rows, owners, offsets, sizes = rest
    experts, weights, rows = (x.reshape(tokens, k) for x in (experts, weights, rows))
    routing = Routing(experts, weights, rows, owners, offsets, sizes)
    return routing if capacity is None else _limited(routing, capacity)


def _gate(logits_g, experts_g, weights_g, *results_g, plan: _Plan, normalize: bool) -> None:
    """Softmax and top k of a tile. Then its tables, if it is the only one, else its positions and counts.

    results_g: rows, tokens, offsets, sizes (see `_assign`), or positions int32 [N k] and counts int32 [tiles, width].
    """
    tile = lax.axis_index("tile")
    alone = len(results_g) > 2

    @functools.partial(
        pl.run_scoped,
        logits=plgpu.SMEM((plan.tile, 1, plan.width), jnp.float32),
        arrived=plgpu.Barrier(),
        ranks=plgpu.SMEM((plan.tile, plan.width), jnp.int32),
        best=plgpu.SMEM((plan.k, plan.tile), jnp.int32),
        powers=plgpu.SMEM((plan.k, plan.tile), jnp.float32),
        factors=plgpu.SMEM((plan.tile,), jnp.float32),
        experts=plgpu.SMEM((plan.choices,), jnp.int32),
        weights=plgpu.SMEM((plan.choices,), jnp.float32),
        positions=plgpu.SMEM((plan.choices,), jnp.int32),
    )
    def _(logits, arrived, ranks, best, powers, factors, experts, weights, positions):
        box = logits_g.at[pl.ds(tile * plan.tile, plan.tile), pl.ds(0, 1), _padded(plan.width)]
        plgpu.copy_gmem_to_smem(box, logits, arrived, oob_mode=plgpu.OOBFillMode.ZEROS)
        plgpu.barrier_wait(arrived)
        _choose(logits, ranks, best, powers, factors, plan, normalize)
        plgpu.commit_smem()
        counts = _count(ranks, plan)
        plgpu.commit_smem()

        def read(i):
            token, choice = i // plan.k, i % plan.k
            expert = best[choice, token]
            return expert, powers[choice, token] * factors[token], ranks[token, expert]

        def write(i, values):
            experts[i], weights[i], positions[i] = values

        _each(plan.choices, read, write)
        _store(experts, experts_g, plan)
        _store(weights, weights_g, plan)
        if alone:
            _assign(experts, positions, counts, jnp.zeros_like(counts), *results_g, plan=plan)
        else:
            _store(positions, results_g[0], plan)
            results_g[1][tile] = counts
            plgpu.wait_smem_to_gmem(0)


def _choose(logits, ranks, best, powers, factors, plan: _Plan, normalize: bool) -> None:
    """The k highest logits of each token.

    logits: f32 [tile, width]. Writes `ranks`: 1 for each chosen expert, else 0; `best`: int32 [k, tile], the experts;
    `powers` and `factors`, whose product are the weights: f32 [k, tile] and [tile].
    """
    shape = (plan.tile, plan.width)
    column = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, shape, 1), _BY_ROW)
    # Below every logit: what was taken, and the padding. Logits of -inf are still taken, and last.
    gone = -jnp.inf
    lowest = float(jnp.finfo(jnp.float32).min)
    x = jnp.maximum(plgpu.load(logits.at[:, 0], layout=_BY_ROW), lowest)
    left = jnp.where(column < plan.experts, x, gone)

    def along(row):
        return lax.broadcast_in_dim(row, shape, (0,))

    top = jnp.max(left, axis=1)
    total = jnp.zeros_like(top) if normalize else jnp.sum(jnp.exp(left - along(top)), axis=1)

    def take(choice, state):
        left, total = state
        highest = jnp.max(left, axis=1)
        expert = jnp.min(jnp.where(left == along(highest), column, plan.width), axis=1)
        power = jnp.exp(highest - top)
        best[choice], powers[choice] = expert, power
        return jnp.where(column == along(expert), gone, left), total + power if normalize else total

    left, total = lax.fori_loop(0, plan.k, take, (left, total))
    factors[...] = 1 / total
    ranks[...] = jnp.where((left == gone) & (column < plan.experts), 1, 0)


def _count(ranks, plan: _Plan) -> jax.Array:
    """How many tokens of the tile chose each expert, [width]; `ranks`, from 0 and 1, become how many did before."""

    def step(token, counts):
        chosen = ranks[token]
        ranks[token] = counts
        return counts + chosen

    return lax.fori_loop(0, plan.present(), step, jnp.zeros(plan.width, jnp.int32))


def _place(experts_g, positions_g, counts_g, *results_g, plan: _Plan, tiles: int) -> None:
    """The tables, from each tile's choices, positions and counts; every block adds up the counts of all tiles."""
    tile = lax.axis_index("tile")

    @functools.partial(
        pl.run_scoped,
        experts=plgpu.SMEM((plan.choices,), jnp.int32),
        positions=plgpu.SMEM((plan.choices,), jnp.int32),
        counts=plgpu.SMEM((_TILES, plan.width), jnp.int32),
        arrived=plgpu.Barrier(num_arrivals=2 * len(_parts(plan.choices))),
        counted=plgpu.Barrier(),
    )
    def _(experts, positions, counts, arrived, counted):
        _load(experts_g, experts, arrived, plan)
        _load(positions_g, positions, arrived, plan)

        def add(part, state):
            box = counts_g.at[pl.ds(part * _TILES, _TILES), pl.ds(0, plan.width)]
            plgpu.copy_gmem_to_smem(box, counts, counted, oob_mode=plgpu.OOBFillMode.ZEROS)
            plgpu.barrier_wait(counted)

            def one(i, state):
                total, before = state
                count, earlier = counts[i], (part * _TILES + i < tile).astype(jnp.int32)
                return total + count, before + count * earlier

            state = lax.fori_loop(0, _TILES, one, state)
            plgpu.commit_smem()  # all warps have read what the next copy writes over
            return state

        zeros = jnp.zeros(plan.width, jnp.int32)
        total, before = lax.fori_loop(0, pl.cdiv(tiles, _TILES), add, (zeros, zeros))
        plgpu.barrier_wait(arrived)
        _assign(experts, positions, total, before, *results_g, plan=plan)


def _assign(experts, positions, total, before, rows_g, tokens_g, offsets_g, sizes_g, *, plan: _Plan) -> None:
    """Both tables of a tile.

    Args:
      experts, positions: int32 [choices], each choice's expert and place among the tile's tokens of that expert.
      total, before: int32 [width], rows of each expert in all tiles, and in the tiles before.
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

        def advance(batch, row):
            at = [batch * _BATCH + i for i in range(_BATCH)]
            for i, size in zip(at, [sizes[i] for i in at], strict=True):
                offsets[i] = row
                row += size
            return row

        lax.fori_loop(0, plan.width // _BATCH, advance, jnp.int32(0))
        plgpu.commit_smem()
        starts[...] = offsets[...] + before
        plgpu.commit_smem()

        def read(i):
            return starts[experts[i]] + positions[i]

        def write(i, row):
            rows[i] = row
            tokens_g[row] = tile * plan.tile + i // plan.k

        _each(plan.present() * plan.k, read, write)
        _store(rows, rows_g, plan)

        @pl.when(tile == 0)
        def _():
            for source, target in ((offsets, offsets_g), (sizes, sizes_g)):
                plgpu.copy_smem_to_gmem(source, target.at[_padded(plan.width)])

        plgpu.wait_smem_to_gmem(0)


def _each(count, read, write) -> None:
    """write(i, read(i)) for every i below `count`."""

    def run(first, size):
        at = [first + i for i in range(size)]
        for i, values in zip(at, [read(i) for i in at], strict=True):
            write(i, values)

    whole = count // _BATCH
    lax.fori_loop(0, whole, lambda batch, _: run(batch * _BATCH, _BATCH), None)
    lax.fori_loop(whole * _BATCH, count, lambda i, _: run(i, 1), None)


def _parts(size: int) -> list[tuple[int, int]]:
    """Starts and sizes of the copies of that many numbers; TMA takes 256 at once."""
    return [(start, min(256, size - start)) for start in range(0, size, 256)]


def _load(source_g, target_s, arrived, plan: _Plan) -> None:
    """Fetch the tile's part of [N k] numbers."""
    first = lax.axis_index("tile") * plan.choices
    for start, size in _parts(plan.choices):
        box = source_g.at[pl.ds(first + start, size)]
        plgpu.copy_gmem_to_smem(box, target_s.at[pl.ds(start, size)], arrived, oob_mode=plgpu.OOBFillMode.ZEROS)


def _store(source_s, target_g, plan: _Plan) -> None:
    """Send the tile's part of [N k] numbers; what is beyond the last token is left out."""
    first = lax.axis_index("tile") * plan.choices
    if plan.tokens * plan.k % 4:  # the last copy would end within 16 bytes
        _each(plan.present() * plan.k, lambda i: source_s[i], lambda i, value: _set(target_g, first + i, value))
        return
    plgpu.commit_smem()
    for start, size in _parts(plan.choices):
        plgpu.copy_smem_to_gmem(source_s.at[pl.ds(start, size)], target_g.at[pl.ds(first + start, size)])


def _padded(width: int) -> pl.Slice:
    """From 0 on, perhaps beyond the end, which JAX takes of starts only that it does not know."""
    return pl.ds(pl.multiple_of(lax.axis_index("tile") * 0, 128), width)


def _set(ref, index, value) -> None:
    ref[index] = value

"""Every row times the matrix of its expert.

The rows of an expert lie together, so the work is a list of tiles, each some rows of one expert by some of its outputs.
A block finds its tile from `offsets` and `sizes` alone; experts without rows have none, and their weights are not read.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import UnsupportedError, dispatch
from pallas_kernels.tuning import tuned
from pallas_kernels.weights import contract


def grouped_matmul(x: jax.Array, weights: jax.Array, offsets: jax.Array, sizes: jax.Array) -> jax.Array:
    """x[r] W[e]^T for each row r of each expert e.

    Args:
      x: [R, K]. weights: [E, N, K].
      offsets, sizes: int32 [E], as in `Routing`: rows offsets[e] to offsets[e] + sizes[e] - 1 are expert e's. The
        experts' rows ascend and do not overlap.
    Returns: [R, N] in x's dtype, summed in float32. Rows of no expert may hold anything.
    """
    return dispatch("grouped_matmul", _grouped_matmul_kernel, _grouped_matmul_definition, x, weights, offsets, sizes)


def _grouped_matmul_definition(x: jax.Array, weights: jax.Array, offsets: jax.Array, sizes: jax.Array) -> jax.Array:
    """Block after block of the rows of one expert: at most twice the necessary products, and some."""
    (rows, _), (experts, outputs, _) = x.shape, weights.shape
    block = min(max(pl.next_power_of_2(rows // experts), 1), 64)
    blocks = pl.cdiv(sizes, block)
    ends = jnp.cumsum(blocks)
    x = jnp.pad(x, ((0, block), (0, 0)))

    def multiply(i: jax.Array, y: jax.Array) -> jax.Array:
        expert = jnp.sum(ends <= i)
        first = offsets[expert] + (i - ends[expert] + blocks[expert]) * block
        product = contract(lax.dynamic_slice_in_dim(x, first, block), weights[expert])
        # What it writes beyond the expert's rows, the next experts write over.
        return lax.dynamic_update_slice_in_dim(y, product, first, 0)

    y = jnp.pad(x[:, :0], ((0, 0), (0, outputs)))  # zeros that lie as x does
    return lax.fori_loop(0, ends[-1], multiply, y)[:rows]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """What a block computes.

    Attributes:
      rows, outputs: of its tile of the result.
      stages: slots of the ring, each of 64 inputs of the tile's rows and weights; at least 2.
    """

    rows: int
    outputs: int
    stages: int

    @staticmethod
    def choose(rows: int, experts: int, outputs: int) -> "Tiles":
        """Tiles that take a usual expert's rows at once, so that its weights are read once; they divide the outputs."""
        if found := tuned("grouped_matmul", f"{rows}x{experts}x{outputs}"):
            return Tiles(**found)
        usual = pl.cdiv(rows, min(rows, experts))
        tile = min(max(pl.next_power_of_2(usual * 3 // 2 + 7), 8), 128)  # 7: rows of the expert before, see `_find`
        if rows <= 8:
            tile = 8
        if tile <= 32:  # a stream of weights: three or four blocks an SM hold 140 KiB in flight
            return Tiles(rows=tile, outputs=64, stages=5)
        return Tiles(rows=tile, outputs=64 if outputs % 128 else 128, stages=3)  # arithmetic: two blocks an SM


_INPUTS = 64  # of a slot: 128 bytes, the widest swizzle
_SPREAD = 8  # neighbouring tiles of outputs that run together, so that they share rows of x in the L2 cache
_MAX_EXPERTS = 256


def _grouped_matmul_kernel(x: jax.Array, weights: jax.Array, offsets: jax.Array, sizes: jax.Array) -> jax.Array:
    (rows, inputs), (experts, outputs, _) = x.shape, weights.shape
    if x.dtype not in (jnp.bfloat16, jnp.float16) or weights.dtype != x.dtype:
        raise UnsupportedError(f"it takes bfloat16 or float16, got {x.dtype} and {weights.dtype}")
    if inputs % _INPUTS or outputs % 64:
        raise UnsupportedError(f"it takes K and N in multiples of 64, got K={inputs}, N={outputs}")
    if experts > _MAX_EXPERTS:
        raise UnsupportedError(f"it takes up to {_MAX_EXPERTS} experts, got {experts}")
    tiles = Tiles.choose(rows, experts, outputs)
    numbers = min(rows, rows // tiles.rows + experts)

    def body(x_g, weights_g, offsets_g, sizes_g, y_g):
        first_output = (lax.axis_index("spread") * _SPREAD + lax.axis_index("output")) * tiles.outputs
        tile = _find(offsets_g, sizes_g, tiles.rows, by_row=numbers == rows)

        @pl.when((tile.count > 0) & (first_output < outputs))
        def _():
            _multiply(x_g, weights_g.at[tile.expert], y_g, tile, first_output, tiles=tiles)

    launch = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, 1, outputs), x.dtype),  # in three dimensions copies are not swizzled
        grid=(pl.cdiv(outputs, tiles.outputs * _SPREAD), numbers, _SPREAD),
        grid_names=("spread", "number", "output"),
        kernel_name="grouped_matmul",
    )
    x = jnp.pad(x, ((0, -rows % 8), (0, 0)))  # TMA swizzles whole tiles of 8 rows
    return launch(x, weights, offsets, sizes)[:, 0]


@dataclasses.dataclass(frozen=True)
class _Tile:
    """What a block is to do: `count` rows from `first` on, of one expert; no more than `start` + Tiles.rows - 1."""

    expert: jax.Array
    start: jax.Array
    first: jax.Array
    count: jax.Array  # 0 or less: nothing


def _find(offsets_g, sizes_g, rows: int, *, by_row: bool) -> _Tile:
    """The tile with this block's number.

    Tiles start at multiples of 8 rows, as swizzled copies must; so the first may hold rows of the experts before. The
    expert whose tiles start at `base` has the numbers from base // rows + expert on: that leaves each a number, since
    the next expert's base is less than a tile before the end of this one's last. Where a number for each row is fewer,
    a tile has that of its first row.
    """
    number, experts = lax.axis_index("number"), offsets_g.shape[0]
    width = 128 * pl.cdiv(experts, 128)

    @functools.partial(pl.run_scoped, offsets=plgpu.SMEM((width,), jnp.int32), known=plgpu.Barrier())
    def found(offsets, known):
        box = offsets_g.at[pl.ds(number * 0, width)]  # beyond the end, which JAX takes of unknown starts only
        plgpu.copy_gmem_to_smem(box, offsets, known, oob_mode=plgpu.OOBFillMode.ZEROS)
        plgpu.barrier_wait(known)
        each = lax.broadcasted_iota(jnp.int32, (width,), 0)
        numbers = offsets[...] if by_row else offsets[...] // rows + each
        expert = jnp.sum(jnp.where((numbers <= number) & (each < experts), 1, 0)) - 1
        return expert, offsets[expert]

    expert, offset = found
    base = offset // 8 * 8
    tile = (number - base) // rows if by_row else number - base // rows - expert
    start = base + tile * rows
    first = jnp.maximum(start, offset)
    count = jnp.minimum(offset + sizes_g[expert], start + rows) - first
    if by_row:
        count = jnp.where(first == number, count, 0)
    return _Tile(expert, pl.multiple_of(start, 8), first, count)


def _multiply(x_g, weights_g, y_g, tile: _Tile, first_output, *, tiles: Tiles) -> None:
    """One tile of the result. The weights are the left operand: 64 of them are what wgmma takes, rows as few as 8."""
    steps = x_g.shape[1] // _INPUTS
    stages = min(tiles.stages, steps + 1)
    swizzled = (
        plgpu.TilingTransform((8, _INPUTS)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
    )

    @functools.partial(
        pl.run_scoped,
        arrived=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        # The result takes the place of the operands, once they have been read: two blocks fit an SM.
        shared=plgpu.RefUnion(
            (
                plgpu.SMEM((stages, tiles.rows, _INPUTS), x_g.dtype, transforms=swizzled),
                plgpu.SMEM((stages, tiles.outputs, _INPUTS), x_g.dtype, transforms=swizzled),
            ),
            plgpu.SMEM((tiles.rows, 1, tiles.outputs), y_g.dtype),
        ),
    )
    def _(arrived, shared):
        (x, weights), y = shared

        def fetch(step, slot):
            inputs = pl.ds(step * _INPUTS, _INPUTS)
            for source, first, target in ((weights_g, first_output, weights), (x_g, tile.start, x)):
                box = source.at[pl.ds(first, target.shape[1]), inputs]
                zeros = plgpu.OOBFillMode.ZEROS
                plgpu.copy_gmem_to_smem(box, target.at[slot], arrived.at[slot], oob_mode=zeros)

        for step in range(stages - 1):
            fetch(step, step)

        def accumulate(total):
            def add(step, _):
                slot = step % stages
                plgpu.barrier_wait(arrived.at[slot])
                plgpu.wgmma(total, weights.at[slot], x.at[slot].T)
                # Once only this product is under way, the one before has read its slot, which is the next to fill. Its
                # other warps have, too: a copy starts with a barrier of the four.
                plgpu.wgmma_wait(1)
                ahead = step + stages - 1

                @pl.when(ahead < steps)
                def _():
                    fetch(ahead, ahead % stages)

            lax.fori_loop(0, steps, add, None)
            return total[...]

        total = pl.run_scoped(accumulate, plgpu.ACC((tiles.outputs, tiles.rows), jnp.float32))  # pyright: ignore[reportPrivateImportUsage]
        y.at[:, 0].T[...] = total.astype(y.dtype)
        plgpu.commit_smem()
        _store(y, y_g, tile, first_output)


def _store(y, y_g, tile: _Tile, first_output) -> None:
    """Send the expert's rows, in runs of powers of two: the size of a copy is static."""
    size = y.shape[0]
    while size:
        behind = tile.count // (2 * size) * (2 * size)

        @pl.when(tile.count & size != 0)
        def _(behind=behind, size=size):
            rows = y.at[pl.ds(tile.first - tile.start + behind, size)]
            box = y_g.at[pl.ds(tile.first + behind, size), pl.ds(0, 1), pl.ds(first_output, y.shape[2])]
            plgpu.copy_smem_to_gmem(rows, box)

        size //= 2
    plgpu.wait_smem_to_gmem(0)

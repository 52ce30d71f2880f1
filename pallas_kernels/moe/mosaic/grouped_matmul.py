"""Grouped matmul as a kernel: every row times the matrix of its expert.

The rows of an expert are adjacent, so the work is a list of tiles, each some rows of one expert by some of its outputs.
A thread block finds its tile from `offsets` and `sizes` alone. Experts without rows have no tiles, and their weights
are not read.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.pallas_kernels.mosaic import pl, plgpu
from jaxinfer.pallas_kernels.mosaic.refs import Ref
from jaxinfer.pallas_kernels.mosaic.tuning import tuned
from jaxinfer.pallas_kernels.target import UnsupportedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """The tile sizes of a thread block.

    Attributes:
      rows, outputs: the tile of the result.
      stages: pipeline stages, each with 64 inputs of the tile's rows and weights; at least 2.
    """

    rows: int
    outputs: int
    stages: int

    @staticmethod
    def choose(rows: int, experts: int, outputs: int) -> "Tiles":
        """Tiles that usually hold all rows of an expert, so that its weights are read once; they divide the outputs."""
        if found := tuned("grouped_matmul", f"{rows}x{experts}x{outputs}"):
            return Tiles(**found)
        mean = pl.cdiv(rows, min(rows, experts))
        tile = min(
            max(pl.next_power_of_2(mean * 3 // 2 + 7), 8), 128
        )  # 7: the previous expert's rows, see `_find_tile`
        if rows <= 8:
            tile = 8
        if tile <= 32:  # memory-bound: three or four thread blocks per SM have 140 KiB in flight
            return Tiles(rows=tile, outputs=64, stages=5)
        return Tiles(rows=tile, outputs=64 if outputs % 128 else 128, stages=3)  # compute-bound: two per SM


_TILE_K = 64  # inputs of a stage: 128 bytes, the widest swizzle
_L2_GROUP = 8  # adjacent tiles of outputs that run together, so that they share rows of x in L2
_MAX_EXPERTS = 256


def grouped_matmul(x: jax.Array, weights: jax.Array, offsets: jax.Array, sizes: jax.Array) -> jax.Array:
    """Multiply each row by its expert's matrix. Arguments as of `api`. Raises UnsupportedError."""
    (rows, inputs), (experts, outputs, _) = x.shape, weights.shape
    if x.dtype not in (jnp.bfloat16, jnp.float16) or weights.dtype != x.dtype:
        raise UnsupportedError(f"grouped_matmul takes bfloat16 or float16, got {x.dtype} and {weights.dtype}")
    if inputs % _TILE_K or outputs % 64:
        raise UnsupportedError(f"K and N must be multiples of 64, got K={inputs}, N={outputs}")
    if experts > _MAX_EXPERTS:
        raise UnsupportedError(f"grouped_matmul takes up to {_MAX_EXPERTS} experts, got {experts}")
    tiles = Tiles.choose(rows, experts, outputs)
    max_tiles = min(rows, rows // tiles.rows + experts)

    def body(x_g, weights_g, offsets_g, sizes_g, y_g):
        first_output = (lax.axis_index("group") * _L2_GROUP + lax.axis_index("output")) * tiles.outputs
        tile = _find_tile(offsets_g, sizes_g, tiles.rows, by_row=max_tiles == rows)

        @pl.when((tile.count > 0) & (first_output < outputs))
        def _():
            _multiply(x_g, weights_g.at[tile.expert], y_g, tile, first_output, tiles=tiles)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, 1, outputs), x.dtype),  # three dimensions, so that copies are not swizzled
        grid=(pl.cdiv(outputs, tiles.outputs * _L2_GROUP), max_tiles, _L2_GROUP),
        grid_names=("group", "tile", "output"),
        kernel_name="grouped_matmul",
    )
    x = jnp.pad(x, ((0, -rows % 8), (0, 0)))  # swizzled TMA tiles have 8 rows
    return kernel(x, weights, offsets, sizes)[:, 0]


@dataclasses.dataclass(frozen=True)
class _Tile:
    """The rows of a thread block: `count` rows of one expert from `first` on, none at `start` + Tiles.rows or later."""

    expert: jax.Array
    start: jax.Array  # of the TMA tile, a multiple of 8
    first: jax.Array
    count: jax.Array  # 0 or less: no work


def _find_tile(offsets_g: Ref, sizes_g: Ref, rows: int, *, by_row: bool) -> _Tile:
    """The tile of this thread block.

    Tiles start at multiples of 8 rows, as swizzled copies require, so an expert's first tile may also hold rows of the
    previous experts. The tiles of an expert whose first one starts at row `base` have indices from base // rows +
    expert on. These are unique, because the next expert's base is less than a tile before the end of this expert's last
    tile. If there would be fewer indices with one per row (`by_row`), a tile has the index of its first row.
    """
    index, experts = lax.axis_index("tile"), offsets_g.shape[0]
    width = 128 * pl.cdiv(experts, 128)

    @functools.partial(pl.run_scoped, offsets=plgpu.SMEM((width,), jnp.int32), full=plgpu.Barrier())
    def found(offsets, full):
        source = offsets_g.at[pl.ds(index * 0, width)]  # may end out of bounds, which JAX rejects for a constant start
        plgpu.copy_gmem_to_smem(source, offsets, full, oob_mode=plgpu.OOBFillMode.ZEROS)
        plgpu.barrier_wait(full)
        experts_iota = lax.broadcasted_iota(jnp.int32, (width,), 0)
        first_indices = offsets[...] if by_row else offsets[...] // rows + experts_iota
        expert = jnp.sum(jnp.where((first_indices <= index) & (experts_iota < experts), 1, 0)) - 1
        return expert, offsets[expert]

    expert, offset = found
    base = offset // 8 * 8
    tile = (index - base) // rows if by_row else index - base // rows - expert
    start = base + tile * rows
    first = jnp.maximum(start, offset)
    count = jnp.minimum(offset + sizes_g[expert], start + rows) - first
    if by_row:
        count = jnp.where(first == index, count, 0)
    return _Tile(expert, pl.multiple_of(start, 8), first, count)


def _multiply(x_g: Ref, weights_g: Ref, y_g: Ref, tile: _Tile, first_output: jax.Array, *, tiles: Tiles) -> None:
    """One tile of the result. The weights are the left operand: wgmma has M = 64, and N, here rows, as small as 8."""
    iterations = x_g.shape[1] // _TILE_K
    stages = min(tiles.stages, iterations + 1)
    swizzled = (
        plgpu.TilingTransform((8, _TILE_K)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
    )

    @functools.partial(
        pl.run_scoped,
        full=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        # The result reuses the memory of the operands, so that two thread blocks fit into an SM.
        smem=plgpu.RefUnion(
            (
                plgpu.SMEM((stages, tiles.rows, _TILE_K), x_g.dtype, transforms=swizzled),
                plgpu.SMEM((stages, tiles.outputs, _TILE_K), x_g.dtype, transforms=swizzled),
            ),
            plgpu.SMEM((tiles.rows, 1, tiles.outputs), y_g.dtype),
        ),
    )
    def _(full, smem):
        (x, weights), y = smem

        def fetch(i, stage):
            inputs = pl.ds(i * _TILE_K, _TILE_K)
            for source, first, target in ((weights_g, first_output, weights), (x_g, tile.start, x)):
                source_tile = source.at[pl.ds(first, target.shape[1]), inputs]
                zeros = plgpu.OOBFillMode.ZEROS
                plgpu.copy_gmem_to_smem(source_tile, target.at[stage], full.at[stage], oob_mode=zeros)

        for i in range(stages - 1):
            fetch(i, i)

        def accumulate(acc):
            def iteration(i, _):
                stage = i % stages
                plgpu.barrier_wait(full.at[stage])
                plgpu.wgmma(acc, weights.at[stage], x.at[stage].T)
                # With only this wgmma in flight, the previous one has finished reading its stage, the next to be
                # refilled. So have the other warps, because Mosaic starts a copy with a barrier of all four
                # (`auto_barriers`).
                plgpu.wgmma_wait(1)
                ahead = i + stages - 1

                @pl.when(ahead < iterations)
                def _():
                    fetch(ahead, ahead % stages)

            lax.fori_loop(0, iterations, iteration, None)
            return acc[...]

        acc = pl.run_scoped(accumulate, plgpu.ACC((tiles.outputs, tiles.rows), jnp.float32))  # pyright: ignore[reportPrivateImportUsage]
        y.at[:, 0].T[...] = acc.astype(y.dtype)
        plgpu.commit_smem()
        _store(y, y_g, tile, first_output)


def _store(y: Ref, y_g: Ref, tile: _Tile, first_output: jax.Array) -> None:
    """Write the expert's rows in copies of powers of two, because the size of a copy is static."""
    size = y.shape[0]
    while size:
        done = tile.count // (2 * size) * (2 * size)

        @pl.when(tile.count & size != 0)
        def _(done=done, size=size):
            rows = y.at[pl.ds(tile.first - tile.start + done, size)]
            target = y_g.at[pl.ds(tile.first + done, size), pl.ds(0, 1), pl.ds(first_output, y.shape[2])]
            plgpu.copy_smem_to_gmem(rows, target)

        size //= 2
    plgpu.wait_smem_to_gmem(0)

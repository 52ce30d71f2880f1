"""Grouped matmul as a kernel: every row times the matrix of its expert.

The rows of an expert are adjacent, so the work is a list of tiles, each some rows of one expert by some of its outputs.
A thread block finds its tile from `offsets` and `sizes` alone. Experts without rows have no tiles, and their weights
are not read.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.pallas_kernels.mosaic import pl, plgpu
from jaxinfer.pallas_kernels.mosaic.layout import swizzled_tiles
from jaxinfer.pallas_kernels.mosaic.refs import (
    Barrier,
    Index,
    Ref,
    barrier,
    copy_zero_filled,
    gmem,
    slice_past_end,
    smem,
)
from jaxinfer.pallas_kernels.mosaic.ring import Ring
from jaxinfer.pallas_kernels.mosaic.tuning import tuned
from jaxinfer.pallas_kernels.target import UnsupportedError
from jaxinfer.pallas_kernels.weights import Weights

_TILE_K = 64  # inputs of a stage: 128 bytes, the widest swizzle
_L2_GROUP = 8  # adjacent tiles of outputs that run together, so that they share rows of x in L2
_MAX_EXPERTS = 256


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The static parameters of a launch.

    Attributes:
      rows: R. experts: E. inputs: K. outputs: N. dtype: of all matrices.
    """

    rows: int
    experts: int
    inputs: int
    outputs: int
    dtype: np.dtype
    tiles: Tiles

    @property
    def max_tiles(self) -> int:
        """Tiles of rows, at most: one for each row if that is fewer."""
        return min(self.rows, self.rows // self.tiles.rows + self.experts)

    @property
    def by_row(self) -> bool:
        """Whether a tile has the index of its first row."""
        return self.max_tiles == self.rows

    @property
    def ring(self) -> Ring:
        """The tiles of inputs. The last wgmma may still read its stage when another is refilled."""
        iterations = self.inputs // _TILE_K
        return Ring(min(self.tiles.stages, iterations + 1), 0, iterations, in_use=1)


class _Inputs(NamedTuple):
    """Arrays in global memory: x [R, K], weights [E, N, K], and int32 offsets and sizes [E]."""

    x: Ref
    weights: Ref
    offsets: Ref
    sizes: Ref


class _TableScratch(NamedTuple):
    """The offsets in shared memory, int32 [E in whole warps], and the barrier that says that they have been copied."""

    full: Barrier
    offsets: Ref


class _Stages(NamedTuple):
    """Pipeline stages in shared memory: [stages, tile's rows, _TILE_K] and [stages, tile's outputs, _TILE_K]."""

    x: Ref
    weights: Ref


class _Scratch(NamedTuple):
    """Shared memory of a thread block, and barriers.

    Attributes:
      full: a stage has been copied, for each stage.
      memory: the stages, and afterwards the result [tile's rows, 1, tile's outputs] in their place, so that two thread
        blocks fit into an SM.
    """

    full: Barrier
    memory: Any


def choose_tiles(rows: int, experts: int, outputs: int) -> Tiles:
    """Return tiles that usually hold all rows of an expert, so that its weights are read once.

    They divide the outputs.
    """
    sizes = tuned("grouped_matmul", f"{rows}x{experts}x{outputs}")
    if sizes is not None:
        return Tiles(**sizes)
    mean = pl.cdiv(rows, min(rows, experts))
    tile = pl.next_power_of_2(mean * 3 // 2 + 7)  # 7: the previous expert's rows, see `_find_tile`
    tile = 8 if rows <= 8 else min(max(tile, 8), 128)
    if tile <= 32:  # memory-bound: three or four thread blocks per SM have 140 KiB in flight
        return Tiles(rows=tile, outputs=64, stages=5)
    return Tiles(rows=tile, outputs=64 if outputs % 128 else 128, stages=3)  # compute-bound: two per SM


def grouped_matmul(x: jax.Array, weights: Weights, offsets: jax.Array, sizes: jax.Array) -> jax.Array:
    """Multiply each row by its expert's matrix. Arguments as of `api`. Raises UnsupportedError."""
    matrices = weights.weight
    (rows, inputs), (experts, outputs, _) = x.shape, matrices.shape
    if x.dtype not in (jnp.bfloat16, jnp.float16) or matrices.dtype != x.dtype:
        raise UnsupportedError(f"grouped_matmul takes bfloat16 or float16, got {x.dtype} and {matrices.dtype}")
    if inputs % _TILE_K or outputs % 64:
        raise UnsupportedError(f"K and N must be multiples of 64, got K={inputs}, N={outputs}")
    if experts > _MAX_EXPERTS:
        raise UnsupportedError(f"grouped_matmul takes up to {_MAX_EXPERTS} experts, got {experts}")
    tiles = choose_tiles(rows, experts, outputs)
    plan = Plan(rows=rows, experts=experts, inputs=inputs, outputs=outputs, dtype=x.dtype, tiles=tiles)
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan),
        out_type=jax.ShapeDtypeStruct((rows, 1, outputs), x.dtype),  # three dimensions, so that copies are not swizzled
        grid=(pl.cdiv(outputs, tiles.outputs * _L2_GROUP), plan.max_tiles, _L2_GROUP),
        grid_names=("group", "tile", "output"),
        kernel_name="grouped_matmul",
    )
    x = jnp.pad(x, ((0, -rows % 8), (0, 0)))  # swizzled TMA tiles have 8 rows
    return kernel(_Inputs(gmem(x), gmem(matrices), gmem(offsets), gmem(sizes)))[:, 0]


def _kernel(plan: Plan, inputs: _Inputs, y: Ref) -> None:
    """Compute one tile of the result. y: [R, 1, N] in global memory."""
    first_output = (lax.axis_index("group") * _L2_GROUP + lax.axis_index("output")) * plan.tiles.outputs
    tile = _find_tile(plan, inputs)

    @pl.when((tile.count > 0) & (first_output < plan.outputs))
    def _() -> None:
        # The table of `_find_tile` has been read: this uses its memory again.
        pl.run_scoped(functools.partial(_multiply, plan, inputs, y, tile, first_output), _scratch(plan))


def _scratch(plan: Plan) -> _Scratch:
    """Declare the scratch of `_multiply`."""
    stages, tiles, transforms = plan.ring.stages, plan.tiles, swizzled_tiles(plan.dtype)
    operands = _Stages(
        x=smem((stages, tiles.rows, _TILE_K), plan.dtype, transforms),
        weights=smem((stages, tiles.outputs, _TILE_K), plan.dtype, transforms),
    )
    y = smem((tiles.rows, 1, tiles.outputs), plan.dtype)
    return _Scratch(full=barrier(2, stages), memory=plgpu.RefUnion(operands, y))


@dataclasses.dataclass(frozen=True)
class _Tile:
    """The rows of a thread block: `count` rows of one expert from `first` on, none at `start` + Tiles.rows or later.

    Attributes:
      start: the first row of the TMA tile, a multiple of 8. count: 0 or less without work.
    """

    expert: jax.Array
    start: jax.Array
    first: jax.Array
    count: jax.Array


def _find_tile(plan: Plan, inputs: _Inputs) -> _Tile:
    """Find the tile of this thread block.

    Tiles start at multiples of 8 rows, as swizzled copies require, so an expert's first tile may also hold rows of the
    previous experts. The tiles of an expert whose first one starts at row `base` have indices from base // rows +
    expert on. These are unique, because the next expert's base is less than a tile before the end of this expert's last
    tile. If there would be fewer indices with one per row (`by_row`), a tile has the index of its first row.
    """
    index, rows = lax.axis_index("tile"), plan.tiles.rows
    scratch = _TableScratch(full=barrier(), offsets=smem((128 * pl.cdiv(plan.experts, 128),), jnp.int32))
    expert, offset = pl.run_scoped(functools.partial(_find_expert, plan, inputs.offsets), scratch)
    base = offset // 8 * 8
    tile = (index - base) // rows if plan.by_row else index - base // rows - expert
    start = base + tile * rows
    first = jnp.maximum(start, offset)
    count = jnp.minimum(offset + inputs.sizes[expert], start + rows) - first
    if plan.by_row:
        count = jnp.where(first == index, count, 0)
    return _Tile(expert, pl.multiple_of(start, 8), first, count)


def _find_expert(plan: Plan, offsets: Ref, scratch: _TableScratch) -> tuple[jax.Array, jax.Array]:
    """Find the expert of this thread block's tile, and its first row."""
    index, (width,) = lax.axis_index("tile"), scratch.offsets.shape
    source = offsets.at[slice_past_end(width, index)]
    copy_zero_filled(source, scratch.offsets, scratch.full)
    plgpu.barrier_wait(scratch.full)
    experts = lax.broadcasted_iota(jnp.int32, (width,), 0)
    table = scratch.offsets[...]
    first_indices = table if plan.by_row else table // plan.tiles.rows + experts
    expert = jnp.sum(jnp.where((first_indices <= index) & (experts < plan.experts), 1, 0)) - 1
    return expert, scratch.offsets[expert]


def _multiply(plan: Plan, inputs: _Inputs, y_g: Ref, tile: _Tile, first_output: jax.Array, scratch: _Scratch) -> None:
    """Multiply one tile. The weights are the left operand: wgmma has M = 64, and N, here rows, as small as 8."""
    stages, y = scratch.memory
    ring, fetch = plan.ring, functools.partial(_fetch, inputs, tile, first_output, scratch.full, stages)
    ring.fill(fetch)

    def accumulate(acc: Ref) -> jax.Array:
        def iteration(i: jax.Array, _: None) -> None:
            stage = ring.stage(i)
            plgpu.barrier_wait(scratch.full.at[stage])
            plgpu.wgmma(acc, stages.weights.at[stage], stages.x.at[stage].T)
            # With only this wgmma in flight, the previous one has finished reading its stage, the next to be refilled.
            # So have the other warps, because Mosaic starts a copy with a barrier of all four (`auto_barriers`).
            plgpu.wgmma_wait(1)
            ring.refill(i, fetch)

        lax.fori_loop(0, ring.stop, iteration, None)
        return acc[...]

    acc = pl.run_scoped(accumulate, plgpu.ACC((plan.tiles.outputs, plan.tiles.rows), jnp.float32))  # pyright: ignore[reportPrivateImportUsage]
    y.at[:, 0].T[...] = acc.astype(plan.dtype)
    plgpu.commit_smem()
    _store(y, y_g, tile, first_output)


def _fetch(
    inputs: _Inputs, tile: _Tile, first_output: jax.Array, full: Barrier, stages: _Stages, i: Index, stage: Index
) -> None:
    """Begin the copies of tile `i` of the inputs into a stage."""
    columns = pl.ds(i * _TILE_K, _TILE_K)
    weights = inputs.weights.at[tile.expert]
    for source, first, target in ((weights, first_output, stages.weights), (inputs.x, tile.start, stages.x)):
        source_tile = source.at[pl.ds(first, target.shape[1]), columns]
        copy_zero_filled(source_tile, target.at[stage], full.at[stage])


def _store(y: Ref, y_g: Ref, tile: _Tile, first_output: jax.Array) -> None:
    """Write the expert's rows in copies of powers of two, because the size of a copy is static."""
    size = y.shape[0]
    while size:
        done = tile.count // (2 * size) * (2 * size)

        @pl.when(tile.count & size != 0)
        def _(done: jax.Array = done, size: int = size) -> None:
            rows = y.at[pl.ds(tile.first - tile.start + done, size)]
            target = y_g.at[pl.ds(tile.first + done, size), pl.ds(0, 1), pl.ds(first_output, y.shape[2])]
            plgpu.copy_smem_to_gmem(rows, target)

        size //= 2
    plgpu.wait_smem_to_gmem(0)

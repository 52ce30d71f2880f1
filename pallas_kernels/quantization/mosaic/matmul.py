"""The product of int8 rows with int8 weights.

Tiling. A thread block computes a tile of rows x outputs, whose rows are partitioned over its warps. A pipeline stage
is 128 inputs of both operands, the width of a swizzled TMA tile. With tiles of 128 x 128 each byte from memory is used
in 128 multiplications, and an SM holds two thread blocks, one of which computes while the other waits. Smaller tiles
are for matmuls that would otherwise not give every SM a thread block.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.pallas_kernels.mosaic import pl, plgpu
from jaxinfer.pallas_kernels.mosaic.layout import full, load, load_broadcast, swizzled
from jaxinfer.pallas_kernels.mosaic.refs import Barrier, Index, Ref, barrier, copy_zero_filled, gmem, smem
from jaxinfer.pallas_kernels.mosaic.ring import Ring
from jaxinfer.pallas_kernels.mosaic.tuning import tuned
from jaxinfer.pallas_kernels.target import UnsupportedError, target_gpu

_TILE_K = 128  # int8 inputs of a stage: 128 bytes, the widest swizzle
_OTHER_BYTES = 4096  # of shared memory: scales, bias, barriers, alignment
_MIN_STAGES = 2  # so that one is copied while another is multiplied
_STORE_BYTES = 64  # of each row, written at once: more would leave no shared memory for a second thread block


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """Rows (a multiple of 32) and outputs (a multiple of 64) of a thread block's tile, and its pipeline stages."""

    rows: int
    outputs: int
    stages: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The static parameters of a launch: rows R, inputs K, outputs N, and the dtype of the result."""

    rows: int
    inputs: int
    outputs: int
    dtype: np.dtype
    tiles: Tiles

    @property
    def shape(self) -> tuple[int, int]:
        """The tile's rows and outputs."""
        return self.tiles.rows, self.tiles.outputs

    @property
    def store_outputs(self) -> int:
        """Outputs that are written at once."""
        return _STORE_BYTES // self.dtype.itemsize

    @property
    def ring(self) -> Ring:
        """The tiles of inputs. Not from a constant 0: the last may end past the inputs, which JAX rejects for those."""
        return Ring(self.tiles.stages, jnp.int32(0), self.iterations)

    @property
    def iterations(self) -> int:
        """Tiles of inputs."""
        return pl.cdiv(self.inputs, _TILE_K)

    def layout(self, kind: Any) -> Any:
        """The register layout of an mma's operand or accumulator, `plgpu.Layout.MMA_...`."""
        return kind(jnp.int8, m_warps=min(4, self.tiles.rows // 16))


class _Inputs(NamedTuple):
    """Arrays in global memory: int8 q [R, K] and weight [N, K]; float32 q_scale [R], scale and bias [N]."""

    q: Ref
    q_scale: Ref
    weight: Ref
    scale: Ref
    bias: Ref | None


class _Scratch(NamedTuple):
    """Shared memory of a thread block, and barriers.

    Attributes:
      q: [stages, tile's rows, _TILE_K]. weight: [stages, tile's outputs, _TILE_K].
      q_scale: [tile's rows]. vectors: [1 or 2, tile's outputs], scale and bias.
      y: [tile's rows, outputs that are written at once].
      full: a stage has been copied, for each stage. vectors_full: scales and bias have been copied.
    """

    q: Ref
    weight: Ref
    q_scale: Ref
    vectors: Ref
    y: Ref
    full: Barrier
    vectors_full: Barrier


def choose_tiles(rows: int, inputs: int, outputs: int) -> Tiles:
    """Choose the tuned tiles of these shapes, or the largest that give every SM a thread block.

    Two thread blocks share an SM, unless its shared memory holds too few stages for two.
    """
    sizes = tuned("quantized_matmul", f"rows={pl.next_power_of_2(rows)},K={inputs},N={outputs}")
    if sizes is not None:
        return Tiles(**sizes)
    shapes, gpu = ((128, 128), (64, 128), (64, 64), (32, 64)), target_gpu()
    fitting = [size for size in shapes if pl.cdiv(rows, size[0]) * pl.cdiv(outputs, size[1]) >= gpu.sms] or shapes[-1:]
    # Padding rows are multiplied too: a tile of 64 rows for 32 would double the work.
    tile_m, tile_n = next((size for size in fitting if size[0] < 2 * rows), shapes[-1])
    with_two, with_one = (
        (gpu.shared_bytes_of(blocks) - _OTHER_BYTES - tile_m * _STORE_BYTES) // ((tile_m + tile_n) * _TILE_K)
        for blocks in (2, 1)
    )
    stages = with_two if with_two >= _MIN_STAGES else with_one
    return Tiles(rows=tile_m, outputs=tile_n, stages=min(stages, 6, pl.cdiv(inputs, _TILE_K)))


def matmul(
    q: jax.Array, q_scale: jax.Array, weight: jax.Array, scale: jax.Array, bias: jax.Array | None, *, dtype: Any
) -> jax.Array:
    """Multiply quantised rows and weights. Arguments as of `api.quantized_matmul`. Raises UnsupportedError."""
    inputs, outputs = q.shape[-1], weight.shape[0]
    rows = q.size // inputs
    if inputs < _TILE_K:
        raise UnsupportedError(f"a stage holds {_TILE_K} inputs, got {inputs}")
    for name, size in (("inputs", inputs), ("outputs", outputs * dtype.itemsize)):
        if size % 16:
            raise UnsupportedError(f"TMA needs rows of a multiple of 16 bytes, got {size} bytes of {name}")
    tiles = choose_tiles(rows, inputs, outputs)
    plan = Plan(rows=rows, inputs=inputs, outputs=outputs, dtype=dtype, tiles=tiles)
    arrays = _Inputs(
        q=gmem(q.reshape(rows, inputs)),
        q_scale=gmem(q_scale.reshape(rows)),
        weight=gmem(weight),
        scale=gmem(scale),
        bias=gmem(None if bias is None else bias.astype(jnp.float32)),
    )
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan),
        out_type=jax.ShapeDtypeStruct((rows, outputs), dtype),
        scratch_types=[_scratch(plan, vectors=1 if bias is None else 2)],
        grid=(pl.cdiv(outputs, tiles.outputs), pl.cdiv(rows, tiles.rows)),
        grid_names=("output", "row"),
        kernel_name="quantized_matmul",
    )
    return kernel(arrays).reshape(*q.shape[:-1], outputs)


def _scratch(plan: Plan, *, vectors: int) -> _Scratch:
    """Declare the scratch of a thread block. vectors: the scale, and the bias if there is one."""
    (rows, outputs), stages = plan.shape, plan.tiles.stages
    return _Scratch(
        q=smem((stages, rows, _TILE_K), jnp.int8, swizzled(_TILE_K)),
        weight=smem((stages, outputs, _TILE_K), jnp.int8, swizzled(_TILE_K)),
        q_scale=smem((rows,), jnp.float32),
        vectors=smem((vectors, outputs), jnp.float32),
        y=smem((rows, plan.store_outputs), plan.dtype, swizzled(_STORE_BYTES)),
        full=barrier(2, stages),
        vectors_full=barrier(1 + vectors),
    )


def _kernel(plan: Plan, inputs: _Inputs, y: Ref, scratch: _Scratch) -> None:
    """Compute one tile of the result. y: [R, N] in global memory."""
    ring, fetch = plan.ring, functools.partial(_fetch, plan, inputs, scratch)
    ring.fill(fetch)
    copy_zero_filled(inputs.q_scale.at[_rows(plan)], scratch.q_scale, scratch.vectors_full)
    for index, vector in enumerate(vector for vector in (inputs.scale, inputs.bias) if vector is not None):
        plgpu.copy_gmem_to_smem(vector.at[_outputs(plan)], scratch.vectors.at[index], scratch.vectors_full)

    def iteration(i: jax.Array, sums: jax.Array) -> jax.Array:
        stage = ring.stage(i)
        plgpu.barrier_wait(scratch.full.at[stage])
        lhs = load(scratch.q.at[stage], plan.layout(plgpu.Layout.MMA_LHS))
        rhs = load(scratch.weight.at[stage].T, plan.layout(plgpu.Layout.MMA_RHS))
        sums = plgpu.mma(sums, lhs, rhs)
        # The commit is a barrier: all warps have the stage in registers, so TMA may refill it.
        ring.refill(i, fetch, commit=True)
        return sums

    zeros = full(plan.shape, 0, jnp.int32, plan.layout(plgpu.Layout.MMA_ACC))
    sums = lax.fori_loop(0, plan.iterations, iteration, zeros)
    plgpu.barrier_wait(scratch.vectors_full)
    _store(plan, _scale(plan, sums, scratch, has_bias=inputs.bias is not None), y, scratch)


def _rows(plan: Plan) -> Any:
    """The slice of rows of this thread block."""
    return pl.ds(lax.axis_index("row") * plan.tiles.rows, plan.tiles.rows)


def _outputs(plan: Plan) -> Any:
    """The slice of outputs of this thread block."""
    return pl.ds(lax.axis_index("output") * plan.tiles.outputs, plan.tiles.outputs)


def _fetch(plan: Plan, inputs: _Inputs, scratch: _Scratch, i: Index, stage: Index) -> None:
    """Begin the copies of tile `i` of the inputs into a stage."""
    columns = pl.ds(i * _TILE_K, _TILE_K)
    plgpu.copy_gmem_to_smem(inputs.q.at[_rows(plan), columns], scratch.q.at[stage], scratch.full.at[stage])
    plgpu.copy_gmem_to_smem(inputs.weight.at[_outputs(plan), columns], scratch.weight.at[stage], scratch.full.at[stage])


def _scale(plan: Plan, sums: jax.Array, scratch: _Scratch, *, has_bias: bool) -> jax.Array:
    """Apply the scales and the bias to sums in int32, and round."""
    acc = plan.layout(plgpu.Layout.MMA_ACC)
    y = sums.astype(jnp.float32) * load_broadcast(scratch.q_scale, plan.shape, 0, acc)
    y *= load_broadcast(scratch.vectors.at[0], plan.shape, 1, acc)
    if has_bias:
        y += load_broadcast(scratch.vectors.at[1], plan.shape, 1, acc)
    return y.astype(plan.dtype)


def _store(plan: Plan, y: jax.Array, y_g: Ref, scratch: _Scratch) -> None:
    """Write the tile to global memory, some outputs at a time."""
    for first in range(0, plan.tiles.outputs, plan.store_outputs):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        scratch.y[...] = y[:, first : first + plan.store_outputs]
        plgpu.commit_smem()
        outputs = pl.ds(lax.axis_index("output") * plan.tiles.outputs + first, plan.store_outputs)
        plgpu.copy_smem_to_gmem(scratch.y, y_g.at[_rows(plan), outputs])
    plgpu.wait_smem_to_gmem(0)

"""W8A8 matmul of many rows (DeepSpeed Inference, arXiv:2207.00032, section III-C).

Rows of x are quantised dynamically, fused with the norm before (`norm_quantize`), so that x is written and read as
int8. Tiles of int8 are multiplied into int32; the scales and the bias are applied at the end, in registers
(`quantized_matmul`). For up to 16 rows `small_batch_linear` reads the weights faster.

Tiling. A thread block computes a tile of rows x outputs, whose rows are partitioned over its warps. A pipeline stage
is 128 inputs of both operands, the width of a swizzled TMA tile. With tiles of 128 x 128 each byte from memory is used
in 128 multiplications, and an SM holds two thread blocks, one of which computes while the other waits. Smaller tiles
are for matmuls that would otherwise not give every SM a thread block.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.pallas_kernels.mosaic import pl, plgpu
from jaxinfer.pallas_kernels.mosaic.refs import Ref
from jaxinfer.pallas_kernels.mosaic.tuning import tuned
from jaxinfer.pallas_kernels.target import UnsupportedError, target_gpu

_THREADS = 128  # of a warpgroup
_TILE_K = 128  # int8 inputs of a stage: 128 bytes, the widest swizzle
_OTHER_BYTES = 4096  # of shared memory: scales, bias, barriers, alignment
_MIN_STAGES = 2  # so that one is copied while another is multiplied
_MAX_INPUTS = 16_384  # of a row in registers
_STORE_BYTES = 64  # of each row, written at once: more would leave no shared memory for a second thread block


def _swizzled(width: int) -> "tuple[plgpu.SwizzleTransform, ...]":
    return (plgpu.SwizzleTransform(width),)  # pyright: ignore[reportAbstractUsage]  # pyright takes JAX's class for abstract


def quantize(
    x: jax.Array, norm_scale: jax.Array | None = None, norm_shift: jax.Array | None = None, *, eps: float = 0.0
) -> tuple[jax.Array, jax.Array]:
    """One warpgroup per row; the row stays in registers between finding its maximum and rounding."""
    inputs = x.shape[-1]
    if inputs % _THREADS or inputs > _MAX_INPUTS:
        raise UnsupportedError(f"a row must be a multiple of {_THREADS}, at most {_MAX_INPUTS} inputs, got {inputs}")
    rows = x.size // inputs
    vec_size = next(size for size in (8, 4, 2, 1) if inputs % (_THREADS * size) == 0)
    layout = plgpu.Layout.WG_STRIDED((inputs,), vec_size=vec_size)
    operands = [array for array in (norm_scale, norm_shift) if array is not None]

    def body(x_g, *refs):
        *norm, q_g, scale_g = refs
        row = lax.axis_index("row")

        def load(ref: Ref) -> jax.Array:
            return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)

        y = load(x_g.at[row])
        if norm:
            norm_scale_g, *shift = norm
            if shift:
                y -= jnp.sum(y) / inputs
            y *= lax.rsqrt(jnp.sum(y * y) / inputs + eps)
            y *= load(norm_scale_g)  # loaded late: a row, the scale and the shift do not fit into registers together
            if shift:
                y += load(shift[0])
        scale = jnp.maximum(jnp.max(jnp.abs(y)), 1e-30) / 127.0
        q_g[row] = jnp.round(y / scale).astype(jnp.int8)
        scale_g[row] = scale

    q, scale = plgpu.kernel(
        body,
        out_type=(jax.ShapeDtypeStruct((rows, inputs), jnp.int8), jax.ShapeDtypeStruct((rows,), jnp.float32)),
        grid=(rows,),
        grid_names=("row",),
        kernel_name="norm_quantize" if operands else "quantize_rows",
    )(x.reshape(rows, inputs), *operands)
    return q.reshape(x.shape), scale.reshape(*x.shape[:-1], 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """Rows (a multiple of 32) and outputs (a multiple of 64) of a thread block's tile, and its pipeline stages."""

    rows: int
    outputs: int
    stages: int


def choose_tiles(rows: int, inputs: int, outputs: int) -> Tiles:
    """The tuned tiles of these shapes, or the largest that give every SM a thread block.

    Two thread blocks share an SM, unless its shared memory holds too few stages for two.
    """
    if found := tuned("quantized_matmul", f"rows={pl.next_power_of_2(rows)},K={inputs},N={outputs}"):
        return Tiles(**found)
    sizes, gpu = ((128, 128), (64, 128), (64, 64), (32, 64)), target_gpu()
    fitting = [size for size in sizes if pl.cdiv(rows, size[0]) * pl.cdiv(outputs, size[1]) >= gpu.sms] or sizes[-1:]
    # Padding rows are multiplied too: a tile of 64 rows for 32 would double the work.
    tile_m, tile_n = next((size for size in fitting if size[0] < 2 * rows), sizes[-1])
    two, one = (
        (gpu.shared_bytes_of(blocks) - _OTHER_BYTES - tile_m * _STORE_BYTES) // ((tile_m + tile_n) * _TILE_K)
        for blocks in (2, 1)
    )
    stages = two if two >= _MIN_STAGES else one
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
    return _matmul(
        q.reshape(rows, inputs),
        q_scale.reshape(rows),
        weight,
        scale,
        *(() if bias is None else (bias.astype(jnp.float32),)),
        dtype=dtype,
        tiles=choose_tiles(rows, inputs, outputs),
    ).reshape(*q.shape[:-1], outputs)


def _matmul(q: jax.Array, q_scale: jax.Array, weight: jax.Array, *vectors: jax.Array, dtype: Any, tiles: Tiles):
    """q: [R, K]; q_scale: [R]; weight: [N, K]; vectors: the scale and optionally the bias, float32 [N]. -> [R, N]."""
    (rows, inputs), outputs = q.shape, weight.shape[0]
    shape, iterations = (tiles.rows, tiles.outputs), pl.cdiv(inputs, _TILE_K)
    lhs, rhs, acc = (
        layout(jnp.int8, m_warps=min(4, tiles.rows // 16))
        for layout in (plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS, plgpu.Layout.MMA_ACC)
    )
    store = _STORE_BYTES // dtype.itemsize

    def body(q_g, q_scale_g, weight_g, *refs):
        vectors_g, (y_g, q_s, weight_s, q_scale_s, vectors_s, y_s, full, vectors_full) = (
            refs[: len(vectors)],
            refs[len(vectors) :],
        )
        own_rows = pl.ds(lax.axis_index("row") * tiles.rows, tiles.rows)
        own_outputs = pl.ds(lax.axis_index("output") * tiles.outputs, tiles.outputs)

        def fetch(i):
            stage, own_inputs = lax.rem(i, tiles.stages), pl.ds(i * _TILE_K, _TILE_K)
            plgpu.copy_gmem_to_smem(q_g.at[own_rows, own_inputs], q_s.at[stage], full.at[stage])
            plgpu.copy_gmem_to_smem(weight_g.at[own_outputs, own_inputs], weight_s.at[stage], full.at[stage])

        pl.loop(0, tiles.stages)(fetch)
        plgpu.copy_gmem_to_smem(q_scale_g.at[own_rows], q_scale_s, vectors_full)
        for index, ref in enumerate(vectors_g):
            plgpu.copy_gmem_to_smem(ref.at[own_outputs], vectors_s.at[index], vectors_full)

        def iteration(i, sums):
            stage = lax.rem(i, tiles.stages)
            plgpu.barrier_wait(full.at[stage])
            left = plgpu.load(q_s.at[stage], layout=lhs, optimized=False)
            right = plgpu.load(weight_s.at[stage].T, layout=rhs, optimized=False)
            sums = plgpu.mma(sums, left, right)

            @pl.when(i + tiles.stages < iterations)
            def _():
                plgpu.commit_smem()  # a barrier: all warps have the stage in registers, so TMA may refill it
                fetch(i + tiles.stages)

            return sums

        sums = lax.fori_loop(0, iterations, iteration, plgpu.layout_cast(jnp.zeros(shape, jnp.int32), acc))
        plgpu.barrier_wait(vectors_full)

        def broadcast(ref: Ref, axis: int) -> jax.Array:
            vector = plgpu.load(ref, layout=acc.reduce(1 - axis), optimized=False)
            return lax.broadcast_in_dim(vector, shape, (axis,))

        y = sums.astype(jnp.float32) * broadcast(q_scale_s, 0) * broadcast(vectors_s.at[0], 1)
        if len(vectors) == 2:
            y += broadcast(vectors_s.at[1], 1)
        y = y.astype(dtype)
        for first in range(0, tiles.outputs, store):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            y_s[...] = y[:, first : first + store]
            plgpu.commit_smem()
            columns = pl.ds(lax.axis_index("output") * tiles.outputs + first, store)
            plgpu.copy_smem_to_gmem(y_s, y_g.at[own_rows, columns])
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, outputs), dtype),
        scratch_types=[
            plgpu.SMEM((tiles.stages, tiles.rows, _TILE_K), jnp.int8, transforms=_swizzled(_TILE_K)),
            plgpu.SMEM((tiles.stages, tiles.outputs, _TILE_K), jnp.int8, transforms=_swizzled(_TILE_K)),
            plgpu.SMEM((tiles.rows,), jnp.float32),
            plgpu.SMEM((len(vectors), tiles.outputs), jnp.float32),
            plgpu.SMEM((tiles.rows, store), dtype, transforms=_swizzled(_STORE_BYTES)),
            plgpu.Barrier(num_arrivals=2, num_barriers=tiles.stages),
            plgpu.Barrier(num_arrivals=1 + len(vectors)),
        ],
        grid=(pl.cdiv(outputs, tiles.outputs), pl.cdiv(rows, tiles.rows)),
        grid_names=("output", "row"),
        kernel_name="quantized_matmul",
    )(q, q_scale, weight, *vectors)

"""Int8 products of many rows, as DeepSpeed Inference has them (arXiv:2207.00032, section III-C).

Rows of x are quantised on the fly, together with the norm that comes before (`norm_quantize`), so that x is written and
read in bytes; tiles of int8 are multiplied into int32, and both scales and the bias come at the end, in registers
(`quantized_matmul`). For up to 16 rows `small_batch_linear` reads the weights faster.

How the product divides. A block computes a tile of rows x outputs, each of its warps a share of the rows. 128 inputs
of both operands, which is what TMA swizzles, arrive in a ring of slots. With 128 x 128 a byte from memory takes part in
128 multiplications, and each SM has room for two blocks, one of which computes while the other waits; smaller tiles are
for products that would not make a block for every SM.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import weights as formats
from pallas_kernels.dispatch import UnsupportedError, dispatch
from pallas_kernels.norm import normalize
from pallas_kernels.tuning import tuned

_LANES = 128  # threads of a warpgroup
_DEPTH = 128  # int8 inputs of a slot: 128 bytes, the widest swizzle
_SMS = 132
_BLOCK_BYTES = 112_000  # of shared memory for slots and results, so that two blocks fit into an SM
_MAX_INPUTS = 16_384  # of a row in registers
_STORED = 64  # bytes of each row that are written at once: more would leave no room for a second block


def _swizzled(width: int) -> tuple[plgpu.SwizzleTransform, ...]:
    return (plgpu.SwizzleTransform(width),)  # pyright: ignore[reportAbstractUsage]  # JAX's class is whole


def quantize_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Symmetric int8 per row: x ~ q * scale. x: [..., K] -> int8 [..., K], float32 [..., 1]."""
    return dispatch("quantize_rows", _quantize_kernel, formats.quantize_rows, x)


def norm_quantize(
    x: jax.Array, scale: jax.Array, shift: jax.Array | None, *, eps: float
) -> tuple[jax.Array, jax.Array]:
    """`quantize_rows` of LayerNorm(x), or of RMSNorm(x) if there is no shift. x: [..., K]; scale, shift: [K]."""
    return dispatch("norm_quantize", _quantize_kernel, _norm_quantize_definition, x, scale, shift, eps=eps)


def quantized_matmul(
    q: jax.Array,
    q_scale: jax.Array,
    kernel: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None = None,
    *,
    dtype: Any,
) -> jax.Array:
    """(q * q_scale) (kernel * scale)^T + bias, accumulated in int32.

    q: int8 [..., K]; q_scale: float32 [..., 1]; kernel: int8 [N, K]; scale, bias: [N]. Returns [..., N] in `dtype`.
    """
    arrays = (q, q_scale, kernel, scale, bias)
    return dispatch("quantized_matmul", _matmul_kernel, _matmul_definition, *arrays, dtype=jnp.dtype(dtype))


def _norm_quantize_definition(
    x: jax.Array, scale: jax.Array, shift: jax.Array | None, *, eps: float
) -> tuple[jax.Array, jax.Array]:
    return formats.quantize_rows(normalize(x, scale, shift, eps=eps))


def _matmul_definition(
    q: jax.Array, q_scale: jax.Array, kernel: jax.Array, scale: jax.Array, bias: jax.Array | None, *, dtype: Any
) -> jax.Array:
    y = formats.int8_product(q, q_scale, kernel, scale)
    return (y if bias is None else y + bias).astype(dtype)


def _quantize_kernel(
    x: jax.Array, norm_scale: jax.Array | None = None, norm_shift: jax.Array | None = None, *, eps: float = 0.0
) -> tuple[jax.Array, jax.Array]:
    """One warpgroup per row, which stays in registers between its maximum and its rounding."""
    inputs = x.shape[-1]
    if inputs % _LANES or inputs > _MAX_INPUTS:
        raise UnsupportedError(f"a row must be a multiple of {_LANES}, at most {_MAX_INPUTS} inputs, got {inputs}")
    rows = x.size // inputs
    each = next(count for count in (8, 4, 2, 1) if inputs % (_LANES * count) == 0)
    held = plgpu.Layout.WG_STRIDED((inputs,), vec_size=each)
    operands = [array for array in (norm_scale, norm_shift) if array is not None]

    def body(x_g, *refs):
        *norm, q_g, scale_g = refs
        row = lax.axis_index("row")

        def load(ref):
            return plgpu.load(ref, layout=held, optimized=False).astype(jnp.float32)

        y = load(x_g.at[row])
        if norm:
            factor, *shift = norm
            if shift:
                y -= jnp.sum(y) / inputs
            y *= lax.rsqrt(jnp.sum(y * y) / inputs + eps)
            y *= load(factor)  # no sooner: registers would not hold a row and both
            if shift:
                y += load(shift[0])
            y = y.astype(x.dtype).astype(jnp.float32)
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
    """A block's rows and outputs, multiples of 32 and of 64, and the slots of its ring."""

    rows: int
    outputs: int
    stages: int


def choose_tiles(rows: int, inputs: int, outputs: int) -> Tiles:
    """The measured tiles of these shapes, or the largest that give every SM a block."""
    if found := tuned("quantized_matmul", f"rows={pl.next_power_of_2(rows)},K={inputs},N={outputs}"):
        return Tiles(**found)
    sizes = ((128, 128), (64, 128), (64, 64), (32, 64))
    fitting = [size for size in sizes if pl.cdiv(rows, size[0]) * pl.cdiv(outputs, size[1]) >= _SMS] or sizes[-1:]
    # Rows of no use are multiplied too: a tile of 64 for 32 rows would double the work.
    height, width = next((size for size in fitting if size[0] < 2 * rows), sizes[-1])
    stages = (_BLOCK_BYTES - height * _STORED) // ((height + width) * _DEPTH)
    return Tiles(rows=height, outputs=width, stages=min(stages, 6, pl.cdiv(inputs, _DEPTH)))


def _matmul_kernel(
    q: jax.Array, q_scale: jax.Array, kernel: jax.Array, scale: jax.Array, bias: jax.Array | None, *, dtype: Any
) -> jax.Array:
    inputs, outputs = q.shape[-1], kernel.shape[0]
    rows = q.size // inputs
    if inputs < _DEPTH:
        raise UnsupportedError(f"a slot holds {_DEPTH} inputs, got {inputs}")
    for name, size in (("inputs", inputs), ("outputs", outputs * dtype.itemsize)):
        if size % 16:
            raise UnsupportedError(f"TMA takes rows of whole 16 bytes, got {size} bytes of {name}")
    return _matmul(
        q.reshape(rows, inputs),
        q_scale.reshape(rows),
        kernel,
        scale,
        *(() if bias is None else (bias.astype(jnp.float32),)),
        dtype=dtype,
        tiles=choose_tiles(rows, inputs, outputs),
    ).reshape(*q.shape[:-1], outputs)


def _matmul(q: jax.Array, q_scale: jax.Array, kernel: jax.Array, *channels: jax.Array, dtype: Any, tiles: Tiles):
    """q: [R, K]; q_scale: [R]; channels: the scale and perhaps the bias, float32 [N]. Returns [R, N]."""
    (rows, inputs), outputs = q.shape, kernel.shape[0]
    shape, steps = (tiles.rows, tiles.outputs), pl.cdiv(inputs, _DEPTH)
    lhs, rhs, acc = (
        layout(jnp.int8, m_warps=min(4, tiles.rows // 16))
        for layout in (plgpu.Layout.MMA_LHS, plgpu.Layout.MMA_RHS, plgpu.Layout.MMA_ACC)
    )
    store = _STORED // dtype.itemsize

    def body(q_g, q_scale_g, kernel_g, *refs):
        channels_g, (y_g, q_s, kernel_s, q_scale_s, channels_s, y_s, arrived, scaled) = (
            refs[: len(channels)],
            refs[len(channels) :],
        )
        own_rows = pl.ds(lax.axis_index("row") * tiles.rows, tiles.rows)
        own_outputs = pl.ds(lax.axis_index("output") * tiles.outputs, tiles.outputs)

        def fetch(step):
            slot, part = lax.rem(step, tiles.stages), pl.ds(step * _DEPTH, _DEPTH)
            plgpu.copy_gmem_to_smem(q_g.at[own_rows, part], q_s.at[slot], arrived.at[slot])
            plgpu.copy_gmem_to_smem(kernel_g.at[own_outputs, part], kernel_s.at[slot], arrived.at[slot])

        pl.loop(0, tiles.stages)(fetch)
        plgpu.copy_gmem_to_smem(q_scale_g.at[own_rows], q_scale_s, scaled)
        for index, ref in enumerate(channels_g):
            plgpu.copy_gmem_to_smem(ref.at[own_outputs], channels_s.at[index], scaled)

        def add(step, sums):
            slot = lax.rem(step, tiles.stages)
            plgpu.barrier_wait(arrived.at[slot])
            left = plgpu.load(q_s.at[slot], layout=lhs, optimized=False)
            right = plgpu.load(kernel_s.at[slot].T, layout=rhs, optimized=False)
            sums = plgpu.mma(sums, left, right)

            @pl.when(step + tiles.stages < steps)
            def _():
                plgpu.commit_smem()  # all warps have the slot in registers: TMA may overwrite it
                fetch(step + tiles.stages)

            return sums

        sums = lax.fori_loop(0, steps, add, plgpu.layout_cast(jnp.zeros(shape, jnp.int32), acc))
        plgpu.barrier_wait(scaled)

        def broadcast(ref, axis):
            vector = plgpu.load(ref, layout=acc.reduce(1 - axis), optimized=False)
            return lax.broadcast_in_dim(vector, shape, (axis,))

        y = sums.astype(jnp.float32) * broadcast(q_scale_s, 0) * broadcast(channels_s.at[0], 1)
        if len(channels) == 2:
            y += broadcast(channels_s.at[1], 1)
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
            plgpu.SMEM((tiles.stages, tiles.rows, _DEPTH), jnp.int8, transforms=_swizzled(_DEPTH)),
            plgpu.SMEM((tiles.stages, tiles.outputs, _DEPTH), jnp.int8, transforms=_swizzled(_DEPTH)),
            plgpu.SMEM((tiles.rows,), jnp.float32),
            plgpu.SMEM((len(channels), tiles.outputs), jnp.float32),
            plgpu.SMEM((tiles.rows, store), dtype, transforms=_swizzled(_STORED)),
            plgpu.Barrier(num_arrivals=2, num_barriers=tiles.stages),
            plgpu.Barrier(num_arrivals=1 + len(channels)),
        ],
        grid=(pl.cdiv(outputs, tiles.outputs), pl.cdiv(rows, tiles.rows)),
        grid_names=("output", "row"),
        kernel_name="quantized_matmul",
    )(q, q_scale, kernel, *channels)

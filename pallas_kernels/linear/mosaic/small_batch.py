"""A linear layer for a few rows, as fast as its weights can be read from memory.

DeepSpeed Inference, sections III-B and III-C: at small batch, a linear layer is a stream of weights. One kernel
computes it, fused with what comes before it (a norm) and after it (bias, activation, gate, residual).

Tiling. A thread block owns TILE_N outputs and a split of the inputs (split-K). Its weights come by TMA into pipeline
stages and are multiplied by `mma.sync`. The weights are the left operand, whose 64 rows are the outputs; x is the right
one, whose 8 or 16 columns are the rows of x. Weights are read once from HBM; x, a thousandth of their size, is read by
every thread block from L2. If the outputs alone give too few thread blocks, the inputs are split over a cluster, which
reduces its partial sums through an extra output.

Memory-level parallelism. 4.8 TB/s times 0.8 us of latency is 29 KB in flight on each of the 132 SMs of an H200. The
pipelines of two thread blocks hold at least twice that, and one computes while the other waits. The pipeline is filled
before anything else, so that rows are normalised while the first weights are in flight.

Edges. TMA fills in zeros past the ends of N, K and the rows, and does not write past them. So XLA pads no matrix, only
the scales of a vocabulary, outside of the decode loop.

Formats. `operands.py` describes how each weight format is multiplied. Up to MAX_RESIDENT_ROWS rows of x that are
normalised or quantised are resident: every thread block computes them at its start and keeps them in shared memory
(`rows.py`). More rows are normalised or quantised before.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.pallas_kernels.activations import activate, approximate_erf
from jaxinfer.pallas_kernels.linear.mosaic.operands import (
    acc_layout,
    broadcast_columns,
    broadcast_outputs,
    operand_of,
)
from jaxinfer.pallas_kernels.linear.mosaic.rows import NormRefs, prepare_rows, row_layout
from jaxinfer.pallas_kernels.linear.mosaic.tiles import TILE_N, FusedLinear, Plan, plan_layer
from jaxinfer.pallas_kernels.mosaic import pl, plgpu
from jaxinfer.pallas_kernels.mosaic.cluster import meet, partial_results
from jaxinfer.pallas_kernels.mosaic.layout import full, store, swizzled_tiles
from jaxinfer.pallas_kernels.mosaic.products import split_bfloat16
from jaxinfer.pallas_kernels.mosaic.refs import (
    Barrier,
    Index,
    Ref,
    barrier,
    cluster_barrier,
    copy_zero_filled,
    gmem,
    slice_past_end,
    smem,
)
from jaxinfer.pallas_kernels.mosaic.ring import Ring
from jaxinfer.pallas_kernels.norm import normalize
from jaxinfer.pallas_kernels.quantization.api import norm_quantize, quantize_rows
from jaxinfer.pallas_kernels.target import UnsupportedError, interpreting
from jaxinfer.pallas_kernels.weights import GROUP, Weights

MAX_ROWS = 16
MAX_RESIDENT_ROWS = 4
"""Rows that every thread block prepares itself. With 8 rows of int8 or int4 a kernel before is faster, by 10 and 7%
(docs/decisions/0031)."""

_SCALES = 32  # of rows in shared memory: Mosaic copies a multiple of 128 bytes


class Norm(NamedTuple):
    """A norm over the inputs: LayerNorm, or RMSNorm if `shift` is None. scale, shift: [K]."""

    scale: jax.Array
    shift: jax.Array | None


class _Inputs(NamedTuple):
    """Arrays in global memory; None for those that a layer does not have.

    Attributes:
      x: [rows, K]; with `x_scale`, float32 [rows], its rows are quantised.
      weights: [outputs, matrices, K / per_element]. Gate and up rows alternate. A strided copy fetches either, so that
        both tiles have a pair at the same place and `act(gate) * up` exchanges nothing between threads.
      weights_scale: float32 [outputs in whole tiles, matrices]; int4: bfloat16 [K / GROUP, outputs * matrices].
      bias: [outputs in whole tiles, matrices].
      residual: [rows, outputs].
      norm: [K] each.
    """

    x: Ref
    x_scale: Ref | None
    weights: Ref
    weights_scale: Ref | None
    bias: Ref | None
    residual: Ref | None
    norm: NormRefs | None


class _Results(NamedTuple):
    """Arrays in global memory.

    Attributes:
      y: [rows, outputs]. TMA writes rows of a multiple of 16 bytes. Others, such as a vocabulary of 50,257, are padded,
        and sliced by XLA.
      partial: [split - 1, blocks, matrices, TILE_N, columns], the sums of all splits but the first; None with one.
    """

    y: Ref
    partial: Ref | None


class _ResidualScratch(NamedTuple):
    """The residual in shared memory, [columns, TILE_N], and the barrier that says that it has been copied."""

    full: Barrier
    tile: Ref


class _Scratch(NamedTuple):
    """Shared memory of a thread block, and barriers; None for those that a layer does not need.

    Attributes:
      full: a stage has been copied, for each stage.
      group_scale: bfloat16 [stages, groups, TILE_N * matrices].
      out: [columns, TILE_N], the result.
      sums_full: the cluster's partial sums are in global memory.
      transpose: bfloat16 [3, columns, TILE_N], the result on its way from one layout to another.
      weights: [stages, matrices, TILE_N, tile_k / per_element].
      x: [stages, columns, tile_k], or if it is resident [resident_rows, the split's inputs and padding].
      x_scale: float32 [_SCALES], of quantised rows. x_scale_full: it has been copied, if the rows come quantised.
    """

    full: Barrier
    group_scale: Ref | None
    out: Ref
    residual: _ResidualScratch | None
    sums_full: Barrier | None
    transpose: Ref
    weights: Ref
    x: Ref
    x_scale: Ref | None
    x_scale_full: Barrier | None


def fused_small_batch_linear(
    x: jax.Array,
    weights: Weights,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    norm: Norm | None = None,
    *,
    eps: float = 0.0,
    activation: str | None = None,
    gated: bool = False,
) -> jax.Array:
    """residual + act(norm(x) W^T + b), or with `gated` act(gate) * up of alternating outputs.

    One kernel computes all of it; more than MAX_RESIDENT_ROWS are normalised and quantised before it.

    x: [..., K]; weights: N by K; bias: [N]; residual and result: [..., N], or [..., N / 2] with `gated`.
    Raises: UnsupportedError, which names the constraint.
    """
    matrices, rows = 2 if gated else 1, math.prod(x.shape[:-1])
    operand, x_scale = operand_of(weights, x.dtype), None
    prepared = MAX_RESIDENT_ROWS < rows <= MAX_ROWS
    if prepared and operand.quantizes:
        operand = operand_of(weights, x.dtype, quantized=True)
        x, x_scale = quantize_rows(x) if norm is None else norm_quantize(x, norm.scale, norm.shift, eps=eps)
        norm = None
    elif prepared and norm is not None:
        x, norm = normalize(x, norm.scale, norm.shift, eps=eps), None
    layer = FusedLinear(
        rows=rows,
        inputs=x.shape[-1],
        outputs=weights.weight.shape[0] // matrices,
        matrices=matrices,
        operand=operand,
        eps=None if norm is None else eps,
        activation=activation,
    )
    _check(layer, residual)
    scale = weights.scale
    if scale is not None and layer.operand.per_scale == 1:
        scale = _pad_to_tiles(scale, matrices)
    inputs = _Inputs(
        x=gmem(_whole_tiles(x.reshape(layer.rows, layer.inputs))),
        x_scale=gmem(None if x_scale is None else x_scale.reshape(layer.rows)),
        weights=gmem(weights.weight.reshape(layer.outputs, matrices, -1)),
        weights_scale=gmem(scale),
        bias=gmem(None if bias is None else _pad_to_tiles(bias, matrices)),
        residual=gmem(None if residual is None else residual.reshape(layer.rows, layer.outputs)),
        norm=None if norm is None else NormRefs(gmem(norm.scale), gmem(norm.shift)),
    )
    return _launch(plan_layer(layer), inputs).reshape(*x.shape[:-1], layer.outputs)


def _pad_to_tiles(vector: jax.Array, matrices: int) -> jax.Array:
    """Reshape [outputs * matrices] to [N, matrices], padding N (a vocabulary) to a multiple of TILE_N."""
    return jnp.pad(vector, (0, -vector.size % (TILE_N * matrices))).reshape(-1, matrices)


def _whole_tiles(x: jax.Array) -> jax.Array:
    """Pad more than 8 rows to a multiple of 8, since TMA's tiles of 8 rows must divide a matrix that has more."""
    rows = len(x)
    return x if rows < 8 else jnp.pad(x, ((0, -rows % 8), (0, 0)))


def _check(layer: FusedLinear, residual: jax.Array | None) -> None:
    """Raise UnsupportedError for what the kernel does not take."""
    operand, dtype, inputs, outputs = layer.operand, layer.operand.dtype, layer.inputs, layer.outputs
    if not 1 <= layer.rows <= MAX_ROWS:
        raise UnsupportedError(f"small-batch kernel takes 1 to {MAX_ROWS} rows, got {layer.rows}")
    if dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise UnsupportedError(f"small-batch kernel takes x in bfloat16, float16 or float32, got {dtype}")
    has_norm = layer.eps is not None
    unit = max(operand.swizzle * operand.per_element // operand.weights.itemsize, 64 if has_norm else 0)
    if inputs % unit:  # the width of a swizzled tile, or what a warp holds of a row
        raise UnsupportedError(
            f"small-batch kernel takes a multiple of {unit} inputs in {operand.weights}, got {inputs}"
        )
    if operand.slices and outputs % 8:
        raise UnsupportedError(f"small-batch kernel takes a multiple of 8 outputs in {operand.slices}, got {outputs}")
    if residual is not None and residual.dtype != dtype:
        raise UnsupportedError(f"small-batch kernel takes a residual in x's dtype {dtype}, got {residual.dtype}")
    if residual is not None and outputs * dtype.itemsize % 16:
        raise UnsupportedError(f"TMA takes rows of a multiple of 16 bytes, got a residual of {outputs} in {dtype}")
    if layer.x_resident and row_layout(inputs)[1] > 160:
        kind = "normalised" if has_norm else "quantised"
        raise UnsupportedError(f"registers do not hold {kind} rows of {inputs} inputs")


def _launch(plan: Plan, inputs: _Inputs) -> jax.Array:
    """Launch the kernel and return its result [rows, outputs]."""
    split, dtype = plan.tiles.split, plan.operand.dtype
    blocks = pl.cdiv(plan.outputs, TILE_N)
    padded_outputs = pl.cdiv(plan.outputs * dtype.itemsize, 16) * 16 // dtype.itemsize
    partial = (split - 1, blocks, plan.matrices, TILE_N, plan.columns)
    results = _Results(
        y=gmem(jax.ShapeDtypeStruct((plan.rows, padded_outputs), dtype)),
        partial=gmem(jax.ShapeDtypeStruct(partial, plan.operand.accumulator)) if split > 1 else None,
    )
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan),
        out_type=[results],
        scratch_types=[_scratch(plan, inputs)],
        grid=(blocks,),
        grid_names=("block",),
        cluster=(split,),
        cluster_names=("split",),
        # Uses the declared SMEM layouts; Warpgroup semantics would infer them, and does not support skewed rows.
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name="small_batch_linear",
    )
    return kernel(inputs)[0].y[:, : plan.outputs]


def _scratch(plan: Plan, inputs: _Inputs) -> _Scratch:
    """Declare the scratch of a thread block."""
    operand, stages, tile_k, columns = plan.operand, plan.tiles.stages, plan.tiles.tile_k, plan.columns
    if plan.x_resident:
        x = smem((plan.resident_rows, plan.resident_row_size(plan.iterations * tile_k)), operand.x)
    else:
        x = smem((stages, columns, tile_k), operand.x, swizzled_tiles(operand.x, operand.swizzle))
    residual = _ResidualScratch(barrier(), smem((columns, TILE_N), operand.dtype))
    return _Scratch(
        full=barrier(plan.matrices + (plan.groups > 0) + (not plan.x_resident), stages),
        group_scale=smem((stages, plan.groups, TILE_N * plan.matrices), jnp.bfloat16) if plan.groups else None,
        out=smem((columns, TILE_N), operand.dtype),
        residual=None if inputs.residual is None else residual,
        sums_full=cluster_barrier("split") if plan.tiles.split > 1 else None,
        transpose=smem((3, columns, TILE_N), jnp.bfloat16),
        weights=smem(
            (stages, plan.matrices, TILE_N, tile_k // operand.per_element),
            operand.weights,
            _weight_tiles(plan),
        ),
        x=x,
        x_scale=smem((_SCALES,), jnp.float32) if operand.x == jnp.int8 else None,
        x_scale_full=None if inputs.x_scale is None else barrier(),
    )


def _weight_tiles(plan: Plan) -> tuple[Any, ...]:
    """The SMEM transforms of a stage of weights.

    TMA needs tiles of 8 rows to divide the matrix. Tiles of one row fit any matrix, but have two-way bank conflicts
    where a stage is two tiles wide, and Mosaic reads a slice of them from wrong addresses (docs/decisions/0031).
    """
    rows = 1 if plan.outputs % 8 and plan.outputs > 8 else 8
    return swizzled_tiles(plan.operand.weights, plan.operand.swizzle, rows=rows)


def _kernel(plan: Plan, inputs: _Inputs, results: _Results, scratch: _Scratch) -> None:
    """Compute some outputs for a split of the inputs: one thread block."""
    split = lax.axis_index("split")
    ring, fetch = Ring(plan.tiles.stages, 0, plan.iterations), functools.partial(_fetch, plan, inputs, scratch)
    ring.fill(fetch)
    if inputs.residual is not None and scratch.residual is not None:
        source, target = inputs.residual.at[_columns(plan), _outputs()], scratch.residual
        pl.when(split == 0)(lambda: plgpu.copy_gmem_to_smem(source, target.tile, target.full))
    if inputs.x_scale is not None and scratch.x_scale is not None and scratch.x_scale_full is not None:
        copy = inputs.x_scale.at[slice_past_end(_SCALES, split)], scratch.x_scale, scratch.x_scale_full
        pl.when(split == 0)(lambda: copy_zero_filled(*copy))
    scales = None if plan.groups else _load_output_vectors(plan, inputs.weights_scale)
    biases = _load_output_vectors(plan, inputs.bias)
    if plan.x_resident:
        first_input = _first_tile(plan) * plan.tiles.tile_k
        prepare_rows(plan, inputs.x, inputs.norm, first_input, scratch.x, scratch.x_scale)

    def iteration(i: jax.Array, accs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        accs = _multiply(plan, scratch, i, ring.stage(i), accs)
        # After the commit, which is a barrier, all warps have their operands in registers and TMA may refill the stage.
        ring.refill(i, fetch, commit=True)
        return accs

    zeros = full((TILE_N, plan.columns), 0, plan.operand.accumulator, acc_layout())
    accs = lax.fori_loop(0, plan.iterations, iteration, (zeros,) * plan.matrices)
    if results.partial is not None and scratch.sums_full is not None:
        _write_partial_sums(accs, results.partial, scratch.sums_full)

    @pl.when(split == 0)
    def _() -> None:
        sums = _add_partial_sums(plan, accs, results.partial)
        if scratch.x_scale_full is not None:
            plgpu.barrier_wait(scratch.x_scale_full)
        for matrix in range(plan.matrices):
            if scratch.x_scale is not None:
                sums[matrix] *= broadcast_columns(scratch.x_scale.at[pl.ds(0, plan.columns)], sums[matrix].shape)
            if scales is not None:
                sums[matrix] *= scales[matrix]
            if biases is not None:
                sums[matrix] += biases[matrix]
        _write_result(plan, _transpose(_activate(plan, sums), scratch.transpose), results.y, scratch)


def _outputs() -> Any:
    """The slice of outputs of this thread block."""
    return pl.ds(lax.axis_index("block") * TILE_N, TILE_N)


def _columns(plan: Plan) -> Any:
    """The slice of all rows of x, and of some past the last one that pad them."""
    return slice_past_end(plan.columns, lax.axis_index("block"))


def _tile_inputs(plan: Plan, i: Index, per_element: int = 1) -> Any:
    """The slice of inputs of this split's tile `i`, in elements that hold `per_element` of them."""
    size = plan.tiles.tile_k // per_element
    return pl.ds((lax.axis_index("split") * plan.iterations + i) * size, size)


def _first_tile(plan: Plan) -> jax.Array:
    """The first tile of inputs that a resident x covers.

    If the splits are unequal, the last one starts early, so that all lie within x.
    """
    return jnp.minimum(lax.axis_index("split") * plan.iterations, plan.inputs // plan.tiles.tile_k - plan.iterations)


def _resident_inputs(plan: Plan, i: jax.Array) -> Any:
    """The slice of this split's tile `i` in a resident x.

    Past the end any finite x will do, since the weights there are zero.
    """
    tile_k = plan.tiles.tile_k
    tile = jnp.minimum(lax.axis_index("split") * plan.iterations - _first_tile(plan) + i, plan.iterations - 1)
    return pl.ds(pl.multiple_of(tile * tile_k, tile_k), tile_k)


def _fetch(plan: Plan, inputs: _Inputs, scratch: _Scratch, i: Index, stage: Index) -> None:
    """Begin the copies of tile `i` into a stage."""
    full = scratch.full.at[stage]
    for matrix in range(plan.matrices):
        tile = inputs.weights.at[_outputs(), matrix, _tile_inputs(plan, i, plan.operand.per_element)]
        plgpu.copy_gmem_to_smem(tile, scratch.weights.at[stage, matrix], full)
    if inputs.weights_scale is not None and scratch.group_scale is not None:
        pairs = pl.ds(lax.axis_index("block") * TILE_N * plan.matrices, TILE_N * plan.matrices)
        tile = inputs.weights_scale.at[_tile_inputs(plan, i, GROUP), pairs]
        plgpu.copy_gmem_to_smem(tile, scratch.group_scale.at[stage], full)
    if not plan.x_resident:
        plgpu.copy_gmem_to_smem(inputs.x.at[_columns(plan), _tile_inputs(plan, i)], scratch.x.at[stage], full)


def _multiply(
    plan: Plan, scratch: _Scratch, i: jax.Array, stage: jax.Array, accs: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """Wait for tile `i` of the inputs and add its products to the sums of each matrix."""
    plgpu.barrier_wait(scratch.full.at[stage])
    x = scratch.x.at[:, _resident_inputs(plan, i)] if plan.x_resident else scratch.x.at[stage]
    return tuple(
        plan.operand.multiply(acc, scratch.weights.at[stage, matrix], x, _group_scales(plan, scratch, stage, matrix))
        for matrix, acc in enumerate(accs)
    )


def _group_scales(plan: Plan, scratch: _Scratch, stage: jax.Array, matrix: int) -> list[Ref]:
    """Return the scales of each int4 group of a stage: [TILE_N] in shared memory, where gate and up alternate."""
    if scratch.group_scale is None:
        return []
    pairs = [scratch.group_scale.at[stage, group] for group in range(plan.groups)]
    if interpreting():  # the interpreter does not support reshaped refs, the compiler does not support strided slices
        return [pair.at[pl.ds(matrix, TILE_N, plan.matrices)] for pair in pairs]
    return [pair.reshape(TILE_N, plan.matrices).at[:, matrix] for pair in pairs]


def _load_output_vectors(plan: Plan, vectors: Ref | None) -> list[jax.Array] | None:
    """Load a vector per matrix, broadcast to all columns: float32 [TILE_N, columns]. vectors: [N, matrices] in GMEM."""
    if vectors is None:
        return None
    block = vectors.at[_outputs()]
    return [broadcast_outputs(block.at[:, matrix], (TILE_N, plan.columns)) for matrix in range(plan.matrices)]


def _write_partial_sums(accs: tuple[jax.Array, ...], partial: Ref, sums_full: Barrier) -> None:
    """Write the sums of all splits but the first, for the first one to add, and wait for the cluster."""
    split, block_sums = lax.axis_index("split"), partial.at[:, lax.axis_index("block")]

    @pl.when(split > 0)
    def _() -> None:
        for matrix, acc in enumerate(accs):
            store(block_sums.at[split - 1, matrix], acc)

    meet(sums_full)


def _add_partial_sums(plan: Plan, accs: tuple[jax.Array, ...], partial: Ref | None) -> list[jax.Array]:
    """Add the other splits' sums to the first one's: float32 [TILE_N, columns] of each matrix."""
    sums = list(accs)
    if partial is not None:
        block = lax.axis_index("block")
        others = [partial_results(partial, (block, matrix), acc_layout()) for matrix in range(plan.matrices)]
        for split in zip(*others, strict=True):
            sums = [x + other for x, other in zip(sums, split, strict=True)]
    return [x.astype(jnp.float32) for x in sums]


def _activate(plan: Plan, sums: list[jax.Array]) -> jax.Array:
    """act(y), or act(gate) * up. sums: float32 [TILE_N, columns]."""
    y = sums[0] if plan.activation is None else activate(sums[0], plan.activation, erf=approximate_erf)
    return y * sums[1] if plan.matrices == 2 else y


def _transpose(y: jax.Array, transpose_s: Ref) -> jax.Array:
    """Return y^T, [columns, TILE_N], in the order of memory. transpose_s: bfloat16 [3, columns, TILE_N].

    `stmatrix` exchanges only 16-bit values between threads, so float32 is split into three bfloat16, without loss.
    """
    parts = split_bfloat16(y)
    for i, part in enumerate(parts):
        store(transpose_s.at[i].T, part)
    plgpu.commit_smem()
    layout = _result_layout(y.shape[1])
    high, middle, low = (plgpu.load(transpose_s.at[i], layout=layout).astype(jnp.float32) for i in range(len(parts)))
    return high + (middle + low)


def _result_layout(columns: int) -> Any:
    """The register layout of the result [columns, TILE_N]: as in memory."""
    return plgpu.Layout.WG_STRIDED((columns, TILE_N), vec_size=columns * TILE_N // 128)


def _write_result(plan: Plan, y: jax.Array, y_g: Ref, scratch: _Scratch) -> None:
    """Add the residual and write the rows to global memory. y: float32 [columns, TILE_N]."""
    if scratch.residual is not None:
        plgpu.barrier_wait(scratch.residual.full)
        y += plgpu.load(scratch.residual.tile, layout=_result_layout(plan.columns)).astype(jnp.float32)
    scratch.out[...] = y.astype(plan.operand.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(scratch.out.at[pl.ds(0, plan.rows)], y_g.at[:, _outputs()])
    plgpu.wait_smem_to_gmem(0)

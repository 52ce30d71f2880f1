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

Formats. `operands.py` describes how each weight format is multiplied. Rows of x that are normalised or
quantised are resident: every thread block computes them at its start and keeps them in shared memory.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.pallas_kernels.activations import activate, approximate_erf
from jaxinfer.pallas_kernels.linear.mosaic.operands import (
    Operand,
    acc_layout,
    broadcast,
    broadcast_columns,
    broadcast_outputs,
    operand_of,
    split_bfloat16,
)
from jaxinfer.pallas_kernels.mosaic import fragmented_array, pl, plgpu
from jaxinfer.pallas_kernels.mosaic.cluster import MAX_CLUSTER, check_cluster, meet
from jaxinfer.pallas_kernels.mosaic.refs import Ref
from jaxinfer.pallas_kernels.mosaic.tuning import tuned
from jaxinfer.pallas_kernels.target import UnsupportedError, interpreting, target_gpu
from jaxinfer.pallas_kernels.weights import GROUP, Weights

TILE_N = 64  # outputs of a thread block: four warps of 16 rows, the M of one mma.sync
MAX_ROWS = 16
_MAX_STAGES = 8
_IN_FLIGHT = 65_536  # bytes that the pipelines of an SM should hold


class Norm(NamedTuple):
    """A norm over the inputs: LayerNorm, or RMSNorm if `shift` is None. scale, shift: [K]."""

    scale: jax.Array
    shift: jax.Array | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """How the kernel partitions its work.

    Attributes:
      tile_k: inputs per pipeline stage. stages: pipeline stages. split: thread blocks (a cluster) over which the inputs
        are split.
    """

    tile_k: int
    stages: int
    split: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The static parameters of a launch.

    Attributes:
      rows: rows of x. inputs: K. outputs: columns of the result.
      matrices: 2 with a gate, else 1; each output has this many rows of weights.
      dtype: dtype of x, the result and the residual.
      operand: how weights of this format are multiplied.
      eps: of the norm; None without a norm.
      operands: the names of the arrays in GMEM, in order.
    """

    rows: int
    inputs: int
    outputs: int
    matrices: int
    dtype: Any
    operand: Operand
    eps: float | None
    activation: str | None
    operands: tuple[str, ...]
    tiles: Tiles

    @property
    def columns(self) -> int:
        """Rows of x, padded to the N of an mma.sync."""
        return 8 if self.rows <= 8 else 16

    @property
    def x_resident(self) -> bool:
        """Whether x is computed once (normalised, quantised) and stays in SMEM; else its tiles are loaded with W's."""
        return self.eps is not None or self.operand.quantizes

    @property
    def resident_rows(self) -> int:
        """Rows of a resident x in shared memory. A single row is broadcast to all columns of the mma."""
        return 1 if self.rows == 1 else self.columns

    @property
    def groups(self) -> int:
        """int4 groups, and so scales of each output, in a tile of inputs."""
        return self.tiles.tile_k // GROUP if self.operand.per_scale == GROUP else 0

    @property
    def iterations(self) -> int:
        """Tiles of inputs per split; past the end of the inputs TMA fills in zeros."""
        return pl.cdiv(self.inputs, self.tiles.tile_k * self.tiles.split)


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

    One kernel computes all of it.

    x: [..., K]; weights: N by K; bias: [N]; residual and result: [..., N], or [..., N / 2] with `gated`.
    Raises: UnsupportedError, which names the constraint.
    """
    rows, inputs = math.prod(x.shape[:-1]), x.shape[-1]
    matrices = 2 if gated else 1
    outputs = weights.weight.shape[0] // matrices
    operand = operand_of(weights, x.dtype)
    _check(x, operand, residual, norm, rows, outputs)
    scale = weights.scale
    if scale is not None and operand.per_scale == 1:
        scale = _pad_to_tiles(scale, matrices)
    arrays = {
        "x": x.reshape(rows, inputs),
        # Gate and up rows alternate. A strided copy fetches either, so that both tiles have a pair at the same place
        # and `act(gate) * up` exchanges nothing between threads.
        "weights": weights.weight.reshape(outputs, matrices, -1),
        "weights_scale": scale,
        "bias": None if bias is None else _pad_to_tiles(bias, matrices),
        "residual": None if residual is None else residual.reshape(rows, outputs),
        "scale": None if norm is None else norm.scale,
        "shift": None if norm is None else norm.shift,
    }
    arrays = {name: array for name, array in arrays.items() if array is not None}
    plan = Plan(
        rows=rows,
        inputs=inputs,
        outputs=outputs,
        matrices=matrices,
        dtype=x.dtype,
        operand=operand,
        eps=None if norm is None else eps,
        activation=activation,
        operands=tuple(arrays),
        tiles=choose_tiles(rows, inputs, outputs, operand, norm=norm is not None, gated=gated),
    )
    return _launch(plan, tuple(arrays.values())).reshape(*x.shape[:-1], outputs)


def _pad_to_tiles(vector: jax.Array, matrices: int) -> jax.Array:
    """[outputs * matrices] -> [N, matrices], with N padded to a multiple of TILE_N, as a vocabulary may need."""
    return jnp.pad(vector, (0, -vector.size % (TILE_N * matrices))).reshape(-1, matrices)


def _check(
    x: jax.Array,
    operand: Operand,
    residual: jax.Array | None,
    norm: Norm | None,
    rows: int,
    outputs: int,
) -> None:
    if not 1 <= rows <= MAX_ROWS:
        raise UnsupportedError(f"small-batch kernel takes 1 to {MAX_ROWS} rows, got {rows}")
    if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise UnsupportedError(f"small-batch kernel takes x in bfloat16, float16 or float32, got {x.dtype}")
    unit = max(operand.swizzle * operand.per_element // operand.weights.itemsize, 64 if norm else 0)
    if x.shape[-1] % unit:  # the width of a swizzled tile, or what a warp holds of a row
        raise UnsupportedError(
            f"small-batch kernel takes a multiple of {unit} inputs in {operand.weights}, got {x.shape[-1]}"
        )
    if operand.per_scale == GROUP and outputs % 8:
        raise UnsupportedError(f"small-batch kernel takes a multiple of 8 outputs in int4, got {outputs}")
    if residual is not None and residual.dtype != x.dtype:
        raise UnsupportedError(f"small-batch kernel takes a residual in x's dtype {x.dtype}, got {residual.dtype}")
    if residual is not None and outputs * x.dtype.itemsize % 16:
        raise UnsupportedError(f"TMA takes rows of a multiple of 16 bytes, got a residual of {outputs} in {x.dtype}")
    if (norm is not None or operand.quantizes) and _row_layout(x.shape[-1])[1] > 160:
        kind = "normalised" if norm else "quantised"
        raise UnsupportedError(f"registers do not hold {kind} rows of {x.shape[-1]} inputs")


def choose_tiles(rows: int, inputs: int, outputs: int, operand: Operand, *, norm: bool, gated: bool) -> Tiles:
    """The tuned tile sizes of these shapes, or else those of lowest estimated cost."""
    columns = 8 if rows <= 8 else 16
    key = f"rows={columns},K={inputs},N={outputs},{operand.dtype},{operand.weights},{norm=},{gated=}"
    x_resident = norm or operand.quantizes
    if found := tuned("small_batch_linear", key):
        if x_resident and inputs % found["tile_k"]:
            raise UnsupportedError(f"tile_k must divide resident rows of {inputs} inputs, got tile_k={found['tile_k']}")
        check_cluster(found["split"])
        return Tiles(**found)
    # Stages of 16 KB need few instructions per byte; 8 KB next to a resident x, which takes much of the shared memory.
    tile_k = (128 if x_resident else 256) * operand.per_element // operand.weights.itemsize
    if x_resident:  # tiles must divide the rows
        tile_k = math.gcd(tile_k, inputs)
    stage_bytes = tile_k * operand.weights.itemsize // operand.per_element
    stage_bytes += 2 * tile_k // GROUP if operand.per_scale == GROUP else 0
    stage_bytes *= TILE_N * (2 if gated else 1)
    stage_bytes += 0 if x_resident else columns * tile_k * operand.x.itemsize
    fixed_bytes = columns * TILE_N * (3 * 2 + 2 * operand.dtype.itemsize)  # results and residual
    fixed_bytes += 2048 + 1024  # Mosaic's reductions and alignment
    tiles_n, tiles_k = pl.cdiv(outputs, TILE_N), pl.cdiv(inputs, tile_k)
    gpu, candidates = target_gpu(), []
    for split in range(1, min(MAX_CLUSTER, tiles_k) + 1):
        iterations = pl.cdiv(tiles_k, split)
        x_bytes = 0
        if x_resident:
            x_rows = 1 if rows == 1 else columns
            x_bytes = x_rows * (iterations * tile_k + _skew(operand.x)) * operand.x.itemsize
        for blocks in (2, 1):  # per SM
            free_bytes = gpu.shared_bytes_of(blocks) - fixed_bytes - x_bytes
            stages = min(_MAX_STAGES, free_bytes // stage_bytes)
            if stages * stage_bytes * blocks >= _IN_FLIGHT:
                cost = _cost(tiles_n * split, gpu.sms, blocks) * (iterations + (4 if x_resident else 1))
                candidates.append((cost, Tiles(tile_k=tile_k, stages=min(stages, iterations), split=split)))
                break
    if not candidates:
        raise UnsupportedError(
            f"{columns} rows of {inputs} inputs leave no room for weights in {gpu.shared_bytes} bytes of shared memory"
        )
    return min(candidates, key=lambda candidate: candidate[0])[1]


def _cost(blocks: int, sms: int, per_sm: int) -> int:
    """The time of `blocks` thread blocks, `per_sm` at once on each SM, in thread blocks at full memory bandwidth.

    Full waves run at full bandwidth. A partial last wave takes as long as its own bytes, but at least as long as
    four thread blocks on three SMs, which is the least that can saturate memory.
    """
    waves, rest = divmod(blocks, capacity := sms * per_sm)
    return waves * capacity + (max(rest, min(capacity, sms * 4 // 3)) if rest else 0)


def _launch(plan: Plan, arrays: tuple[jax.Array, ...]) -> jax.Array:
    tiles, columns = plan.tiles, plan.columns
    blocks = pl.cdiv(plan.outputs, TILE_N)
    operand = plan.operand
    arrivals = plan.matrices + (plan.groups > 0) + (not plan.x_resident)
    scratch = {
        "weights_s": plgpu.SMEM(
            (tiles.stages, plan.matrices, TILE_N, tiles.tile_k // operand.per_element),
            operand.weights,
            transforms=_swizzled(plan.outputs, operand.weights, operand.swizzle),
        ),
        "transpose_s": plgpu.SMEM((3, columns, TILE_N), jnp.bfloat16),
        "out_s": plgpu.SMEM((columns, TILE_N), plan.dtype),
        "full": plgpu.Barrier(num_arrivals=arrivals, num_barriers=tiles.stages),
    }
    if plan.x_resident:
        row_size = plan.iterations * tiles.tile_k + _skew(operand.x)
        scratch["x_s"] = plgpu.SMEM((plan.resident_rows, row_size), operand.x)
    else:
        scratch["x_s"] = plgpu.SMEM(
            (tiles.stages, columns, tiles.tile_k),
            operand.x,
            transforms=_swizzled(plan.rows, operand.x, operand.swizzle),
        )
    if operand.quantizes:
        scratch["x_scale_s"] = plgpu.SMEM((columns,), jnp.float32)
    if plan.groups:
        shape = (tiles.stages, plan.groups, TILE_N * plan.matrices)
        scratch["group_scale_s"] = plgpu.SMEM(shape, jnp.bfloat16)
    if "residual" in plan.operands:
        scratch["residual_s"] = plgpu.SMEM((columns, TILE_N), plan.dtype)
        scratch["residual_full"] = plgpu.Barrier(num_arrivals=1)
    # TMA writes rows of a multiple of 16 bytes. Other results, such as a vocabulary of 50,257, are sliced by XLA.
    padded_outputs = pl.cdiv(plan.outputs * plan.dtype.itemsize, 16) * 16 // plan.dtype.itemsize
    result = [jax.ShapeDtypeStruct((plan.rows, padded_outputs), plan.dtype)]
    if tiles.split > 1:
        scratch["sums_full"] = plgpu.ClusterBarrier(collective_axes=("split",), num_arrivals=1)
        partial = (tiles.split - 1, blocks, plan.matrices, TILE_N, columns)
        result.append(jax.ShapeDtypeStruct(partial, operand.accumulator))
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=result,
        scratch_types=scratch,
        grid=(blocks,),
        grid_names=("block",),
        cluster=(tiles.split,),
        cluster_names=("split",),
        # Uses the declared SMEM layouts; Warpgroup semantics would infer them, and does not support skewed rows.
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name="small_batch_linear",
    )
    return kernel(*arrays)[0][:, : plan.outputs]


def _skew(dtype: Any) -> int:
    """Padding elements after each row of x in shared memory: columns avoid bank conflicts, and rows stay aligned."""
    return max(8, 16 // dtype.itemsize)


def _swizzled(size: int, dtype: Any, row_bytes: int) -> tuple[Any, ...]:
    """SMEM transforms without bank conflicts along columns, for tiles of a matrix with `size` rows.

    TMA needs tiles of 8 rows to divide the matrix. Tiles of one row fit any matrix, but have two-way bank conflicts
    where a stage is two tiles wide.
    """
    tiling = (8 if size < 8 or size % 8 == 0 else 1, row_bytes // dtype.itemsize)
    return plgpu.TilingTransform(tiling), plgpu.SwizzleTransform(row_bytes)  # pyright: ignore[reportAbstractUsage]


def _kernel(*refs: Ref, plan: Plan, weights_s, x_s, transpose_s, out_s, full, **smem: Ref) -> None:
    operands = dict(zip(plan.operands, refs, strict=False))
    out, *partial = refs[len(plan.operands) :]
    block, split = lax.axis_index("block"), lax.axis_index("split")
    stages, tile_k, iterations = plan.tiles.stages, plan.tiles.tile_k, plan.iterations
    outputs = pl.ds(block * TILE_N, TILE_N)
    columns = pl.ds(0 * block, plan.columns)  # may end past x's last row, which JAX rejects if the start is constant

    def inputs(i: Any, per_element: int = 1) -> Any:
        size = tile_k // per_element
        return pl.ds((split * iterations + i) * size, size)

    # The first tile of inputs that a resident x covers. If the splits are unequal, the last one starts early, so that
    # all lie within x.
    first_tile = jnp.minimum(split * iterations, plan.inputs // tile_k - iterations)

    def resident_inputs(i: Any) -> Any:  # past the end any finite x will do, since the weights there are zero
        tile = jnp.minimum(split * iterations - first_tile + i, iterations - 1)
        return pl.ds(pl.multiple_of(tile * tile_k, tile_k), tile_k)

    def fetch(i: Any, stage: Any) -> None:
        for matrix in range(plan.matrices):
            tile = operands["weights"].at[outputs, matrix, inputs(i, plan.operand.per_element)]
            plgpu.copy_gmem_to_smem(tile, weights_s.at[stage, matrix], full.at[stage])
        if plan.groups:
            pairs = pl.ds(block * TILE_N * plan.matrices, TILE_N * plan.matrices)
            tile = operands["weights_scale"].at[inputs(i, GROUP), pairs]
            plgpu.copy_gmem_to_smem(tile, smem["group_scale_s"].at[stage], full.at[stage])
        if not plan.x_resident:
            tile = operands["x"].at[columns, inputs(i)]
            plgpu.copy_gmem_to_smem(tile, x_s.at[stage], full.at[stage])

    for i in range(min(stages, iterations)):
        fetch(i, i)

    if "residual" in operands:

        @pl.when(split == 0)
        def _() -> None:
            rows = operands["residual"].at[columns, outputs]
            plgpu.copy_gmem_to_smem(rows, smem["residual_s"], smem["residual_full"])

    scales, biases = (
        _load_output_vectors(plan, operands[name].at[outputs]) if name in operands else None
        for name in ("weights_scale" if not plan.groups else "", "bias")
    )
    if plan.x_resident:
        _prepare_x(plan, operands, first_tile * tile_k, x_s, smem.get("x_scale_s"))

    def iteration(i: jax.Array, accs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        stage = lax.rem(i, stages)
        plgpu.barrier_wait(full.at[stage])
        x_tile = x_s.at[:, resident_inputs(i)] if plan.x_resident else x_s.at[stage]
        accs = tuple(
            plan.operand.multiply(
                acc,
                weights_s.at[stage, matrix],
                x_tile,
                [_deinterleave(smem["group_scale_s"].at[stage, group], matrix, plan) for group in range(plan.groups)],
            )
            for matrix, acc in enumerate(accs)
        )

        # After the commit, which is a barrier, all warps have their operands in registers and TMA may refill the stage.
        @pl.when(i + stages < iterations)
        def _() -> None:
            plgpu.commit_smem()
            fetch(i + stages, stage)

        return accs

    zeros = plgpu.layout_cast(jnp.zeros((TILE_N, plan.columns), plan.operand.accumulator), acc_layout())
    accs = lax.fori_loop(0, iterations, iteration, (zeros,) * plan.matrices)
    if partial:
        _write_partial_sums(accs, partial[0].at[:, block], split, smem["sums_full"])

    @pl.when(split == 0)
    def _() -> None:
        sums = list(accs)
        for other in range(plan.tiles.split - 1):  # always in the same order, so that results are deterministic
            for matrix in range(plan.matrices):
                sums[matrix] += plgpu.load(partial[0].at[other, block, matrix], layout=acc_layout(), optimized=False)
        for matrix in range(plan.matrices):
            sums[matrix] = sums[matrix].astype(jnp.float32)
            if plan.operand.quantizes:
                sums[matrix] *= broadcast_columns(smem["x_scale_s"], sums[matrix].shape)
            if scales:
                sums[matrix] *= scales[matrix]
            if biases:
                sums[matrix] += biases[matrix]
        y = _transpose(_activate(plan, sums), transpose_s)
        if "residual" in operands:
            plgpu.barrier_wait(smem["residual_full"])
            y += plgpu.load(smem["residual_s"], layout=_result_layout(plan.columns)).astype(jnp.float32)
        out_s[...] = y.astype(plan.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_s.at[pl.ds(0, plan.rows)], out.at[:, outputs])
        plgpu.wait_smem_to_gmem(0)


def _prepare_x(plan: Plan, operands: dict[str, Ref], first_input: jax.Array, x_s: Ref, x_scale_s: Ref) -> None:
    """Normalise and/or quantise rows of x and write this split's inputs, from `first_input` on, to shared memory.

    Every thread block computes the statistics of the whole rows itself: as many rows at a time as fit into 128
    registers per thread, or 64 if it also needs the maximum of the normalised inputs.
    """
    layout, registers_per_row = _row_layout(plan.inputs)
    width = plan.iterations * plan.tiles.tile_k
    all_inputs, own_inputs, own_layout = pl.ds(0, plan.inputs), pl.ds(first_input, width), _row_layout(width)[0]
    rows_at_once = max(1, (64 if plan.operand.quantizes and plan.eps is not None else 128) // registers_per_row)
    for first in range(0, plan.rows, rows_at_once):
        rows = pl.ds(first, min(rows_at_once, plan.rows - first))
        y = _load_rows(operands["x"].at[rows, all_inputs], layout)
        norm = _RowNorm.of(y, plan, operands, layout)
        x_scale = None
        if plan.operand.quantizes or width == plan.inputs:
            y = norm(y, all_inputs, layout)
        if plan.operand.quantizes:
            x_scale = jnp.maximum(jnp.max(jnp.abs(y), axis=1), 1e-30) / 127.0
        if width == plan.inputs:
            own = y
        else:
            own = norm(_load_rows(operands["x"].at[rows, own_inputs], own_layout), own_inputs, own_layout)
        if x_scale is not None:
            own = _round_to_int(own / broadcast(x_scale, 0, own.shape, own_layout))
            if rows.size == 1:
                x_scale_s[first] = jnp.max(x_scale)  # Mosaic cannot store a vector of one element
            else:
                _store(x_scale_s.at[rows], x_scale)
        _store(x_s.at[rows, pl.ds(0, width)], own.astype(plan.operand.x))
    plgpu.commit_smem()


class _RowNorm(NamedTuple):
    """The norm of some rows with known statistics, applicable to any of their inputs; the identity without a norm."""

    plan: Plan
    operands: dict[str, Ref]
    mean: jax.Array | None
    factor: jax.Array | None

    @classmethod
    def of(cls, y: jax.Array, plan: Plan, operands: dict[str, Ref], layout: Any) -> "_RowNorm":
        """Compute the statistics of these rows, float32 [rows, K]."""
        if plan.eps is None:
            return cls(plan, operands, None, None)
        mean = jnp.sum(y, axis=1) / plan.inputs if "shift" in operands else None
        if mean is not None:
            y -= broadcast(mean, 0, y.shape, layout)
        return cls(plan, operands, mean, lax.rsqrt(jnp.sum(y * y, axis=1) / plan.inputs + plan.eps))

    def __call__(self, y: jax.Array, inputs: Any, layout: Any) -> jax.Array:
        """Normalise these inputs of the rows, in float32."""
        if self.factor is None:
            return y
        if self.mean is not None:
            y -= broadcast(self.mean, 0, y.shape, layout)
        y *= broadcast(self.factor, 0, y.shape, layout)
        y *= broadcast(_load_rows(self.operands["scale"].at[inputs], layout.reduce(0)), 1, y.shape, layout)
        if self.mean is not None:
            y += broadcast(_load_rows(self.operands["shift"].at[inputs], layout.reduce(0)), 1, y.shape, layout)
        return y


def _round_to_int(y: jax.Array) -> jax.Array:
    """Round to int32, ties to even, for |y| < 2 ** 22: adding 1.5 * 2 ** 23, whose unit in the last place is 1, leaves
    the integer in the lowest mantissa bits."""
    return lax.bitcast_convert_type(y + 1.5 * 2**23, jnp.int32) - 0x4B400000


def _store(ref: Ref, value: jax.Array) -> None:
    """Store even with bank conflicts: the default of JAX 0.11, an option in 0.12."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        ref[...] = value


def _load_rows(ref: Ref, layout: Any) -> jax.Array:
    return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)


def _row_layout(inputs: int) -> tuple[Any, int]:
    """A register layout for rows [R, K] of K inputs over 128 threads, and how many elements of a row each thread has.

    Adjacent threads hold up to eight adjacent elements each; if K is an odd multiple of 64, every warp holds all of
    them.
    """
    for width in (8, 4, 2, 1):
        if inputs % (128 * width) == 0:
            tiling = fragmented_array.Tiling(((1, 128 * width), (32 * width,), (width,)))
            return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1), inputs // 128
    tiling = fragmented_array.Tiling(((1, 64), (2,)))
    everyone = (fragmented_array.Replicated(4),)
    return plgpu.Layout.TILED(tiling, warp_dims=everyone, lane_dims=(-2,), vector_dim=-1), inputs // 32


def _write_partial_sums(accs: tuple[jax.Array, ...], partial: Ref, split: jax.Array, sums_full: Ref) -> None:
    """Write the sums of all splits but the first to GMEM, for the first one to reduce, and synchronise the cluster.

    partial: float32 [split - 1, matrices, TILE_N, columns] in GMEM.
    """

    @pl.when(split > 0)
    def _() -> None:
        for matrix, acc in enumerate(accs):
            _store(partial.at[split - 1, matrix], acc)

    meet(sums_full)


def _load_output_vectors(plan: Plan, vectors: Ref) -> list[jax.Array]:
    """A vector per matrix, broadcast to all columns: float32 [TILE_N, columns]. vectors: [TILE_N, matrices] in GMEM."""
    return [broadcast_outputs(vectors.at[:, matrix], (TILE_N, plan.columns)) for matrix in range(plan.matrices)]


def _deinterleave(pairs: Ref, matrix: int, plan: Plan) -> Ref:
    """The elements of one matrix in a vector that alternates between the matrices. pairs: in shared memory."""
    if interpreting():  # the interpreter does not support reshaped refs, the compiler does not support strided slices
        return pairs.at[pl.ds(matrix, TILE_N, plan.matrices)]
    return pairs.reshape(TILE_N, plan.matrices).at[:, matrix]


def _activate(plan: Plan, sums: list[jax.Array]) -> jax.Array:
    """act(y), or act(gate) * up. sums: float32 [TILE_N, columns]."""
    y = sums[0] if plan.activation is None else activate(sums[0], plan.activation, erf=approximate_erf)
    return y * sums[1] if plan.matrices == 2 else y


def _transpose(y: jax.Array, transpose_s: Ref) -> jax.Array:
    """y^T, [columns, TILE_N], in the order of the result in memory. transpose_s: bfloat16 [3, columns, TILE_N].

    `stmatrix` exchanges only 16-bit values between threads, so float32 is split into three bfloat16, without loss.
    """
    parts = split_bfloat16(y)
    for i, part in enumerate(parts):
        _store(transpose_s.at[i].T, part)
    plgpu.commit_smem()
    layout = _result_layout(y.shape[1])
    high, middle, low = (plgpu.load(transpose_s.at[i], layout=layout).astype(jnp.float32) for i in range(len(parts)))
    return high + (middle + low)


def _result_layout(columns: int) -> Any:
    return plgpu.Layout.WG_STRIDED((columns, TILE_N), vec_size=columns * TILE_N // 128)

"""The product of a few rows with a matrix of weights, at the speed at which the weights can be read.

DeepSpeed Inference, sections III-B and III-C: at small batch a linear layer is a stream of weights. One kernel does it,
with what comes before it (a norm) and after it (bias, activation, gate, residual) built in: `small_batch_linear` here,
`norm_linear` and `linear_residual` in their own files.

How it divides. A block owns TILE_N outputs and a share of the inputs. Its weights come by TMA into a ring of slots and
are multiplied by `mma.sync`: the weights are the left operand, whose 64 rows are the outputs, and x is the right one,
whose 8 or 16 columns are the rows of x. Weights are read once from memory; x, which is a thousandth of them, is read by
every block from the L2 cache. Where the outputs alone make too few blocks, the inputs are divided over a cluster, which
adds up its shares through an extra output.

What keeps memory busy. 4.8 TB/s times 0.8 us of latency is 29 KB in flight on each of 132 SMs. The rings of two blocks
hold twice that or more, and one block computes while the other waits. The ring is started before anything else, so that
the rows are normalised while the first weights are on their way.

Edges. TMA fills in zeros past the ends of N, K and the rows, and does not write past them: XLA pads no matrix, only a
vocabulary's scales, outside the loop over steps.

Formats. `small_batch_operands.py` says how weights of each are multiplied. Rows of x that are quantised are held by
every block, as normalised ones are.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.pallas.mosaic_gpu.helpers import inline_ptx  # no public way to fence
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array as registers
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.activations import activate, approximate_erf
from pallas_kernels.dispatch import UnsupportedError, dispatch, interpreting
from pallas_kernels.linear import linear_definition
from pallas_kernels.small_batch_operands import ACC, Operand, bfloat16_parts, operand_of, per_column, per_output, spread
from pallas_kernels.tuning import tuned
from pallas_kernels.weights import GROUP, Weights

TILE_N = 64  # outputs of a block: four warps of 16 rows, what one mma.sync takes
MAX_ROWS = 16
_MAX_STAGES = 8
_IN_FLIGHT = 65_536  # bytes that the rings of an SM's blocks should hold
_SMS = 132  # of an H100 or H200
_SHARED_BYTES, _RESERVED_BYTES = 233_472, 1024  # of an SM, and of that for each of its blocks


def small_batch_linear(x: jax.Array, weights: Weights, bias: jax.Array | None = None) -> jax.Array:
    """x W^T + b: one kernel for up to 16 rows, `linear_definition` for more.

    x: [..., K]; weights: N by K; bias: [N]. Returns [..., N] in x's dtype.
    """
    return dispatch("small_batch_linear", _linear_kernel, linear_definition, x, weights, bias)


def _linear_kernel(x: jax.Array, weights: Weights, bias: jax.Array | None) -> jax.Array:
    if bias is None or bias.size % TILE_N == 0:
        return small_batch_product(x, weights, bias)
    y = small_batch_product(x, weights)  # of a vocabulary: XLA adds the bias where it reads the logits
    return y + bias.astype(y.dtype)


class Norm(NamedTuple):
    """A norm over the inputs: LayerNorm, or RMSNorm if `shift` is None. scale, shift: [K]."""

    scale: jax.Array
    shift: jax.Array | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """How the kernel divides its work.

    Attributes:
      tile_k: inputs of a slot. stages: slots of the ring. split: blocks that share the inputs, a cluster.
    """

    tile_k: int
    stages: int
    split: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """All that is static about one launch.

    Attributes:
      rows: of x. inputs, outputs: K, and the columns of the result.
      matrices: 2 with a gate, else 1: how many weights each output has an input.
      dtype: of x, the result and the residual.
      operand: how weights of this format are multiplied.
      eps: of the norm; None without.
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
        """Rows of x as mma.sync takes them."""
        return 8 if self.rows <= 8 else 16

    @property
    def holds(self) -> bool:
        """Whether a block makes its x at the start, normalised or quantised; else tiles of x come with those of W."""
        return self.eps is not None or self.operand.quantizes

    @property
    def held(self) -> int:
        """Rows of x in shared memory then. A single one stands for all columns of a product."""
        return 1 if self.rows == 1 else self.columns

    @property
    def groups(self) -> int:
        """Scales that each output has in a tile."""
        return self.tiles.tile_k // GROUP if self.operand.per_scale == GROUP else 0

    @property
    def share(self) -> int:
        """Tiles of inputs that a block goes through; past the end of the inputs TMA fills in zeros."""
        return pl.cdiv(self.inputs, self.tiles.tile_k * self.tiles.split)


def small_batch_product(
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
    """residual + act(norm(x) W^T + b), or with `gated` act(gate) * up of its alternating outputs; one kernel.

    x: [..., K]; weights: N by K; bias: [N]; residual and result: [..., N], or [..., N / 2] with `gated`.
    Raises: UnsupportedError, which names the constraint.
    """
    rows, inputs = math.prod(x.shape[:-1]), x.shape[-1]
    matrices = 2 if gated else 1
    outputs = weights.kernel.shape[0] // matrices
    operand = operand_of(weights, x.dtype)
    _check(x, operand, residual, norm, rows, outputs)
    scale = weights.scale
    if scale is not None and operand.per_scale == 1:
        scale = _whole_blocks(scale, matrices)
    arrays = {
        "x": x.reshape(rows, inputs),
        # The gate and up of a pair follow each other: a copy with a stride fetches either, and the tiles of both
        # have the pairs at the same place, so that nothing need move between threads.
        "weights": weights.kernel.reshape(outputs, matrices, -1),
        "weights_scale": scale,
        "bias": None if bias is None else _whole_blocks(bias, matrices),
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


def _whole_blocks(vector: jax.Array, matrices: int) -> jax.Array:
    """[outputs * matrices] -> [N, matrices], N a multiple of TILE_N: a vocabulary may end within a block."""
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
    if x.shape[-1] % unit:  # what TMA swizzles, or what a warp holds of a row
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
    """The measured tile sizes of these shapes, or else those that the module's argument leads to."""
    columns = 8 if rows <= 8 else 16
    key = f"rows={columns},K={inputs},N={outputs},{operand.dtype},{operand.weights},{norm=},{gated=}"
    holds = norm or operand.quantizes
    if found := tuned("small_batch_linear", key):
        if holds and inputs % found["tile_k"]:
            raise UnsupportedError(f"rows of {inputs} inputs are held in whole tiles, got tile_k={found['tile_k']}")
        return Tiles(**found)
    # A slot of 16 KB takes few instructions a byte; beside rows of x, which take much of the memory, one of 8 KB.
    tile_k = (128 if holds else 256) * operand.per_element // operand.weights.itemsize
    if holds:  # whole tiles of rows
        tile_k = math.gcd(tile_k, inputs)
    slot = tile_k * operand.weights.itemsize // operand.per_element
    slot += 2 * tile_k // GROUP if operand.per_scale == GROUP else 0
    slot *= TILE_N * (2 if gated else 1)
    slot += 0 if holds else columns * tile_k * operand.x.itemsize
    fixed = columns * TILE_N * (3 * 2 + 2 * operand.dtype.itemsize)  # results and residual
    fixed += 2048 + 1024  # Mosaic's reductions and alignment
    wide, tiles = pl.cdiv(outputs, TILE_N), pl.cdiv(inputs, tile_k)
    choices = []
    for split in range(1, min(8, tiles) + 1):
        share = pl.cdiv(tiles, split)
        held = (1 if rows == 1 else columns) * (share * tile_k + _skew(operand.x)) * operand.x.itemsize if holds else 0
        for blocks in (2, 1):  # of an SM
            stages = min(_MAX_STAGES, (_SHARED_BYTES // blocks - _RESERVED_BYTES - fixed - held) // slot)
            if stages * slot * blocks >= _IN_FLIGHT:
                cost = _cost(wide * split, _SMS * blocks) * (share + (4 if holds else 1))
                choices.append((cost, Tiles(tile_k=tile_k, stages=min(stages, share), split=split)))
                break
    if not choices:
        kind = "normalised" if norm else "quantised"
        raise UnsupportedError(f"{columns} {kind} rows of {inputs} inputs leave no shared memory for weights")
    return min(choices, key=lambda choice: choice[0])[1]


def _cost(blocks: int, slots: int) -> int:
    """How long this many blocks run on so many places, as a number of blocks while memory is busy.

    Memory is busy while all places are taken. The last wave lasts as long as its blocks have bytes, or as one of four
    blocks on three SMs, which memory can just be busy with.
    """
    waves, rest = divmod(blocks, slots)
    return waves * slots + (max(rest, min(slots, _SMS * 4 // 3)) if rest else 0)


def _launch(plan: Plan, arrays: tuple[jax.Array, ...]) -> jax.Array:
    tiles, columns = plan.tiles, plan.columns
    blocks = pl.cdiv(plan.outputs, TILE_N)
    operand = plan.operand
    arrivals = plan.matrices + (plan.groups > 0) + (not plan.holds)
    scratch = {
        "weights_s": plgpu.SMEM(
            (tiles.stages, plan.matrices, TILE_N, tiles.tile_k // operand.per_element),
            operand.weights,
            transforms=_swizzled(plan.outputs, operand.weights, operand.swizzle),
        ),
        "turned_s": plgpu.SMEM((3, columns, TILE_N), jnp.bfloat16),
        "out_s": plgpu.SMEM((columns, TILE_N), plan.dtype),
        "arrived": plgpu.Barrier(num_arrivals=arrivals, num_barriers=tiles.stages),
    }
    if plan.holds:
        scratch["x_s"] = plgpu.SMEM((plan.held, plan.share * tiles.tile_k + _skew(operand.x)), operand.x)
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
        scratch["residual_arrived"] = plgpu.Barrier(num_arrivals=1)
    # TMA takes rows of a multiple of 16 bytes. Of others, as of a vocabulary of 50,257, XLA takes a slice.
    stored = pl.cdiv(plan.outputs * plan.dtype.itemsize, 16) * 16 // plan.dtype.itemsize
    result = [jax.ShapeDtypeStruct((plan.rows, stored), plan.dtype)]
    if tiles.split > 1:
        scratch["summed"] = plgpu.ClusterBarrier(collective_axes=("share",), num_arrivals=1)
        partial = (tiles.split - 1, blocks, plan.matrices, TILE_N, columns)
        result.append(jax.ShapeDtypeStruct(partial, operand.accumulator))
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=result,
        scratch_types=scratch,
        grid=(blocks,),
        grid_names=("block",),
        cluster=(tiles.split,),
        cluster_names=("share",),
        # Memory lies as it is declared, where the other semantics infers how, and knows no skewed rows.
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        kernel_name="small_batch_linear",
    )
    return kernel(*arrays)[0][:, : plan.outputs]


def _skew(dtype: Any) -> int:
    """Elements between rows of x in shared memory: those of a column in different banks, and all aligned for stores."""
    return max(8, 16 // dtype.itemsize)


def _swizzled(size: int, dtype: Any, row_bytes: int) -> tuple[Any, ...]:
    """How a tile of a matrix with so many rows lies in shared memory: those of a column in different banks.

    TMA wants whole tiles of 8 rows. Tiles of one row suit any matrix, and put two in a bank where a slot is two wide.
    """
    tiling = (8 if size < 8 or size % 8 == 0 else 1, row_bytes // dtype.itemsize)
    return plgpu.TilingTransform(tiling), plgpu.SwizzleTransform(row_bytes)  # pyright: ignore[reportAbstractUsage]


def _kernel(*refs: Any, plan: Plan, weights_s, x_s, turned_s, out_s, arrived, **smem: Any) -> None:
    operands = dict(zip(plan.operands, refs, strict=False))
    out, *partial = refs[len(plan.operands) :]
    block, share = lax.axis_index("block"), lax.axis_index("share")
    stages, tile_k = plan.tiles.stages, plan.tiles.tile_k
    outputs = pl.ds(block * TILE_N, TILE_N)
    columns = pl.ds(0 * block, plan.columns)  # past the last row of x, which JAX refuses where it knows the start

    def inputs(i: Any, of_an_element: int = 1) -> Any:
        size = tile_k // of_an_element
        return pl.ds((share * plan.share + i) * size, size)

    # Where x is held: of the shares that divide unequally the last begins early, so that all lie within x.
    held = jnp.minimum(share * plan.share, plan.inputs // tile_k - plan.share)

    def held_inputs(i: Any) -> Any:  # past the end any finite x will do, as the weights are zeros there
        tile = jnp.minimum(share * plan.share - held + i, plan.share - 1)
        return pl.ds(pl.multiple_of(tile * tile_k, tile_k), tile_k)

    def fetch(i: Any, slot: Any) -> None:
        for matrix in range(plan.matrices):
            tile = operands["weights"].at[outputs, matrix, inputs(i, plan.operand.per_element)]
            plgpu.copy_gmem_to_smem(tile, weights_s.at[slot, matrix], arrived.at[slot])
        if plan.groups:
            pairs = pl.ds(block * TILE_N * plan.matrices, TILE_N * plan.matrices)
            tile = operands["weights_scale"].at[inputs(i, GROUP), pairs]
            plgpu.copy_gmem_to_smem(tile, smem["group_scale_s"].at[slot], arrived.at[slot])
        if not plan.holds:
            tile = operands["x"].at[columns, inputs(i)]
            plgpu.copy_gmem_to_smem(tile, x_s.at[slot], arrived.at[slot])

    for i in range(min(stages, plan.share)):
        fetch(i, i)

    if "residual" in operands:

        @pl.when(share == 0)
        def _() -> None:
            rows = operands["residual"].at[columns, outputs]
            plgpu.copy_gmem_to_smem(rows, smem["residual_s"], smem["residual_arrived"])

    scales, biases = (
        _load_per_output(plan, operands[name].at[outputs]) if name in operands else None
        for name in ("weights_scale" if not plan.groups else "", "bias")
    )
    if plan.holds:
        _hold(plan, operands, held * tile_k, x_s, smem.get("x_scale_s"))

    def step(i: jax.Array, accs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        slot = lax.rem(i, stages)
        plgpu.barrier_wait(arrived.at[slot])
        x_tile = x_s.at[:, held_inputs(i)] if plan.holds else x_s.at[slot]
        accs = tuple(
            plan.operand.multiply(
                acc,
                weights_s.at[slot, matrix],
                x_tile,
                [_alternating(smem["group_scale_s"].at[slot, group], matrix, plan) for group in range(plan.groups)],
            )
            for matrix, acc in enumerate(accs)
        )

        # The operands of all warps are in registers: TMA may overwrite what they have read once that is in order.
        @pl.when(i + stages < plan.share)
        def _() -> None:
            plgpu.commit_smem()
            fetch(i + stages, slot)

        return accs

    zeros = plgpu.layout_cast(jnp.zeros((TILE_N, plan.columns), plan.operand.accumulator), ACC)
    accs = lax.fori_loop(0, plan.share, step, (zeros,) * plan.matrices)
    if partial:
        _exchange(accs, partial[0].at[:, block], share, smem["summed"])

    @pl.when(share == 0)
    def _() -> None:
        sums = list(accs)
        for other in range(plan.tiles.split - 1):  # always in the same order
            for matrix in range(plan.matrices):
                sums[matrix] += plgpu.load(partial[0].at[other, block, matrix], layout=ACC, optimized=False)
        for matrix in range(plan.matrices):
            sums[matrix] = sums[matrix].astype(jnp.float32)
            if plan.operand.quantizes:
                sums[matrix] *= per_column(smem["x_scale_s"], sums[matrix].shape)
            if scales:
                sums[matrix] *= scales[matrix]
            if biases:
                sums[matrix] += biases[matrix]
        y = _turned(_activated(plan, sums), turned_s)
        if "residual" in operands:
            plgpu.barrier_wait(smem["residual_arrived"])
            y += plgpu.load(smem["residual_s"], layout=_result_layout(plan.columns)).astype(jnp.float32)
        out_s[...] = y.astype(plan.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_s.at[pl.ds(0, plan.rows)], out.at[:, outputs])
        plgpu.wait_smem_to_gmem(0)


def _hold(plan: Plan, operands: dict[str, Any], first_input: jax.Array, x_s: Any, x_scale_s: Any) -> None:
    """Write rows of x, normalised or quantised or both, into shared memory, from that input on.

    Every block finds means and scales of the whole rows by itself, as many at a time as 128 registers of a thread hold,
    or 64 where the largest of normalised inputs is looked for.
    """
    layout, registers_of_a_row = _row_layout(plan.inputs)
    width = plan.share * plan.tiles.tile_k
    whole, held, held_layout = pl.ds(0, plan.inputs), pl.ds(first_input, width), _row_layout(width)[0]
    at_once = max(1, (64 if plan.operand.quantizes and plan.eps is not None else 128) // registers_of_a_row)
    for first in range(0, plan.rows, at_once):
        rows = pl.ds(first, min(at_once, plan.rows - first))
        y = _load_rows(operands["x"].at[rows, whole], layout)
        norm = _Normaliser.of(y, plan, operands, layout)
        x_scale = None
        if plan.operand.quantizes or width == plan.inputs:
            y = norm(y, whole, layout)
        if plan.operand.quantizes:
            x_scale = jnp.maximum(jnp.max(jnp.abs(y), axis=1), 1e-30) / 127.0
        if width == plan.inputs:
            part = y
        else:
            part = norm(_load_rows(operands["x"].at[rows, held], held_layout), held, held_layout)
        if x_scale is not None:
            part = _nearest_integers(part / spread(x_scale, 0, part.shape, held_layout))
            if rows.size == 1:
                x_scale_s[first] = jnp.max(x_scale)  # Mosaic stores no vector of one
            else:
                _store(x_scale_s.at[rows], x_scale)
        _store(x_s.at[rows, pl.ds(0, width)], part.astype(plan.operand.x))
    plgpu.commit_smem()


class _Normaliser(NamedTuple):
    """What the norm does with any inputs of some rows, whose means are known; nothing without a norm."""

    plan: Plan
    operands: dict[str, Any]
    mean: jax.Array | None
    factor: jax.Array | None

    @classmethod
    def of(cls, y: jax.Array, plan: Plan, operands: dict[str, Any], layout: Any) -> "_Normaliser":
        """For these rows, float32 [rows, K]."""
        if plan.eps is None:
            return cls(plan, operands, None, None)
        mean = jnp.sum(y, axis=1) / plan.inputs if "shift" in operands else None
        if mean is not None:
            y -= spread(mean, 0, y.shape, layout)
        return cls(plan, operands, mean, lax.rsqrt(jnp.sum(y * y, axis=1) / plan.inputs + plan.eps))

    def __call__(self, y: jax.Array, inputs: Any, layout: Any) -> jax.Array:
        """These inputs of the rows, normalised, in float32."""
        if self.factor is None:
            return y
        if self.mean is not None:
            y -= spread(self.mean, 0, y.shape, layout)
        y *= spread(self.factor, 0, y.shape, layout)
        y *= spread(_load_rows(self.operands["scale"].at[inputs], layout.reduce(0)), 1, y.shape, layout)
        if self.mean is not None:
            y += spread(_load_rows(self.operands["shift"].at[inputs], layout.reduce(0)), 1, y.shape, layout)
        return y


def _nearest_integers(y: jax.Array) -> jax.Array:
    """int32, ties to even, for |y| < 2 ** 22: the last bits of a sum with 1.5 * 2 ** 23, whose last bit counts one."""
    return lax.bitcast_convert_type(y + 1.5 * 2**23, jnp.int32) - 0x4B400000


def _store(ref: Any, value: jax.Array) -> None:
    """Whatever banks it goes to: as JAX 0.11 stores by itself, and 0.12 if told to."""
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)  # pyright: ignore[reportAttributeAccessIssue]
    else:
        ref[...] = value


def _load_rows(ref: Any, layout: Any) -> jax.Array:
    return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)


def _row_layout(inputs: int) -> tuple[Any, int]:
    """How 128 threads hold rows [R, K] of K inputs, and the elements of a row that each has.

    All threads side by side, with up to eight neighbours each; or, if K is an odd multiple of 64, every warp holds all.
    """
    for width in (8, 4, 2, 1):
        if inputs % (128 * width) == 0:
            tiling = registers.Tiling(((1, 128 * width), (32 * width,), (width,)))
            return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1), inputs // 128
    tiling = registers.Tiling(((1, 64), (2,)))
    everyone = (registers.Replicated(4),)
    return plgpu.Layout.TILED(tiling, warp_dims=everyone, lane_dims=(-2,), vector_dim=-1), inputs // 32


def _exchange(accs: tuple[jax.Array, ...], partial: Any, share: jax.Array, summed: Any) -> None:
    """Show the first block of a cluster the sums of the others.

    partial: float32 [split - 1, matrices, TILE_N, columns] in GMEM.
    All wait, as arrivals are counted in every block's own shared memory, which has to be there still.
    """

    @pl.when(share > 0)
    def _() -> None:
        for matrix, acc in enumerate(accs):
            _store(partial.at[share - 1, matrix], acc)

    inline_ptx("fence.acq_rel.cluster;")
    plgpu.barrier_arrive(summed)
    plgpu.barrier_wait(summed)
    inline_ptx("fence.acq_rel.cluster;")


def _load_per_output(plan: Plan, vectors: Any) -> list[jax.Array]:
    """Of each matrix, for all columns, float32 [TILE_N, columns]. vectors: [TILE_N, matrices] in GMEM."""
    return [per_output(vectors.at[:, matrix], (TILE_N, plan.columns)) for matrix in range(plan.matrices)]


def _alternating(pairs: Any, matrix: int, plan: Plan) -> Any:
    """What belongs to one of the matrices in a vector that alternates between them. pairs: in shared memory."""
    if interpreting():  # it knows no reshaped references, and the compiler no steps
        return pairs.at[pl.ds(matrix, TILE_N, plan.matrices)]
    return pairs.reshape(TILE_N, plan.matrices).at[:, matrix]


def _activated(plan: Plan, sums: list[jax.Array]) -> jax.Array:
    """act(y), or act(gate) * up. sums: float32 [TILE_N, columns]."""
    y = sums[0] if plan.activation is None else activate(sums[0], plan.activation, erf=approximate_erf)
    return y * sums[1] if plan.matrices == 2 else y


def _turned(y: jax.Array, turned_s: Any) -> jax.Array:
    """y^T, [columns, TILE_N], its rows as they lie in memory. turned_s: bfloat16 [3, columns, TILE_N].

    Threads exchange 16-bit values only (`stmatrix`), so that float32 goes in three parts, which lose nothing.
    """
    parts = bfloat16_parts(y)
    for i, part in enumerate(parts):
        _store(turned_s.at[i].T, part)
    plgpu.commit_smem()
    layout = _result_layout(y.shape[1])
    high, middle, low = (plgpu.load(turned_s.at[i], layout=layout).astype(jnp.float32) for i in range(len(parts)))
    return high + (middle + low)


def _result_layout(columns: int) -> Any:
    return plgpu.Layout.WG_STRIDED((columns, TILE_N), vec_size=columns * TILE_N // 128)

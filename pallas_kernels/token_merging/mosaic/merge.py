"""The kernel that merges tokens: the size-weighted means of those with the same output."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.pallas_kernels.mosaic import pl, plgpu
from jaxinfer.pallas_kernels.mosaic.layout import full, iota, load, load_broadcast, swizzled
from jaxinfer.pallas_kernels.mosaic.refs import Barrier, Ref, barrier, gmem, smem
from jaxinfer.pallas_kernels.target import require_shared_bytes
from jaxinfer.pallas_kernels.token_merging.mosaic.tiles import MMA_TOKENS, OTHER_BYTES, TILE

_SHAPE = (TILE, TILE)  # a tile of the result: outputs by features
_WEIGHTS = (TILE, MMA_TOKENS)  # a tile of the merge matrix: outputs by tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The static parameters of a launch.

    Attributes:
      batch: rows. features: of a token. dtype: of the tokens.
      tokens: tokens of a row, in whole tiles. outputs: those that are left.
    """

    batch: int
    features: int
    dtype: Any
    tokens: int
    outputs: int

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a thread block, at most."""
        return self.tokens * (TILE * self.dtype.itemsize + 8) + OTHER_BYTES

    @property
    def lhs(self) -> Any:
        """Register layout of the merge matrix."""
        return plgpu.Layout.MMA_LHS(self.dtype)

    @property
    def acc(self) -> Any:
        """Register layout of the sums."""
        return plgpu.Layout.MMA_ACC(self.dtype)


class _Inputs(NamedTuple):
    """Arrays in global memory.

    Attributes:
      x: [B, n, features]. size: float32 [B, tokens], 0 for padding.
      target: int32 [B, tokens], the output of each token.
    """

    x: Ref
    size: Ref
    target: Ref


class _Results(NamedTuple):
    """Arrays in global memory.

    Attributes:
      y: [B, outputs, features], the means. size: float32 [B, outputs in whole tiles], their sizes.
    """

    y: Ref
    size: Ref


class _Scratch(NamedTuple):
    """Shared memory of a thread block, and its barrier.

    Attributes:
      x: [tokens, TILE], the block's features of all tokens. size: float32 [tokens]. target: int32 [tokens].
      y: [TILE, TILE], a tile of the result. new_size: float32 [TILE], the sizes that its sums are divided by.
      full: the inputs have been copied.
    """

    x: Ref
    size: Ref
    target: Ref
    y: Ref
    new_size: Ref
    full: Barrier


def plan_merge(x: jax.Array, r: int) -> Plan:
    """Return the plan for removing `r` tokens of x [B, n, d]. Raises UnsupportedError."""
    batch, count, features = x.shape
    tokens = 2 * TILE * pl.cdiv(count, 2 * TILE)
    plan = Plan(batch=batch, features=features, dtype=x.dtype, tokens=tokens, outputs=count - r)
    require_shared_bytes(plan.shared_bytes)
    return plan


def merge(plan: Plan, x: jax.Array, size: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Merge the tokens with equal outputs into size-weighted means, and add up their sizes.

    Args:
      x: [B, n, d]. size: float32 [B, n]. target: int32 [B, tokens], of `select`.
    """
    size = jnp.pad(size, ((0, 0), (0, plan.tokens - x.shape[1])))  # of weight 0, whatever their target
    results = _Results(
        y=gmem(jax.ShapeDtypeStruct((plan.batch, plan.outputs, plan.features), plan.dtype)),
        size=gmem(jax.ShapeDtypeStruct((plan.batch, pl.cdiv(plan.outputs, TILE) * TILE), jnp.float32)),
    )
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan),
        out_type=[results],
        scratch_types=[_scratch(plan)],
        grid=(plan.batch, pl.cdiv(plan.features, TILE)),
        grid_names=("row", "column"),
        kernel_name="merge_average",
    )
    (merged,) = kernel(_Inputs(gmem(x), gmem(size), gmem(target)))
    return merged.y, merged.size[:, : plan.outputs]


def _scratch(plan: Plan) -> _Scratch:
    """Declare the scratch of a thread block."""
    return _Scratch(
        x=smem((plan.tokens, TILE), plan.dtype, swizzled()),
        size=smem((plan.tokens,), jnp.float32),
        target=smem((plan.tokens,), jnp.int32),
        y=smem(_SHAPE, plan.dtype, swizzled()),
        new_size=smem((TILE,), jnp.float32),
        full=barrier(3 * plan.tokens // TILE),
    )


def _kernel(plan: Plan, inputs: _Inputs, results: _Results, scratch: _Scratch) -> None:
    """Merge one batch row's tile of features."""
    row, features = lax.axis_index("row"), pl.ds(lax.axis_index("column") * TILE, TILE)

    @pl.loop(0, plan.tokens // TILE)
    def _(t: jax.Array) -> None:
        tokens = pl.ds(t * TILE, TILE)
        plgpu.copy_gmem_to_smem(inputs.size.at[row, tokens], scratch.size.at[tokens], scratch.full)
        plgpu.copy_gmem_to_smem(inputs.target.at[row, tokens], scratch.target.at[tokens], scratch.full)
        plgpu.copy_gmem_to_smem(inputs.x.at[row, tokens, features], scratch.x.at[tokens], scratch.full)

    plgpu.barrier_wait(scratch.full)

    @pl.loop(0, pl.cdiv(plan.outputs, TILE))
    def _(t: jax.Array) -> None:
        outputs = pl.ds(t * TILE, TILE)
        sums, new_size = _sum_tokens(plan, scratch, t)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous tile has left `y`
        scratch.new_size[...] = jnp.where(new_size > 0, new_size, 1.0)  # padding only: the sum is 0
        plgpu.commit_smem()
        scratch.y[...] = (sums / load_broadcast(scratch.new_size, _SHAPE, 0, plan.acc)).astype(plan.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(scratch.y, results.y.at[row, outputs, features])

        @pl.when(lax.axis_index("column") == 0)
        def _() -> None:
            results.size[row, outputs] = new_size

    plgpu.wait_smem_to_gmem(0)


def _sum_tokens(plan: Plan, scratch: _Scratch, t: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute the weighted sums of tile `t` of the outputs, float32 [TILE, TILE], and their sizes, [TILE]."""
    output = iota(_WEIGHTS, 0, plan.lhs) + t * TILE

    def add(u: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        sums, new_size = state
        tokens = pl.ds(u * MMA_TOKENS, MMA_TOKENS)
        target, size = (
            load_broadcast(vector.at[tokens], _WEIGHTS, 1, plan.lhs) for vector in (scratch.target, scratch.size)
        )
        weights = jnp.where(target == output, size, 0.0)
        x = load(scratch.x.at[tokens], plgpu.Layout.MMA_RHS(plan.dtype))
        return plgpu.mma(sums, weights.astype(plan.dtype), x), new_size + jnp.sum(weights, axis=1)

    init = (
        full(_SHAPE, 0, jnp.float32, plan.acc),
        full((TILE,), 0, jnp.float32, plan.lhs.reduce(1)),
    )
    return lax.fori_loop(0, plan.tokens // MMA_TOKENS, add, init)

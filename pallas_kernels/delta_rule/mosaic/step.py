"""The kernel that moves states on by one token of each row.

    grid (row, value head, tile of columns)

The columns of a state do not depend on one another. So a thread block loads a tile of columns, all keys of it, into the
registers of a warpgroup, sums over the keys, adds the change, sums again, and writes the tile back where it was. XLA
computes the convolution before, and stores its inputs.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.pallas_kernels.delta_rule.recurrent_state import RecurrentState
from jaxinfer.pallas_kernels.delta_rule.xla import convolve
from jaxinfer.pallas_kernels.mosaic import pl, plgpu
from jaxinfer.pallas_kernels.mosaic.layout import broadcast, full, load, load_broadcast, store
from jaxinfer.pallas_kernels.mosaic.refs import Ref, gmem
from jaxinfer.pallas_kernels.target import UnsupportedError

_TILE_VALUES = 4096  # of a state in the registers of a warpgroup, 32 in each thread
_KEY_DIMS = (64, 128, 256)
_COLUMNS = (64, 32, 16, 8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """The static parameters of a launch.

    Attributes:
      rows, heads: the grid. group: value heads of a key head. slots: states of each head.
      key_dim, value_dim: of a state. columns: of a tile.
    """

    rows: int
    heads: int
    group: int
    slots: int
    key_dim: int
    value_dim: int
    columns: int

    @property
    def tile(self) -> tuple[int, int]:
        """The shape of a tile of a state."""
        return self.key_dim, self.columns

    @property
    def layout(self) -> Any:
        """Register layout of a tile."""
        return plgpu.Layout.MMA_ACC(jnp.bfloat16)


class _Inputs(NamedTuple):
    """Arrays in global memory.

    Attributes:
      x: float32 [B, Hk, F], of each key head the query, the key and the values.
      kept: float32 [B, Hv], what is left of the state, e^decay. beta: float32 [B, Hv].
      slot, position: int32 [B].
      state: float32 [S, Hv, K, V], which is updated in place.
    """

    x: Ref
    kept: Ref
    beta: Ref
    slot: Ref
    position: Ref
    state: Ref


def delta_rule_step(
    qkv: jax.Array,
    decay: jax.Array,
    beta: jax.Array,
    conv_weight: jax.Array,
    cache: RecurrentState,
    slot: jax.Array,
    positions: jax.Array,
    *,
    key_dim: int,
) -> tuple[jax.Array, RecurrentState]:
    """Move states on by one token of each row. Arguments as of `api`, with T = 1. Raises UnsupportedError."""
    slots, heads, _, value_dim = cache.state.shape
    if key_dim not in _KEY_DIMS:
        raise UnsupportedError(f"a state must have 64, 128 or 256 keys, got {key_dim}")
    if value_dim % _COLUMNS[-1]:
        raise UnsupportedError(f"a state must have a multiple of {_COLUMNS[-1]} columns, got {value_dim}")
    columns = next(size for size in _COLUMNS if value_dim % size == 0 and size * key_dim <= _TILE_VALUES)
    plan = Plan(
        rows=len(qkv),
        heads=heads,
        group=heads // qkv.shape[2],
        slots=slots,
        key_dim=key_dim,
        value_dim=value_dim,
        columns=columns,
    )
    x, conv = convolve(qkv, conv_weight, cache.conv, slot, positions)
    state = jax.new_ref(cache.state)
    small = (jax.nn.silu(x[:, 0]), jnp.exp(decay[:, 0]), beta[:, 0], slot, positions[:, 0])
    output = plgpu.kernel(
        functools.partial(_kernel, plan),
        out_type=jax.ShapeDtypeStruct((plan.rows, heads, value_dim), jnp.float32),
        grid=(plan.rows, heads, value_dim // columns),
        grid_names=("row", "head", "column"),
        kernel_name="delta_rule_step",
    )(_Inputs(*(gmem(array) for array in (*small, state))))
    return output[:, None], RecurrentState(conv, jax.freeze(state))


def _kernel(plan: Plan, inputs: _Inputs, output: Ref) -> None:
    """Move a tile of a state on. output: float32 [B, Hv, V] in global memory."""
    row, head = lax.axis_index("row"), lax.axis_index("head")
    first = lax.axis_index("column") * plan.columns
    columns, layout, position = pl.ds(first, plan.columns), plan.layout, inputs.position[row]
    slot = jnp.clip(inputs.slot[row], 0, plan.slots - 1)  # padding may have any
    place, x = inputs.state.at[slot, head, :, columns], inputs.x.at[row, lax.div(head, plan.group)]
    before = load(place, layout)
    query, key = (load_broadcast(x.at[pl.ds(i * plan.key_dim, plan.key_dim)], plan.tile, 0, layout) for i in (0, 1))
    values = 2 * plan.key_dim + lax.rem(head, plan.group) * plan.value_dim
    value = load(x.at[pl.ds(values + first, plan.columns)], layout.reduce(0))
    by_query, by_key = (lax.rsqrt(jnp.sum(y * y, axis=0) + 1e-6) for y in (query, key))  # while the state is loaded
    # A select: what another sequence has left may be NaN.
    state = jnp.where(full(plan.tile, position, jnp.int32, layout) == 0, 0.0, before) * inputs.kept[row, head]
    change = inputs.beta[row, head] * (value - by_key * jnp.sum(state * key, axis=0))
    state += key * broadcast(change * by_key, plan.tile, 1)
    output[row, head, columns] = plan.key_dim**-0.5 * by_query * jnp.sum(state * query, axis=0)
    pl.when(position >= 0)(lambda: store(place, state))

"""Ways of tokens to experts on other devices, and back (DeepSpeed Inference, section V-B).

Experts are split over lanes, which have other tokens, and over the devices of a lane that have the same tokens: its
column. Every device routes the tokens of its lane. Then, with Q lanes, L devices in a column, T tokens of a lane, E
experts that take up to C of a lane's tokens each, and a table of S = E * C * D numbers:

* "all_to_all", the plain way: as if each of the Q * L devices had tokens of its own, each sends the rows of all experts
  to where these are, and gets them back: 2 (QL - 1) / QL * S.
* "pcc", parallelism-coordinated communication: a device keeps the rows of the experts that its own place in the column
  has, which costs nothing, and exchanges them with its peers in other lanes alone, 2 (Q - 1) / Q * S / L. It adds up
  what it gets for each token, and the sum over the column is the one that slices of experts need anyway.
* "pcc_all_gather": as in the paper's figure 5, the column exchanges the rows rather than the sums, (L - 1) / L * S.
* "all_gather": every device has the tokens of all lanes, and its own experts only: T tokens from each other lane, and
  as many sums back. No row is sent that no token has, so this is the least while nothing is dropped.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import get_abstract_mesh

from jaxinfer.models.layers.linear import PartialSum
from jaxinfer.pallas_kernels.moe import Routing, limit_capacity, permute, sort_choices, unpermute
from jaxinfer.sharding.collectives import axis_index, mesh_axes, rules
from jaxinfer.sharding.planner.exchanges import ExchangeSizes

Run = Callable[[jax.Array, Routing], jax.Array]
"""Sums the experts on this device over each token: (tokens [N, D], their choices of these experts) -> [N, D]."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Place:
    """Where the device is among those that have experts.

    Attributes:
      lanes, column: the mesh axes over which experts are split, those of lanes and those within one.
      num_lanes, column_size: how many devices there are along them.
      held: how many experts each device has.
    """

    lanes: tuple[str, ...]
    column: tuple[str, ...]
    num_lanes: int
    column_size: int
    held: int

    @classmethod
    def of_experts(cls, experts: int) -> Self:
        """The place of this device, as the rules split so many experts."""
        split, lanes = mesh_axes("experts"), mesh_axes("batch")
        here = tuple(name for name in split if name in lanes)
        column = tuple(name for name in split if name not in lanes)
        sizes = get_abstract_mesh().shape
        counts = [math.prod(sizes[name] for name in names) for names in (here, column)]
        held = experts // math.prod(counts)
        return cls(lanes=here, column=column, num_lanes=counts[0], column_size=counts[1], held=held)


def run_experts(x: jax.Array, routing: Routing, run: Run, capacity: int | None) -> PartialSum:
    """Sum the experts of each token, wherever these are.

    Args:
      x: [T, D], the tokens of this device's lane.
      routing: their choices of all E experts.
      run: runs the experts on this device.
      capacity: how many tokens the routing lets an expert have; None: it drops nothing.
    Returns: [T, D].
    """
    experts, slices = len(routing.sizes), mesh_axes("expert_mlp")
    place = _Place.of_experts(experts)
    if place.num_lanes * place.column_size == 1:
        return PartialSum(run(x, routing), slices)
    tokens, choices = routing.experts.shape
    room = tokens if capacity is None else capacity
    sizes = ExchangeSizes(
        lanes=place.num_lanes,
        column=place.column_size,
        slices=math.prod(get_abstract_mesh().shape[name] for name in slices),
        tokens=tokens,
        choices=choices,
        experts=experts,
        capacity=room,
        token_bytes=x.shape[1] * x.dtype.itemsize,
    )
    exchange = sizes.cheapest if rules().exchange == "cheapest" else rules().exchange
    with jax.named_scope(exchange):
        if exchange == "all_gather":
            return PartialSum(_all_gather(x, routing, run, place), place.column + slices)
        if capacity is None:
            routing = limit_capacity(routing, tokens)
        if exchange == "all_to_all":
            y = _all_to_all(x, routing, run, place.lanes + place.column, place.num_lanes * place.column_size)
            return PartialSum(unpermute(y, routing), slices)
        held = _of_column(routing, place, room)
        y = _all_to_all(x, held, run, place.lanes, place.num_lanes)
        if exchange == "pcc":
            return PartialSum(unpermute(y, held), place.column + slices)
        rows = lax.all_gather(y.reshape(place.num_lanes, -1, y.shape[1]), place.column, axis=1)  # [Q, L, held * C, D]
        return PartialSum(unpermute(rows.reshape(-1, y.shape[1]), routing), slices)


def _all_gather(x: jax.Array, routing: Routing, run: Run, place: _Place) -> jax.Array:
    """Run this device's experts on the tokens of all lanes: each token's sum over them, [T, D]."""
    weights = routing.weights
    chosen = jnp.where(_kept(routing), routing.experts, len(routing.sizes))
    if place.lanes:
        # A float32 has every number of an expert exactly, so that both go in one exchange.
        both = jnp.concatenate([weights, chosen.astype(jnp.float32)], axis=1)
        x, both = (lax.all_gather(part, place.lanes, tiled=True) for part in (x, both))
        weights, chosen = jnp.split(both, 2, axis=1)
        chosen = chosen.astype(jnp.int32)
    number = chosen - axis_index("experts") * place.held
    y = run(x, _choices(number, weights, (number >= 0) & (number < place.held), place.held))
    return lax.psum_scatter(y, place.lanes, tiled=True) if place.lanes else y


def _of_column(routing: Routing, place: _Place, capacity: int) -> Routing:
    """The choices of the experts that devices at this one's place in their columns have, lane by lane."""
    lane, rest = jnp.divmod(routing.experts, place.column_size * place.held)
    at, number = jnp.divmod(rest, place.held)
    mine = at == (lax.axis_index(place.column) if place.column else 0)
    choices = _choices(lane * place.held + number, routing.weights, _kept(routing) & mine, place.num_lanes * place.held)
    return limit_capacity(choices, capacity)


def _all_to_all(x: jax.Array, routing: Routing, run: Run, peers: tuple[str, ...], count: int) -> jax.Array:
    """Return what the experts that these devices have, E of them, give for each row of a table.

    Args:
      x: [T, D].
      routing: choices of these experts, each of which has as many rows.
      peers: the mesh axes along which `count` devices have them, in their order.
    Returns: [E * C, D]; rows without a token are 0.
    """

    def exchange(parts: jax.Array) -> jax.Array:
        return lax.all_to_all(parts, peers, split_axis=0, concat_axis=0, tiled=True) if peers else parts

    held, capacity = len(routing.sizes) // count, len(routing.tokens) // len(routing.sizes)
    rows = exchange(permute(x, routing).reshape(count, held * capacity, -1))
    filled = jnp.arange(capacity) < exchange(routing.sizes.reshape(count, held))[..., None]
    expert = jnp.broadcast_to(jnp.arange(held, dtype=jnp.int32)[:, None], filled.shape)
    choices = _choices(expert.reshape(-1, 1), jnp.ones((filled.size, 1)), filled.reshape(-1, 1), held)
    y = run(rows.reshape(-1, x.shape[1]), choices)
    return exchange(y.reshape(rows.shape)).reshape(-1, x.shape[1])


def _kept(routing: Routing) -> jax.Array:
    """Return which choices have a row, bool [N, k]."""
    return routing.rows < len(routing.tokens)


def _choices(experts: jax.Array, weights: jax.Array, kept: jax.Array, count: int) -> Routing:
    """The routing of those choices that are kept, of `count` experts; the others may be anything."""
    return sort_choices(jnp.where(kept, experts, 0), weights, kept, count)

"""What stays on the device between steps, and how programs read and change it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.generation.sampling.arrays import SamplingArrays
from jaxinfer.models import KVPages, TokenRows


class Slots(NamedTuple):
    """The requests on the device, one a slot; the last row belongs to no request.

    Attributes:
      history: int32 [S, C], their tokens.
      length: int32 [S], how many of them are known.
      active: bool [S], whether the request decodes: its prompt is through and nothing has ended it.
      limit: int32 [S], the total length at which it ends.
      adapter: int32 [S], its adapter, from 1; 0 is none.
      options: its sampling options.
    """

    history: jax.Array
    length: jax.Array
    active: jax.Array
    limit: jax.Array
    adapter: jax.Array
    options: SamplingArrays


class DeviceState(NamedTuple):
    """What stays on the device between steps: one KVPages per layer, and the slots."""

    caches: list[KVPages]
    slots: Slots


class Rows(NamedTuple):
    """Requests that decode.

    Attributes:
      slot: int32 [B], the spare slot in padding rows.
      page_table: int32 [B, P].
    """

    slot: jax.Array
    page_table: jax.Array


def options_of(slots: Slots, slot: jax.Array) -> SamplingArrays:
    """The sampling options of some slots."""
    return jax.tree.map(lambda x: x[slot], slots.options)


def last_tokens(slots: Slots, rows: Rows) -> TokenRows:
    """The token of each row that is not in the cache yet."""
    at = jnp.maximum(slots.length[rows.slot] - 1, 0)
    positions = jnp.where(slots.active[rows.slot], at, -1)
    return TokenRows(
        slots.history[rows.slot, at][:, None], positions[:, None], rows.page_table, slots.adapter[rows.slot]
    )


def append(slots: Slots, slot: jax.Array, length: jax.Array, tokens: jax.Array, count: jax.Array) -> Slots:
    """Write the first `count` [B] of tokens [B, W] after `length` [B], and end what a stop token or the limit ends."""
    nowhere = len(slots.length)
    index = jnp.arange(tokens.shape[1])
    written = index < count[:, None]
    at = jnp.where(written, length[:, None] + index, slots.history.shape[1])
    stop_token_ids = slots.options.stop_token_ids[slot]
    stopped = jnp.any((tokens[..., None] == stop_token_ids[:, None]) & written[..., None], axis=(1, 2))
    length = length + count
    row = jnp.where(count > 0, slot, nowhere)
    return slots._replace(
        history=slots.history.at[slot[:, None], at].set(tokens, mode="drop"),
        length=slots.length.at[row].set(length, mode="drop"),
        active=slots.active.at[row].set(~stopped & (length < slots.limit[slot]), mode="drop"),
    )

"""State that stays on the device between steps, and how programs read and change it."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.generation.outputs import NO_TOKEN
from jaxinfer.generation.params import MAX_STOP_TOKEN_IDS
from jaxinfer.generation.sampling.arrays import SamplingArrays
from jaxinfer.models import Cache, KVPages, TokenRows


class Slots(NamedTuple):
    """The requests on the device, one a slot; the last row belongs to no request.

    Attributes:
      history: int32 [S, C], their tokens.
      length: int32 [S], the number of known tokens of an active request, whose prompt is through and which has not
        ended; for any other, that number negated.
      adapter: int32 [S], its adapter, from 1; 0 is none.
      options: its sampling options.
    """

    history: jax.Array
    length: jax.Array
    adapter: jax.Array
    options: SamplingArrays


class Progress(NamedTuple):
    """The progress of some requests: one number each, which one kernel reads and writes.

    Attributes:
      position: int32 [B], the last token's position, which is not in the cache yet; below 0 unless the request is
        active.
    """

    position: jax.Array

    @property
    def active(self) -> jax.Array:
        """Whether each request decodes, bool [B]."""
        return self.position >= 0

    @property
    def length(self) -> jax.Array:
        """The number of known tokens, int32 [B]."""
        return jnp.abs(self.position + 1)


class DeviceState(NamedTuple):
    """State that stays on the device between steps: the cache of each layer, and the slots."""

    caches: list[Cache]
    slots: Slots


def pages_by_shape(caches: Sequence[Cache]) -> list[dict[int, KVPages]]:
    """Group the pages of all layers by their shape: each group by layer, in order. Other layers are left out."""
    groups: dict[tuple[int, ...], dict[int, KVPages]] = {}
    for layer, cache in enumerate(caches):
        if isinstance(cache, KVPages):
            groups.setdefault(cache.k.shape[1:], {})[layer] = cache
    return list(groups.values())


class Rows(NamedTuple):
    """Requests that decode.

    Attributes:
      slot: int32 [B], the spare slot in padding rows.
      page_table: int32 [B, P].
    """

    slot: jax.Array
    page_table: jax.Array


def progress(length: jax.Array, active: jax.Array) -> Progress:
    """The progress of requests of `length` [B] tokens, of which those in `active` [B] decode."""
    return Progress(jnp.where(active, length, -length) - 1)


def progress_of(slots: Slots, slot: jax.Array) -> Progress:
    """The progress of the requests in some slots."""
    return Progress(slots.length[slot] - 1)


def options_of(slots: Slots, slot: jax.Array) -> SamplingArrays:
    """The sampling options of some slots."""
    return jax.tree.map(lambda x: x[slot], slots.options)


def last_tokens(history: jax.Array, rows: Rows, position: jax.Array, adapter: jax.Array) -> TokenRows:
    """The token of each row that is not in the cache yet. position, adapter: int32 [B]."""
    ids = history[rows.slot, jnp.maximum(position, 0)]
    return TokenRows(ids[:, None], position[:, None], rows.page_table, adapter, rows.slot)


@jax.named_scope("append")
def append(
    history: jax.Array,
    slot: jax.Array,
    before: Progress,
    tokens: jax.Array,
    count: jax.Array,
    options: SamplingArrays,
) -> tuple[jax.Array, Progress]:
    """Add the first `count` [B] of tokens [B, W], up to a stop token or the limit, either of which ends the request.

    NO_TOKEN ends it like a stop token.

    Returns the history [S, C], and the requests' progress after that.
    """
    # Comparisons one by one, unlike a reduction, belong to the kernel that uses them.
    ids = lax.split(options.stop_token_ids, (1,) * MAX_STOP_TOKEN_IDS, axis=1)
    stops = functools.reduce(jnp.logical_or, (tokens == id for id in ids), tokens == NO_TOKEN)
    width = tokens.shape[1]
    until_stop = jnp.where(jnp.any(stops, axis=1), jnp.argmax(stops, axis=1) + 1, width + 1)
    count = jnp.minimum(jnp.minimum(count, until_stop), options.limit - before.length)
    index = jnp.arange(width)
    at = slot[:, None] * history.shape[1] + before.length[:, None] + index
    at = jnp.where(index < count[:, None], at, history.size - 1)  # which belongs to the spare slot
    length = before.length + count
    ended = (until_stop == count) | (length >= options.limit)
    after = Progress(jnp.where(count > 0, progress(length, ~ended).position, before.position))
    return _put(history, at, tokens), after


def _put(history: jax.Array, at: jax.Array, tokens: jax.Array) -> jax.Array:
    """Write tokens at places in the flat history; a single one as a slice, since scattering it takes two kernels."""
    flat = history.reshape(-1)
    if tokens.size == 1:
        flat = lax.dynamic_update_slice(flat, tokens.reshape(1), (at.reshape(()),))
    else:
        flat = flat.at[at].set(tokens, mode="drop")
    return flat.reshape(history.shape)


def with_progress(slots: Slots, slot: jax.Array, progress: Progress, written: jax.Array) -> Slots:
    """Put the requests' progress into their slots where `written` [B]."""
    row = jnp.where(written, slot, len(slots.length))
    return slots._replace(length=slots.length.at[row].set(progress.position + 1, mode="drop"))

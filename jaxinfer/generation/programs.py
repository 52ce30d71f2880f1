"""The pure functions that generation compiles: `admit`, `copy`, `place_adapter`, `step` and `decode`.

All take and return the whole device state (donated, so it is updated in place). What a request asks for is in the
state from its admission on, so that a step is told only which slots and pages it is about. The host may therefore
send the next step before it has seen the tokens of the last.

Dimensions: B rows of the batch, M pieces of prompts, T tokens a piece, P pages a row, C tokens of context, S slots.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.generation.sampling import (
    Logprobs,
    Processors,
    SamplingArrays,
    logprobs_of,
    no_logprobs,
    sample,
)
from jaxinfer.models import Decoder, KVPages, LayerAdapters, LowRankStack, TokenRows

PROMPT_LOGPROB_BLOCK = 64
"""Most prompt positions whose logits are held at once."""
LONGEST_NGRAM = 4
SHORTEST_NGRAM = 3
"""Tokens at the end of a text that must have stood there before, for what followed then to be proposed."""

LEAST_ACCEPTED = 4
"""One draft in so many must have been right, or a row gets no more in this dispatch."""


class Slots(NamedTuple):
    """The requests on the device, one a slot; the last row belongs to no request.

    Attributes:
      history: int32 [S, C], their tokens. length: int32 [S], how many of them are known.
      active: bool [S], whether the request generates: its prompt is through and nothing has ended it.
      limit: int32 [S], the total length at which it ends.
      adapter: int32 [S], its adapter slot, from 1; 0 is none.
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


class Pieces(NamedTuple):
    """Pieces of prompts; several may be of one request.

    Attributes:
      slot: int32 [M]. start: int32 [M], the position of the first token. tokens: int32 [M], how many are real.
      last: bool [M], whether the piece ends what is known of its request, so that a token is chosen after it.
      page_table: int32 [M, P].
    """

    slot: jax.Array
    start: jax.Array
    tokens: jax.Array
    last: jax.Array
    page_table: jax.Array


class Rows(NamedTuple):
    """Requests that generate. slot: int32 [B], the spare slot in padding rows. page_table: int32 [B, P]."""

    slot: jax.Array
    page_table: jax.Array


class Stepped(NamedTuple):
    """Results of `step`, for the M pieces and then the B rows.

    Attributes:
      tokens: int32 [M + B]. produced: bool [M + B], whether the token counts. logprobs: [M + B].
      prompt: [M, T], log probabilities of the token after each one of a piece.
      pooled: float32 [M, D], sums of a piece's hidden vectors, in pieces whose request wants them.
    """

    tokens: jax.Array
    produced: jax.Array
    logprobs: Logprobs
    prompt: Logprobs
    pooled: jax.Array


class Decoded(NamedTuple):
    """Results of `decode`.

    Attributes:
      tokens: int32 [B, K]. produced: int32 [B], how many of them are valid. logprobs: [B, K].
      drafted, accepted: int32 [B], tokens proposed by prompt lookup, and those that were right.
      steps: int32 [2], passes through the model with one token a row, and with drafts.
    """

    tokens: jax.Array
    produced: jax.Array
    logprobs: Logprobs
    drafted: jax.Array
    accepted: jax.Array
    steps: jax.Array


def admit(state: DeviceState, slot: jax.Array, rows: Slots) -> DeviceState:
    """Put requests into slots. slot: int32 [R], out of range in padding rows; rows: Slots of R rows."""
    slots = jax.tree.map(lambda old, new: old.at[slot].set(new, mode="drop"), state.slots, rows)
    return DeviceState(state.caches, slots)


def copy(state: DeviceState, source: jax.Array, target: jax.Array) -> DeviceState:
    """Copy pages, all read before any is written. source, target: int32 [R]; a target out of range is dropped."""
    caches = jax.tree.map(lambda x: x.at[target].set(x[source], mode="drop"), state.caches)
    return DeviceState(caches, state.slots)


def place_adapter(adapters: list[LayerAdapters], slot: jax.Array, one: list[LayerAdapters]) -> list[LayerAdapters]:
    """Fill an adapter slot. slot: int32 [], from 0; one: a: [R, K], b: [N, R] of every linear."""

    def fill(stack: LowRankStack, new: LowRankStack) -> LowRankStack:
        a, b = new.a.astype(stack.a.dtype), new.b.astype(stack.b.dtype)
        return LowRankStack(stack.a.at[slot].set(a), stack.b.at[:, slot].set(b))

    return jax.tree.map(fill, adapters, one, is_leaf=lambda x: isinstance(x, LowRankStack))


def _options(slots: Slots, slot: jax.Array) -> SamplingArrays:
    return jax.tree.map(lambda x: x[slot], slots.options)


def step(
    model: Decoder,
    adapters: list[LayerAdapters] | None,
    state: DeviceState,
    pieces: Pieces,
    rows: Rows,
    mask: jax.Array,
    *,
    width: int,
    processors: Processors,
) -> tuple[DeviceState, Stepped]:
    """One pass of the model over pieces of prompts and one token of each generating row (chunked prefill).

    Args:
      mask: uint32 [M + B, V / 32], the tokens that may be chosen; see `sampling.allowed`.
      width: T, tokens a piece.
    """
    slots = state.slots
    index = jnp.arange(width)
    positions = jnp.where(index < pieces.tokens[:, None], pieces.start[:, None] + index, -1)
    ids = slots.history[pieces.slot[:, None], jnp.maximum(positions, 0)]
    groups = [TokenRows(ids, positions, pieces.page_table, slots.adapter[pieces.slot])]
    if rows.slot.size:
        groups.append(_last_tokens(slots, rows))
    hidden, caches = model.forward(tuple(groups), state.caches, adapters)
    assert caches is not None
    last = jnp.take_along_axis(hidden[0], jnp.maximum(pieces.tokens - 1, 0)[:, None, None], axis=1)
    ends = jnp.concatenate([last[:, 0], *(group[:, 0] for group in hidden[1:])])  # [M + B, D]
    slot = jnp.concatenate([pieces.slot, rows.slot])
    length = jnp.concatenate([pieces.start + pieces.tokens, slots.length[rows.slot]])
    produced = jnp.concatenate([pieces.last, slots.active[rows.slot]])
    options = _options(slots, slot)
    tokens, logprobs = sample(model.logits(ends), slots.history, slot, length, options, mask, processors)
    slots = _append(slots, slot, length, tokens[:, None], produced.astype(jnp.int32))
    following = slots.history[pieces.slot[:, None], positions + 1]
    asked = options.prompt_logprobs[: len(pieces.slot)]
    prompt = lax.cond(
        jnp.any(asked), lambda: _prompt_logprobs(model, hidden[0], following), lambda: no_logprobs(ids.shape)
    )
    real = (positions >= 0)[..., None]
    pooled = lax.cond(
        jnp.any(options.pooled),
        lambda: jnp.sum(jnp.where(real, hidden[0].astype(jnp.float32), 0.0), axis=1),
        lambda: jnp.zeros(last[:, 0].shape, jnp.float32),
    )
    return DeviceState(caches, slots), Stepped(tokens, produced, logprobs, prompt, pooled)


def _last_tokens(slots: Slots, rows: Rows) -> TokenRows:
    """The token of each row that is not in the cache yet."""
    at = jnp.maximum(slots.length[rows.slot] - 1, 0)
    positions = jnp.where(slots.active[rows.slot], at, -1)
    return TokenRows(
        slots.history[rows.slot, at][:, None], positions[:, None], rows.page_table, slots.adapter[rows.slot]
    )


def _append(slots: Slots, slot: jax.Array, length: jax.Array, tokens: jax.Array, count: jax.Array) -> Slots:
    """Write the first `count` [B] of tokens [B, W] after `length` [B], and end what a stop id or the limit ends."""
    nowhere = len(slots.length)
    index = jnp.arange(tokens.shape[1])
    written = index < count[:, None]
    at = jnp.where(written, length[:, None] + index, slots.history.shape[1])
    stop_ids = slots.options.stop_ids[slot]
    stopped = jnp.any((tokens[..., None] == stop_ids[:, None]) & written[..., None], axis=(1, 2))
    length = length + count
    row = jnp.where(count > 0, slot, nowhere)
    return slots._replace(
        history=slots.history.at[slot[:, None], at].set(tokens, mode="drop"),
        length=slots.length.at[row].set(length, mode="drop"),
        active=slots.active.at[row].set(~stopped & (length < slots.limit[slot]), mode="drop"),
    )


def _prompt_logprobs(model: Decoder, hidden: jax.Array, following: jax.Array) -> Logprobs:
    """Log probabilities of the following tokens, a block of positions at a time: the logits of all would be large."""
    batch, tokens = following.shape
    block = math.gcd(PROMPT_LOGPROB_BLOCK, tokens)

    def one(args):
        return logprobs_of(model.logits(args[0]), args[1])

    def blocks(x):
        return jnp.moveaxis(x.reshape(batch, tokens // block, block, *x.shape[2:]), 1, 0)

    found = lax.map(one, (blocks(hidden), blocks(following)))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(batch, tokens, *x.shape[3:]), found)


def decode(
    model: Decoder,
    adapters: list[LayerAdapters] | None,
    state: DeviceState,
    rows: Rows,
    mask: jax.Array,
    steps: jax.Array,
    draft_limit: jax.Array,
    *,
    max_steps: int,
    max_drafts: int,
    processors: Processors,
) -> tuple[DeviceState, Decoded]:
    """Up to `steps` passes of the model over one token a row, or over that and its drafts.

    Drafts are what followed the text's last tokens when they stood there before (prompt lookup). Each position's
    token is chosen as it would be without drafts, from the same scores and noise, and a draft is right if it is that
    token: so the text is the same, and its distribution too (Leviathan et al. 2023, arXiv:2211.17192, with a draft
    distribution of a single token).

    Args:
      mask: uint32 [B, V / 32], which holds for all passes; rows whose mask changes take one pass at a time.
      steps: int32 [], at most `max_steps`. Ends early when all rows are done.
      draft_limit: int32 [B], most drafts of each row in a pass, at most `max_drafts`.
    """
    batch, width = len(rows.slot), 1 + max_drafts
    options = _options(state.slots, rows.slot)
    capacity = max_steps * width
    zeros = jnp.zeros(batch, jnp.int32)
    empty = Decoded(
        jnp.zeros((batch, capacity), jnp.int32),
        zeros,
        no_logprobs((batch, capacity)),
        zeros,
        zeros,
        jnp.zeros(2, jnp.int32),
    )

    def going(carry):
        state, out = carry
        return (jnp.sum(out.steps) < steps) & jnp.any(state.slots.active[rows.slot])

    def with_drafts(drafts: jax.Array, count: jax.Array):
        """One pass over 1 + W tokens a row; drafts: int32 [B, W], `count` [B] of them real."""

        def run(carry):
            state, out = carry
            slots, length = state.slots, state.slots.length[rows.slot]
            last, index = _last_tokens(slots, rows), jnp.arange(drafts.shape[1] + 1)
            used = (index <= count[:, None]) & (last.positions >= 0)
            groups = last._replace(
                ids=jnp.concatenate([last.ids, drafts], axis=1),
                positions=jnp.where(used, last.positions + index, -1),
            )
            (hidden,), caches = model.forward((groups,), state.caches, adapters)
            assert caches is not None
            tokens, logprobs = _choose(model, hidden, slots, rows.slot, drafts, options, mask, processors)
            right = jnp.cumprod((tokens[:, :-1] == drafts) & (index[:-1] < count[:, None]), axis=1)
            accepted = jnp.sum(right, axis=1)
            produced = _until_stop(tokens, accepted + 1, options.stop_ids)
            produced = jnp.minimum(produced, slots.limit[rows.slot] - length)
            produced = jnp.where(slots.active[rows.slot], produced, 0)
            slots = _append(slots, rows.slot, length, tokens, produced)
            wide = drafts.shape[1] > 0
            at = jnp.where(index < produced[:, None], out.produced[:, None] + index, capacity)
            row = jnp.arange(batch)[:, None]
            out = Decoded(
                out.tokens.at[row, at].set(tokens, mode="drop"),
                out.produced + produced,
                jax.tree.map(lambda old, new: old.at[row, at].set(new, mode="drop"), out.logprobs, logprobs),
                out.drafted + count,
                out.accepted + accepted,
                out.steps.at[int(wide)].add(1),
            )
            return DeviceState(caches, slots), out

        return run

    no_drafts = with_drafts(jnp.zeros((batch, 0), jnp.int32), zeros)

    def one(carry):
        if not max_drafts:
            return no_drafts(carry)
        slots = carry[0].slots
        drafts, count = look_up(slots.history[rows.slot], slots.length[rows.slot], max_drafts)
        room = slots.limit[rows.slot] - slots.length[rows.slot] - 1
        # A dispatch in which most drafts were wrong proposes no more.
        good = carry[1].accepted * LEAST_ACCEPTED >= carry[1].drafted
        count = jnp.where(slots.active[rows.slot] & good, jnp.minimum(jnp.minimum(count, draft_limit), room), 0)
        return lax.cond(jnp.any(count > 0), with_drafts(drafts, count), no_drafts, carry)

    return lax.while_loop(going, one, (state, empty))


def _choose(
    model: Decoder,
    hidden: jax.Array,
    slots: Slots,
    slot: jax.Array,
    drafts: jax.Array,
    options: SamplingArrays,
    mask: jax.Array,
    processors: Processors,
) -> tuple[jax.Array, Logprobs]:
    """The token after each one of a row, and its log probabilities: [B, W]; the drafts before it count as text."""
    batch, width = hidden.shape[:2]
    length = slots.length[slot]
    if width > 1:  # penalties read the drafts from the history, where what is chosen replaces them
        at = jnp.where(slots.active[slot][:, None], length[:, None] + jnp.arange(width - 1), slots.history.shape[1])
        slots = slots._replace(history=slots.history.at[slot[:, None], at].set(drafts, mode="drop"))

    def repeated(x: jax.Array) -> jax.Array:
        return jnp.repeat(x, width, axis=0) if width > 1 else x

    lengths = (length[:, None] + jnp.arange(width)).reshape(-1)
    tokens, logprobs = sample(
        model.logits(hidden.reshape(batch * width, -1)),
        slots.history,
        repeated(slot),
        lengths,
        jax.tree.map(repeated, options),
        repeated(mask),
        processors,
    )
    return jax.tree.map(lambda x: x.reshape(batch, width, *x.shape[1:]), (tokens, logprobs))


def _until_stop(tokens: jax.Array, count: jax.Array, stop_ids: jax.Array) -> jax.Array:
    """How many of the first `count` [B] of tokens [B, W] there are up to the first stop id, with it."""
    stops = jnp.any(tokens[..., None] == stop_ids[:, None], axis=-1)
    first = jnp.where(jnp.any(stops, axis=1), jnp.argmax(stops, axis=1) + 1, tokens.shape[1])
    return jnp.minimum(count, first)


def look_up(history: jax.Array, length: jax.Array, most: int) -> tuple[jax.Array, jax.Array]:
    """Propose what followed the longest, then latest, earlier occurrence of the text's last tokens.

    Where the text repeats itself up to its end, the proposal repeats it further.

    Args:
      history: int32 [B, C]; the first `length` [B] tokens are known.
      most: tokens to propose.
    Returns: int32 [B, most], and how many are real: `most`, or 0 where the last tokens are new. int32 [B].
    """
    end = length[:, None] - 1  # the last known token
    place = jnp.arange(history.shape[1])
    alike = place < end  # an earlier place whose n tokens up to it are those at the end
    matched = jnp.zeros(history.shape, jnp.int32)
    for back in range(LONGEST_NGRAM):
        wanted = jnp.take_along_axis(history, jnp.maximum(end - back, 0), axis=1)
        alike &= (jnp.roll(history, back, axis=1) == wanted) & (place >= back)
        matched += alike
    score = jnp.where(matched >= SHORTEST_NGRAM, matched * history.shape[1] + place, -1)
    best = jnp.argmax(score, axis=1)[:, None]
    found = jnp.max(score, axis=1) >= 0
    period = jnp.maximum(end - best, 1)
    drafts = jnp.take_along_axis(history, best + 1 + jnp.arange(most) % period, axis=1)
    return drafts, jnp.where(found, most, 0)

"""`decode`: several passes in one loop, each over a token of every row, with speculative tokens if asked."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.compiled import ProgramSpec, Sizes
from jaxinfer.generation.engine.buckets import Buckets
from jaxinfer.generation.execution.layout import DecoderStatic, DeviceLayout, integers
from jaxinfer.generation.execution.programs.ngram import propose
from jaxinfer.generation.execution.state import (
    DeviceState,
    Progress,
    Rows,
    append,
    last_tokens,
    options_of,
    progress_of,
    with_progress,
)
from jaxinfer.generation.sampling.arrays import SamplingArrays
from jaxinfer.generation.sampling.logprobs import Logprobs, no_logprobs, record_logprobs
from jaxinfer.generation.sampling.sampler import LogitsProcessors, asks_more_than_greedy, sample
from jaxinfer.generation.sampling.vocabulary import greedy
from jaxinfer.models import KVPages, LayerAdapters

if TYPE_CHECKING:
    from jaxinfer.models import Decoder

MIN_ACCEPTED = 4
"""One speculative token of this many must have been right, or a row gets no more in this step."""


class DecodeOutput(NamedTuple):
    """Results of `decode`.

    Attributes:
      tokens: int32 [B, K].
      produced: int32 [B], how many of them are valid.
      logprobs: [B, K].
      proposed: int32 [B], speculative tokens.
      accepted: int32 [B], those of them that were right.
      passes: int32 [2], passes through the model with one token a row, and with speculative ones.
    """

    tokens: jax.Array
    produced: jax.Array
    logprobs: Logprobs
    proposed: jax.Array
    accepted: jax.Array
    passes: jax.Array


class _PassInputs(NamedTuple):
    """What all passes of a step have in common.

    Attributes:
      model, adapters, rows, bitmask, processors: as in `decode`.
      adapter: int32 [B], each row's.
      options: of the rows.
      asks_more: bool [], whether a row asks for more than its best token.
      start: int32 [B], the lengths before the step.
      passes: int32 [], how many there may be.
    """

    model: "Decoder"
    adapters: list[LayerAdapters] | None
    rows: Rows
    bitmask: jax.Array
    processors: LogitsProcessors
    adapter: jax.Array
    options: SamplingArrays
    asks_more: jax.Array
    start: jax.Array
    passes: jax.Array


class _Carry(NamedTuple):
    """What a pass changes.

    Attributes:
      caches, history: all of them.
      progress: of the rows.
      logprobs, proposed, accepted: as in `DecodeOutput`.
      passes, speculative_passes: int32 [B], those in which each row was active.
      going: bool [], whether there is another pass.
    """

    caches: list[KVPages]
    history: jax.Array
    progress: Progress
    logprobs: Logprobs
    proposed: jax.Array
    accepted: jax.Array
    passes: jax.Array
    speculative_passes: jax.Array
    going: jax.Array


def decode(
    model: "Decoder",
    adapters: list[LayerAdapters] | None,
    state: DeviceState,
    rows: Rows,
    bitmask: jax.Array,
    passes: jax.Array,
    speculation_limit: jax.Array,
    *,
    max_passes: int,
    num_speculative_tokens: int,
    processors: LogitsProcessors,
) -> tuple[DeviceState, DecodeOutput]:
    """Up to `passes` passes of the model over one token a row, or over that and its speculative tokens.

    Each position's token is chosen as it would be without speculation, from the same scores and noise, and a
    speculative token is right if it is that token: so the text is the same, and its distribution too (Leviathan et
    al. 2023, arXiv:2211.17192, with a draft distribution of a single token).

    Args:
      bitmask: uint32 [B, V / 32], which holds for all passes; rows whose bitmask changes take one pass a step.
      passes: int32 [], at most `max_passes`. Ends early when all rows are done.
      speculation_limit: int32 [B], how many speculative tokens each row may have in a pass, at most
        `num_speculative_tokens`.
    """
    slots, slot = state.slots, rows.slot
    options, before = options_of(slots, slot), progress_of(slots, slot)
    inputs = _PassInputs(
        model,
        adapters,
        rows,
        bitmask,
        processors,
        adapter=slots.adapter[slot],
        options=options,
        asks_more=asks_more_than_greedy(options, before.length),
        start=before.length,
        passes=passes,
    )
    batch, width = len(slot), max_passes * (1 + num_speculative_tokens)
    none, zeros = no_logprobs((batch, width)), jnp.zeros(batch, jnp.int32)

    def plain(carry: _Carry) -> _Carry:
        return _pass(inputs, carry, jnp.zeros((batch, 0), jnp.int32), zeros)

    def speculative(carry: _Carry) -> _Carry:
        length, active = carry.progress.length, carry.progress.active
        tokens, count = propose(carry.history[slot], length, num_speculative_tokens)
        # A row whose speculative tokens were mostly wrong gets no more in this step.
        good = carry.accepted * MIN_ACCEPTED >= carry.proposed
        room = options.limit - length - 1
        count = jnp.where(active & good, jnp.minimum(jnp.minimum(count, speculation_limit), room), 0)
        return lax.cond(jnp.any(count > 0), lambda carry: _pass(inputs, carry, tokens, count), plain, carry)

    going = jnp.any(before.active) & (passes > 0)
    carry = _Carry(state.caches, slots.history, before, none, zeros, zeros, zeros, zeros, going)
    carry = lax.while_loop(lambda carry: carry.going, speculative if num_speculative_tokens else plain, carry)
    produced = carry.progress.length - inputs.start
    slots = with_progress(slots._replace(history=carry.history), slot, carry.progress, produced > 0)
    tokens = carry.history[slot[:, None], inputs.start[:, None] + jnp.arange(width)]
    speculated = jnp.max(carry.speculative_passes)
    counts = jnp.stack([jnp.max(carry.passes) - speculated, speculated])
    output = DecodeOutput(tokens, produced, carry.logprobs, carry.proposed, carry.accepted, counts)
    return DeviceState(carry.caches, slots), output


def _pass(inputs: _PassInputs, carry: _Carry, speculative: jax.Array, count: jax.Array) -> _Carry:
    """One pass over 1 + W tokens a row; speculative: int32 [B, W], `count` [B] of them real."""
    rows, index = inputs.rows, jnp.arange(speculative.shape[1] + 1)
    group = last_tokens(carry.history, rows, carry.progress.position, inputs.adapter)
    if speculative.size:
        used = (index <= count[:, None]) & (group.positions >= 0)
        group = group._replace(
            ids=jnp.concatenate([group.ids, speculative], axis=1),
            positions=jnp.where(used, group.positions + index, -1),
        )
    (hidden,), caches = inputs.model.forward((group,), carry.caches, inputs.adapters)
    assert caches is not None
    tokens, logprobs = _choose(inputs, carry, hidden, speculative)
    right = jnp.cumprod((tokens[:, :-1] == speculative) & (index[:-1] < count[:, None]), axis=1)
    accepted = jnp.sum(right, axis=1)
    active = carry.progress.active.astype(jnp.int32)
    history, progress = append(
        carry.history, rows.slot, carry.progress, tokens, active * (accepted + 1), inputs.options
    )
    passes = carry.passes + active
    return _Carry(
        caches,
        history,
        progress,
        logprobs,
        carry.proposed + count,
        carry.accepted + accepted,
        passes,
        carry.speculative_passes + active * int(speculative.shape[1] > 0),
        jnp.any(progress.active & (passes < inputs.passes)),
    )


def _choose(
    inputs: _PassInputs, carry: _Carry, hidden: jax.Array, speculative: jax.Array
) -> tuple[jax.Array, Logprobs]:
    """The token after each one of a row: int32 [B, W], and the log probabilities of the step with theirs."""
    batch, width = hidden.shape[:2]
    logits = inputs.model.logits(hidden.reshape(batch * width, -1))

    def by_options() -> tuple[jax.Array, Logprobs]:
        history, length, active = carry.history, carry.progress.length, carry.progress.active
        if width > 1:  # penalties read speculative tokens from the history, where what is chosen replaces them
            at = jnp.where(active[:, None], length[:, None] + jnp.arange(width - 1), history.shape[1])
            history = history.at[inputs.rows.slot[:, None], at].set(speculative, mode="drop")
        slot, start, options, bitmask = jax.tree.map(
            lambda x: jnp.repeat(x, width, axis=0) if width > 1 else x,
            (inputs.rows.slot, inputs.start, inputs.options, inputs.bitmask),
        )
        lengths = (length[:, None] + jnp.arange(width)).reshape(-1)
        vocab = inputs.model.cfg.vocab
        tokens = sample(logits, history, slot, lengths, options, bitmask, inputs.processors, vocab=vocab)
        at = jnp.arange(batch * width) // width, lengths - start  # those of tokens that do not stay are overwritten
        return tokens, record_logprobs(options.logprobs, logits, tokens, at, carry.logprobs)

    with jax.named_scope("sample"):
        best = greedy(logits)
        tokens, logprobs = lax.cond(inputs.asks_more, by_options, lambda: (best, carry.logprobs))
    return tokens.reshape(batch, width), logprobs


def build(static: DecoderStatic, sizes: Sizes) -> Callable[..., Any]:
    """The function of these sizes."""
    body = functools.partial(
        decode,
        max_passes=static.engine.max_decode_passes,
        num_speculative_tokens=sizes["speculative"],
        processors=static.processors,
    )
    return static.with_model(body)


def spec(layout: DeviceLayout) -> ProgramSpec[Buckets]:
    """Sizes: `batch` rows, `speculative` tokens of each in a pass, `pages` of a page table."""

    def arguments(sizes):
        batch = sizes["batch"]
        inputs = layout.rows(batch, sizes["pages"]), layout.bitmask(batch), integers(), integers(batch)
        return (layout.leaves, layout.adapters, layout.state, *layout.inputs(*inputs))

    return ProgramSpec(
        name="decode",
        build=build,
        static=layout.static,
        arguments=arguments,
        reachable=lambda buckets: (
            {"batch": batch, "speculative": speculative, "pages": pages}
            for pages in buckets.page_tables
            for batch in buckets.decode_rows
            for speculative in sorted({0, layout.engine.num_speculative_tokens})
        ),
        donate=(2,),
        out_shardings=lambda sizes: None if layout.mesh is None else (layout.state_shardings, None),
        compiler_options=lambda sizes: layout.compiler_options(tokens=sizes["batch"] * (1 + sizes["speculative"])),
    )

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
from jaxinfer.generation.execution.state import DeviceState, Rows, Slots, append, last_tokens, options_of
from jaxinfer.generation.sampling.arrays import SamplingArrays
from jaxinfer.generation.sampling.logprobs import Logprobs, no_logprobs
from jaxinfer.generation.sampling.sampler import LogitsProcessors, sample
from jaxinfer.models import LayerAdapters

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
    """What all passes of a step have in common."""

    model: "Decoder"
    adapters: list[LayerAdapters] | None
    rows: Rows
    options: SamplingArrays
    bitmask: jax.Array
    processors: LogitsProcessors


_Carry = tuple[DeviceState, DecodeOutput]


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
    inputs = _PassInputs(model, adapters, rows, options_of(state.slots, rows.slot), bitmask, processors)
    batch = len(rows.slot)
    zeros = jnp.zeros(batch, jnp.int32)
    shape = batch, max_passes * (1 + num_speculative_tokens)
    output = DecodeOutput(jnp.zeros(shape, jnp.int32), zeros, no_logprobs(shape), zeros, zeros, jnp.zeros(2, jnp.int32))

    def going(carry: _Carry) -> jax.Array:
        state, output = carry
        return (jnp.sum(output.passes) < passes) & jnp.any(state.slots.active[rows.slot])

    def plain(carry: _Carry) -> _Carry:
        return _pass(inputs, carry, jnp.zeros((batch, 0), jnp.int32), zeros)

    def speculative(carry: _Carry) -> _Carry:
        slots, output = carry[0].slots, carry[1]
        tokens, count = propose(slots.history[rows.slot], slots.length[rows.slot], num_speculative_tokens)
        room = slots.limit[rows.slot] - slots.length[rows.slot] - 1
        # A row whose speculative tokens were mostly wrong gets no more in this step.
        good = output.accepted * MIN_ACCEPTED >= output.proposed
        count = jnp.where(slots.active[rows.slot] & good, jnp.minimum(jnp.minimum(count, speculation_limit), room), 0)
        return lax.cond(jnp.any(count > 0), lambda carry: _pass(inputs, carry, tokens, count), plain, carry)

    return lax.while_loop(going, speculative if num_speculative_tokens else plain, (state, output))


def _pass(inputs: _PassInputs, carry: _Carry, speculative: jax.Array, count: jax.Array) -> _Carry:
    """One pass over 1 + W tokens a row; speculative: int32 [B, W], `count` [B] of them real."""
    state, output = carry
    rows, options = inputs.rows, inputs.options
    slots, length = state.slots, state.slots.length[rows.slot]
    last, index = last_tokens(slots, rows), jnp.arange(speculative.shape[1] + 1)
    used = (index <= count[:, None]) & (last.positions >= 0)
    group = last._replace(
        ids=jnp.concatenate([last.ids, speculative], axis=1),
        positions=jnp.where(used, last.positions + index, -1),
    )
    (hidden,), caches = inputs.model.forward((group,), state.caches, inputs.adapters)
    assert caches is not None
    tokens, logprobs = _choose(inputs, hidden, slots, speculative)
    right = jnp.cumprod((tokens[:, :-1] == speculative) & (index[:-1] < count[:, None]), axis=1)
    accepted = jnp.sum(right, axis=1)
    produced = _until_stop(tokens, accepted + 1, options.stop_token_ids)
    produced = jnp.minimum(produced, slots.limit[rows.slot] - length)
    produced = jnp.where(slots.active[rows.slot], produced, 0)
    slots = append(slots, rows.slot, length, tokens, produced)
    at = jnp.where(index < produced[:, None], output.produced[:, None] + index, output.tokens.shape[1])
    row = jnp.arange(len(at))[:, None]
    output = DecodeOutput(
        output.tokens.at[row, at].set(tokens, mode="drop"),
        output.produced + produced,
        jax.tree.map(lambda old, new: old.at[row, at].set(new, mode="drop"), output.logprobs, logprobs),
        output.proposed + count,
        output.accepted + accepted,
        output.passes.at[int(speculative.shape[1] > 0)].add(1),
    )
    return DeviceState(caches, slots), output


def _choose(inputs: _PassInputs, hidden: jax.Array, slots: Slots, speculative: jax.Array) -> tuple[jax.Array, Logprobs]:
    """The token after each one of a row, and its log probabilities: [B, W]; speculative tokens count as text."""
    batch, width = hidden.shape[:2]
    slot = inputs.rows.slot
    length = slots.length[slot]
    if width > 1:  # penalties read speculative tokens from the history, where what is chosen replaces them
        at = jnp.where(slots.active[slot][:, None], length[:, None] + jnp.arange(width - 1), slots.history.shape[1])
        slots = slots._replace(history=slots.history.at[slot[:, None], at].set(speculative, mode="drop"))

    def repeated(x: jax.Array) -> jax.Array:
        return jnp.repeat(x, width, axis=0) if width > 1 else x

    lengths = (length[:, None] + jnp.arange(width)).reshape(-1)
    tokens, logprobs = sample(
        inputs.model.logits(hidden.reshape(batch * width, -1)),
        slots.history,
        repeated(slot),
        lengths,
        jax.tree.map(repeated, inputs.options),
        repeated(inputs.bitmask),
        inputs.processors,
    )
    return jax.tree.map(lambda x: x.reshape(batch, width, *x.shape[1:]), (tokens, logprobs))


def _until_stop(tokens: jax.Array, count: jax.Array, stop_token_ids: jax.Array) -> jax.Array:
    """How many of the first `count` [B] of tokens [B, W] there are up to the first stop token, with it."""
    stops = jnp.any(tokens[..., None] == stop_token_ids[:, None], axis=-1)
    first = jnp.where(jnp.any(stops, axis=1), jnp.argmax(stops, axis=1) + 1, tokens.shape[1])
    return jnp.minimum(count, first)


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
        out_shardings=None if layout.mesh is None else (layout.state_shardings, None),
        compiler_options=lambda sizes: layout.compiler_options(tokens=sizes["batch"] * (1 + sizes["speculative"])),
    )

"""A pass over decoding rows: the tokens it runs, speculative ones among them, and which of those are right.

Each position's token is chosen as it would be without speculation, from the same scores and noise, and a speculative
token is right if it equals that token. So the text is the same, and its distribution too (Leviathan et al. 2023,
arXiv:2211.17192, with a draft distribution of a single token).
"""

from typing import TYPE_CHECKING, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.generation.execution.programs.expert_load import ExpertCounts
from jaxinfer.generation.execution.programs.ngram import propose
from jaxinfer.generation.execution.state import (
    Progress,
    Rows,
    Slots,
    append,
    last_tokens,
    options_of,
    progress_of,
    with_progress,
)
from jaxinfer.generation.sampling.arrays import SamplingArrays
from jaxinfer.generation.sampling.logprobs import Logprobs, record_logprobs
from jaxinfer.generation.sampling.sampler import LogitsProcessors, asks_more_than_greedy, sample
from jaxinfer.generation.sampling.vocabulary import greedy
from jaxinfer.models import TokenRows

if TYPE_CHECKING:
    from jaxinfer.models import Decoder


class DecodeOutput(NamedTuple):
    """Results of one or several passes over rows; K is the most tokens they give.

    Attributes:
      tokens: int32 [B, K].
      produced: int32 [B], how many of them are valid.
      logprobs: [B, K].
      proposed: int32 [B], speculative tokens.
      accepted: int32 [B], speculative tokens that were right.
      passes: int32 [2], passes through the model with one token a row, and with speculative ones.
      experts: of B rows, the experts of their tokens; None unless the engine counts them.
    """

    tokens: jax.Array
    produced: jax.Array
    logprobs: Logprobs
    proposed: jax.Array
    accepted: jax.Array
    passes: jax.Array
    experts: ExpertCounts | None = None


class Speculation(NamedTuple):
    """Speculative tokens.

    Attributes:
      tokens: int32 [B, W].
      num_tokens: int32 [B], how many of them are real.
    """

    tokens: jax.Array
    num_tokens: jax.Array

    @classmethod
    def none(cls, batch: int) -> Self:
        """The speculation of a plain pass: no tokens."""
        return cls(jnp.zeros((batch, 0), jnp.int32), jnp.zeros(batch, jnp.int32))


class DecodeRows(NamedTuple):
    """The inputs that all passes of a step share.

    Attributes:
      rows: the requests.
      bitmask: uint32 [B, V / 32], the tokens that may be chosen.
      adapter: int32 [B], each row's adapter.
      options: the rows' options.
      asks_more: bool [], whether a row asks for more than its best token.
      start: int32 [B], the lengths before the step.
    """

    rows: Rows
    bitmask: jax.Array
    adapter: jax.Array
    options: SamplingArrays
    asks_more: jax.Array
    start: jax.Array

    @classmethod
    def from_slots(cls, slots: Slots, rows: Rows, bitmask: jax.Array) -> Self:
        """Gather the inputs of a step that begins."""
        options, length = options_of(slots, rows.slot), progress_of(slots, rows.slot).length
        asks_more = asks_more_than_greedy(options, length)
        return cls(rows, bitmask, slots.adapter[rows.slot], options, asks_more, length)


class PassState(NamedTuple):
    """The state after a pass.

    Attributes:
      history: int32 [S, C], of all slots.
      progress: the rows' progress.
      logprobs: [B, K], of the step's tokens.
    """

    history: jax.Array
    progress: Progress
    logprobs: Logprobs


def speculate(
    history: jax.Array, slot: jax.Array, progress: Progress, options: SamplingArrays, limit: jax.Array, width: int
) -> Speculation:
    """The n-gram proposer's suggestions for some rows.

    Args:
      limit: int32 [B], the most tokens of each row.
      width: the most tokens of any row.
    """
    tokens, count = propose(history[slot], progress.length, width)
    room = options.limit - progress.length - 1
    count = jnp.where(progress.active, jnp.minimum(jnp.minimum(count, limit), room), 0)
    return Speculation(tokens, count)


def tokens_of(history: jax.Array, rows: Rows, position: jax.Array, adapter: jax.Array, guess: Speculation) -> TokenRows:
    """The model's input: the last token of each row, and its speculative ones. position: int32 [B]."""
    group = last_tokens(history, rows, position, adapter)
    if not guess.tokens.size:
        return group
    index = jnp.arange(guess.tokens.shape[1] + 1)
    used = (index <= guess.num_tokens[:, None]) & (group.positions >= 0)
    return group._replace(
        ids=jnp.concatenate([group.ids, guess.tokens], axis=1),
        positions=jnp.where(used, group.positions + index, -1),
    )


def verify(
    model: "Decoder",
    step: DecodeRows,
    before: PassState,
    hidden: jax.Array,
    guess: Speculation,
    processors: LogitsProcessors,
) -> tuple[PassState, jax.Array]:
    """Choose the token after each token of the pass, and keep them up to the first that was not guessed.

    hidden: [B, 1 + W, D].
    Returns the state after the pass, and how many speculative tokens were right, int32 [B].
    """
    tokens, logprobs = choose_tokens(model, step, before, hidden, guess.tokens, processors)
    return accept(step, before, guess, tokens, logprobs)


def accept(
    step: DecodeRows, before: PassState, guess: Speculation, tokens: jax.Array, logprobs: Logprobs
) -> tuple[PassState, jax.Array]:
    """Keep tokens [B, 1 + W] that were chosen, up to the first that was not guessed; returns what `verify` does.

    logprobs: of the step, with theirs.
    """
    index = jnp.arange(guess.tokens.shape[1])
    right = jnp.cumprod((tokens[:, :-1] == guess.tokens) & (index < guess.num_tokens[:, None]), axis=1)
    accepted = jnp.sum(right, axis=1)
    count = before.progress.active.astype(jnp.int32) * (accepted + 1)
    history, progress = append(before.history, step.rows.slot, before.progress, tokens, count, step.options)
    return PassState(history, progress, logprobs), accepted


def choose_tokens(
    model: "Decoder",
    step: DecodeRows,
    before: PassState,
    hidden: jax.Array,
    speculative: jax.Array,
    processors: LogitsProcessors,
) -> tuple[jax.Array, Logprobs]:
    """Choose the token after each token of a row, int32 [B, 1 + W], and the step's log probabilities with theirs.

    Args:
      hidden: [B, 1 + W, D].
      speculative: int32 [B, W], the tokens that were guessed.
    """
    batch, width = hidden.shape[:2]
    logits = model.logits(hidden.reshape(batch * width, -1))

    def by_options() -> tuple[jax.Array, Logprobs]:
        history, length, active = before.history, before.progress.length, before.progress.active
        if width > 1:  # penalties read speculative tokens from the history; the chosen tokens replace them later
            at = jnp.where(active[:, None], length[:, None] + jnp.arange(width - 1), history.shape[1])
            history = history.at[step.rows.slot[:, None], at].set(speculative, mode="drop")
        slot, options, bitmask = jax.tree.map(
            lambda x: jnp.repeat(x, width, axis=0) if width > 1 else x, (step.rows.slot, step.options, step.bitmask)
        )
        lengths = (length[:, None] + jnp.arange(width)).reshape(-1)
        tokens = sample(logits, history, slot, lengths, options, bitmask, processors, vocab=model.cfg.vocab)
        wide, by_row = logits.reshape(batch, width, -1), tokens.reshape(batch, width)
        # Rejected tokens' places are overwritten later.
        places = length - step.start
        return tokens, record_logprobs(step.options.logprobs, wide, by_row, places, before.logprobs)

    with jax.named_scope("sample"):
        best = greedy(logits)
        tokens, logprobs = lax.cond(step.asks_more, by_options, lambda: (best, before.logprobs))
    return tokens.reshape(batch, width), logprobs


def finish_step(
    slots: Slots,
    step: DecodeRows,
    after: PassState,
    proposed: jax.Array,
    accepted: jax.Array,
    passes: jax.Array,
    *,
    width: int,
) -> tuple[Slots, DecodeOutput]:
    """The slots after a step's passes, and its results; width: the most tokens that a row can have got."""
    slot, produced = step.rows.slot, after.progress.length - step.start
    slots = with_progress(slots._replace(history=after.history), slot, after.progress, produced > 0)
    tokens = after.history[slot[:, None], step.start[:, None] + jnp.arange(width)]
    return slots, DecodeOutput(tokens, produced, after.logprobs, proposed, accepted, passes)

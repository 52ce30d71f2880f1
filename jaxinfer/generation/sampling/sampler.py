"""Choosing the next token, on the device, each row by its own options.

Every option is an array, so none of them changes a compiled program; work that no row asks for is skipped at run
time (`lax.cond`). No step sorts the vocabulary: the cut-offs of top-k and top-p are found by bisection.

If the vocabulary is split over devices, each works on the scores of its own tokens. The cut-offs are then looked for
among the best tokens of every device first; if they lie below these, by bisection, with an exchange for each bit.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.generation.sampling.arrays import SamplingArrays
from jaxinfer.generation.sampling.vocabulary import greedy, local_bitmask, whole
from jaxinfer.pallas_kernels.sampling.api import threshold, top_k
from jaxinfer.pallas_kernels.sampling.keys import float_of, key_of
from jaxinfer.sharding.collectives import all_gather, axis_size, local_index, local_part, mesh_axes, psum

CANDIDATES = 64
"""Best tokens of each device, among which the cut-offs of a split vocabulary are looked for first."""

LogitsProcessor = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""A pure function of scores (float32 [B, V]), history (int32 [B, C]) and length (int32 [B], the tokens known), all rows
at once, that returns new scores. It is compiled into the programs; a request names the processors it wants."""

LogitsProcessors = tuple[LogitsProcessor, ...]


def token_counts(history: jax.Array, prompt_length: jax.Array, length: jax.Array, vocab: int) -> jax.Array:
    """Count each of this device's tokens in the prompt, and in the output: int32 [2, B, V].

    history: int32 [B, C]; prompt_length, length: int32 [B], tokens of the prompt and tokens known.
    """
    index, rows = jnp.arange(history.shape[1]), jnp.arange(history.shape[0])[:, None]
    output = (index >= prompt_length[:, None]).astype(jnp.int32)
    tokens = jnp.where(index < length[:, None], local_index(history, "vocab", vocab), vocab)
    return jnp.zeros((2, len(history), vocab), jnp.int32).at[output, rows, tokens].add(1, mode="drop")


def penalize(logits: jax.Array, history: jax.Array, length: jax.Array, options: SamplingArrays) -> jax.Array:
    """Apply repetition, presence and frequency penalties. history: int32 [B, C]; length: int32 [B] tokens known."""
    prompt, generated = token_counts(history, options.prompt_length, length, logits.shape[-1])
    repetition = options.repetition[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(generated + prompt > 0, repeated, logits)
    logits -= options.frequency[:, None] * generated
    return logits - options.presence[:, None] * (generated > 0)


def ends_of_bad_words(history: jax.Array, length: jax.Array, options: SamplingArrays) -> jax.Array:
    """Compute the tokens that would complete a bad word of several: int32 [B, MAX_BAD_WORD_TOKENS], -1 for none.

    history: int32 [B, C]; length: int32 [B] tokens known. The word's other tokens are the last ones of the output.
    """
    words, rest = options.bad_words, options.bad_word_rest
    at = length[:, None] - rest
    there = (jnp.take_along_axis(history, jnp.maximum(at, 0), axis=1) == words) & (at >= options.prompt_length[:, None])
    size, last = words.shape[1], rest == 0
    missing = jnp.where(there | last, size, jnp.arange(size) + rest)  # the last token of a word that lacks one
    rows = jnp.arange(len(words))[:, None]
    return jnp.where(last, words, -1).at[rows, missing].set(-1, mode="drop")


class _Candidates(NamedTuple):
    """The best scores of every device that has a part of the vocabulary.

    Attributes:
      keys: int32 [B, N], `key_of` the scores, best first.
      floor: int32 [B]; all scores above it are among the keys.
    """

    keys: jax.Array
    floor: jax.Array

    @classmethod
    def from_keys(cls, keys: jax.Array) -> "_Candidates":
        """Gather candidates from each device's keys [B, V / parts], by one exchange."""
        count = min(CANDIDATES, keys.shape[-1])
        gathered = all_gather(top_k(keys, count)[0], "vocab")
        lowest = jnp.iinfo(jnp.int32).min
        floor = jnp.max(gathered[..., -1], axis=0) if count < keys.shape[-1] else jnp.full(len(keys), lowest)
        ordered = jnp.sort(jnp.moveaxis(gathered, 0, 1).reshape(len(keys), -1), axis=-1, descending=True)
        return cls(ordered, floor)

    def cut(self, weights: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return `threshold` if it lies above the floor, int32 [B], and whether it does. weights: of the keys."""
        reached = jnp.cumsum(weights, axis=-1) >= target[:, None]
        cut = jnp.take_along_axis(self.keys, jnp.argmax(reached, axis=-1)[:, None], axis=-1)[:, 0]
        return cut, jnp.any(reached, axis=-1) & (cut > self.floor)


def _cut(
    name: str,
    keys: jax.Array,
    candidates: _Candidates | None,
    weigh: Callable[[jax.Array], jax.Array],
    target: jax.Array,
    needed: jax.Array,
) -> jax.Array:
    """Return `threshold` in the rows that need it, int32 [B]: from the candidates if they have all of these.

    weigh: from keys to their weights.
    """
    if candidates is None:
        return threshold(keys, weigh(keys), target, axes=mesh_axes("vocab"))
    cut, known = candidates.cut(weigh(candidates.keys), target)
    with jax.named_scope(name):
        below = jnp.any(needed & ~known)
        return lax.cond(below, lambda: threshold(keys, weigh(keys), target, axes=mesh_axes("vocab")), lambda: cut)


def truncate(logits: jax.Array, options: SamplingArrays) -> jax.Array:
    """Ban all but the top-k, then the top-p, then the min-p tokens; ties at a cut-off stay in.

    logits: float32 [B, V], already divided by the temperature. Banned tokens get -inf; NaN stays, for `greedy` to
    find.
    """
    keys, vocab = key_of(logits), logits.shape[-1] * axis_size("vocab")
    candidates = _Candidates.from_keys(keys) if axis_size("vocab") > 1 else None
    draws = options.temperature > 0

    def count(keys: jax.Array) -> jax.Array:
        return jnp.ones(keys.shape, jnp.float32)

    top_k = jnp.where(options.top_k > 0, jnp.minimum(options.top_k, vocab), vocab).astype(jnp.float32)
    kth = _cut("top_k", keys, candidates, count, top_k, draws & (options.top_k > 0))[:, None]
    largest = jnp.max(keys, axis=-1, keepdims=True) if candidates is None else candidates.keys[:, :1]

    def in_top_k(keys: jax.Array) -> jax.Array:
        return (keys >= kth) | (options.top_k[:, None] == 0)

    def weight(keys: jax.Array) -> jax.Array:
        """Compute the probabilities among the top-k, but for a factor."""
        return jnp.where(in_top_k(keys), jnp.exp(float_of(keys) - float_of(largest)), 0.0)

    total = psum(jnp.sum(weight(keys), axis=-1), "vocab")[:, None]

    def probability(keys: jax.Array) -> jax.Array:
        return weight(keys) / total

    # A mass of 1 may never be reached in float32; such rows keep everything.
    mass, all_of_it = jnp.minimum(options.top_p, 1 - 1e-6), options.top_p >= 1
    cut = _cut("top_p", keys, candidates, probability, mass, draws & ~all_of_it)
    nucleus = (keys >= cut[:, None]) | all_of_it[:, None]
    likely = probability(keys) >= options.min_p[:, None] * (1.0 / total)
    return jnp.where((in_top_k(keys) & nucleus & likely) | jnp.isnan(logits), logits, -jnp.inf)


def _perturb(logits: jax.Array, length: jax.Array, options: SamplingArrays) -> jax.Array:
    """Return scores whose best token is drawn from softmax(logits / temperature), cut off as asked (Gumbel-max trick).

    Rows of temperature 0 stay as they are.
    """
    best = options.temperature == 0
    scaled = logits / jnp.where(best, 1.0, options.temperature)[:, None]
    cuts = (options.top_k > 0) | (options.top_p < 1) | (options.min_p > 0)
    scaled = _if_any("truncate", cuts & ~best, lambda x: truncate(x, options), scaled)

    def gumbel(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(jnp.stack([seed, position.astype(jnp.uint32)]), impl="threefry2x32")
        noise = jax.random.gumbel(key, (logits.shape[-1] * axis_size("vocab"),))  # per token, whatever the size
        return local_part(noise, "vocab")

    # The noise depends on seed and position alone, so a row draws the same whatever its batch.
    return jnp.where(best[:, None], logits, scaled + jax.vmap(gumbel)(options.seed, length))


def allowed(bitmask: jax.Array, vocab: int) -> jax.Array:
    """Unpack uint32 [B, ceil(V / 32)] into bool [B, V]; token i is bit i % 32 of word i // 32."""
    bits = (bitmask[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits.reshape(len(bitmask), -1)[:, :vocab] != 0


class _Asked(NamedTuple):
    """Which rows ask for each option, bool [B]; all but `logprobs` affect the choice of a token."""

    bias: jax.Array
    penalties: jax.Array
    min_length: jax.Array
    bad_words: jax.Array
    bitmask: jax.Array
    draw: jax.Array
    logprobs: jax.Array


def _asked(options: SamplingArrays, length: jax.Array) -> _Asked:
    return _Asked(
        bias=options.bias_ids[:, 0] >= 0,
        penalties=(options.repetition != 1) | (options.presence != 0) | (options.frequency != 0),
        min_length=length < options.min_length,
        bad_words=options.bad_words[:, 0] >= 0,
        bitmask=options.constrained,
        draw=options.temperature > 0,
        logprobs=options.logprobs,
    )


def asks_more_than_greedy(options: SamplingArrays, length: jax.Array) -> jax.Array:
    """Return whether any row asks for more than `greedy`, now or when it is longer, bool []. length: int32 [B]."""
    return jnp.any(functools.reduce(jnp.logical_or, _asked(options, length)) | jnp.any(options.processors, axis=1))


def sample(
    logits: jax.Array,
    history: jax.Array,
    slot: jax.Array,
    length: jax.Array,
    options: SamplingArrays,
    bitmask: jax.Array,
    processors: LogitsProcessors = (),
    *,
    vocab: int | None = None,
) -> jax.Array:
    """Choose each row's next token, by its options.

    Args:
      logits: float32 [B, V], the model's scores, of this device's part of the vocabulary.
      history: int32 [S, C], the tokens so far of row i in row `slot[i]`; `length` of them are known. int32 [B] each.
      options: the rows' options.
      bitmask: uint32 [B, ceil(V / 32)], the tokens that may be chosen in rows that are `constrained`; see `allowed`.
      vocab: the number of tokens, whose scores logits processors take; None: as many as `logits` has.

    Returns: int32 [B].
    """
    rows = jnp.arange(logits.shape[0])[:, None]
    size = logits.shape[-1]
    asked = _asked(options, length)

    def biased(x):
        return x.at[rows, local_index(options.bias_ids, "vocab", size)].add(options.bias, mode="drop")

    def without_banned_tokens(x):
        stops = jnp.where((length < options.min_length)[:, None], options.stop_token_ids, -1)
        banned = jnp.concatenate([stops, ends_of_bad_words(history[slot], length, options)], axis=1)
        return x.at[rows, local_index(banned, "vocab", size)].set(-jnp.inf, mode="drop")

    def within_bitmask(x):
        may = allowed(local_bitmask(bitmask, size), size)
        return jnp.where(may | ~options.constrained[:, None], x, -jnp.inf)

    def processed(process: LogitsProcessor, asking: jax.Array):
        def change(x):
            scores = whole(x)  # the one option that moves all of them
            new = process(scores[:, :vocab], history[slot], length)
            new = jnp.pad(new, ((0, 0), (0, scores.shape[1] - new.shape[1])), constant_values=-jnp.inf)
            return jnp.where(asking[:, None], local_part(new, "vocab", dim=1), x)

        return change

    scores = _if_any("bias", asked.bias, biased, logits)
    scores = _if_any("penalties", asked.penalties, lambda x: penalize(x, history[slot], length, options), scores)
    for index, process in enumerate(processors):
        asking = options.processors[:, index]
        scores = _if_any("logits_processor", asking, processed(process, asking), scores)
    scores = _if_any("banned_tokens", asked.min_length | asked.bad_words, without_banned_tokens, scores)
    scores = _if_any("bitmask", asked.bitmask, within_bitmask, scores)
    return greedy(_if_any("draw", asked.draw, lambda x: _perturb(x, length, options), scores))


def _if_any(name: str, asked: jax.Array, change: Callable[[jax.Array], jax.Array], scores: jax.Array) -> jax.Array:
    """Change scores if any row asks for it; `name` is shown by `inspect`."""
    any_row = jnp.any(asked)  # always computed, so not under the name
    with jax.named_scope(name):
        return lax.cond(any_row, change, lambda x: x, scores)

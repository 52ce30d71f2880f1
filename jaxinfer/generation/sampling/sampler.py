"""Choosing the next token, on the device, each row by its own options.

Every option is an array, so none of them changes a compiled program; work that no row asks for is skipped at run
time (`lax.cond`). No step sorts the vocabulary: the cut-offs of top-k and top-p are found by bisection.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.generation.sampling.arrays import SamplingArrays

LogitsProcessor = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""A pure function of scores (float32 [B, V]), history (int32 [B, C]) and length (int32 [B], the tokens known), all rows
at once, that returns new scores. It is compiled into the programs; a request names the ones it wants."""

LogitsProcessors = tuple[LogitsProcessor, ...]


def token_counts(history: jax.Array, start: jax.Array, stop: jax.Array, vocab: int) -> jax.Array:
    """How often each token occurs in history[start:stop]. int32 [B, C], [B], [B] -> int32 [B, V]."""
    index = jnp.arange(history.shape[1])
    inside = (index >= start[:, None]) & (index < stop[:, None])
    rows = jnp.arange(history.shape[0])[:, None]
    counts = jnp.zeros((history.shape[0], vocab), jnp.int32)
    return counts.at[rows, jnp.where(inside, history, vocab)].add(1, mode="drop")


def penalize(logits: jax.Array, history: jax.Array, length: jax.Array, options: SamplingArrays) -> jax.Array:
    """Apply repetition, presence and frequency penalties. history: int32 [B, C]; length: int32 [B] tokens known."""
    vocab = logits.shape[-1]
    generated = token_counts(history, options.prompt_length, length, vocab)
    prompt = token_counts(history, jnp.zeros_like(length), jnp.minimum(options.prompt_length, length), vocab)
    repetition = options.repetition[:, None]
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(generated + prompt > 0, repeated, logits)
    logits -= options.frequency[:, None] * generated
    return logits - options.presence[:, None] * (generated > 0)


def _ordered_bits(x: jax.Array) -> jax.Array:
    """float32 -> int32 whose order is that of the floats."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _largest_cut(keys: jax.Array, weights: jax.Array, wanted: jax.Array) -> jax.Array:
    """The largest t for which the weights of all keys >= t sum to `wanted` or more; exact, by bisection.

    keys: int32 [B, V]; weights: float32 [B, V]; wanted: float32 [B]. Returns int32 [B].
    """

    def halve(_, bounds):
        low, high = bounds  # low reaches `wanted`, high does not
        # floor((low + high) / 2), written so that it cannot overflow
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        enough = jnp.sum(jnp.where(keys >= middle[:, None], weights, 0.0), axis=-1) >= wanted
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    low, high = jnp.min(keys, axis=-1), jnp.max(keys, axis=-1) + 1
    return lax.fori_loop(0, 32, halve, (low, high))[0]


def truncate(logits: jax.Array, options: SamplingArrays) -> jax.Array:
    """Ban all but the top-k, then the top-p, then the min-p tokens; ties at a cut-off stay in.

    logits: float32 [B, V], already divided by the temperature. Banned tokens get -inf.
    """
    vocab = logits.shape[-1]
    keys = _ordered_bits(logits)
    top_k = jnp.where(options.top_k > 0, jnp.minimum(options.top_k, vocab), vocab)
    cut = _largest_cut(keys, jnp.ones_like(logits), top_k.astype(jnp.float32))
    logits = jnp.where(keys >= cut[:, None], logits, -jnp.inf)
    probabilities = jax.nn.softmax(logits, axis=-1)
    # A mass of 1 may never be reached in float32; such rows keep everything.
    cut = _largest_cut(keys, probabilities, jnp.minimum(options.top_p, 1 - 1e-6))
    nucleus = (keys >= cut[:, None]) | (options.top_p[:, None] >= 1)
    likely = probabilities >= options.min_p[:, None] * jnp.max(probabilities, axis=-1, keepdims=True)
    return jnp.where(nucleus & likely, logits, -jnp.inf)


def _draw(logits: jax.Array, length: jax.Array, options: SamplingArrays) -> jax.Array:
    """One token a row from softmax(logits / temperature), cut off as asked; greedy where the temperature is 0."""
    best = options.temperature == 0
    scaled = logits / jnp.where(best, 1.0, options.temperature)[:, None]
    cuts = (options.top_k > 0) | (options.top_p < 1) | (options.min_p > 0)
    scaled = _if_any("truncate", cuts & ~best, lambda x: truncate(x, options), scaled)

    def gumbel(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.gumbel(key, logits.shape[-1:])

    # The noise depends on seed and position alone, so a row draws the same whatever its batch.
    drawn = jnp.argmax(scaled + jax.vmap(gumbel)(options.seed, length), axis=-1)
    return jnp.where(best, greedy(logits), drawn.astype(jnp.int32))


def allowed(bitmask: jax.Array, vocab: int) -> jax.Array:
    """The bits of uint32 [B, ceil(V / 32)] as bool [B, V]; token i is bit i % 32 of word i // 32."""
    bits = (bitmask[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits.reshape(len(bitmask), -1)[:, :vocab] != 0


def greedy(logits: jax.Array) -> jax.Array:
    """The best token of each row: float32 [B, V] -> int32 [B]."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


class _Asked(NamedTuple):
    """Which rows ask for what, bool [B] each; `logprobs` besides the choice of a token."""

    bias: jax.Array
    penalties: jax.Array
    min_length: jax.Array
    bitmask: jax.Array
    draw: jax.Array
    logprobs: jax.Array


def _asked(options: SamplingArrays, length: jax.Array) -> _Asked:
    return _Asked(
        bias=options.bias_ids[:, 0] >= 0,
        penalties=(options.repetition != 1) | (options.presence != 0) | (options.frequency != 0),
        min_length=length < options.min_length,
        bitmask=options.constrained,
        draw=options.temperature > 0,
        logprobs=options.logprobs,
    )


def asks_more_than_greedy(options: SamplingArrays, length: jax.Array) -> jax.Array:
    """Whether any row asks for more than `greedy` now or when it is longer. length: int32 [B]. Returns bool []."""
    return jnp.any(functools.reduce(jnp.logical_or, _asked(options, length)) | jnp.any(options.processors, axis=1))


def sample(
    logits: jax.Array,
    history: jax.Array,
    slot: jax.Array,
    length: jax.Array,
    options: SamplingArrays,
    bitmask: jax.Array,
    processors: LogitsProcessors = (),
) -> jax.Array:
    """Choose each row's next token, by its options.

    Args:
      logits: float32 [B, V], the model's.
      history: int32 [S, C], the tokens so far of row i in row `slot[i]`; `length` of them are known. int32 [B] each.
      options: the rows' options.
      bitmask: uint32 [B, ceil(V / 32)], what may be chosen in rows that are `constrained`; see `allowed`.
    Returns: int32 [B].
    """
    rows = jnp.arange(logits.shape[0])[:, None]
    vocab = logits.shape[-1]
    asked = _asked(options, length)

    def biased(x):
        return x.at[rows, jnp.where(options.bias_ids < 0, vocab, options.bias_ids)].add(options.bias, mode="drop")

    def without_stops(x):
        early = (length < options.min_length)[:, None] & (options.stop_token_ids >= 0)
        return x.at[rows, jnp.where(early, options.stop_token_ids, vocab)].set(-jnp.inf, mode="drop")

    def without_banned(x):
        return jnp.where(allowed(bitmask, vocab) | ~options.constrained[:, None], x, -jnp.inf)

    def processed(process: LogitsProcessor, wanted: jax.Array):
        return lambda x: jnp.where(wanted[:, None], process(x, history[slot], length), x)

    scores = _if_any("bias", asked.bias, biased, logits)
    scores = _if_any("penalties", asked.penalties, lambda x: penalize(x, history[slot], length, options), scores)
    for index, process in enumerate(processors):
        wanted = options.processors[:, index]
        scores = _if_any("logits_processor", wanted, processed(process, wanted), scores)
    scores = _if_any("min_tokens", asked.min_length, without_stops, scores)
    scores = _if_any("bitmask", asked.bitmask, without_banned, scores)
    with jax.named_scope("draw"):
        return lax.cond(jnp.any(asked.draw), lambda x: _draw(x, length, options), greedy, scores)


def _if_any(name: str, asked: jax.Array, change: Callable[[jax.Array], jax.Array], scores: jax.Array) -> jax.Array:
    """Scores as changed if any row asks for it; `name` is what `inspect` calls it."""
    with jax.named_scope(name):
        return lax.cond(jnp.any(asked), change, lambda x: x, scores)

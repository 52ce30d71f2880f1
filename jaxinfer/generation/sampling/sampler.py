"""Choosing the next token, on the device, each row by its own options.

Every option is an array, so none of them changes a compiled program; work that no row asks for is skipped at run
time (`lax.cond`). No step sorts the vocabulary: the cut-offs of top-k and top-p are found by bisection.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.generation.sampling.arrays import SamplingArrays
from jaxinfer.generation.sampling.logprobs import Logprobs, logprobs_of, no_logprobs

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
    greedy = options.temperature == 0
    scaled = logits / jnp.where(greedy, 1.0, options.temperature)[:, None]
    cuts = (options.top_k > 0) | (options.top_p < 1) | (options.min_p > 0)
    scaled = lax.cond(jnp.any(cuts & ~greedy), lambda x: truncate(x, options), lambda x: x, scaled)

    def gumbel(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.gumbel(key, logits.shape[-1:])

    # The noise depends on seed and position alone, so a row draws the same whatever its batch.
    drawn = jnp.argmax(scaled + jax.vmap(gumbel)(options.seed, length), axis=-1)
    return jnp.where(greedy, jnp.argmax(logits, axis=-1), drawn).astype(jnp.int32)


def allowed(bitmask: jax.Array, vocab: int) -> jax.Array:
    """The bits of uint32 [B, ceil(V / 32)] as bool [B, V]; token i is bit i % 32 of word i // 32."""
    bits = (bitmask[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
    return bits.reshape(len(bitmask), -1)[:, :vocab] != 0


def sample(
    logits: jax.Array,
    history: jax.Array,
    slot: jax.Array,
    length: jax.Array,
    options: SamplingArrays,
    bitmask: jax.Array,
    processors: LogitsProcessors = (),
) -> tuple[jax.Array, Logprobs]:
    """Choose each row's next token.

    Args:
      logits: float32 [B, V], the model's.
      history: int32 [S, C], the tokens so far of row i in row `slot[i]`; `length` of them are known. int32 [B] each.
      options: the rows' options.
      bitmask: uint32 [B, ceil(V / 32)], what may be chosen in rows that are `constrained`; see `allowed`.
    Returns: int32 [B], and the log probabilities (zeros unless some row asked).
    """
    rows = jnp.arange(logits.shape[0])[:, None]
    vocab = logits.shape[-1]

    def biased(x):
        return x.at[rows, jnp.where(options.bias_ids < 0, vocab, options.bias_ids)].add(options.bias, mode="drop")

    def without_stops(x):
        early = (length < options.min_length)[:, None] & (options.stop_token_ids >= 0)
        return x.at[rows, jnp.where(early, options.stop_token_ids, vocab)].set(-jnp.inf, mode="drop")

    def without_banned(x):
        return jnp.where(allowed(bitmask, vocab) | ~options.constrained[:, None], x, -jnp.inf)

    def processed(process: LogitsProcessor, wanted: jax.Array):
        return lambda x: jnp.where(wanted[:, None], process(x, history[slot], length), x)

    penalized = (options.repetition != 1) | (options.presence != 0) | (options.frequency != 0)
    scores = lax.cond(jnp.any(options.bias_ids >= 0), biased, lambda x: x, logits)
    scores = lax.cond(jnp.any(penalized), lambda x: penalize(x, history[slot], length, options), lambda x: x, scores)
    for index, process in enumerate(processors):
        wanted = options.processors[:, index]
        scores = lax.cond(jnp.any(wanted), processed(process, wanted), lambda x: x, scores)
    scores = lax.cond(jnp.any(length < options.min_length), without_stops, lambda x: x, scores)
    scores = lax.cond(jnp.any(options.constrained), without_banned, lambda x: x, scores)
    tokens = lax.cond(
        jnp.any(options.temperature > 0),
        lambda x: _draw(x, length, options),
        lambda x: jnp.argmax(x, axis=-1).astype(jnp.int32),
        scores,
    )
    logprobs = lax.cond(
        jnp.any(options.logprobs),
        lambda: logprobs_of(logits, tokens),
        lambda: no_logprobs(tokens.shape),
    )
    return tokens, logprobs

"""The sampling options of a batch as arrays, so that none of them changes a compiled program."""

from collections.abc import Iterable
from typing import NamedTuple

import jax
import numpy as np

from jaxinfer.generation.params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, SamplingParams


class SamplingArrays(NamedTuple):
    """The options of B rows; see `SamplingParams` for their meaning.

    Attributes:
      seed: uint32 [B].
      temperature, top_p, min_p: float32 [B].
      repetition, presence, frequency: float32 [B], the penalties.
      top_k: int32 [B].
      min_length: int32 [B], total tokens before which no stop token is chosen.
      prompt_length: int32 [B].
      stop_token_ids: int32 [B, MAX_STOP_TOKEN_IDS], -1 where unused.
      bias_ids: int32 [B, MAX_LOGIT_BIAS], -1 where unused.
      bias: float32 [B, MAX_LOGIT_BIAS].
      logprobs: bool [B], whether the row wants log probabilities.
      prompt_logprobs: bool [B], whether it wants those of its prompt.
      constrained: bool [B], whether a token bitmask says which tokens may be chosen.
      processors: bool [B, n], which logits processors to apply.
    """

    seed: jax.Array
    temperature: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    repetition: jax.Array
    presence: jax.Array
    frequency: jax.Array
    top_k: jax.Array
    min_length: jax.Array
    prompt_length: jax.Array
    stop_token_ids: jax.Array
    bias_ids: jax.Array
    bias: jax.Array
    logprobs: jax.Array
    prompt_logprobs: jax.Array
    constrained: jax.Array
    processors: jax.Array


class RowOptions(NamedTuple):
    """What decides the choice of one row's tokens.

    Attributes:
      params: the request's options.
      seed: of its draws.
      prompt_length: tokens of its prompt.
      stop_token_ids: those of the options and the model's end-of-text.
      processors: a flag for each logits processor of the engine.
    """

    params: SamplingParams
    seed: int
    prompt_length: int
    stop_token_ids: tuple[int, ...]
    processors: tuple[bool, ...] = ()


def idle_options(processors: int) -> RowOptions:
    """The options of a row for which no token is chosen: greedy, nothing asked."""
    return RowOptions(SamplingParams(temperature=0.0), 0, 0, (), (False,) * processors)


def sampling_arrays(rows: list[RowOptions]) -> SamplingArrays:
    """The options of a batch, as numpy arrays."""

    def column(dtype: type, values: list) -> jax.Array:
        return np.array(values, dtype)  # type: ignore[return-value]  # numpy until the batch is sent to the device

    def padded(values: Iterable, size: int, fill: float) -> list:
        values = list(values)
        return values + [fill] * (size - len(values))

    params = [row.params for row in rows]
    return SamplingArrays(
        seed=column(np.uint32, [row.seed for row in rows]),
        temperature=column(np.float32, [p.temperature for p in params]),
        top_p=column(np.float32, [p.top_p for p in params]),
        min_p=column(np.float32, [p.min_p for p in params]),
        repetition=column(np.float32, [p.repetition_penalty for p in params]),
        presence=column(np.float32, [p.presence_penalty for p in params]),
        frequency=column(np.float32, [p.frequency_penalty for p in params]),
        top_k=column(np.int32, [p.top_k for p in params]),
        min_length=column(np.int32, [row.prompt_length + row.params.min_tokens for row in rows]),
        prompt_length=column(np.int32, [row.prompt_length for row in rows]),
        stop_token_ids=column(np.int32, [padded(row.stop_token_ids, MAX_STOP_TOKEN_IDS, -1) for row in rows]),
        bias_ids=column(np.int32, [padded(p.logit_bias, MAX_LOGIT_BIAS, -1) for p in params]),
        bias=column(np.float32, [padded(p.logit_bias.values(), MAX_LOGIT_BIAS, 0.0) for p in params]),
        logprobs=column(np.bool_, [p.logprobs is not None for p in params]),
        prompt_logprobs=column(np.bool_, [p.prompt_logprobs is not None for p in params]),
        constrained=column(np.bool_, [p.structured_outputs is not None for p in params]),
        processors=column(np.bool_, [row.processors for row in rows]),
    )

"""The sampling options of a batch as an array, so that none of them changes a compiled program."""

import dataclasses
import itertools
from collections.abc import Iterable
from typing import ClassVar, NamedTuple

import jax
import numpy as np
from jax import lax

from jaxinfer.generation.params import MAX_BAD_WORD_TOKENS, MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, SamplingParams


class _Column:
    """An option's place in `SamplingArrays.packed`, after the options named before it.

    Args:
      dtype: the option's dtype; values are stored by their bits, a bool as 0 or 1.
      size: how many values a row has; None: one, without its own dimension; 0: all that remain.
    """

    def __init__(self, dtype: type, size: int | None = None):
        self.dtype, self.size = np.dtype(dtype), size

    def __set_name__(self, owner: "type[SamplingArrays]", name: str) -> None:
        self.start = sum(column.size or 1 for column in owner.COLUMNS.values())
        owner.COLUMNS[name] = self

    def __get__(self, arrays: "SamplingArrays", owner: type | None = None) -> jax.Array:
        if self.size is None:
            bits = lax.index_in_dim(arrays.packed, self.start, axis=1, keepdims=False)
        else:
            end = self.start + self.size if self.size else arrays.packed.shape[1]
            bits = lax.slice_in_dim(arrays.packed, self.start, end, axis=1)
        if self.dtype == np.bool_:
            return bits != 0
        return bits if self.dtype == np.int32 else lax.bitcast_convert_type(bits, self.dtype)

    def pack(self, values: list) -> np.ndarray:
        """Pack the values of some rows as int32 [B, n]."""
        array = np.array(values, self.dtype).reshape(len(values), -1)
        return array.astype(np.int32) if self.dtype == np.bool_ else array.view(np.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingArrays:
    """The options of B rows; see `SamplingParams` for their meaning.

    They are one array, which a single kernel or transfer moves. Read an option where it is needed: a slice that goes
    into a loop or a branch would become an array.

    Attributes:
      packed: int32 [B, n], all of the following options.
      limit: int32 [B], the total length at which a row ends.
      min_length: int32 [B], total tokens before which no stop token is chosen.
      prompt_length: int32 [B].
      stop_token_ids: int32 [B, MAX_STOP_TOKEN_IDS], -1 where unused.
      seed: uint32 [B].
      temperature, top_p, min_p: float32 [B].
      top_k: int32 [B].
      repetition, presence, frequency: float32 [B], the penalties.
      logprobs: bool [B], whether the row wants log probabilities.
      prompt_logprobs: bool [B], whether it wants log probabilities of its prompt.
      constrained: bool [B], whether a token bitmask limits which tokens may be chosen.
      bias_ids: int32 [B, MAX_LOGIT_BIAS], -1 where unused.
      bias: float32 [B, MAX_LOGIT_BIAS].
      bad_words: int32 [B, MAX_BAD_WORD_TOKENS], the tokens of all bad words of several tokens, one word after the
        other; -1 where unused.
      bad_word_rest: int32 [B, MAX_BAD_WORD_TOKENS], how many tokens of its word follow each of them.
      processors: bool [B, n], which logits processors to apply.
    """

    COLUMNS: ClassVar[dict[str, _Column]] = {}

    packed: jax.Array
    limit = _Column(np.int32)
    min_length = _Column(np.int32)
    prompt_length = _Column(np.int32)
    stop_token_ids = _Column(np.int32, MAX_STOP_TOKEN_IDS)
    seed = _Column(np.uint32)
    temperature = _Column(np.float32)
    top_p = _Column(np.float32)
    min_p = _Column(np.float32)
    top_k = _Column(np.int32)
    repetition = _Column(np.float32)
    presence = _Column(np.float32)
    frequency = _Column(np.float32)
    logprobs = _Column(np.bool_)
    prompt_logprobs = _Column(np.bool_)
    constrained = _Column(np.bool_)
    bias_ids = _Column(np.int32, MAX_LOGIT_BIAS)
    bias = _Column(np.float32, MAX_LOGIT_BIAS)
    bad_words = _Column(np.int32, MAX_BAD_WORD_TOKENS)
    bad_word_rest = _Column(np.int32, MAX_BAD_WORD_TOKENS)
    processors = _Column(np.bool_, 0)


_GREEDY = SamplingParams(temperature=0.0)


class RowOptions(NamedTuple):
    """The options that decide the choice of one row's tokens.

    Attributes:
      params: the request's options.
      seed: the seed of its draws.
      prompt_length: tokens of its prompt.
      limit: the number of tokens, prompt included, at which it ends.
      stop_token_ids: stop tokens of the options, and the model's end-of-text.
      processors: a flag for each logits processor of the engine.
      bad_words: the tokens of each bad word of several.
    """

    params: SamplingParams
    seed: int
    prompt_length: int
    limit: int
    stop_token_ids: tuple[int, ...]
    processors: tuple[bool, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()


def idle_options(processors: int) -> RowOptions:
    """The options of a row for which no token is chosen: greedy, nothing asked."""
    return RowOptions(_GREEDY, 0, 0, 0, (), (False,) * processors)


def sampling_arrays(rows: list[RowOptions]) -> SamplingArrays:
    """Pack the options of a batch into a numpy array."""

    def padded(values: Iterable, size: int, fill: float) -> np.ndarray:
        values = list(values)
        row = np.full(size, fill, np.float32 if isinstance(fill, float) else np.int32)
        row[: len(values)] = values  # nearly always none: an array pads faster than a list
        return row

    params = [row.params for row in rows]
    values = {
        "limit": [row.limit for row in rows],
        "min_length": [row.prompt_length + row.params.min_tokens for row in rows],
        "prompt_length": [row.prompt_length for row in rows],
        "stop_token_ids": [padded(row.stop_token_ids, MAX_STOP_TOKEN_IDS, -1) for row in rows],
        "seed": [row.seed for row in rows],
        "temperature": [p.temperature for p in params],
        "top_p": [p.top_p for p in params],
        "min_p": [p.min_p for p in params],
        "top_k": [p.top_k for p in params],
        "repetition": [p.repetition_penalty for p in params],
        "presence": [p.presence_penalty for p in params],
        "frequency": [p.frequency_penalty for p in params],
        "logprobs": [p.logprobs is not None for p in params],
        "prompt_logprobs": [p.prompt_logprobs is not None for p in params],
        "constrained": [_constrained(p) for p in params],
        "bias_ids": [padded(p.logit_bias, MAX_LOGIT_BIAS, -1) for p in params],
        "bias": [padded(p.logit_bias.values(), MAX_LOGIT_BIAS, 0.0) for p in params],
        "bad_words": [padded(itertools.chain(*row.bad_words), MAX_BAD_WORD_TOKENS, -1) for row in rows],
        "bad_word_rest": [
            padded((i for word in row.bad_words for i in reversed(range(len(word)))), MAX_BAD_WORD_TOKENS, 0)
            for row in rows
        ],
        "processors": [row.processors for row in rows],
    }
    columns = [column.pack(values[name]) for name, column in SamplingArrays.COLUMNS.items()]
    return SamplingArrays(np.concatenate(columns, axis=1))  # type: ignore[arg-type]  # numpy until it is sent


def _constrained(params: SamplingParams) -> bool:
    """Return whether a token bitmask may limit the tokens."""
    return params.structured_outputs is not None or params.allowed_token_ids is not None or bool(params.bad_words)

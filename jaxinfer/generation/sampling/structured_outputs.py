"""Structured outputs: text that must follow a grammar, and after each token the tokens that may come next.

A caller asks by `StructuredOutputsParams`, `GrammarCompiler` turns it into a grammar over one model's tokens, and a
`GrammarMatcher` follows one text through that grammar. Grammars, lexing and token bitmasks are llguidance's
(https://github.com/guidance-ai/llguidance); this file adds what llguidance must know of a model: how many scores it
has, and which tokens end its text.
"""

import copy
import dataclasses
import functools
from typing import Any

import llguidance
import numpy as np
import tokenizers

from jaxinfer.fields import shown
from jaxinfer.generation.params import StructuredOutputsParams
from jaxinfer.generation.sampling.bitmasks import bitmask_of
from jaxinfer.generation.sampling.reasoning_limit import ReasoningLimit
from jaxinfer.sandbox import grammars

_KEPT_GRAMMARS = 128  # compiled grammars that stay in memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Vocabulary:
    """The tokens of one model, as bitmasks."""

    size: int
    text: np.ndarray  # tokens that the tokenizer has, the model scores, and that do not end the text
    ends: np.ndarray  # tokens that end the text
    end: int  # llguidance's own end of text, which is no token of the model

    def is_text(self, token: int) -> bool:
        return 0 <= token < self.size and _has(self.text, token)

    def is_end(self, token: int) -> bool:
        return 0 <= token < self.size and _has(self.ends, token)


def _has(bits: np.ndarray, token: int) -> bool:
    return bool(bits[token // 32] >> (token % 32) & 1)


class GrammarMatcher:
    """A text's progress through a grammar. Made by `GrammarCompiler.matcher`; grows by `accept_token`.

    Args:
      state: the place in the grammar; None: the text is free.
      vocabulary: the model's tokens.
      limit: of the tokens of reasoning before it; None: there is none.
    """

    def __init__(
        self, state: llguidance.LLMatcher | None, vocabulary: _Vocabulary, limit: ReasoningLimit | None = None
    ):
        self._state = state
        self._vocabulary = vocabulary
        self._limit = limit

    @property
    def accepting(self) -> bool:
        """Whether the text is complete as it stands, even if it could continue."""
        return self._forced is None and (self._state is None or self._state.is_accepting())

    @property
    def finished(self) -> bool:
        """Whether the text is complete and nothing but an end-of-text token may follow.

        Models without such a token must stop here.
        """
        return self._state is not None and self._state.is_stopped() and not self._state.is_error()

    @property
    def _forced(self) -> int | None:
        """The token that must come next, since reasoning has reached its limit; None: the grammar says."""
        return None if self._limit is None else self._limit.forced

    def token_bitmask(self) -> np.ndarray:
        """Compute the bitmask of the tokens that may follow.

        End-of-text tokens may follow exactly where `accepting`. At least one bit is set.

        Raises: ValueError if no token may follow (the text is `finished` and the model has no end-of-text token, or
          its vocabulary cannot write what must come next), or if the grammar is too complex to follow.
        """
        if (forced := self._forced) is not None:
            return bitmask_of({forced}, self._vocabulary.size)
        if self._state is None:
            return self._vocabulary.text | self._vocabulary.ends
        allowed = np.frombuffer(self._state.compute_bitmask(), np.uint32)
        self._check()
        bitmask = np.bitwise_and(allowed[: len(self._vocabulary.text)], self._vocabulary.text)
        if self.accepting:
            bitmask |= self._vocabulary.ends
        if not bitmask.any():
            raise ValueError("No token of the model may follow: its vocabulary cannot continue this text, nor end it.")
        return bitmask

    def accept_token(self, token: int) -> None:
        """Append a token.

        Raises: ValueError, and nothing changes, if the token is not in `token_bitmask()`; or if the grammar is too
          complex to follow, and then every later call raises too.
        """
        accepted = self._forced in (None, token) and self._advance(token)
        self._check()
        if not accepted:
            raise ValueError(f"Token {token} may not follow here: the grammar does not allow it.")
        if self._limit is not None:
            self._limit.accept_token(token)

    def copy(self) -> "GrammarMatcher":
        """Copy the matcher; the two then continue independently."""
        state = None if self._state is None else self._state.deep_copy()
        limit = None if self._limit is None else copy.copy(self._limit)
        return GrammarMatcher(state, self._vocabulary, limit)

    def _advance(self, token: int) -> bool:
        if self._state is None:
            return self._vocabulary.is_text(token) or self._vocabulary.is_end(token)
        if self._vocabulary.is_end(token):
            return self.accepting and (self.finished or self._state.consume_token(self._vocabulary.end))
        return self._vocabulary.is_text(token) and self._state.try_consume_tokens([token]) == 1

    def _check(self) -> None:
        if self._state is not None and self._state.is_error():
            raise ValueError(f"The grammar cannot be followed from here: {grammars.plain(self._state.get_error())}.")


class GrammarCompiler:
    """Compiles grammars for one model.

    Args:
      tokenizer: the text of the model's `tokenizer.json`.
      vocab: how many scores the model has, more or fewer than the tokenizer has tokens: only ids that are a token and
        have a score are allowed.
      eos_ids: tokens that end a text, all allowed where a text may end; () for a model that has none.

    Raises: ValueError for ids outside [0, vocab), and for tokenizers that llguidance cannot read.
    """

    def __init__(self, tokenizer: str, *, vocab: int, eos_ids: tuple[int, ...]):
        if outside := [i for i in eos_ids if not 0 <= i < vocab]:
            raise ValueError(f"End-of-text ids {outside} are outside the vocabulary [0, {vocab}).")
        extended = tokenizers.Tokenizer.from_str(tokenizer)
        ids = set(extended.get_vocab(with_added_tokens=True).values())
        added = extended.get_added_tokens_decoder()
        # llguidance takes token 0 as the end of text if none is given, and allows the end after an error too. With an
        # end of its own, outside the model's tokens, `GrammarMatcher` alone decides where a text ends.
        end = _add_token(extended)
        try:
            self._tokenizer = llguidance.LLTokenizer(extended.to_str(), n_vocab=max(vocab, end + 1), eos_token=end)
        except ValueError as error:
            raise ValueError(f"This tokenizer cannot be used for structured output: {error}") from error
        # llguidance takes added tokens for no text, those that are not special, too, such as Qwen's `</think>`.
        self._marker_ids = {t.content: i for i, t in added.items() if self._tokenizer.is_special_token(i)}
        self._vocabulary = _Vocabulary(
            size=vocab,
            text=bitmask_of({i for i in ids if i < vocab} - set(eos_ids), vocab),
            ends=bitmask_of(eos_ids, vocab),
            end=end,
        )
        self._compiled = functools.lru_cache(maxsize=_KEPT_GRAMMARS)(self._compile)

    def matcher(self, params: StructuredOutputsParams) -> GrammarMatcher:
        """A matcher at the beginning of a text.

        Raises: ValueError if llguidance does not compile the grammar (with its message), or if only the empty text
          satisfies it.
        """
        return self._compiled(params).copy()

    def _compile(self, params: StructuredOutputsParams) -> GrammarMatcher:
        option = params.kind or "thinking_token_budget"
        try:
            state = None if params.kind is None else self._state(params)
            matcher = GrammarMatcher(state, self._vocabulary, self._limit(params))
            if not (matcher.token_bitmask() & self._vocabulary.text).any():
                raise ValueError("it allows no text but the empty one")
        except (ValueError, RecursionError) as error:
            raise ValueError(f"StructuredOutputsParams.{option} does not compile: {error}") from error
        return matcher

    def _state(self, params: StructuredOutputsParams) -> llguidance.LLMatcher:
        grammar = grammars.grammar_of(**grammar_arguments(params))
        if (tags := params.reasoning_tags) is not None:
            ids = {tag: id_ for tag in tags if (id_ := self._marker_ids.get(tag)) is not None}
            grammar = grammars.after_reasoning(grammar, *tags, ids)
        state = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=grammars.LIMITS)
        if state.is_error():
            raise ValueError(grammars.plain(state.get_error()))
        return state

    def _limit(self, params: StructuredOutputsParams) -> ReasoningLimit | None:
        if (budget := params.thinking_token_budget) is None:
            return None
        tags = params.reasoning_tags
        assert tags is not None, "`StructuredOutputsParams` has refused it"
        end_ids = tuple(self._tokenizer.tokenize_str(tags[1]))
        if not all(map(self._vocabulary.is_text, end_ids)):
            raise ValueError(f"the model cannot write {shown(tags[1])}")
        return ReasoningLimit(budget, tags, end_ids, lambda token: self._tokenizer.decode_bytes([token]))


def check_grammar(params: StructuredOutputsParams) -> None:
    """Raise ValueError for a grammar that no model's tokens can follow, as far as that shows without a tokenizer."""
    grammars.check_grammar(**grammar_arguments(params))


def grammar_arguments(params: StructuredOutputsParams) -> dict[str, Any]:
    """The grammar as arguments of `sandbox.grammars`, which are JSON."""
    assert params.kind is not None, "the text is not free"
    value = getattr(params, params.kind)
    value = list(value) if params.kind == "choice" else str(value)
    return {"kind": params.kind, "value": value, "whitespace_pattern": params.whitespace_pattern}


def _add_token(tokenizer: tokenizers.Tokenizer) -> int:
    """Add a special token that the tokenizer does not have yet; returns its id."""
    name = "<|end of grammar|>"
    while tokenizer.token_to_id(name) is not None:
        name += "|"
    tokenizer.add_special_tokens([name])
    return tokenizer.get_vocab(with_added_tokens=True)[name]

"""Text that must have a given structure: after each token, which tokens may follow.

`Structure` is what a caller asks for, `StructureCompiler` turns it into a grammar over one model's tokens, and a
`Matcher` follows one text through that grammar. Grammars, lexing and masks are llguidance's
(https://github.com/guidance-ai/llguidance); here is what it needs to know of a model: how many scores the model has,
and which tokens end its text.
"""

import dataclasses
import functools
import json
from typing import Any

import llguidance
import numpy as np
import tokenizers

_KEPT_GRAMMARS = 128  # compiled structures that stay in memory
# Blanks between two tokens of JSON; JSON itself sets no limit, and a model that likes blanks would never get past them.
_JSON_SPACE = r"[ \t\r\n]{1,32}"
_LIMITS = llguidance.LLParserLimits(verbose_errors=False)  # messages without the parser's internal state


@dataclasses.dataclass(frozen=True, kw_only=True)
class Structure:
    r"""What a generated text must look like, from its first character to its last. Exactly one of:

    Attributes:
      json_schema: JSON that satisfies this schema, given as a dict or as its text, kept as text without blanks.
        Properties come in the schema's order; `{}` is any JSON. Keywords: llguidance's docs/json_schema.md. Up to 32
        blanks may stand between two tokens of JSON; none with `"x-guidance": {"whitespace_pattern": ""}` in the schema.
      regex: the whole text matches, in the syntax of Rust's `regex` crate: no look-around, no back-references; `\d` is
        any Unicode digit.
      grammar: a context-free grammar in llguidance's dialect of Lark (its docs/syntax.md); it begins at `start`.
      choice: one of these texts.

    Whether llguidance can compile it is known only when `StructureCompiler.matcher` does.

    >>> Structure(json_schema={"type": "integer", "minimum": 0}).json_schema
    '{"type":"integer","minimum":0}'
    """

    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        names = [field.name for field in dataclasses.fields(self)]
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"Structure needs exactly one of {', '.join(names)}; got {', '.join(given) or 'none'}.")
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        elif self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        elif not isinstance(text := getattr(self, self.kind), str):
            raise ValueError(f"Structure.{self.kind} must be a string, got {text!r}.")

    @property
    def kind(self) -> str:
        """The name of the attribute that is given."""
        return next(field.name for field in dataclasses.fields(self) if getattr(self, field.name) is not None)


def _schema_text(schema: object) -> str:
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"Structure.json_schema is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"Structure.json_schema must be a dict or the text of a JSON object, got {schema!r}.")
    return text


def _choices(texts: object) -> tuple[str, ...]:
    if not isinstance(texts, tuple | list) or not texts or not all(isinstance(t, str) and t for t in texts):
        raise ValueError(f"Structure.choice must be a tuple of non-empty strings, at least one, got {texts!r}.")
    return tuple(texts)


def words(vocab: int) -> int:
    """How many 32-bit words hold one bit for each token."""
    return -(-vocab // 32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Vocabulary:
    """The tokens of one model, as sets of bits: uint32 [words(vocab)], bit i % 32 of word i // 32 is token i."""

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


def _bits(tokens: set[int], vocab: int) -> np.ndarray:
    flags = np.zeros(32 * words(vocab), bool)
    flags[list(tokens)] = True
    return np.packbits(flags, bitorder="little").view("<u4").astype(np.uint32)


class Matcher:
    """One text on its way through a structure. Made by `StructureCompiler.matcher`; grows by `accept`."""

    def __init__(self, state: llguidance.LLMatcher, vocabulary: _Vocabulary):
        self._state = state
        self._vocabulary = vocabulary

    @property
    def accepting(self) -> bool:
        """Whether the text is complete as it stands, even if it could go on."""
        return self._state.is_accepting()

    @property
    def finished(self) -> bool:
        """Whether the text is complete and nothing but an end-of-text token may follow.

        Models without such a token must stop here.
        """
        return self._state.is_stopped() and not self._state.is_error()

    def mask(self, out: np.ndarray | None = None) -> np.ndarray:
        """The tokens that may follow: uint32 [words(vocab)], bit i % 32 of word i // 32 is token i.

        End-of-text tokens may follow exactly where `accepting`.

        Args:
          out: an array of that shape and type to write to; None: a new one.
        Returns: `out`, with at least one bit set.
        Raises: ValueError if no token may follow (the text is `finished` and the model has no end-of-text token, or
          its vocabulary cannot write what must come next), or if the structure is too complex to follow.
        """
        allowed = np.frombuffer(self._state.compute_bitmask(), np.uint32)
        self._check()
        out = np.bitwise_and(allowed[: len(self._vocabulary.text)], self._vocabulary.text, out=out)
        if self.accepting:
            out |= self._vocabulary.ends
        if not out.any():
            raise ValueError("No token of the model may follow: its vocabulary cannot continue this text, nor end it.")
        return out

    def accept(self, token: int) -> None:
        """Append a token.

        Raises: ValueError, and nothing changes, if the token is not in `mask()`; or if the structure is too complex
          to follow, and then every later call raises too.
        """
        accepted = self._end() if self._vocabulary.is_end(token) else self._extend(token)
        self._check()
        if not accepted:
            raise ValueError(f"Token {token} may not follow here: the structure does not allow it.")

    def copy(self) -> "Matcher":
        """The same text, from here on independent of this one."""
        return Matcher(self._state.deep_copy(), self._vocabulary)

    def _end(self) -> bool:
        return self.accepting and (self.finished or self._state.consume_token(self._vocabulary.end))

    def _extend(self, token: int) -> bool:
        return self._vocabulary.is_text(token) and self._state.try_consume_tokens([token]) == 1

    def _check(self) -> None:
        if self._state.is_error():
            raise ValueError(f"The structure cannot be followed from here: {_message(self._state)}.")


class StructureCompiler:
    """Compiles structures for one model.

    Args:
      tokenizer: the text of the model's `tokenizer.json`.
      vocab: how many scores the model has, be it more or fewer than the tokenizer has tokens: only ids that are a
        token and have a score are allowed.
      eos_ids: tokens that end a text, all allowed where a structure may end; () for a model that has none.
    Raises: ValueError for ids outside [0, vocab), and for tokenizers that llguidance cannot read.
    """

    def __init__(self, tokenizer: str, *, vocab: int, eos_ids: tuple[int, ...]):
        if outside := [i for i in eos_ids if not 0 <= i < vocab]:
            raise ValueError(f"End-of-text ids {outside} are outside the vocabulary [0, {vocab}).")
        extended = tokenizers.Tokenizer.from_str(tokenizer)
        ids = set(extended.get_vocab(with_added_tokens=True).values())
        # llguidance takes token 0 as the end of text if it is told of none, and allows the end after an error too.
        # With an end of its own, outside the model's tokens, what ends a text is decided in `Matcher` alone.
        end = _add_token(extended)
        try:
            self._tokenizer = llguidance.LLTokenizer(extended.to_str(), n_vocab=max(vocab, end + 1), eos_token=end)
        except ValueError as error:
            raise ValueError(f"This tokenizer cannot be used for structured output: {error}") from error
        self._vocabulary = _Vocabulary(
            size=vocab,
            text=_bits({i for i in ids if i < vocab} - set(eos_ids), vocab),
            ends=_bits(set(eos_ids), vocab),
            end=end,
        )
        self._compiled = functools.lru_cache(maxsize=_KEPT_GRAMMARS)(self._compile)

    def matcher(self, structure: Structure) -> Matcher:
        """A matcher at the beginning of a text.

        Raises: ValueError if llguidance does not compile the structure (with its message), or if no text but the
          empty one has it.
        """
        return self._compiled(structure).copy()

    def _compile(self, structure: Structure) -> Matcher:
        try:
            state = llguidance.LLMatcher(self._tokenizer, _grammar(structure), log_level=0, limits=_LIMITS)
            if state.is_error():
                raise ValueError(_message(state))
            matcher = Matcher(state, self._vocabulary)
            if not (matcher.mask() & self._vocabulary.text).any():
                raise ValueError("it allows no text but the empty one")
        except ValueError as error:
            raise ValueError(f"Structure.{structure.kind} does not compile: {error}") from error
        return matcher


def _grammar(structure: Structure) -> str:
    """The structure in llguidance's own notation."""
    if structure.json_schema is not None:
        return llguidance.LLMatcher.grammar_from_json_schema(
            structure.json_schema, defaults={"whitespace_pattern": _JSON_SPACE}
        )
    if structure.regex is not None:
        return llguidance.LLMatcher.grammar_from_regex(structure.regex)
    if structure.choice is not None:  # one terminal, which is one automaton; as rules, 2000 texts are too many
        terminal = " | ".join(json.dumps(text) for text in structure.choice)
        return llguidance.LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {terminal}")
    assert structure.grammar is not None
    return llguidance.LLMatcher.grammar_from_lark(structure.grammar)


def _message(state: llguidance.LLMatcher) -> str:
    message = state.get_error().removesuffix("\n<non-verbose/>")
    return "no text fits" if message == "NoExtensionBias" else message


def _add_token(tokenizer: tokenizers.Tokenizer) -> int:
    """Add a special token that the tokenizer does not have yet; its id."""
    name = "<|end of structure|>"
    while tokenizer.token_to_id(name) is not None:
        name += "|"
    tokenizer.add_special_tokens([name])
    return tokenizer.get_vocab(with_added_tokens=True)[name]

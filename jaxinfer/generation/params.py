"""Options of one request, checked when they are made."""

import dataclasses
import json
import math
import os
from typing import Annotated, Any, ClassVar, Protocol, Self

from msgspec import Meta

from jaxinfer.fields import (
    FLOAT32_MAX,
    FLOAT32_MIN,
    AtLeast1,
    Finite,
    NotNegative,
    Positive,
    Seed,
    check_fields,
    shown,
)
from jaxinfer.generation.foreign_options import SAMPLING, refuses
from jaxinfer.hub import resolve
from jaxinfer.models.files.description import Description
from jaxinfer.models.files.loading import OpenedModel

# Sizes of the arrays that carry per-request options to the device; part of every compiled program.
MAX_STOP_TOKEN_IDS = 16
MAX_LOGIT_BIAS = 300
MAX_LOGPROBS = 20
MAX_PRIORITY = 1000
MAX_N = 1024
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024  # characters
MAX_BAD_WORDS = 10_000
MAX_BAD_WORD_TOKENS = 512  # in bad words of several tokens
MAX_LOGITS_PROCESSORS = 64
CHAT_TOKENS = 512
"""`max_tokens` of an answer in a chat for which neither the caller nor the model names it."""
MAX_INT = 2**30  # for values that are added to a length on the device, in int32

_TokenId = Annotated[int, Meta(ge=-(2**31), lt=2**31)]  # the engine knows which of these its model has
StopTokenIds = Annotated[
    tuple[_TokenId, ...], Meta(max_length=MAX_STOP_TOKEN_IDS, description=f"at most {MAX_STOP_TOKEN_IDS} token ids")
]
Priority = Annotated[
    int, Meta(ge=-MAX_PRIORITY, le=MAX_PRIORITY, description=f"an integer in [-{MAX_PRIORITY}, {MAX_PRIORITY}]")
]
_AtLeast0 = Annotated[int, Meta(ge=0, le=MAX_INT, description="an integer in [0, 2**30]")]
_Logprobs = Annotated[int, Meta(ge=0, le=MAX_LOGPROBS, description=f"an integer in [0, {MAX_LOGPROBS}]")]
_StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]
_Choices = Annotated[
    tuple[Annotated[str, Meta(min_length=1)], ...],
    Meta(min_length=1, description="one or more non-empty strings"),
]
_ReasoningTags = Annotated[
    tuple[str, Annotated[str, Meta(min_length=1)]], Meta(description="two markers, of which the first may be empty")
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    r"""Constraints on a generated text, from its first character to its last: exactly one of the first four.

    With `thinking_token_budget` none of them need be given: the text is then free.

    Attributes:
      json: JSON that satisfies this schema, given as a dict or as its text, kept as text without blanks.
        Properties come in the schema's order; `{}` is any JSON. Keywords: llguidance's docs/json_schema.md.
      regex: the whole text matches, in the syntax of Rust's `regex` crate: no look-around, no back-references; `\d` is
        any Unicode digit.
      grammar: a context-free grammar in llguidance's dialect of Lark (its docs/syntax.md); it begins at `start`.
      choice: one of these texts.
      whitespace_pattern: with `json`, the text allowed between two of its tokens, in the syntax of `regex`, such as
        `[ \n]{1,8}`; None: nothing, since a small model that may write blanks often writes nothing else. The schema's
        own `x-guidance` takes precedence.
      reasoning_tags: the markers around reasoning, which may come first and is free: `("<think>", "</think>")`. An
        empty first one means that the prompt ends within reasoning. None: the text has no reasoning.
      thinking_token_budget: how many tokens may come between both markers; the model must then write the second one.
        None: any number.

    Whether llguidance can compile it is known only when `GrammarCompiler.matcher` does.

    >>> StructuredOutputsParams(json={"type": "integer", "minimum": 0}).json
    '{"type":"integer","minimum":0}'
    """

    json: Annotated[dict[str, Any] | str, Meta(description="a dict or the text of a JSON object")] | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: _Choices | None = None
    whitespace_pattern: str | None = None
    reasoning_tags: _ReasoningTags | None = None
    thinking_token_budget: _AtLeast0 | None = None

    KINDS: ClassVar[tuple[str, ...]] = ("json", "regex", "grammar", "choice")

    def __post_init__(self) -> None:
        check_fields(self)
        given = [name for name in self.KINDS if getattr(self, name) is not None]
        if self.thinking_token_budget is not None and self.reasoning_tags is None:
            raise ValueError(
                "StructuredOutputsParams.thinking_token_budget must be given with reasoning_tags, "
                f"got {self.thinking_token_budget} alone."
            )
        if len(given) > 1 or (not given and self.thinking_token_budget is None):
            raise ValueError(
                f"StructuredOutputsParams needs exactly one of {', '.join(self.KINDS)}; "
                f"got {', '.join(given) or 'none'}."
            )
        if self.whitespace_pattern is not None and self.json is None:
            raise ValueError(
                "StructuredOutputsParams.whitespace_pattern must be given with json, "
                f"got {shown(self.whitespace_pattern)} with {self.kind}."
            )
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))

    @property
    def kind(self) -> str | None:
        """The name of the attribute that is given; None: the text is free."""
        return next((name for name in self.KINDS if getattr(self, name) is not None), None)


def _schema_text(schema: dict[str, Any] | str) -> str:
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"StructuredOutputsParams.json is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(
            f"StructuredOutputsParams.json must be a dict or the text of a JSON object, got {shown(schema)}."
        )
    return text


_COLLECTIONS = {
    "bad_words": tuple,
    "logit_bias": dict,
    "logits_processors": tuple,
    "stop": tuple,
    "stop_token_ids": tuple,
}


class _HasModel(Protocol):
    """An `LLM` or `AsyncLLM`."""

    @property
    def model(self) -> OpenedModel: ...


@refuses(SAMPLING)
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Options of continuing one prompt.

    The defaults are neutral: every token may be drawn, with the model's own probabilities. `from_model` has those that
    the model names; `generate` and `chat` without options use them.

    Attributes:
      max_tokens: the most tokens to generate; None: until the context is full.
      min_tokens: output tokens before which no stop token may be chosen and no stop string ends the text.
      temperature: 0 is greedy; the other options of choice then have no effect.
      top_k: keep the k likeliest tokens (0: all).
      top_p: keep the smallest set of tokens with this much probability (1: all).
      min_p: drop tokens less likely than this fraction of the likeliest (0: none).
      repetition_penalty: divides positive and multiplies negative scores of tokens seen in prompt or output
        (CTRL, arXiv:1909.05858).
      presence_penalty: subtracted once from the scores of tokens in the output.
      frequency_penalty: subtracted from these scores for every occurrence.
      logit_bias: token id -> value added to its score; -inf bans it.
      allowed_token_ids: the only tokens that may be chosen, any number of them; None: all. A text without an
        end-of-text token among them ends by `stop_token_ids` among them, `stop` or its length.
      bad_words: words that are never generated: of the tokens of each, alone and after a space, the last may not follow
        the others in the output. Words of one token, and up to 512 tokens in words of several.
      seed: same seed, prompt and options, same text, whatever else is in the batch. None: a random seed.
      n: completions of this prompt, each with its own seed.
      stop: strings that end the text; also special tokens, whose text `skip_special_tokens` leaves out.
      stop_token_ids: token ids that end the text.
      include_stop_str_in_output: whether the text keeps the stop string or the stop token's text that ends it.
      skip_special_tokens: whether the text leaves special tokens out.
      ignore_eos: go on after the model's end-of-text token.
      logprobs: None: none; k: the log probability of each chosen token and of the k likeliest (0: chosen only),
        from the model's own distribution, before any option above changes it.
      prompt_logprobs: like `logprobs`, for the prompt's tokens.
      structured_outputs: constraints on the text (JSON, a regular expression, a grammar, a choice); None: none.
      adapter: the name of one of the engine's LoRA adapters; None: the model as it is.
      logits_processors: names of the engine's logits processors to apply, after penalties and before any cut-off.
      priority: default 0; a lower number is served earlier, a higher one later, and none waits for ever.
    """

    max_tokens: AtLeast1 | None = 128
    min_tokens: _AtLeast0 = 0
    temperature: Annotated[NotNegative, Meta(description="finite and >= 0 (0 is greedy)")] = 1.0
    top_k: _AtLeast0 = 0
    top_p: Annotated[float, Meta(ge=FLOAT32_MIN, le=1, description="a number in (0, 1]")] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1, description="a number in [0, 1]")] = 0.0
    repetition_penalty: Positive = 1.0
    presence_penalty: Finite = 0.0
    frequency_penalty: Finite = 0.0
    logit_bias: Annotated[
        dict[_TokenId, Annotated[float, Meta(le=FLOAT32_MAX)]],
        Meta(
            max_length=MAX_LOGIT_BIAS,
            description=f"a dict of at most {MAX_LOGIT_BIAS} token ids, each with a finite value or -inf",
        ),
    ] = dataclasses.field(default_factory=dict, hash=False)
    allowed_token_ids: (
        Annotated[tuple[_TokenId, ...], Meta(min_length=1, description="one or more token ids")] | None
    ) = None
    bad_words: Annotated[
        tuple[_StopString, ...],
        Meta(
            max_length=MAX_BAD_WORDS,
            description=f"at most {MAX_BAD_WORDS} strings of 1 to {MAX_STOP_LENGTH} characters",
        ),
    ] = ()
    seed: Seed | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N, description=f"an integer in [1, {MAX_N}]")] = 1
    stop: Annotated[
        tuple[_StopString, ...],
        Meta(
            max_length=MAX_STOP_STRINGS,
            description=f"at most {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_LENGTH} characters",
        ),
    ] = ()
    stop_token_ids: StopTokenIds = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    ignore_eos: bool = False
    logprobs: _Logprobs | None = None
    prompt_logprobs: _Logprobs | None = None
    structured_outputs: StructuredOutputsParams | None = None
    adapter: str | None = None
    logits_processors: Annotated[
        tuple[str, ...],
        Meta(max_length=MAX_LOGITS_PROCESSORS, description=f"at most {MAX_LOGITS_PROCESSORS} names"),
    ] = ()
    priority: Priority = 0

    @classmethod
    def from_model(
        cls, model: str | os.PathLike[str] | Description | _HasModel, *, chat: bool = False, **options: Any
    ) -> Self:
        """Return the options that `generate` and `chat` use where none are given, with these changed.

        They are what the model's `generation_config.json` names (temperature, top_k, top_p, min_p, repetition_penalty,
        max_new_tokens), and otherwise the neutral defaults above.

        Args:
          model: a model directory or what stands for one, as in `LLM`; or an `LLM` or `AsyncLLM`.
          chat: whether for `chat`, where `max_tokens` is 512 unless the model names it.
          options: options that go before the model's.

        Raises as `LLM` for a model that cannot be found, and as this class for wrong options.

        >>> SamplingParams.from_model("examples/demo_model", max_tokens=16).max_tokens  # doctest: +SKIP
        16
        """
        if isinstance(model, str | os.PathLike):
            model = Description.read(resolve(model))
        description = model if isinstance(model, Description) else model.model.description
        usual: dict[str, Any] = {"max_tokens": CHAT_TOKENS} if chat else {}
        return cls(**{**usual, **description.sampling.named, **options})

    def __post_init__(self) -> None:
        for name, empty in _COLLECTIONS.items():  # None is vLLM's and OpenAI's way to leave out a list or a mapping
            if getattr(self, name) is None:
                object.__setattr__(self, name, empty())
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise ValueError(
                "SamplingParams.structured_outputs must be StructuredOutputsParams or None, "
                f"got {shown(self.structured_outputs)}."
            )
        check_fields(self)
        if any(-math.inf < bias < -FLOAT32_MAX for bias in self.logit_bias.values()):
            raise ValueError(
                f"SamplingParams.logit_bias must have values >= {-FLOAT32_MAX} or -inf, got {shown(self.logit_bias)}."
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"SamplingParams.min_tokens must be <= max_tokens={self.max_tokens}, got {self.min_tokens}."
            )
        if self.structured_outputs is not None and self.min_tokens > 0:
            raise ValueError(
                f"SamplingParams.structured_outputs must be None when min_tokens is given, got {self.min_tokens}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """Options of a request for a prompt's vector, rather than for tokens.

    Attributes:
      adapter: the name of one of the engine's LoRA adapters; None: the model as it is.
      priority: as in `SamplingParams`.
      prompt: what to put before a text to embed: the name of one of the model's prompts, or a text; None: the model's
        default prompt if it has one; "": nothing. Where the model names prompts, another single word is refused.
      truncate: whether a text of more tokens than the model takes is cut, as sentence-transformers does; False: it is
        refused. Token ids are never cut.
    """

    adapter: str | None = None
    priority: Priority = 0
    prompt: str | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        check_fields(self)

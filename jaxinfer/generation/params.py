"""What a caller may ask of one request, checked when it is made."""

import dataclasses
import json
import math
from typing import Any, ClassVar

from jaxinfer.generation.renamed import renamed

# Sizes of the arrays that carry per-request options to the device; part of every compiled program.
MAX_STOP_TOKEN_IDS = 16
MAX_LOGIT_BIAS = 300
MAX_LOGPROBS = 20
MAX_PRIORITY = 1000


@renamed(json_schema="json")
@dataclasses.dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    r"""What a generated text must look like, from its first character to its last: exactly one of the first four.

    Attributes:
      json: JSON that satisfies this schema, given as a dict or as its text, kept as text without blanks.
        Properties come in the schema's order; `{}` is any JSON. Keywords: llguidance's docs/json_schema.md.
      regex: the whole text matches, in the syntax of Rust's `regex` crate: no look-around, no back-references; `\d` is
        any Unicode digit.
      grammar: a context-free grammar in llguidance's dialect of Lark (its docs/syntax.md); it begins at `start`.
      choice: one of these texts.
      whitespace_pattern: with `json`, what may stand between two of its tokens, in the syntax of `regex`, such as
        `[ \n]{1,8}`; None: nothing, since a small model that may write blanks often writes nothing else. The schema's
        own `x-guidance` comes first.

    Whether llguidance can compile it is known only when `GrammarCompiler.matcher` does.

    >>> StructuredOutputsParams(json={"type": "integer", "minimum": 0}).json
    '{"type":"integer","minimum":0}'
    """

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: tuple[str, ...] | None = None
    whitespace_pattern: str | None = None

    KINDS: ClassVar[tuple[str, ...]] = ("json", "regex", "grammar", "choice")

    def __post_init__(self) -> None:
        given = [name for name in self.KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"StructuredOutputsParams needs exactly one of {', '.join(self.KINDS)}; "
                f"got {', '.join(given) or 'none'}."
            )
        if self.whitespace_pattern is not None and (self.json is None or not isinstance(self.whitespace_pattern, str)):
            raise ValueError(
                "StructuredOutputsParams.whitespace_pattern must be a string, given with json, "
                f"got {self.whitespace_pattern!r} with {self.kind}."
            )
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        elif self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        elif not isinstance(text := getattr(self, self.kind), str):
            raise ValueError(f"StructuredOutputsParams.{self.kind} must be a string, got {text!r}.")

    @property
    def kind(self) -> str:
        """The name of the attribute that is given."""
        return next(name for name in self.KINDS if getattr(self, name) is not None)


def _schema_text(schema: object) -> str:
    try:
        value = json.loads(schema) if isinstance(schema, str) else schema
        text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"StructuredOutputsParams.json is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"StructuredOutputsParams.json must be a dict or the text of a JSON object, got {schema!r}.")
    return text


def _choices(texts: object) -> tuple[str, ...]:
    if not isinstance(texts, tuple | list) or not texts or not all(isinstance(t, str) and t for t in texts):
        raise ValueError(
            f"StructuredOutputsParams.choice must be a tuple of non-empty strings, at least one, got {texts!r}."
        )
    return tuple(texts)


@renamed(structure="structured_outputs", stop_ids="stop_token_ids", processors="logits_processors")
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to continue one prompt.

    Attributes:
      max_tokens: how many tokens to generate at most; None: until the context is full.
      min_tokens: output tokens before which no stop token may be chosen.
      temperature: 0 is greedy; the other options of choice then have no effect.
      top_k: keep the k likeliest tokens (0: all).
      top_p: keep the smallest set of tokens with this much probability (1: all).
      min_p: drop tokens less likely than this fraction of the likeliest (0: none).
      repetition_penalty: divides positive and multiplies negative scores of tokens seen in prompt or output
        (CTRL, arXiv:1909.05858).
      presence_penalty: subtracted once from the scores of tokens in the output.
      frequency_penalty: subtracted from them for every occurrence.
      logit_bias: token id -> value added to its score; -inf bans it.
      seed: same seed, prompt and options, same text, whatever else is in the batch. None: a fresh one.
      n: completions of this prompt, each with a seed of its own.
      stop: strings that end the text, and are not part of it.
      stop_token_ids: token ids that end the text.
      ignore_eos: go on after the model's end-of-text token.
      logprobs: None: none; k: the log probability of each chosen token and of the k likeliest (0: chosen only),
        from the model's own distribution, before any option above changes it.
      prompt_logprobs: the same for the prompt's tokens.
      structured_outputs: what the text must be (JSON, a regular expression, a grammar, a choice); None: anything.
      adapter: the name of a LoRA adapter of the engine; None: the model as it is.
      logits_processors: names of the engine's logits processors to apply, after penalties and before any cut-off.
      priority: 0 is the usual; a lower number is served earlier, a higher one later, and none waits for ever.
    """

    max_tokens: int | None = 128
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = dataclasses.field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | None = None
    adapter: str | None = None
    logits_processors: tuple[str, ...] = ()
    priority: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        object.__setattr__(self, "logits_processors", tuple(self.logits_processors))
        self._check("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "None or >= 1")
        self._check("min_tokens", self.min_tokens >= 0, ">= 0")
        if self.max_tokens is not None:
            self._check("min_tokens", self.min_tokens <= self.max_tokens, f"<= max_tokens={self.max_tokens}")
        self._check("temperature", 0 <= self.temperature < math.inf, "finite and >= 0 (0 is greedy)")
        self._check("top_k", self.top_k >= 0, ">= 0 (0 keeps all tokens)")
        self._check("top_p", 0 < self.top_p <= 1, "in (0, 1]")
        self._check("min_p", 0 <= self.min_p <= 1, "in [0, 1]")
        self._check("repetition_penalty", 0 < self.repetition_penalty < math.inf, "finite and > 0")
        self._check("presence_penalty", math.isfinite(self.presence_penalty), "finite")
        self._check("frequency_penalty", math.isfinite(self.frequency_penalty), "finite")
        self._check("seed", self.seed is None or 0 <= self.seed < 2**32, "None or in [0, 2**32)")
        self._check("n", self.n >= 1, ">= 1")
        self._check("priority", abs(self.priority) <= MAX_PRIORITY, f"in [-{MAX_PRIORITY}, {MAX_PRIORITY}]")
        free = self.structured_outputs is None or self.min_tokens == 0
        self._check("structured_outputs", free, "None when min_tokens is given")
        self._check("stop", all(self.stop), "without empty strings")
        self._check(
            "stop_token_ids", len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS, f"at most {MAX_STOP_TOKEN_IDS} ids"
        )
        self._check("logit_bias", len(self.logit_bias) <= MAX_LOGIT_BIAS, f"at most {MAX_LOGIT_BIAS} entries")
        bias = self.logit_bias.values()
        self._check("logit_bias", all(b < math.inf and not math.isnan(b) for b in bias), "with finite values or -inf")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            self._check(name, value is None or 0 <= value <= MAX_LOGPROBS, f"None or in [0, {MAX_LOGPROBS}]")

    def _check(self, name: str, ok: bool, wanted: str) -> None:
        if not ok:
            raise ValueError(f"SamplingParams.{name} must be {wanted}, got {getattr(self, name)!r}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolingParams:
    """That a prompt's vector is wanted rather than tokens.

    Attributes:
      adapter: the name of a LoRA adapter of the engine; None: the model as it is.
      priority: as in `SamplingParams`.
    """

    adapter: str | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        if abs(self.priority) > MAX_PRIORITY:
            raise ValueError(
                f"PoolingParams.priority must be in [-{MAX_PRIORITY}, {MAX_PRIORITY}], got {self.priority!r}."
            )

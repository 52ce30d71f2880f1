"""What a caller may ask of one request, checked at birth."""

import dataclasses
import math

from jaxinfer.generation.structured import Structure

# Sizes of the arrays that carry per-request options to the device; part of every compiled program.
MAX_STOP_IDS = 16
MAX_LOGIT_BIAS = 300
MAX_LOGPROBS = 20
MAX_PRIORITY = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to continue one prompt.

    Attributes:
      max_tokens: most tokens to generate; None: until the context is full.
      min_tokens: tokens before which no stop id may be chosen.
      temperature: 0 is greedy; the other options of choice then have no effect.
      top_k: keep the k likeliest tokens (0: all). top_p: keep the smallest set with this much probability (1: all).
      min_p: drop tokens less likely than this fraction of the likeliest (0: none).
      repetition_penalty: divides positive and multiplies negative scores of tokens seen in prompt or output
        (CTRL, arXiv:1909.05858). presence_penalty, frequency_penalty: subtracted from the scores of tokens in the
        output, once or per occurrence.
      logit_bias: token id -> value added to its score; -inf bans it.
      seed: same seed, prompt and options, same text, whatever else is in the batch. None: a fresh one.
      n: completions of this prompt, each with a seed of its own.
      stop: strings that end the text, and are not part of it. stop_ids: token ids that do.
      ignore_eos: go on after the model's end-of-text token.
      logprobs: None: none; k: the log probability of each chosen token and of the k likeliest (0: chosen only),
        from the model's own distribution, before any option above changes it.
      prompt_logprobs: the same for the prompt's tokens.
      structure: what the text must be (a JSON schema, a regular expression, a grammar, a choice); None: anything.
      adapter: the name of a LoRA adapter of the engine; None: the model as it is.
      processors: names of the engine's logits processors to apply, after penalties and before any cut-off.
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
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structure: Structure | None = None
    adapter: str | None = None
    processors: tuple[str, ...] = ()
    priority: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_ids", tuple(self.stop_ids))
        object.__setattr__(self, "processors", tuple(self.processors))
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
        self._check("structure", self.structure is None or self.min_tokens == 0, "None when min_tokens is given")
        self._check("stop", all(self.stop), "without empty strings")
        self._check("stop_ids", len(self.stop_ids) <= MAX_STOP_IDS, f"at most {MAX_STOP_IDS} ids")
        self._check("logit_bias", len(self.logit_bias) <= MAX_LOGIT_BIAS, f"at most {MAX_LOGIT_BIAS} entries")
        bias = self.logit_bias.values()
        self._check("logit_bias", all(b < math.inf and not math.isnan(b) for b in bias), "with finite values or -inf")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            self._check(name, value is None or 0 <= value <= MAX_LOGPROBS, f"None or in [0, {MAX_LOGPROBS}]")

    def _check(self, name: str, ok: bool, wanted: str) -> None:
        if not ok:
            raise ValueError(f"SamplingParams.{name} must be {wanted}, got {getattr(self, name)!r}.")

"""Outputs of a request."""

import dataclasses
import enum
import functools
import operator

import numpy as np

NO_TOKEN = -1
"""Chosen where no token can be: all scores are -inf, or one is not a number. It ends the completion."""


class FinishReason(enum.StrEnum):
    """Why a completion ended."""

    STOP = "stop"  # end-of-text, a stop token, a stop string, or structured output that is complete
    LENGTH = "length"  # max_tokens, or the context is full
    ABORT = "abort"  # the caller gave it up
    ERROR = "error"  # it could not go on, or a step that it was part of failed; `CompletionOutput.error` says how


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """A token's log probability, and the likeliest tokens in its place (token id -> log probability, best first)."""

    token_id: int
    logprob: float
    top: dict[int, float]


@dataclasses.dataclass(kw_only=True)  # not frozen: a reader makes one for each token, and that would take longer
class Timings:
    """Seconds since the request was added, and the rate after its first token."""

    first_token_s: float | None
    total_s: float
    tokens_per_s: float | None


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class ExpertLoad:
    """Where the routers of a mixture of experts sent tokens, in each of the L layers that have E experts.

    Every token counts that went through the layers, k times for its k experts: of a prompt, without what the prefix
    cache had; of the output, without the last, which does not go back in; suggested by the n-gram proposer, right or
    wrong; and computed again after a preemption.

    Attributes:
      tokens: int64 [L, E], how many tokens were sent to each expert, those that were dropped included.
      dropped: int64 [L], how many choices were dropped since the expert was full; 0 unless the model has a capacity.
    """

    tokens: np.ndarray
    dropped: np.ndarray

    def __add__(self, other: "ExpertLoad") -> "ExpertLoad":
        return ExpertLoad(tokens=self.tokens + other.tokens, dropped=self.dropped + other.dropped)

    @property
    def imbalance(self) -> np.ndarray:
        """The tokens of the busiest expert over those of the mean one: float64 [L], from 1 (even) to E."""
        return _ratio(self.tokens.max(axis=1), self.tokens.mean(axis=1), nothing=1.0)

    @property
    def dropped_share(self) -> np.ndarray:
        """The share of choices that were dropped: float64 [L]."""
        return _ratio(self.dropped, self.tokens.sum(axis=1), nothing=0.0)

    def __str__(self) -> str:
        choices, dropped = self.tokens.sum(), self.dropped.sum()
        share = f", {dropped / choices:.1%} dropped" if dropped else ""
        return f"{choices:,} choices of experts, imbalance {self.imbalance.mean():.2f}{share}"


def _ratio(part: np.ndarray, whole: np.ndarray, *, nothing: float) -> np.ndarray:
    return np.divide(part, whole, out=np.full(len(whole), nothing), where=whole > 0)


@dataclasses.dataclass(kw_only=True)  # not frozen, as `Timings`
class CompletionOutput:
    """One continuation of a prompt, whole or (while streaming) as far as it has come.

    Attributes:
      index: which of the request's `n` completions it is.
      text: the output as text, without the stop string unless `include_stop_str_in_output`.
      token_ids: the output tokens.
      finish_reason: why it ended; None while it runs.
      stop_reason: the stop string, or the one of `stop_token_ids`, that ended it; None for the model's end-of-text, a
        length, or complete structured output.
      logprobs: one entry per output token, if asked for.
      cumulative_logprob: the sum of the output tokens' log probabilities, if asked for.
      timings: how long it took.
      num_draft_tokens: tokens that the n-gram proposer suggested.
      num_accepted_tokens: suggested tokens that were right.
      error: the error, if `finish_reason` is ERROR.
      expert_load: where its tokens went in a mixture of experts; None unless the engine has `expert_load=True`.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprob] | None
    cumulative_logprob: float | None = None
    timings: Timings
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    error: str | None = None
    expert_load: ExpertLoad | None = None


@dataclasses.dataclass(kw_only=True)  # not frozen, as `Timings`
class RequestOutput:
    """All completions of one prompt.

    Attributes:
      request_id: the request's name, the caller's own or the engine's.
      prompt: the prompt as text, if it was given so.
      prompt_token_ids: the prompt as tokens; one list for all outputs of a run.
      prompt_logprobs: one entry per prompt token, if asked for; None for the first, which has no probability.
      outputs: the completions, `SamplingParams.n` of them.
      num_cached_tokens: how many of the prompt's tokens were in the cache, for the completion with the fewest.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprob | None] | None
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        """Whether all completions have ended."""
        return all(completion.finish_reason is not None for completion in self.outputs)

    @property
    def expert_load(self) -> ExpertLoad | None:
        """The sum over its completions; None unless the engine has `expert_load=True`."""
        loads = [completion.expert_load for completion in self.outputs if completion.expert_load is not None]
        return functools.reduce(operator.add, loads) if loads else None

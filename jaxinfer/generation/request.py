"""A request on its way through the engine, and what comes back of it."""

import dataclasses
import enum
import time
from collections.abc import Hashable

import numpy as np

from jaxinfer.generation.drafting import DraftControl
from jaxinfer.generation.params import SamplingParams
from jaxinfer.generation.structured import Matcher
from jaxinfer.generation.text import TextStream, held_back


class FinishReason(enum.StrEnum):
    """Why a completion ended."""

    STOP = "stop"  # end-of-text, a stop id, a stop string, or a structure that is complete
    LENGTH = "length"  # max_tokens, or the context is full
    ABORT = "abort"  # the caller gave it up
    ERROR = "error"  # a step that it was part of failed; `Completion.error` says how


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """A token's log probability, and the likeliest tokens in its place (token id -> log probability, best first)."""

    token_id: int
    logprob: float
    top: dict[int, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timings:
    """Seconds since the request was added, and the rate after its first token."""

    first_token_s: float | None
    total_s: float
    tokens_per_s: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """One continuation of a prompt, whole or (while streaming) as far as it has come.

    Attributes:
      drafted, accepted: tokens that prompt lookup proposed, and those of them that were right.
      error: what went wrong, if `finish_reason` is ERROR.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    logprobs: list[TokenLogprob] | None
    timings: Timings
    drafted: int = 0
    accepted: int = 0
    error: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """All completions of one prompt. `prompt_logprobs` speaks of every prompt token; the first has no probability.

    `cached_tokens` is how many of the prompt's tokens were found in the cache, by the completion that found fewest.
    """

    request_id: str
    prompt: str | None
    prompt_ids: list[int]
    prompt_logprobs: list[TokenLogprob | None] | None
    completions: list[Completion]
    cached_tokens: int = 0


class Sequence:
    """One completion while it runs: its tokens, its text, and what scheduler and runner know of it.

    Attributes:
      ids: prompt and output so far, as far as the host has seen them.
      limit: the length at which it ends. stop_ids: token ids that end it.
      order: its place in the queue; the smallest is served first and gives way last.
      matcher: what its structure allows next, or None.
      pooled: whether it ends with its prompt, for the mean of its hidden vectors (`vector`).
      slot, adapter_slot, pages: its place on the device while it runs.
      prefilling: whether more than its last token has to go through the model before it can generate.
      computed: while prefilling, the leading tokens whose keys and values are in the cache or on their way there.
      findable: leading pages that others can find; `node` is the last of them in the tree.
      least, most: tokens that the steps in flight will add to `ids`.
      cached: prompt tokens that were found in the cache when it was first admitted; None before.
    """

    def __init__(
        self,
        request_id: str,
        index: int,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        prompt: str | None,
        seed: int,
        limit: int,
        stop_ids: tuple[int, ...],
        stream: TextStream | None,
        matcher: Matcher | None = None,
        pooled: bool = False,
        drafting: DraftControl | None = None,
    ):
        self.request_id, self.index, self.params, self.seed = request_id, index, params, seed
        self.prompt, self.prompt_length = prompt, len(prompt_ids)
        self.ids = list(prompt_ids)
        self.limit, self.stop_ids = limit, stop_ids
        self.matcher, self.pooled, self.drafting = matcher, pooled, drafting
        self.order = 0
        self.slot, self.adapter_slot = -1, 0
        self.pages: list[int] = []
        self.prefilling = True
        self.computed = self.findable = 0
        self.cached: int | None = None
        self.node: Hashable = None
        self.least = self.most = 0
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None
        self.vector: np.ndarray | None = None
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob | None] = [None]
        self.drafted = self.accepted = 0
        self._stream = stream
        self._first: float | None = None
        self.arrive()

    def arrive(self) -> None:
        """Start the clock of `Timings`."""
        self._added = self._last = time.perf_counter()

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def ready(self) -> int:
        """Tokens whose keys and values are in the cache, as far as the host has seen."""
        return self.computed if self.prefilling else len(self.ids) - 1

    def append(self, token: int, logprob: TokenLogprob | None) -> None:
        """Take the next token: grow the text, and finish if it, a stop string, the structure or the limit says so."""
        self._last = time.perf_counter()
        self._first = self._first or self._last
        self.ids.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        if token in self.stop_ids:
            self.finish_reason = FinishReason.STOP
            return
        if self.matcher is not None:
            self._match(token)
        self._grow(token)
        if self.finish_reason is None and len(self.ids) >= self.limit:
            self.finish_reason = FinishReason.LENGTH

    def _match(self, token: int) -> None:
        assert self.matcher is not None
        try:
            self.matcher.accept(token)
        except ValueError as error:
            self.fail(str(error))
        else:
            if self.matcher.finished:
                self.finish_reason = FinishReason.STOP

    def _grow(self, token: int) -> None:
        if self._stream is None:
            return
        before = len(self.text)
        self.text += self._stream.push(token)
        # A stop string may have begun before this piece.
        start = max(0, before - max(map(len, self.params.stop), default=0))
        found = [at for stop in self.params.stop if (at := self.text.find(stop, start)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.finish_reason = FinishReason.STOP

    def pool(self, total: np.ndarray, start: int, *, last: bool) -> None:
        """Add the sum of a piece's hidden vectors, float32 [D]; end after the last with their mean, of length 1."""
        self.vector = total if start == 0 or self.vector is None else self.vector + total
        if last:
            mean = self.vector / self.prompt_length
            self.vector = mean / max(float(np.linalg.norm(mean)), 1e-12)
            self._last = time.perf_counter()
            self.finish_reason = FinishReason.STOP

    def fail(self, message: str) -> None:
        """End with an error."""
        self._last = time.perf_counter()
        self.finish_reason, self.error = FinishReason.ERROR, message

    @property
    def safe_text(self) -> str:
        """The text without an end that may turn out to be a stop string's beginning."""
        if self.finished:
            return self.text
        return self.text[: len(self.text) - held_back(self.text, self.params.stop)]

    def completion(self) -> Completion:
        """This completion as the caller sees it."""
        count = len(self.ids) - self.prompt_length
        rate = None
        if self._first is not None and count > 1 and self._last > self._first:
            rate = (count - 1) / (self._last - self._first)
        first = None if self._first is None else self._first - self._added
        return Completion(
            index=self.index,
            text=self.safe_text,
            token_ids=self.ids[self.prompt_length :],
            finish_reason=self.finish_reason,
            logprobs=None if self.params.logprobs is None else list(self.logprobs),
            timings=Timings(first_token_s=first, total_s=self._last - self._added, tokens_per_s=rate),
            drafted=self.drafted,
            accepted=self.accepted,
            error=self.error,
        )

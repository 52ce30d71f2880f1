"""A request on its way through the engine, and what comes back of it."""

import dataclasses
import enum
import time

from jaxinfer.generation.params import SamplingParams
from jaxinfer.generation.text import TextStream, held_back


class FinishReason(enum.StrEnum):
    """Why a completion ended."""

    STOP = "stop"  # end-of-text, a stop id or a stop string
    LENGTH = "length"  # max_tokens, or the context is full
    ABORT = "abort"  # the caller gave it up


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
    """One continuation of a prompt, whole or (while streaming) as far as it has come."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    logprobs: list[TokenLogprob] | None
    timings: Timings


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """All completions of one prompt. `prompt_logprobs` speaks of every prompt token; the first has no probability."""

    request_id: str
    prompt: str | None
    prompt_ids: list[int]
    prompt_logprobs: list[TokenLogprob | None] | None
    completions: list[Completion]


class Sequence:
    """One completion in the making: its tokens, its place in the cache, its text so far.

    Attributes:
      ids: prompt and output tokens. computed: how many of the prompt's are in the cache.
      limit: the length at which it ends. stop_ids: token ids that end it.
      slot, pages: its place on the device while it runs.
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
    ):
        self.request_id, self.index, self.params, self.seed = request_id, index, params, seed
        self.prompt, self.prompt_length = prompt, len(prompt_ids)
        self.ids = list(prompt_ids)
        self.limit, self.stop_ids = limit, stop_ids
        self.computed = 0
        self.slot: int = -1
        self.pages: list[int] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob | None] = [None]
        self._stream = stream
        self._first: float | None = None
        self.arrive()

    def arrive(self) -> None:
        """Start the clock of `Timings`."""
        self._added = self._last = time.perf_counter()

    @property
    def prefilled(self) -> bool:
        return self.computed == self.prompt_length

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def append(self, token: int, logprob: TokenLogprob | None) -> None:
        """Take the next token: grow the text, and finish if it, a stop string or the limit says so."""
        self._last = time.perf_counter()
        self._first = self._first or self._last
        self.ids.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        if token in self.stop_ids:
            self.finish_reason = FinishReason.STOP
            return
        if self._stream is not None:
            self._grow(self._stream.push(token))
        if self.finish_reason is None and len(self.ids) >= self.limit:
            self.finish_reason = FinishReason.LENGTH

    def _grow(self, piece: str) -> None:
        before = len(self.text)
        self.text += piece
        # A stop string may have begun before this piece.
        start = max(0, before - max(map(len, self.params.stop), default=0))
        found = [at for stop in self.params.stop if (at := self.text.find(stop, start)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.finish_reason = FinishReason.STOP

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
        )

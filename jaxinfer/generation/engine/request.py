"""`Request`: a checked prompt and its params. `Sequence`: one completion of it, its tokens and its text."""

import dataclasses
import functools

import numpy as np

from jaxinfer.generation.engine.growing_text import GrowingText
from jaxinfer.generation.engine.pooler import Pooler
from jaxinfer.generation.outputs import ExpertLoad, FinishReason, TokenLogprob
from jaxinfer.generation.params import PoolingParams, SamplingParams
from jaxinfer.generation.sampling.structured_outputs import GrammarMatcher
from jaxinfer.text import TextStream, Tokenizer


def special_stops(params: SamplingParams, tokenizer: Tokenizer | None) -> dict[int, str]:
    """Return the special tokens that stop strings name, and that are not part of a text: they end it as tokens."""
    if tokenizer is None or not params.skip_special_tokens:
        return {}
    return {id_: stop for stop in params.stop if (id_ := tokenizer.special_id(stop)) is not None}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """A caller's request for one prompt, checked; made by `InputProcessor`.

    Attributes:
      request_id: its name, the caller's own or the engine's.
      prepared_by: the identity of that engine, which alone can run it.
      prompt: the prompt as text, if it was given so.
      prompt_token_ids: the prompt as tokens.
      params: how to continue it, or that its vector is wanted.
      max_length: the number of tokens, prompt included, at which a completion ends.
      stop_token_ids: tokens that end a completion, the model's end-of-text included.
      eos_ids: the model's end-of-text tokens among them.
      bitmask: the tokens that may be chosen (sampling/bitmasks.py); None: all.
      bad_words: the tokens of bad words of several tokens.
      seed: the seed of the first completion.
      matcher: the matcher of the structured output, at its beginning; or None.
      tokenizer: turns tokens into text; None without.
      pooler: joins the vectors of a prompt's chunks; None: the first is the prompt's, as an encoder's.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams | PoolingParams
    max_length: int
    stop_token_ids: tuple[int, ...] = ()
    eos_ids: tuple[int, ...] = ()
    bitmask: np.ndarray | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    seed: int = 0
    matcher: GrammarMatcher | None = None
    tokenizer: Tokenizer | None = None
    pooler: Pooler | None = None
    prepared_by: object = None

    @property
    def pooling(self) -> bool:
        """Whether the prompt's vector is wanted rather than tokens."""
        return isinstance(self.params, PoolingParams)

    @functools.cached_property
    def sampling(self) -> SamplingParams:
        """The params of a request for tokens."""
        assert isinstance(self.params, SamplingParams)
        return self.params

    @functools.cached_property
    def max_cached_tokens(self) -> int:
        """Most tokens that need a place in the KV cache: an output's last token is never fed back."""
        return self.max_length if self.pooling else self.max_length - 1

    def sequences(self) -> "list[Sequence]":
        """Make new sequences, one for each completion asked for."""
        count = 1 if isinstance(self.params, PoolingParams) else self.params.n
        return [Sequence(self, index) for index in range(count)]


class Sequence:
    """One completion while it runs: its tokens and its text. Only `OutputProcessor` writes to it.

    Attributes:
      request: the request that it completes.
      index: which of the request's completions it is.
      seed: the seed of its random draws.
      token_ids: prompt and output so far, as far as the host has seen them.
      text: the output as text.
      finish_reason: why it ended; None while it runs.
      stop_reason: as in `CompletionOutput`.
      error: the error that ended it, if any.
      logprobs: log probabilities of the output tokens, if asked for.
      cumulative_logprob: their sum.
      prompt_logprobs: log probabilities of the prompt tokens that have been computed, if asked for.
      embedding: float32 [D], the prompt's vector of a pooling request; while it runs, that of the chunks so far.
      num_cached_tokens: prompt tokens that were in the cache when it was first admitted; None before.
      num_draft_tokens: tokens proposed by speculation.
      num_accepted_tokens: proposed tokens that were right.
      expert_load: where its tokens went in a mixture of experts; None unless the engine counts them.
      matcher: its place in the structured output, or None.
      arrival_time: when it was queued.
      first_token_time: when its first token came; None before.
      last_token_time: when its last token came, or when it ended.
    """

    def __init__(self, request: Request, index: int = 0):
        self.request, self.index = request, index
        # Completions of one seed differ by a fixed odd step, so that n of them are reproducible too.
        self.seed = (request.seed + 0x9E3779B9 * index) % 2**32
        self.token_ids = list(request.prompt_token_ids)
        self.text = GrowingText()
        if isinstance(request.params, SamplingParams) and request.params.stop:
            self.text = GrowingText(request.params.stop, keeps_stop=request.params.include_stop_str_in_output)
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.error: str | None = None
        self.logprobs: list[TokenLogprob] = []
        self.cumulative_logprob = 0.0
        self.prompt_logprobs: list[TokenLogprob | None] = [None]
        self.embedding: np.ndarray | None = None
        self.num_cached_tokens: int | None = None
        self.num_draft_tokens = self.num_accepted_tokens = 0
        self.expert_load: ExpertLoad | None = None
        self.matcher = request.matcher and request.matcher.copy()
        self._detokenizer: TextStream | None = None
        self.arrival_time = 0.0
        self.first_token_time: float | None = None
        self.last_token_time = 0.0

    @property
    def params(self) -> SamplingParams | PoolingParams:
        return self.request.params

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def detokenizer(self) -> TextStream | None:
        """Turns its tokens into text; None without a tokenizer. Made at the first token: many sequences may wait."""
        if self._detokenizer is None and self.request.tokenizer is not None:
            skip = self.request.sampling.skip_special_tokens
            self._detokenizer = TextStream(
                self.request.tokenizer, self.request.prompt_token_ids, skip_special_tokens=skip
            )
        return self._detokenizer

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def max_length(self) -> int:
        return self.request.max_length

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

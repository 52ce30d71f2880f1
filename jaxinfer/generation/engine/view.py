"""What the caller sees of a request: its outputs, made in any thread of what the engine's thread has noted."""

from typing import NamedTuple

from jaxinfer.generation.engine.request import Request, Sequence
from jaxinfer.generation.outputs import CompletionOutput, FinishReason, RequestOutput, Timings
from jaxinfer.generation.text import held_back


class CompletionSnapshot(NamedTuple):
    """How far a sequence has come at some moment. Its lists only grow, so that their lengths say what they held then.

    Attributes:
      sequence: which one.
      num_tokens: of the prompt and the output.
      num_logprobs: how many of its log probabilities.
      num_prompt_logprobs: and of its prompt's.
      others: as in `Sequence`.
    """

    sequence: Sequence
    num_tokens: int
    num_logprobs: int
    num_prompt_logprobs: int
    num_cached_tokens: int | None
    text: str
    finish_reason: FinishReason | None
    error: str | None
    num_draft_tokens: int
    num_accepted_tokens: int
    first_token_time: float | None
    last_token_time: float

    @classmethod
    def of(cls, sequence: Sequence) -> "CompletionSnapshot":
        """How far a sequence has come."""
        return cls(
            sequence,
            len(sequence.token_ids),
            len(sequence.logprobs),
            len(sequence.prompt_logprobs),
            sequence.num_cached_tokens,
            sequence.text,
            sequence.finish_reason,
            sequence.error,
            sequence.num_draft_tokens,
            sequence.num_accepted_tokens,
            sequence.first_token_time,
            sequence.last_token_time,
        )

    def output(self) -> CompletionOutput:
        """The completion, as far as it had come."""
        sequence, first, last = self.sequence, self.first_token_time, self.last_token_time
        count = self.num_tokens - sequence.num_prompt_tokens
        return CompletionOutput(
            index=sequence.index,
            text=self._safe_text(),
            token_ids=sequence.token_ids[sequence.num_prompt_tokens : self.num_tokens],
            finish_reason=self.finish_reason,
            logprobs=None if sequence.request.sampling.logprobs is None else sequence.logprobs[: self.num_logprobs],
            timings=Timings(
                first_token_s=None if first is None else first - sequence.arrival_time,
                total_s=last - sequence.arrival_time,
                tokens_per_s=(count - 1) / (last - first) if first is not None and count > 1 and last > first else None,
            ),
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            error=self.error,
        )

    def _safe_text(self) -> str:
        """The text without an end that may turn out to be a stop string's beginning."""
        if self.finish_reason is not None:
            return self.text
        return self.text[: len(self.text) - held_back(self.text, self.sequence.request.sampling.stop)]


class RequestSnapshot(NamedTuple):
    """How far a request has come at some moment; takes no time to make, whatever the length of its texts.

    Attributes:
      request: which one.
      prompt_token_ids: its prompt's tokens, for the caller.
      completions: of its sequences.
    """

    request: Request
    prompt_token_ids: list[int]
    completions: list[CompletionSnapshot]

    def output(self) -> RequestOutput:
        """The request's completions, as far as they had come. In any thread, at any later time."""
        request, first = self.request, self.completions[0]
        logprobs = first.sequence.prompt_logprobs[: first.num_prompt_logprobs]
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=None if request.sampling.prompt_logprobs is None else logprobs,
            outputs=[completion.output() for completion in self.completions],
            num_cached_tokens=min(completion.num_cached_tokens or 0 for completion in self.completions),
        )


class RequestView:
    """One run of a request, as its caller sees it.

    All its outputs share a list of the prompt's tokens, so that none of them copies a long prompt. The list is the
    caller's: the engine has its own.
    """

    def __init__(self, sequences: list[Sequence]):
        self._sequences = sequences
        self._prompt_token_ids = list(sequences[0].request.prompt_token_ids)

    def snapshot(self) -> RequestSnapshot:
        """How far the request has come. In the thread that steps the engine."""
        completions = [CompletionSnapshot.of(sequence) for sequence in self._sequences]
        return RequestSnapshot(self._sequences[0].request, self._prompt_token_ids, completions)

    def output(self) -> RequestOutput:
        """The request's completions, as far as they have come. In the thread that steps the engine."""
        return self.snapshot().output()

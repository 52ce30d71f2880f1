"""A caller's view of a request: outputs are made in any thread, from snapshots that the engine's thread takes."""

import msgspec

from jaxinfer.generation.engine.request import Request, Sequence
from jaxinfer.generation.outputs import CompletionOutput, ExpertLoad, FinishReason, RequestOutput, Timings


class CompletionSnapshot(msgspec.Struct, frozen=True):  # faster to make than a dataclass
    """The progress of a sequence at some moment. Its lists only grow, so their lengths say what they held then.

    Attributes:
      sequence: the sequence.
      num_tokens: tokens of prompt and output.
      num_logprobs: log probabilities of the output.
      num_prompt_logprobs: log probabilities of the prompt.
      num_blocks: blocks of the text.
      end: the text after these, without characters that may turn out to begin a stop string.
      others: as in `Sequence`.
    """

    sequence: Sequence
    num_tokens: int
    num_logprobs: int
    num_prompt_logprobs: int
    num_blocks: int
    end: str
    num_cached_tokens: int | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    cumulative_logprob: float
    error: str | None
    num_draft_tokens: int
    num_accepted_tokens: int
    expert_load: ExpertLoad | None
    first_token_time: float | None
    last_token_time: float

    @classmethod
    def from_sequence(cls, sequence: Sequence) -> "CompletionSnapshot":
        """Take a snapshot of a sequence."""
        text, end = sequence.text, sequence.text.end
        if text.num_held_back and not sequence.finished:
            end = end[: -text.num_held_back]
        return cls(
            sequence,
            len(sequence.token_ids),
            len(sequence.logprobs),
            len(sequence.prompt_logprobs),
            len(text.blocks),
            end,
            sequence.num_cached_tokens,
            sequence.finish_reason,
            sequence.stop_reason,
            sequence.cumulative_logprob,
            sequence.error,
            sequence.num_draft_tokens,
            sequence.num_accepted_tokens,
            sequence.expert_load,
            sequence.first_token_time,
            sequence.last_token_time,
        )

    def output(self, since: "CompletionSnapshot | None" = None) -> CompletionOutput:
        """The completion as of the snapshot. since: as in `RequestSnapshot.output`."""
        sequence, first, last = self.sequence, self.first_token_time, self.last_token_time
        request, logprobs = sequence.request, None
        num_prompt_tokens = len(request.prompt_token_ids)
        asked = request.sampling.logprobs is not None
        if asked:
            logprobs = sequence.logprobs[since.num_logprobs if since else 0 : self.num_logprobs]
        count = self.num_tokens - num_prompt_tokens
        return CompletionOutput(
            index=sequence.index,
            text=self.text(since),
            token_ids=sequence.token_ids[since.num_tokens if since else num_prompt_tokens : self.num_tokens],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=logprobs,
            cumulative_logprob=self.cumulative_logprob if asked else None,
            timings=Timings(
                first_token_s=None if first is None else first - sequence.arrival_time,
                total_s=last - sequence.arrival_time,
                tokens_per_s=(count - 1) / (last - first) if first is not None and count > 1 and last > first else None,
            ),
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=self.num_accepted_tokens,
            error=self.error,
            expert_load=self.expert_load,
        )

    def text(self, since: "CompletionSnapshot | None" = None) -> str:
        """The text as of the snapshot, or what of it is new after another one."""
        if since is None:
            return "".join(self.sequence.text.blocks[: self.num_blocks]) + self.end
        text = self.end
        if self.num_blocks > since.num_blocks:
            text = "".join(self.sequence.text.blocks[since.num_blocks : self.num_blocks]) + text
        return text[len(since.end) :]


class RequestSnapshot(msgspec.Struct, frozen=True):
    """The progress of a request at some moment; cheap to make, however long its texts are.

    Attributes:
      request: the request.
      prompt_token_ids: its prompt's tokens, for the caller.
      completions: snapshots of its sequences.
    """

    request: Request
    prompt_token_ids: list[int]
    completions: list[CompletionSnapshot]

    def output(self, since: "RequestSnapshot | None" = None) -> RequestOutput:
        """The request's completions as of the snapshot. In any thread, at any later time.

        since: an earlier snapshot; then texts, tokens and log probabilities are only those after it.
        """
        request, completions, logprobs = self.request, self.completions, None
        before = since.completions if since else [None] * len(completions)
        if request.sampling.prompt_logprobs is not None:
            start = since.completions[0].num_prompt_logprobs if since else 0
            logprobs = completions[0].sequence.prompt_logprobs[start : completions[0].num_prompt_logprobs]
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=logprobs,
            outputs=[completion.output(seen) for completion, seen in zip(completions, before, strict=True)],
            num_cached_tokens=min([completion.num_cached_tokens or 0 for completion in completions]),
        )


class RequestView:
    """One run of a request, as its caller sees it.

    All its outputs share one list of the prompt's tokens, so that none copies a long prompt. The list is the caller's:
    the engine has its own.
    """

    def __init__(self, sequences: list[Sequence]):
        self._sequences = sequences
        self._prompt_token_ids = list(sequences[0].request.prompt_token_ids)

    def snapshot(self) -> RequestSnapshot:
        """Take a snapshot of the request. In the thread that steps the engine."""
        completions = [CompletionSnapshot.from_sequence(sequence) for sequence in self._sequences]
        return RequestSnapshot(self._sequences[0].request, self._prompt_token_ids, completions)

    def output(self) -> RequestOutput:
        """The request's completions so far. In the thread that steps the engine."""
        return self.snapshot().output()

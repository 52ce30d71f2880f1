"""The one place where sequences change: a step's results become tokens, text and the reason to end."""

import numpy as np

from jaxinfer.generation.engine.batch import Batch, Chunk, DecodeRow, SequenceOutput, StepOutput
from jaxinfer.generation.engine.protocols import Clock
from jaxinfer.generation.engine.request import Sequence
from jaxinfer.generation.outputs import FinishReason, TokenLogprob


class OutputProcessor:
    """Writes to sequences what has come of them; `clock` is the engine's."""

    def __init__(self, clock: Clock):
        self._clock = clock

    def arrive(self, sequence: Sequence) -> None:
        """Start the clock of `Timings`."""
        sequence.arrival_time = sequence.last_token_time = self._clock()

    def process(self, batch: Batch, output: StepOutput) -> None:
        """Give a step's results to its sequences; those that have ended meanwhile take nothing."""
        now = self._clock()
        for admission in batch.admissions:
            sequence = admission.sequence
            if sequence.num_cached_tokens is None:
                sequence.num_cached_tokens = min(admission.num_cached_tokens, sequence.num_prompt_tokens)
        for part, found in zip(batch.parts, output.outputs, strict=True):
            if part.error is not None and not part.sequence.finished:
                self.fail(part.sequence, part.error)
            elif not part.sequence.finished:
                _extend(part, found, now)

    def fail(self, sequence: Sequence, message: str) -> None:
        """End with an error."""
        sequence.last_token_time = self._clock()
        sequence.finish_reason, sequence.error = FinishReason.ERROR, message

    def abort(self, sequence: Sequence) -> None:
        """End because the caller gave it up."""
        sequence.finish_reason = FinishReason.ABORT


def _extend(part: Chunk | DecodeRow, found: SequenceOutput, now: float) -> None:
    sequence = part.sequence
    sequence.num_draft_tokens += found.num_draft_tokens
    sequence.num_accepted_tokens += found.num_accepted_tokens
    for position, entry in found.prompt_logprobs or ():
        if position == len(sequence.prompt_logprobs):  # a chunk that is computed again brings nothing new
            sequence.prompt_logprobs.append(entry)
    if found.embedding is not None and isinstance(part, Chunk):
        _pool(sequence, found.embedding, part, now)
    for index, token in enumerate(found.token_ids):
        if sequence.finished:  # a stop string may end it before the device knew
            break
        _append(sequence, token, None if found.logprobs is None else found.logprobs[index], now)


def _append(sequence: Sequence, token: int, logprob: TokenLogprob | None, now: float) -> None:
    """Take the next token, and end if it, a stop string, the grammar or the length says so."""
    sequence.last_token_time = now
    if sequence.first_token_time is None:
        sequence.first_token_time = now
    sequence.token_ids.append(token)
    if logprob is not None:
        sequence.logprobs.append(logprob)
    if token in sequence.request.stop_token_ids:
        sequence.finish_reason = FinishReason.STOP
        return
    if sequence.matcher is not None:
        _match(sequence, token)
    _detokenize(sequence, token)
    if sequence.finish_reason is None and len(sequence.token_ids) >= sequence.max_length:
        sequence.finish_reason = FinishReason.LENGTH


def _match(sequence: Sequence, token: int) -> None:
    assert sequence.matcher is not None
    try:
        sequence.matcher.accept_token(token)
    except ValueError as error:
        sequence.finish_reason, sequence.error = FinishReason.ERROR, str(error)
    else:
        if sequence.matcher.finished:
            sequence.finish_reason = FinishReason.STOP


def _detokenize(sequence: Sequence, token: int) -> None:
    if sequence.detokenizer is None:
        return
    stops, before = sequence.request.sampling.stop, len(sequence.text)
    sequence.text += sequence.detokenizer.push(token)
    # A stop string may have begun before this token.
    start = max(0, before - max(map(len, stops), default=0))
    found = [at for stop in stops if (at := sequence.text.find(stop, start)) >= 0]
    if found:
        sequence.text = sequence.text[: min(found)]
        sequence.finish_reason = FinishReason.STOP


def _pool(sequence: Sequence, total: np.ndarray, chunk: Chunk, now: float) -> None:
    """Add the sum of a chunk's hidden vectors; after the last, end with their mean, of length 1."""
    if chunk.start and sequence.embedding is not None:
        total = sequence.embedding + total
    sequence.embedding = total
    if chunk.last:
        mean = total / sequence.num_prompt_tokens
        sequence.embedding = mean / max(float(np.linalg.norm(mean)), 1e-12)
        sequence.last_token_time, sequence.finish_reason = now, FinishReason.STOP

"""The only writer of sequences: turns a step's results into tokens, text and finish reasons."""

import logging

import numpy as np

from jaxinfer.compiled import Clock
from jaxinfer.generation.engine.batch import NOTHING, Batch, Chunk, DecodeRow, SequenceOutput, StepOutput
from jaxinfer.generation.engine.request import Sequence, special_stops
from jaxinfer.generation.engine.stats import Counters
from jaxinfer.generation.outputs import NO_TOKEN, ExpertLoad, FinishReason, TokenLogprob

log = logging.getLogger(__name__)

NO_TOKEN_MESSAGE = (
    "No token can be chosen: every score is -inf, or one is not a number. Look at logit_bias, allowed_token_ids, "
    "bad_words, stop_token_ids with min_tokens, structured_outputs and logits processors; or the model's own scores "
    "overflow."
)


class OutputProcessor:
    """Writes results to sequences, and counts them; `clock` is the engine's."""

    def __init__(self, clock: Clock):
        self._clock, self.counters = clock, Counters()
        self._unfinished: Sequence | None = None  # its results are being written, or were when it was interrupted

    def arrive(self, sequence: Sequence) -> None:
        """Start the clock of `Timings`."""
        sequence.arrival_time = sequence.last_token_time = self._clock()

    def process(self, batch: Batch, output: StepOutput) -> None:
        """Give a step's results to its sequences, except those that have ended meanwhile.

        An error in the results of one sequence ends that sequence alone.
        """
        now = self._clock()
        self.counters.steps += 1
        for admission in batch.admissions:
            self._begin(admission.sequence, admission.num_cached_tokens)
        for part, result in zip(batch.parts, output.outputs, strict=True):
            sequence = part.sequence
            if sequence.finish_reason is not None:
                continue
            if sequence.num_cached_tokens is None:
                self._begin(sequence, 0)  # which an encoder does not admit
            if result is NOTHING and part.error is None:  # all but the last chunk of a prompt
                continue
            self._unfinished, length = sequence, len(sequence.token_ids)
            try:
                if part.error is not None:
                    raise ValueError(part.error)
                _extend(part, result, now)
            except ValueError as error:
                self.fail(sequence, str(error))
            except Exception as error:
                log.error("The results of a sequence could not be applied; it ends with an error.", exc_info=error)
                self.fail(sequence, f"{type(error).__name__}: {error}")
            else:
                self._count(sequence, result)
            self.counters.generated_tokens += len(sequence.token_ids) - length
            self._unfinished = None

    def _begin(self, sequence: Sequence, num_cached_tokens: int) -> None:
        """Note that a sequence runs for the first time."""
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = min(num_cached_tokens, sequence.num_prompt_tokens)
            self.counters.prompt_tokens += sequence.num_prompt_tokens
            self.counters.cached_tokens += sequence.num_cached_tokens

    def _count(self, sequence: Sequence, result: SequenceOutput) -> None:
        self.counters.draft_tokens += result.num_draft_tokens
        self.counters.accepted_tokens += result.num_accepted_tokens
        if result.expert_load is not None:
            self.counters.expert_load = _sum(self.counters.expert_load, result.expert_load)
        if sequence.finish_reason is not None:
            self.counters.ended[sequence.finish_reason] += 1

    def take_unfinished(self) -> Sequence | None:
        """Return, once, the sequence that an interrupt has left with a part of its results."""
        sequence, self._unfinished = self._unfinished, None
        return None if sequence is None or sequence.finished else sequence

    def fail(self, sequence: Sequence, message: str) -> None:
        """End with an error."""
        sequence.last_token_time = self._clock()
        sequence.finish_reason, sequence.error = FinishReason.ERROR, message
        self.counters.ended[FinishReason.ERROR] += 1

    def abort(self, sequence: Sequence) -> None:
        """End because the caller gave it up."""
        sequence.finish_reason = FinishReason.ABORT
        self.counters.ended[FinishReason.ABORT] += 1


def _extend(part: Chunk | DecodeRow, result: SequenceOutput, now: float) -> None:
    sequence = part.sequence
    if result.num_draft_tokens:
        sequence.num_draft_tokens += result.num_draft_tokens
        sequence.num_accepted_tokens += result.num_accepted_tokens
    if result.expert_load is not None:
        sequence.expert_load = _sum(sequence.expert_load, result.expert_load)
    for position, entry in result.prompt_logprobs or ():
        if position == len(sequence.prompt_logprobs):  # a chunk that is computed again brings nothing new
            sequence.prompt_logprobs.append(entry)
    if result.embedding is not None and isinstance(part, Chunk):
        _pool(sequence, result.embedding, part, now)
    for index, token in enumerate(result.token_ids):
        if index and sequence.finished:  # a stop string may end it before the device knew
            break
        if token == NO_TOKEN:
            raise ValueError(NO_TOKEN_MESSAGE)
        _append(sequence, token, None if result.logprobs is None else result.logprobs[index], now)


def _sum(load: ExpertLoad | None, more: ExpertLoad) -> ExpertLoad:
    """Add up into a new object: a view in another thread may have the old one."""
    return more if load is None else load + more


def _append(sequence: Sequence, token: int, logprob: TokenLogprob | None, now: float) -> None:
    """Append the next token, and end if it, a stop string, the grammar or the length says so."""
    sequence.last_token_time = now
    if sequence.first_token_time is None:
        sequence.first_token_time = now
    sequence.token_ids.append(token)
    if logprob is not None:
        sequence.logprobs.append(logprob)
        sequence.cumulative_logprob += logprob.logprob
    request, detokenizer = sequence.request, sequence.detokenizer
    params, stops = request.sampling, token in request.stop_token_ids
    reason = FinishReason.STOP if stops else _reason_to_end(sequence, token)
    if stops and token not in request.eos_ids:
        sequence.stop_reason = special_stops(params, request.tokenizer).get(token, token)
    if detokenizer is not None:
        text = "" if stops and not params.include_stop_str_in_output else detokenizer.push(token)
        if reason is not None:
            text += detokenizer.flush()
        may_stop = not params.min_tokens or sequence.num_output_tokens >= params.min_tokens
        stop = sequence.text.add(text, may_stop=may_stop)
        if stop is not None:
            reason, sequence.stop_reason = FinishReason.STOP, stop
    sequence.finish_reason = reason


def _reason_to_end(sequence: Sequence, token: int) -> FinishReason | None:
    """Return why the sequence ends with this token, which is no stop token, stop strings aside; None if it goes on.

    Raises ValueError if the grammar forbids the token.
    """
    if sequence.matcher is not None:
        sequence.matcher.accept_token(token)
        if sequence.matcher.finished:
            return FinishReason.STOP
    return FinishReason.LENGTH if len(sequence.token_ids) >= sequence.request.max_length else None


def _pool(sequence: Sequence, vector: np.ndarray, chunk: Chunk, now: float) -> None:
    """Join a chunk's vector with those before it; the last one ends the sequence."""
    if pooler := sequence.request.pooler:
        vector = pooler.join(sequence.embedding if chunk.start else None, vector)
        if chunk.last:
            vector = pooler.finish(vector, sequence.num_prompt_tokens)
    sequence.embedding = vector
    if chunk.last:
        sequence.last_token_time, sequence.finish_reason = now, FinishReason.STOP

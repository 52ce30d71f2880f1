"""The only writer of sequences: turns a step's results into tokens, text and finish reasons."""

import logging
import operator

import numpy as np

from jaxinfer.compiled import Clock
from jaxinfer.generation.engine.batch import Batch, Chunk, DecodeRow, SequenceOutput, StepOutput
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
            if part.sequence.finished:
                continue
            self._begin(part.sequence, 0)  # which an encoder does not admit
            self._unfinished, length = part.sequence, len(part.sequence.token_ids)
            try:
                if part.error is not None:
                    raise ValueError(part.error)
                _extend(part, result, now)
            except ValueError as error:
                self.fail(part.sequence, str(error))
            except Exception as error:
                log.error("The results of a sequence could not be applied; it ends with an error.", exc_info=error)
                self.fail(part.sequence, f"{type(error).__name__}: {error}")
            else:
                self._count(part.sequence, result)
            self.counters.generated_tokens += len(part.sequence.token_ids) - length
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
    sequence.num_draft_tokens += result.num_draft_tokens
    sequence.num_accepted_tokens += result.num_accepted_tokens
    sequence.expert_load = _sum(sequence.expert_load, result.expert_load)
    for position, entry in result.prompt_logprobs or ():
        if position == len(sequence.prompt_logprobs):  # a chunk that is computed again brings nothing new
            sequence.prompt_logprobs.append(entry)
    if result.embedding is not None and isinstance(part, Chunk):
        _pool(sequence, result.embedding, part, now)
    for index, token in enumerate(result.token_ids):
        if sequence.finished:  # a stop string may end it before the device knew
            break
        if token == NO_TOKEN:
            raise ValueError(NO_TOKEN_MESSAGE)
        _append(sequence, token, None if result.logprobs is None else result.logprobs[index], now)


def _sum(load: ExpertLoad | None, more: ExpertLoad | None) -> ExpertLoad | None:
    """Add up into a new object: a view in another thread may have the old one."""
    return more if load is None or more is None else load + more


def _append(sequence: Sequence, token: int, logprob: TokenLogprob | None, now: float) -> None:
    """Append the next token, and end if it, a stop string, the grammar or the length says so."""
    sequence.last_token_time = now
    if sequence.first_token_time is None:
        sequence.first_token_time = now
    sequence.token_ids.append(token)
    if logprob is not None:
        sequence.logprobs.append(logprob)
        sequence.cumulative_logprob += logprob.logprob
    reason, stops = _reason_to_end(sequence, token), token in sequence.request.stop_token_ids
    if stops and token not in sequence.request.eos_ids:
        sequence.stop_reason = special_stops(sequence.request.sampling, sequence.request.tokenizer).get(token, token)
    if sequence.detokenizer is not None:
        silent = stops and not sequence.request.sampling.include_stop_str_in_output
        text = "" if silent else sequence.detokenizer.push(token)
        stop = _add_text(sequence, text if reason is None else text + sequence.detokenizer.flush())
        if stop is not None:
            reason, sequence.stop_reason = FinishReason.STOP, stop
    sequence.finish_reason = reason


def _reason_to_end(sequence: Sequence, token: int) -> FinishReason | None:
    """Return why the sequence ends with this token, stop strings aside; None if it goes on.

    Raises ValueError if the grammar forbids the token.
    """
    if token in sequence.request.stop_token_ids:
        return FinishReason.STOP
    if sequence.matcher is not None:
        sequence.matcher.accept_token(token)
        if sequence.matcher.finished:
            return FinishReason.STOP
    return FinishReason.LENGTH if len(sequence.token_ids) >= sequence.max_length else None


def _add_text(sequence: Sequence, text: str) -> str | None:
    """Let the text grow, up to a stop string, or its end if it is kept; returns the string, None if there is none."""
    params, before = sequence.request.sampling, len(sequence.text)
    sequence.text += text
    if not params.stop:
        return None
    if len(sequence.token_ids) - sequence.num_prompt_tokens < params.min_tokens:
        sequence.stop_start = len(sequence.text)
        return None
    # A stop string may have begun before.
    start = max(sequence.stop_start, before - max(map(len, params.stop)))
    places = [(at, stop) for stop in params.stop if (at := sequence.text.find(stop, start)) >= 0]
    if not places:
        return None
    at, stop = min(places, key=operator.itemgetter(0))
    sequence.text = sequence.text[: at + len(stop) * params.include_stop_str_in_output]
    return stop


def _pool(sequence: Sequence, vector: np.ndarray, chunk: Chunk, now: float) -> None:
    """Join a chunk's vector with those before it; the last one ends the sequence."""
    if pooler := sequence.request.pooler:
        vector = pooler.join(sequence.embedding if chunk.start else None, vector)
        if chunk.last:
            vector = pooler.finish(vector, sequence.num_prompt_tokens)
    sequence.embedding = vector
    if chunk.last:
        sequence.last_token_time, sequence.finish_reason = now, FinishReason.STOP

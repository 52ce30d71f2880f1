"""Reads the results of programs into the plain values of a `StepOutput`."""

from collections.abc import Sequence as Ordered
from typing import Any

import jax
import numpy as np

from jaxinfer.generation.engine.batch import NOTHING, Batch, Chunk, SequenceOutput
from jaxinfer.generation.engine.request import Sequence
from jaxinfer.generation.execution.programs.expert_load import ExpertCounts
from jaxinfer.generation.execution.programs.prefill import PrefillOutput
from jaxinfer.generation.execution.programs.verification import DecodeOutput
from jaxinfer.generation.outputs import ExpertLoad, TokenLogprob
from jaxinfer.generation.params import SamplingParams
from jaxinfer.generation.sampling.logprobs import Logprobs


def split_lanes[T: PrefillOutput | DecodeOutput](output: T, lanes: int, stages: int = 1) -> list[T]:
    """Divide results on the host, which have each lane's one after the other.

    stages: of a pipeline, whose last stage's results count; they come last.
    """
    if lanes * stages == 1:
        return [output]
    parts = jax.tree.map(lambda x: np.split(x, lanes * stages)[-lanes:], output)
    return [jax.tree.map(lambda _, split, lane=lane: split[lane], output, parts) for lane in range(lanes)]


def only_asked[T: PrefillOutput | DecodeOutput](batch: Batch, output: T) -> T:
    """Drop the results that no sequence of the batch has asked for: they stay on the device."""
    params = [sequence.request.params for sequence in batch.sequences]
    sampling = [p for p in params if isinstance(p, SamplingParams)]
    asked: dict[str, object] = {
        "logprobs": [p for p in sampling if p.logprobs is not None],
        "prompt_logprobs": [p for p in sampling if p.prompt_logprobs is not None],
        "pooled": len(sampling) < len(params),
    }
    unasked: dict[str, Any] = {name: None for name in output._fields if not asked.get(name, True)}
    return output._replace(**unasked)


def read_prefill(batch: Batch, output: PrefillOutput, places: Ordered[int]) -> list[SequenceOutput]:
    """Read the results of `prefill` for each of `Batch.parts`. places: of the rows in the results."""
    tokens, produced = output.tokens.tolist(), output.produced.tolist()
    plain = output.logprobs is output.experts is output.prompt_logprobs is output.pooled is None
    results = [
        NOTHING if plain and not chunk.last else _read_chunk(chunk, output, index, tokens[index])
        for index, chunk in enumerate(batch.chunks)
    ]
    if plain:  # nearly always
        results += [SequenceOutput([tokens[index]] if produced[index] else ()) for index in places]
        return results
    for index, row in zip(places, batch.rows, strict=True):
        new, at = ([tokens[index]], [(index,)]) if produced[index] else ([], [])
        logprobs = None if output.logprobs is None else _logprobs(row.sequence, output.logprobs, at, new)
        load = None if output.experts is None else _expert_load(output.experts, index)
        results.append(SequenceOutput(new, logprobs, expert_load=load))
    return results


def _read_chunk(chunk: Chunk, output: PrefillOutput, index: int, token: int) -> SequenceOutput:
    request = chunk.sequence.request
    load = None if output.experts is None else _expert_load(output.experts, index)
    if request.pooling:
        return SequenceOutput(embedding=np.asarray(output.pooled[index]), expert_load=load)
    new, places = ([token], [(index,)]) if chunk.chooses else ([], [])
    top = request.sampling.prompt_logprobs
    return SequenceOutput(
        new,
        _logprobs(chunk.sequence, output.logprobs, places, new),
        None if top is None else _prompt_logprobs(chunk, output.prompt_logprobs, index, top),
        expert_load=load,
    )


def _expert_load(experts: ExpertCounts, index: int) -> ExpertLoad:
    """The counts of one row."""
    tokens, dropped = (np.asarray(x[index], np.int64) for x in experts)
    return ExpertLoad(tokens=tokens, dropped=dropped)


def _prompt_logprobs(chunk: Chunk, logprobs: Logprobs, index: int, top: int) -> list[tuple[int, TokenLogprob]]:
    """Return (position, log probability) of the prompt token after each token of a chunk."""
    ids = chunk.sequence.request.prompt_token_ids
    positions = range(chunk.start + 1, min(chunk.start + chunk.count + 1, len(ids)))
    return [(at, _token_logprob(logprobs, (index, at - chunk.start - 1), ids[at], top)) for at in positions]


def read_decode(batch: Batch, output: DecodeOutput, places: Ordered[int]) -> list[SequenceOutput]:
    """Read the results of `decode` for each row. places: of the rows in the results."""
    if output.logprobs is output.experts is None and not batch.num_speculative_tokens:  # nearly always
        all_tokens, counts = output.tokens.tolist(), output.produced.tolist()
        return [SequenceOutput(all_tokens[index][: counts[index]]) for index in places]
    results = []
    columns = [x.tolist() for x in (output.tokens, output.produced, output.proposed, output.accepted)]
    rows = list(zip(*columns, strict=True))
    for index, row in zip(places, batch.rows, strict=True):
        tokens, produced, proposed, accepted = rows[index]
        new, logprobs = tokens[:produced], None
        if output.logprobs is not None:
            logprobs = _logprobs(row.sequence, output.logprobs, [(index, at) for at in range(produced)], new)
        load = None if output.experts is None else _expert_load(output.experts, index)
        results.append(SequenceOutput(new, logprobs, None, None, proposed, accepted, load))
    return results


def _logprobs(
    sequence: Sequence, logprobs: Logprobs, places: list[tuple[int, ...]], tokens: list[int]
) -> list[TokenLogprob] | None:
    """The log probabilities of new tokens, at these places of the results; None if not asked for."""
    top = sequence.request.sampling.logprobs
    if top is None:
        return None
    return [_token_logprob(logprobs, at, token, top) for at, token in zip(places, tokens, strict=True)]


def _token_logprob(logprobs: Logprobs, at: tuple[int, ...], token: int, count: int) -> TokenLogprob:
    top = zip(logprobs.top_ids[at][:count], logprobs.top[at][:count], strict=True)
    return TokenLogprob(token, float(logprobs.chosen[at]), {int(i): float(p) for i, p in top if i >= 0})

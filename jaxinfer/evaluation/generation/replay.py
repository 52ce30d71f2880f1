"""Replays a load on an engine of this process: each request is added when it is due, and the engine steps."""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Sequence

from jaxinfer.compiled import Clock
from jaxinfer.evaluation.serving.client import RequestRecord
from jaxinfer.generation.engine.engine import Engine
from jaxinfer.generation.engine.request import Request
from jaxinfer.generation.engine.request import Sequence as TokenSequence
from jaxinfer.generation.params import SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenRequest:
    """A request of a load.

    Attributes:
      arrival: seconds from the start.
      prompt: its tokens.
      output_tokens: tokens to generate.
    """

    arrival: float
    prompt: list[int]
    output_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replayed:
    """The course of a load.

    Attributes:
      records: of the requests, in the order of their arrivals.
      preemptions: how often a request gave its pages to another.
      cached_tokens: tokens of prompts that were in the prefix cache.
      steps: of the engine.
    """

    records: list[RequestRecord]
    preemptions: int
    cached_tokens: int
    steps: int

    @property
    def hit_rate(self) -> float:
        """The share of the prompts' tokens that were in the prefix cache."""
        return self.cached_tokens / sum(record.prompt_tokens for record in self.records)


def replay(
    engine: Engine,
    requests: Sequence[TokenRequest],
    *,
    clock: Clock = time.perf_counter,
    wait: Callable[[float], None] = time.sleep,
) -> Replayed:
    """Run requests, each from its arrival on, however many run (open loop).

    Args:
      engine: runs nothing else meanwhile.
      requests: in the order of their arrivals.
      clock: the engine's.
      wait: lets so many seconds of this clock pass.

    Raises ValueError for a request that the engine could never run.
    """
    before = engine.stats()
    coming = deque((each, _prepared(engine, each)) for each in requests)
    records: dict[TokenSequence, RequestRecord] = {}
    lengths: dict[TokenSequence, int] = {}
    start = clock()
    while coming or lengths:
        now = clock() - start
        while coming and coming[0][0].arrival <= now:
            asked, request = coming.popleft()
            (sequence,) = request.sequences()
            records[sequence] = RequestRecord(arrival=asked.arrival, sent=now, prompt_tokens=len(asked.prompt))
            lengths[sequence] = len(asked.prompt)
            engine.add([sequence])
        if not lengths:
            wait(coming[0][0].arrival - now)
            continue
        _note(engine.step(), records, lengths, lambda: clock() - start)
    after = engine.stats()
    return Replayed(
        records=list(records.values()),
        preemptions=after.preemptions - before.preemptions,
        cached_tokens=after.cached_tokens - before.cached_tokens,
        steps=after.steps - before.steps,
    )


def _prepared(engine: Engine, asked: TokenRequest) -> Request:
    return engine.prepare(asked.prompt, SamplingParams(max_tokens=asked.output_tokens, temperature=0, ignore_eos=True))


def _note(
    advanced: list[TokenSequence],
    records: dict[TokenSequence, RequestRecord],
    lengths: dict[TokenSequence, int],
    clock: Clock,
) -> None:
    """Write a step's new tokens into the records; those that have ended leave `lengths`."""
    now = clock()
    for sequence in advanced:
        if sequence not in lengths:
            continue
        record, count = records[sequence], len(sequence.token_ids)
        if count > lengths[sequence]:
            record.events.append(now)
            lengths[sequence] = count
        if sequence.finished:
            record.output_tokens, record.ended = sequence.num_output_tokens, now
            record.error = sequence.error or ""
            del lengths[sequence]

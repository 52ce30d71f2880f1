"""The process of one engine: it loads a model, then answers timing requests, one JSON object per line.

Runs in the peers' interpreter, so it imports only the standard library. Requests on standard input:

  {"do": "prefill", "tokens": 512}            -> {"seconds": s}: from a prompt to its first new token
  {"do": "decode", "batch": 8, "context": 384, "steps": 16} -> {"seconds": s}: of one step, mean over `steps`
  {"do": "greedy", "prompt": [...], "count": 8} -> {"tokens": [...]}
  {"do": "throughput", "prompts": [[...]], "outputs": [64], "way": {...}, "limit": null} -> {"seconds": s, "tokens":
      [[...]]}: all prompts at once, greedy, each to its own number of output tokens; `way` is one of the engine's
      `ways`. A run that takes longer than `limit` seconds may be stopped, and is answered without tokens.
  {"do": "remember", "tokens": 8192} -> {}: ours alone: the engine takes a prompt for computed, so that the next decode
      does not compute it
  {"do": "trace", "folder": "...", "batch": 8, "context": 384, "steps": 16} -> {}: ours alone: a decode that the
      profiler of JAX records

Before the first request it writes {"version": "...", "ways": [...]}.
"""

import json
import os
import random
import sys
import time
from typing import Any, Protocol

VOCAB = 32_000


class Stopwatch:
    """Timer of a run, which stops one that takes too long.

    Args:
      limit: seconds, or None.
    """

    def __init__(self, limit: float | None):
        self.limit, self._start = limit, 0.0

    def start(self) -> None:
        self._start = time.perf_counter()

    def seconds(self) -> float:
        """Compute the seconds since `start`."""
        return time.perf_counter() - self._start

    def is_over(self) -> bool:
        """Check whether the limit has passed."""
        return self.limit is not None and self.seconds() > self.limit

    def check(self) -> None:
        """Check the limit. Raises TimeoutError if it has passed."""
        if self.is_over():
            raise TimeoutError


class Engine(Protocol):
    """The interface of a peer.

    `decode` may continue where the previous call with the same batch size stopped. `throughput` allocates what a way
    needs (another context, another thread pool) before it starts the watch, and returns every prompt's tokens, or
    raises TimeoutError soon after the watch's limit.

    Attributes:
      version: version of the engine's packages.
      ways: keyword arguments of `throughput` worth trying, the most promising first; each has "batch", the maximum of
        sequences running at once.
    """

    version: str
    ways: list[dict[str, Any]]

    def prefill(self, prompt: list[int]) -> float: ...

    def decode(self, prompts: list[list[int]], steps: int) -> float: ...

    def greedy(self, prompt: list[int], count: int) -> list[int]: ...

    def throughput(
        self, prompts: list[list[int]], outputs: list[int], watch: Stopwatch, *, batch: int, **way: Any
    ) -> list[list[int]]: ...


def prompts(batch: int, length: int) -> list[list[int]]:
    """Draw random prompts, the same for every engine."""
    source = random.Random(0)
    return [[source.randrange(3, VOCAB) for _ in range(length)] for _ in range(batch)]


def timed_throughput(engine: Engine, request: dict[str, Any]) -> dict[str, Any]:
    """Answer a throughput request."""
    watch = Stopwatch(request["limit"])
    try:
        tokens = engine.throughput(request["prompts"], request["outputs"], watch, **request["way"])
    except TimeoutError:
        return {"seconds": watch.seconds()}
    return {"seconds": watch.seconds(), "tokens": tokens}


def serve(load):
    """Answer requests until standard input closes; return the Engine, which `load()` creates. Prints go to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries' prints must not end up in the protocol

    def answer(**fields) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    engine = load()
    answer(version=engine.version, ways=engine.ways)
    for line in sys.stdin:
        request = json.loads(line)
        if request["do"] == "prefill":
            answer(seconds=engine.prefill(prompts(1, request["tokens"])[0]))
        elif request["do"] == "decode":
            answer(seconds=engine.decode(prompts(request["batch"], request["context"]), request["steps"]))
        elif request["do"] == "remember":
            engine.remember(prompts(1, request["tokens"])[0])
            answer()
        elif request["do"] == "trace":
            engine.trace(prompts(request["batch"], request["context"]), request["steps"], request["folder"])
            answer()
        elif request["do"] == "throughput":
            answer(**timed_throughput(engine, request))
        else:
            answer(tokens=engine.greedy(request["prompt"], request["count"]))
    return engine

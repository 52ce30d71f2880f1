"""How fast a model generates: latency of one batch at a time, throughput of many requests at once.

Both use `LLM` as a caller does, with prompts of random token ids, greedy, past the end-of-text token, so that every
length is exact. A warm-up of the same sizes compiles every program; while the figures are taken, compiling is forbidden
(`CompileMissError`), so none of them contains a compilation. No prompt is used twice, so none is found computed.
"""

import dataclasses
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxinfer.compiled.program import bucket_text
from jaxinfer.generation.llm import LLM
from jaxinfer.generation.params import SamplingParams
from jaxinfer.generation.request import Completion


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distribution:
    """What a sample of seconds looks like; percentiles interpolate linearly."""

    samples: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Distribution | None":
        """The distribution of `values`, or None if there are none."""
        if not values:
            return None
        p50, p90, p95, p99 = map(float, np.percentile(values, (50, 90, 95, 99)))
        mean = float(np.mean(values))
        return cls(samples=len(values), mean=mean, p50=p50, p90=p90, p95=p95, p99=p99, min=min(values), max=max(values))


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt and how many tokens it is to be continued by."""

    prompt_ids: list[int]
    output_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class WarmUp:
    """What ran before the figures: its wall clock, and the programs compiled in it (or read from the disk cache).

    `compile_s` adds the programs up; several compile at a time, so it can exceed `seconds`.
    """

    seconds: float
    compile_s: float
    programs: dict[str, float]  # "decode: batch=8, pages=16" -> seconds


@dataclasses.dataclass(kw_only=True)
class Latency:
    """Samples of one batch size, in seconds; they grow by a round at a time.

    Attributes:
      end_to_end_s: from the call of `LLM.generate` until it returns; one a round.
      first_token_s: from queueing until the first token is on the host; one a request.
      per_output_token_s: the rest of the request's time over its tokens after the first; one a request. One dispatch
        decodes several tokens, so this is a mean, not what passes between two tokens that a caller sees.
      inter_token_s: between two outputs of a request under `LLM.stream(max_steps=1)`, which hands over every token
        when it is made, at the price of a dispatch each; measured in rounds of its own, as it slows the others down.
    """

    batch: int
    output_tokens: int  # of a request
    end_to_end_s: list[float] = dataclasses.field(default_factory=list)
    first_token_s: list[float] = dataclasses.field(default_factory=list)
    per_output_token_s: list[float] = dataclasses.field(default_factory=list)
    inter_token_s: list[float] = dataclasses.field(default_factory=list)

    total_output_tokens: int = 0  # of the rounds that `end_to_end_s` timed

    @property
    def tokens_per_s(self) -> float:
        """Output tokens over end-to-end time."""
        return self.total_output_tokens / sum(self.end_to_end_s)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Throughput:
    """Requests that were all queued at once.

    Attributes:
      seconds: from the call until the last request is finished.
      prompt_tokens, output_tokens: of all requests.
      end_to_end_s, first_token_s: since queueing, the wait for a free slot included; one a request.
      per_output_token_s: as in `Latency`.
      timeline: (seconds since the call, output tokens so far), whenever an output grew.
    """

    seconds: float
    prompt_tokens: int
    output_tokens: int
    end_to_end_s: list[float]
    first_token_s: list[float]
    per_output_token_s: list[float]
    timeline: list[tuple[float, int]]

    @property
    def requests(self) -> int:
        return len(self.end_to_end_s)

    @property
    def requests_per_s(self) -> float:
        return self.requests / self.seconds

    @property
    def output_tokens_per_s(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def total_tokens_per_s(self) -> float:
        """Prompt and output tokens a second."""
        return (self.prompt_tokens + self.output_tokens) / self.seconds


def measure_latency(
    llm: LLM,
    batches: Sequence[int],
    *,
    prompt_tokens: int,
    output_tokens: int,
    rounds: int,
    warmup: int = 1,
    seed: int = 0,
    progress: Callable[[], None] = lambda: None,
) -> tuple[list[Latency], WarmUp]:
    """Run one batch at a time, `rounds` times for each size in `batches`, after `warmup` >= 1 rounds not counted.

    A round is a `generate` and, for the gaps between tokens, a `stream`; `progress` is called after each round.
    The LLM needs `max_batch` >= every batch. Raises ValueError, before anything runs, if the cache holds no such batch.
    """
    for batch in batches:
        _check_fits_at_once(llm, batch, prompt_tokens + output_tokens)
    rng = np.random.default_rng(seed)

    def run(batch: int, rounds: int) -> Latency:
        result = Latency(batch=batch, output_tokens=output_tokens)
        for _ in range(rounds):
            _latency_round(llm, result, *(_random(llm, rng, [prompt_tokens] * batch) for _ in range(2)))
            progress()
        return result

    start = time.perf_counter()
    for batch in batches:
        run(batch, warmup)
    warm_up = _warm_up(llm, start)
    with llm.engine.runner.programs.forbid_compile():
        return [run(batch, rounds) for batch in batches], warm_up


def measure_throughput(
    llm: LLM,
    requests: Sequence[Request],
    *,
    warmup: int = 1,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda finished, tokens: None,
) -> tuple[Throughput, WarmUp]:
    """Queue all requests at once and time until the last is finished, after `warmup` >= 1 runs not counted.

    The warm-up runs random prompts of the same lengths. Times and progress are taken from `LLM.stream` without a bound
    on its steps: the dispatches are `generate`'s, and an output is made per request and dispatch. `progress` is called
    then, with the finished requests and the output tokens so far.
    """
    rng, start = np.random.default_rng(seed), time.perf_counter()
    for _ in range(warmup):
        others = _random(llm, rng, [len(r.prompt_ids) for r in requests])
        _throughput_run(llm, [Request(p, r.output_tokens) for p, r in zip(others, requests, strict=True)])
    warm_up = _warm_up(llm, start)
    with llm.engine.runner.programs.forbid_compile():
        return _throughput_run(llm, requests, progress), warm_up


def random_prompts(rng: np.random.Generator, vocab: int, lengths: Sequence[int]) -> list[list[int]]:
    """Prompts of these lengths, their ids uniform in [0, vocab)."""
    return [rng.integers(0, vocab, length).tolist() for length in lengths]


def spread_lengths(rng: np.random.Generator, mean: int, spread: float, count: int) -> list[int]:
    """`count` lengths, uniform over the integers from mean * (1 - spread) to mean * (1 + spread), and at least 1."""
    least, most = (max(1, round(mean * share)) for share in (1 - spread, 1 + spread))
    return rng.integers(least, most, count, endpoint=True).tolist()


def machine() -> dict[str, Any]:
    """The machine, as far as speed depends on it."""
    cpu, flags = platform.processor() or platform.machine(), set()
    if (info := Path("/proc/cpuinfo")).exists():
        fields = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line)
        fields = {name.strip(): value.strip() for name, value in fields.items()}
        cpu, flags = fields.get("model name", cpu), set(fields.get("flags", "").split())
    device = jax.devices()[0]
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "features": sorted(flags & {"avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8"}),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "platform": device.platform,
        "device": device.device_kind,
        "backend": device.client.platform_version,
    }


def _check_fits_at_once(llm: LLM, batch: int, tokens: int) -> None:
    page_size, pages = llm.engine.config.page_size, llm.engine.scheduler.pages.count
    if batch * -(-tokens // page_size) > pages:
        raise ValueError(
            f"A batch of {batch} requests of {tokens} tokens does not fit in the cache of {pages} pages of {page_size} "
            "tokens at once: lower the batch or the tokens, or give the cache more memory."
        )


def _random(llm: LLM, rng: np.random.Generator, lengths: Sequence[int]) -> list[list[int]]:
    return random_prompts(rng, llm.model.config.vocab, lengths)


def _params(output_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)


def _latency_round(llm: LLM, result: Latency, prompts: list[list[int]], streamed: list[list[int]]) -> None:
    """Add one round's samples to `result`."""
    params, start = _params(result.output_tokens), time.perf_counter()
    outputs = llm.generate(prompts, params)
    result.end_to_end_s.append(time.perf_counter() - start)
    for output in outputs:
        _add_times(output.completions[0], result.first_token_s, result.per_output_token_s)
        result.total_output_tokens += len(output.completions[0].token_ids)
    result.inter_token_s += _gaps(llm, streamed, params)


def _gaps(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[float]:
    """Seconds between the outputs of each request, streamed with one token a step."""
    gaps, last = [], {}
    for output in llm.stream(prompts, params, max_steps=1):
        if not output.completions[0].token_ids:
            continue  # a part of a long prompt
        now = time.perf_counter()
        if output.request_id in last:
            gaps.append(now - last[output.request_id])
        last[output.request_id] = now
    return gaps


def _throughput_run(
    llm: LLM, requests: Sequence[Request], progress: Callable[[int, int], None] = lambda finished, tokens: None
) -> Throughput:
    done: list[Completion] = []
    timeline, counts, tokens = [], dict[str, int](), 0
    start = time.perf_counter()
    outputs = llm.stream(
        [r.prompt_ids for r in requests],
        [_params(r.output_tokens) for r in requests],
        max_steps=max(r.output_tokens for r in requests),
    )
    for output in outputs:
        completion, count = output.completions[0], len(output.completions[0].token_ids)
        tokens += count - counts.get(output.request_id, 0)
        counts[output.request_id] = count
        timeline.append((time.perf_counter() - start, tokens))
        if completion.finish_reason is not None:
            done.append(completion)
        progress(len(done), tokens)
    seconds = time.perf_counter() - start
    first_token_s, per_output_token_s = [], []
    for completion in done:
        _add_times(completion, first_token_s, per_output_token_s)
    return Throughput(
        seconds=seconds,
        prompt_tokens=sum(len(r.prompt_ids) for r in requests),
        output_tokens=tokens,
        end_to_end_s=[completion.timings.total_s for completion in done],
        first_token_s=first_token_s,
        per_output_token_s=per_output_token_s,
        timeline=timeline,
    )


def _add_times(completion: Completion, first_token_s: list[float], per_output_token_s: list[float]) -> None:
    timings, rest = completion.timings, len(completion.token_ids) - 1
    assert timings.first_token_s is not None, "the completion is finished"
    first_token_s.append(timings.first_token_s)
    if rest:
        per_output_token_s.append((timings.total_s - timings.first_token_s) / rest)


def _warm_up(llm: LLM, start: float) -> WarmUp:
    programs = llm.engine.runner.programs
    seconds = {f"{p.name}: {bucket_text(p.bucket)}": p.cost.compile_seconds for p in programs}
    return WarmUp(seconds=time.perf_counter() - start, compile_s=sum(seconds.values()), programs=seconds)

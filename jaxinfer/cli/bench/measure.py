"""Measurement of how fast a model generates: latency of one batch at a time, throughput of many requests at once.

Both use `LLM` as a caller does, with random prompts and greedy decoding that ignores the end-of-text token, so that
every length is exact. A warm-up of the same sizes compiles every program; compiling during the measurement is an error
(`CompileMissError`), so no figure includes it. No prompt is used twice, so none is found in the prefix cache.
"""

import time
from collections.abc import Callable, Sequence

import numpy as np

from jaxinfer.cli.bench.results import LatencyResult, Throughput, WarmUp
from jaxinfer.cli.bench.workload import BenchRequest, random_prompts
from jaxinfer.compiled.program import bucket_text
from jaxinfer.generation import LLM, CompletionOutput, SamplingParams
from jaxinfer.generation.engine.config import EngineConfig


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
) -> tuple[list[LatencyResult], WarmUp]:
    """Run one batch at a time, `rounds` times for each size in `batches`, after `warmup` >= 1 unmeasured rounds.

    A round is a `generate` and, for the inter-token latency, a `stream`; `progress` is called after each round.
    The LLM needs `max_batch` >= every batch. Raises ValueError, before anything runs, if a batch exceeds the cache.
    """
    for batch in batches:
        _check_fits_at_once(llm, batch, prompt_tokens + output_tokens)
    rng = np.random.default_rng(seed)

    def run(batch: int, rounds: int) -> LatencyResult:
        result = LatencyResult(batch=batch, output_tokens=output_tokens)
        for _ in range(rounds):
            _run_latency_round(llm, result, *(_random(llm, rng, [prompt_tokens] * batch) for _ in range(2)))
            progress()
        return result

    start = time.perf_counter()
    for batch in batches:
        run(batch, warmup)
    warm_up = _warm_up(llm, start)
    with llm.engine.executor.programs.forbid_compile():
        return [run(batch, rounds) for batch in batches], warm_up


def measure_throughput(
    llm: LLM,
    requests: Sequence[BenchRequest],
    *,
    warmup: int = 1,
    seed: int = 0,
    progress: Callable[[int, int], None] = lambda finished, tokens: None,
) -> tuple[Throughput, WarmUp]:
    """Queue all requests at once and time until the last is finished, after `warmup` >= 1 unmeasured runs.

    The warm-up runs random prompts of the same lengths. Times and progress come from `LLM.stream` without a limit on
    its passes: it dispatches the same programs as `generate`, and yields an output per request and dispatch. `progress`
    is called for each output, with the number of finished requests and the output tokens so far.
    """
    rng, start = np.random.default_rng(seed), time.perf_counter()
    for _ in range(warmup):
        others = _random(llm, rng, [len(r.prompt_token_ids) for r in requests])
        _run_throughput(llm, [BenchRequest(p, r.output_tokens) for p, r in zip(others, requests, strict=True)])
    warm_up = _warm_up(llm, start)
    with llm.engine.executor.programs.forbid_compile():
        return _run_throughput(llm, requests, progress), warm_up


def _check_fits_at_once(llm: LLM, batch: int, tokens: int) -> None:
    config, pages = llm.engine.config, llm.memory.num_pages
    assert isinstance(config, EngineConfig)
    page_size = config.page_size
    if batch * -(-tokens // page_size) > pages:
        raise ValueError(
            f"A batch of {batch} requests of {tokens} tokens does not fit in the cache of {pages} pages of {page_size} "
            "tokens: lower the batch or the tokens, or give the cache more memory."
        )


def _random(llm: LLM, rng: np.random.Generator, lengths: Sequence[int]) -> list[list[int]]:
    return random_prompts(rng, llm.model.transformer.vocab, lengths)


def _params(output_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)


def _run_latency_round(llm: LLM, result: LatencyResult, prompts: list[list[int]], streamed: list[list[int]]) -> None:
    """Append one round's samples to `result`."""
    params, start = _params(result.output_tokens), time.perf_counter()
    outputs = llm.generate(prompts, params)
    result.end_to_end_s.append(time.perf_counter() - start)
    for output in outputs:
        _add_times(output.outputs[0], result.first_token_s, result.per_output_token_s)
        result.total_output_tokens += len(output.outputs[0].token_ids)
    result.inter_token_s += _inter_token_gaps(llm, streamed, params)


def _inter_token_gaps(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> list[float]:
    """Return the seconds between the outputs of each request, streamed one pass per step."""
    gaps, last = [], {}
    for output in llm.stream(prompts, params, max_passes=1):
        if not output.outputs[0].token_ids:
            continue  # a chunk of a long prompt
        now = time.perf_counter()
        if output.request_id in last:
            gaps.append(now - last[output.request_id])
        last[output.request_id] = now
    return gaps


def _run_throughput(
    llm: LLM, requests: Sequence[BenchRequest], progress: Callable[[int, int], None] = lambda finished, tokens: None
) -> Throughput:
    done: list[CompletionOutput] = []
    timeline, counts, tokens = [], dict[str, int](), 0
    before = llm.stats().pipeline
    start = time.perf_counter()
    outputs = llm.stream(
        [r.prompt_token_ids for r in requests],
        [_params(r.output_tokens) for r in requests],
        max_passes=max(r.output_tokens for r in requests),
    )
    for output in outputs:
        completion, count = output.outputs[0], len(output.outputs[0].token_ids)
        tokens += count - counts.get(output.request_id, 0)
        counts[output.request_id] = count
        timeline.append((time.perf_counter() - start, tokens))
        if completion.finish_reason is not None:
            done.append(completion)
        progress(len(done), tokens)
    seconds = time.perf_counter() - start
    after = llm.stats().pipeline
    first_token_s, per_output_token_s = [], []
    for completion in done:
        _add_times(completion, first_token_s, per_output_token_s)
    return Throughput(
        seconds=seconds,
        prompt_tokens=sum(len(r.prompt_token_ids) for r in requests),
        output_tokens=tokens,
        end_to_end_s=[completion.timings.total_s for completion in done],
        first_token_s=first_token_s,
        per_output_token_s=per_output_token_s,
        timeline=timeline,
        idle_share=None if after is None or before is None else (after - before).idle_share,
    )


def _add_times(completion: CompletionOutput, first_token_s: list[float], per_output_token_s: list[float]) -> None:
    timings, rest = completion.timings, len(completion.token_ids) - 1
    assert timings.first_token_s is not None, "the completion is finished"
    first_token_s.append(timings.first_token_s)
    if rest:
        per_output_token_s.append((timings.total_s - timings.first_token_s) / rest)


def _warm_up(llm: LLM, start: float) -> WarmUp:
    programs = llm.engine.executor.programs
    seconds = {f"{p.name}: {bucket_text(p.bucket)}": p.compile_seconds for p in programs}
    return WarmUp(seconds=time.perf_counter() - start, compile_s=sum(seconds.values()), programs=seconds)

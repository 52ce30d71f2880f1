"""Programs missing after compiling ahead, for requests that arrive while others run, some of them aborted."""

import itertools
import random
import time

from benchmarks.engine.settings import Settings
from benchmarks.report import Report
from jaxinfer import LLM, FinishReason, SamplingParams

REQUESTS = 200


def random_requests(llm: LLM, count: int) -> list[tuple[list[int], SamplingParams]]:
    """Draw requests of every length and kind that this engine supports."""
    source = random.Random(0)
    requests = []
    for index in range(count):
        length = source.randint(1, llm.engine.config.context - 1)
        params = SamplingParams(
            temperature=source.choice((0.0, 0.7, 1.0)),
            top_k=source.choice((0, 20)),
            top_p=source.choice((1.0, 0.9)),
            repetition_penalty=source.choice((1.0, 1.1)),
            logprobs=source.choice((None, 3)),
            prompt_logprobs=source.choice((None, None, 1)),
            max_tokens=source.randint(1, 48),
            seed=index,
        )
        requests.append(([source.randrange(3, llm.model.transformer.vocab) for _ in range(length)], params))
    return requests


def compile_misses(report: Report, settings: Settings) -> None:
    llm = LLM(settings.demo)
    start = time.perf_counter()
    llm.engine.compile_ahead()
    report.row(figure="compiling ahead", seconds=round(time.perf_counter() - start, 1))
    engine, programs = llm.engine, llm.engine.executor.programs
    before, source = programs.misses, random.Random(1)
    requests = [engine.prepare(*request).sequences() for request in random_requests(llm, REQUESTS)]
    waiting = iter(requests)
    while not all(sequence.finished for request in requests for sequence in request):
        for request in itertools.islice(waiting, source.choice((0, 0, 1, 3))):
            engine.add(request)
        if source.random() < 0.01:
            engine.abort(source.choice(requests)[0].request_id)
        engine.step()
    if failed := sum(request[0].finish_reason == FinishReason.ERROR for request in requests):
        raise SystemExit(f"{failed} of {len(requests)} requests ended with an error.")
    report.check("compile_misses", programs.misses - before, "programs", target=0, better="lower")

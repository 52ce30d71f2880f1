"""Time to first token with most of the prompt in the prefix cache, against a prompt of which nothing is cached."""

import random
import statistics
import time

from benchmarks.engine.settings import Settings
from benchmarks.peers.worker import VOCAB
from benchmarks.report import Report
from jaxinfer import LLM, SamplingParams

SHARED, OWN = 512, 16  # tokens of a prompt that two requests share, and tokens that differ


def prefix(report: Report, settings: Settings) -> None:
    llm = LLM(settings.random_model(), dtype="float32", max_batch=8, context=1024)
    source = random.Random(0)
    one_token = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)

    def draw(count: int) -> list[int]:
        return [source.randrange(3, VOCAB) for _ in range(count)]

    def first_token(prompt: list[int]) -> float:
        start = time.perf_counter()
        llm.generate([prompt], one_token)
        return time.perf_counter() - start

    pairs = []
    for _ in range(1 + (3 if settings.quick else 7)):
        shared = draw(SHARED)
        pairs.append([first_token(shared + draw(OWN)) for _ in ("miss", "hit")])
    miss, hit = (statistics.median(times) for times in zip(*pairs[1:], strict=True))  # the first pair compiles
    report.row(figure="prefix", shared=SHARED, own=OWN, miss_ms=round(1e3 * miss, 1), hit_ms=round(1e3 * hit, 1))
    report.check("prefix_hit_ttft_gain", miss / hit, "x", target=4)

"""Prompts that never come again: what it costs to keep their pages."""

import statistics
import time

from benchmarks.kv_tier.settings import HOST_KV, PAGE, Settings, Tokens
from benchmarks.report import Report
from jaxinfer import LLM, SamplingParams

REQUESTS, PROMPT, OUTPUT = 8, 64, 32


def idle(report: Report, settings: Settings) -> None:
    """Measure `host_tier_idle_overhead`: pairs of rounds without and with the tier, which take turns in being first."""
    pages = 2 * REQUESTS * (-(-(PROMPT + OUTPUT) // PAGE))
    engines = {"device alone": settings.engine(pages), "host tier": settings.engine(pages, host_kv=HOST_KV)}
    tokens = {name: Tokens(llm) for name, llm in engines.items()}
    for name, llm in engines.items():
        for _ in range(4):
            tokens_per_second(llm, tokens[name])
    before = {name: llm.stats() for name, llm in engines.items()}
    ratios, speeds = [], {name: [] for name in engines}
    for index in range(2 if settings.quick else 20):
        for name in sorted(engines, reverse=bool(index % 2)):
            speeds[name].append(tokens_per_second(engines[name], tokens[name]))
        ratios.append(speeds["host tier"][-1] / speeds["device alone"][-1])
    stats = {name: llm.stats() for name, llm in engines.items()}
    kept = stats["host tier"].host_kv
    assert kept is not None
    misses = sum(stats[name].compile_misses - before[name].compile_misses for name in engines)
    report.row(
        figure="idle",
        tokens_per_second={name: round(statistics.median(values), 1) for name, values in speeds.items()},
        ratios=[round(ratio, 4) for ratio in ratios],
        stored=kept.stored,
        read_back=kept.read_back,
        compile_misses=misses,
    )
    invalid = "" if kept.stored and not kept.read_back and not misses else "nothing was stored, or some was read back"
    overhead = 1 - statistics.median(ratios)
    report.check("host_tier_idle_overhead", overhead, "", target=0.02, better="lower", invalid=invalid)
    for llm in engines.values():
        llm.close()


def tokens_per_second(llm: LLM, tokens: Tokens) -> float:
    """Run a round of new prompts."""
    prompts = [tokens.draw(PROMPT) for _ in range(REQUESTS)]
    start = time.perf_counter()
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True))
    return REQUESTS * (PROMPT + OUTPUT) / (time.perf_counter() - start)

"""A sequence that gave way: from when there is room again to its next token, restored and computed again."""

import dataclasses
import statistics
import time
from typing import NamedTuple

from benchmarks.kv_tier.settings import HOST_KV, PAGE, Settings, Tokens
from benchmarks.report import Report
from jaxinfer import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
FIRST = dataclasses.replace(GREEDY, priority=-1)


def resume(report: Report, settings: Settings) -> None:
    """Measure `resume_gain`: pairs of a restored and a computed resumption, which take turns in being first."""
    llm = settings.engine(settings.tokens // PAGE + 13, host_kv=HOST_KV, max_batch=2)
    tokens = Tokens(llm)
    prompt = tokens.draw(settings.tokens)
    (wanted,) = llm.generate([prompt], GREEDY)
    times: dict[str, list[float]] = {"restored": [], "computed": []}
    equal, misses = True, llm.stats().compile_misses
    read_back: list[int] = []
    for index in range(2 if settings.quick else 4):
        for way in sorted(times, reverse=bool(index % 2)):
            done = resumption(llm, prompt, tokens, restores=way == "restored")
            times[way].append(done.seconds)
            if way == "restored":
                read_back.append(done.read_back_bytes)
            equal &= done.token_ids == list(wanted.outputs[0].token_ids[: len(done.token_ids)])
    restored, computed = (statistics.median(times[way]) for way in ("restored", "computed"))
    misses = llm.stats().compile_misses - misses
    row = {"tokens": settings.tokens, "read_back_bytes": read_back, "compile_misses": misses, "equal": equal}
    report.row(figure="resume", restored_ms=_ms(times["restored"]), computed_ms=_ms(times["computed"]), **row)
    invalid = "" if all(read_back) and not misses else "nothing was read back, or a program was compiled"
    report.check("resume_gain", computed / restored, "x", target=10, invalid=invalid)
    report.check("resume_tokens_equal", int(equal), "", target=1, invalid=invalid)
    llm.close()


class Resumption(NamedTuple):
    """How a sequence went on that gave way.

    Attributes:
      seconds: to its next token, from when there was room again.
      read_back_bytes: bytes that came from the host meanwhile.
      token_ids: its tokens after the prompt.
    """

    seconds: float
    read_back_bytes: int
    token_ids: list[int]


def resumption(llm: LLM, prompt: list[int], tokens: Tokens, *, restores: bool) -> Resumption:
    """Have a sequence give way, and measure its next token once those before it have ended.

    Its pages have been overwritten meanwhile: another prompt of its length has taken them.
    """
    engine, scheduler = llm.engine, llm.engine.scheduler
    (grows,) = engine.prepare(tokens.draw(7 * PAGE), FIRST).sequences()
    (victim,) = engine.prepare(prompt, GREEDY).sequences()
    engine.add([grows])
    engine.add([victim])
    before = llm.stats().preemptions
    while llm.stats().preemptions == before:
        engine.step()
    others = tokens.draw(len(prompt) + PAGE), dataclasses.replace(FIRST, max_tokens=20)
    (other,) = engine.prepare(*others).sequences()
    engine.add([other])
    (pool,) = scheduler.pools
    while not other.finished:
        engine.step()
    if left := pool.count_cached_tokens(("root", None), prompt):
        raise SystemExit(f"{left} tokens of the sequence are on the device still, and were not overwritten.")
    engine.abort(grows.request_id)
    engine.drain()
    assert engine.page_tier is not None
    if not restores:
        engine.page_tier.free_memory()
    before = _read_back(llm)
    known, start = len(victim.token_ids), time.perf_counter()
    while len(victim.token_ids) == known:
        engine.step()
    seconds = time.perf_counter() - start
    engine.abort(victim.request_id)
    engine.drain()
    return Resumption(seconds, _read_back(llm) - before, list(victim.token_ids[len(prompt) :]))


def _read_back(llm: LLM) -> int:
    kept = llm.stats().host_kv
    assert kept is not None
    return kept.read_back_bytes


def _ms(times: list[float]) -> list[float]:
    return [round(1e3 * seconds, 1) for seconds in times]

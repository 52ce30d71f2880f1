"""Sessions that take turns, of which the device has room for a few: the first token of later turns."""

import statistics

from benchmarks.kv_tier.settings import HOST_KV, PAGE, Settings, Tokens
from benchmarks.report import Report
from jaxinfer import LLM, SamplingParams

TURNS = 5
QUESTION, ANSWER = 48, 16


def chat(report: Report, settings: Settings) -> None:
    """Measure `host_tier_ttft_gain`: the mean of turns 2 to 5, without and with the tier."""
    sessions, room = (6, 2) if settings.quick else (16, 4)
    means = {}
    read_back = misses = 0
    for way, options in (("host tier", {"host_kv": HOST_KV}), ("device alone", {})):
        llm = settings.engine(room * -(-settings.tokens // PAGE) + 4, max_batch=1, **options)
        before = llm.stats().compile_misses
        turns = run(llm, sessions, settings.tokens)
        stats = llm.stats()
        misses += stats.compile_misses - before
        kept = stats.host_kv
        if kept is not None:
            read_back = kept.read_back_bytes
        means[way] = statistics.mean(seconds for turn in turns[1:] for seconds in turn)
        report.row(
            figure="chat",
            engine=way,
            first_token_ms=[round(1e3 * statistics.mean(turn), 1) for turn in turns],
            cached_share=round(stats.cache_hit_rate, 3),
            host_kv=str(kept),
        )
        llm.close()
    invalid = "" if read_back and not misses else "nothing was read back, or a program was compiled"
    report.check("host_tier_ttft_gain", means["device alone"] / means["host tier"], "x", target=5, invalid=invalid)


def run(llm: LLM, sessions: int, tokens: int) -> list[list[float]]:
    """Run all sessions in turn; return the seconds to the first token of each, by turn."""
    draws, params = Tokens(llm), SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True)
    start = tokens - TURNS * (QUESTION + ANSWER)
    histories = [draws.draw(max(start, PAGE)) for _ in range(sessions)]
    turns = []
    for _ in range(TURNS):
        times = []
        for history in histories:
            history += draws.draw(QUESTION)
            (output,) = llm.generate([history], params)
            history += output.outputs[0].token_ids
            first = output.outputs[0].timings.first_token_s
            assert first is not None
            times.append(first)
        turns.append(times)
    return turns

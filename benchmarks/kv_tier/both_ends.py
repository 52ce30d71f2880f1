"""A prompt whose pages come slowly: its first token, with all pages copied, all computed, and from both ends."""

import statistics
import time
from typing import Any

from benchmarks.kv_tier.settings import HOST_KV, PAGE, Settings, Tokens
from benchmarks.report import Report
from jaxinfer import LLM, SamplingParams
from jaxinfer.generation.engine.host_pages import READ_PAGE, HostPages
from jaxinfer.generation.engine.restoring import TRIES
from jaxinfer.generation.engine.scheduler import DecoderScheduler

PARAMS = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
RATIOS = (0.25, 1.0, 4.0)
"""Seconds of copying all pages, over those of computing them."""
WAYS = ("copied", "computed", "both ends")


def both_ends(report: Report, settings: Settings) -> None:
    """Measure `both_ends_vs_best`: rounds of the three ways, for copies that are slowed to each of `RATIOS`."""
    tokens = settings.tokens // 2
    llm = settings.engine(tokens // PAGE + 4, host_kv=HOST_KV, max_batch=1)
    slowed, draws = Slowed(llm), Tokens(llm)
    prompt = draws.draw(tokens)
    wanted, _ = slowed.run(prompt, "computed")
    for _ in range(2):  # others' pages take the place of the prompt's
        slowed.run(draws.draw(tokens), "computed", keeps=True)
    for way in WAYS[:2] * (TRIES + 2):  # so that the record knows the costs
        slowed.run(prompt, way)
    misses, gains = llm.stats().compile_misses, []
    for ratio in RATIOS:
        computed = statistics.median(slowed.run(prompt, "computed")[1] for _ in range(3))
        slowed.slow_down(ratio * computed / (tokens // PAGE))
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        before, equal = slowed.stats, True
        for index in range(2 if settings.quick else 4):
            for way in WAYS[:: -1 if index % 2 else 1]:
                found, seconds = slowed.run(prompt, way)
                times[way].append(seconds)
                equal &= found == wanted
        medians = {way: statistics.median(of_way) for way, of_way in times.items()}
        gains.append(min(medians["copied"], medians["computed"]) / medians["both ends"] if equal else 0.0)
        from_back = slowed.stats.from_back - before.from_back
        in_ms = {way: [round(1e3 * seconds, 1) for seconds in of_way] for way, of_way in times.items()}
        row = {"ratio": ratio, "from_back": from_back, "equal": equal, "gain": round(gains[-1], 3)}
        report.row(figure="both_ends", ms=in_ms, **row)
    misses = llm.stats().compile_misses - misses
    invalid = "" if slowed.stats.from_back and not misses else "no page came from the back, or a program was compiled"
    report.check("both_ends_vs_best", min(gains), "x", target=0.95, invalid=invalid)
    slowed.slow_down(0.0)
    llm.close()


class Slowed:
    """An engine whose copies from the host can be slowed, and which can be told the way that pages come back."""

    def __init__(self, llm: LLM):
        tier, scheduler = llm.engine.page_tier, llm.engine.scheduler
        assert isinstance(tier, HostPages)
        assert isinstance(scheduler, DecoderScheduler)
        restoring = scheduler.allocator.restoring
        assert restoring is not None
        self._llm, self._restoring = llm, restoring
        self._read, self._split, self._page_seconds = tier._read, restoring._split, 0.0
        vars(tier)["_read"] = self._read_slowly

    def _read_slowly(self, *arguments: Any) -> Any:
        start = time.perf_counter()
        loaded = self._read(*arguments)
        if self._page_seconds:
            time.sleep(max(0.0, loaded.num_pages * self._page_seconds - (time.perf_counter() - start)))
            self._note()  # what was recorded is the copy alone
        return loaded

    def slow_down(self, seconds: float) -> None:
        """Have each page take so long, also in the record of costs."""
        self._page_seconds = seconds
        self._note()

    def _note(self) -> None:
        self._llm.engine.executor.costs.replace(READ_PAGE, (), [self._page_seconds] * TRIES)

    @property
    def stats(self) -> Any:
        """The tier's work so far."""
        return self._llm.stats().host_kv

    def run(self, prompt: list[int], way: str, *, keeps: bool = False) -> tuple[list[int], float]:
        """Run a prompt that is not on the devices; return its token, and the seconds to it.

        keeps: whether the pages that others have left on the devices give way in turn.
        """
        (pool,) = self._llm.engine.scheduler.pools
        if not keeps:
            pool.clear()
        ways = {"copied": lambda *_: (0, 0.0), "computed": lambda keys, _: (len(keys), 0.0), "both ends": self._split}
        vars(self._restoring)["_split"] = ways[way]
        (output,) = self._llm.generate([prompt], PARAMS)
        self._llm.engine.drain()
        seconds = output.outputs[0].timings.first_token_s
        assert seconds is not None
        return list(output.outputs[0].token_ids), seconds

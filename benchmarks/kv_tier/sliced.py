"""A model streamed from disk whose device has pages for a few rows: four times as many, in slices over host memory."""

import time

from benchmarks.kv_tier.settings import PAGE, Settings, Tokens
from benchmarks.report import Report
from jaxinfer import LLM, SamplingParams
from jaxinfer.generation.execution.memory import FRACTION
from jaxinfer.streaming.statistics import StreamingStatistics

ROWS, TIMES = 8, 4
"""Rows that the device's pages hold, and how many times as many run with the cache on the host."""
PROMPT, OUTPUT = 32, 96
PAGES = -(-(PROMPT + OUTPUT) // PAGE)


def sliced(report: Report, settings: Settings) -> None:
    """Measure `sliced_batch_gain`: output tokens a second of the same requests, with no more memory of the device."""
    options = {"weights": "disk", "context": PROMPT + OUTPUT}
    engines = {"device pages": settings.engine(ROWS * PAGES, max_batch=ROWS, **options)}
    offload = {"max_batch": TIMES * ROWS, "kv_offload": TIMES * engines["device pages"].memory.cache}
    limit = {"device_memory": as_much(engines["device pages"]), "cache_bytes": None}
    engines["host pages"] = settings.engine(ROWS * PAGES, **offload, **limit, **options)
    before = {name: llm.stats().compile_misses for name, llm in engines.items()}
    prompts = [Tokens(engines["device pages"], seed).draw(PROMPT) for seed in range(TIMES * ROWS)]
    speeds, texts = {}, {}
    for name, llm in engines.items():
        streaming(llm).clear()
        speeds[name], texts[name] = tokens_per_second(llm, prompts)  # takes minutes: one round is enough
        report.row(
            figure="sliced",
            engine=name,
            rows=llm.engine.config.max_batch,
            tokens_per_second=round(speeds[name], 1),
            layers=str(llm.placement),
            device_bytes=sum(llm.memory.tenants.values()),
            host_kv_bytes=sum(llm.memory.host_tenants.values()),
            slice_pages=llm.memory.slice_pages,
            read_back_bytes=streaming(llm).kv_bytes,
            streaming=str(llm.streaming),
        )
    gain = speeds["host pages"] / speeds["device pages"]
    report.check("sliced_batch_gain", gain, "x", target=2, invalid=fault(engines, before, texts))
    for llm in engines.values():
        llm.close()


def as_much(llm: LLM) -> int:
    """The `device_memory` with which an engine takes no more of the device than this one.

    Of what is beside layers and other weights, a plan leaves a tenth.
    """
    tenants, used = llm.memory.tenants, llm.memory.cache + (llm.memory.workspace or 0)
    return sum(tenants.values()) - used + int(used / FRACTION)


def fault(engines: dict[str, LLM], misses: dict[str, int], texts: dict[str, list[list[int]]]) -> str:
    """Say why the measurement is not valid; nothing if it is."""
    device, host = engines["device pages"], engines["host pages"]
    if texts["device pages"] != texts["host pages"]:
        return "the tokens differ"
    if any(llm.stats().compile_misses != misses[name] for name, llm in engines.items()):
        return "a program was compiled"
    if sum(host.memory.tenants.values()) > sum(device.memory.tenants.values()):
        return "it takes more memory of the device"
    return "" if streaming(host).kv_bytes else "nothing came from the host"


def streaming(llm: LLM) -> StreamingStatistics:
    """The counters of an engine whose layers are streamed."""
    assert llm.streaming is not None
    return llm.streaming


def tokens_per_second(llm: LLM, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
    """Run all requests; return the output tokens a second, and the tokens."""
    start = time.perf_counter()
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True))
    seconds = time.perf_counter() - start
    return len(prompts) * OUTPUT / seconds, [output.outputs[0].token_ids for output in outputs]

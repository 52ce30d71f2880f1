"""The process of `AsyncLLM`, behind HTTP or bare: `run_async.py MODEL MAX_BATCH MOCK STEP_MS PORT`.

A port of 0 means bare: each line of stdin is a load, {"streams": 64, "prompt": 16, "tokens": 900}, which runs as tasks
that read deltas; its answer is a line, {"events": ..., "seconds": ...}. MOCK says what a clock of STEP_MS replaces:
"device", "engine" or "nothing". At SIGTERM the process prints the mean milliseconds of a step of a mock device with all
rows, {"step_ms": ...}.
"""

import asyncio
import itertools
import json
import signal
import statistics
import sys
import time
from pathlib import Path

from benchmarks.serving.load import MODEL, Load, prompt_of
from benchmarks.serving.mock_engine import ClockedDecoder, with_mock_device, with_mock_engine
from jaxinfer import AsyncLLM, SamplingParams


async def read(llm: AsyncLLM, index: int, prompt: int, tokens: int) -> int:
    """Read a request's deltas; return how many there were."""
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    return sum([1 async for _ in llm.generate(prompt_of(index, prompt), params).deltas()])


async def run_load(llm: AsyncLLM, load: Load) -> dict[str, float]:
    """Run requests at once; return how many deltas came in how many seconds."""
    start = time.perf_counter()
    events = await asyncio.gather(*(read(llm, index, load.prompt, load.tokens) for index in range(load.streams)))
    return {"events": sum(events), "seconds": time.perf_counter() - start}


async def run_bare(llm: AsyncLLM) -> None:
    """Run the loads of stdin, in one event loop as a server does."""
    print("{}", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await run_load(llm, Load(**json.loads(line)))), flush=True)


def step_ms(device: ClockedDecoder | None, rows: int) -> float | None:
    """The mean time between the starts of steps that decode all rows."""
    begun = device.begun if device else []
    periods = [1e3 * (next - first) for (n, first), (m, next) in itertools.pairwise(begun) if n == m == rows]
    return statistics.mean(periods) if periods else None


def main(model: Path, max_batch: int, mock: str, step: float, port: int) -> None:
    device = None
    if mock == "device":
        llm, device = with_mock_device(model, step_s=step / 1e3, max_batch=max_batch)
    elif mock == "engine":
        llm = with_mock_engine(model, step_s=step / 1e3, max_batch=max_batch)
    else:
        llm = AsyncLLM(model, max_batch=max_batch, compile_ahead=True, progress=False)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        if port:
            import uvicorn

            from jaxinfer import http
            from jaxinfer.http.process import freeze, short_turns

            freeze()
            with short_turns():
                uvicorn.run(http.app(llm, name=MODEL), port=port, log_level="warning")
        else:
            asyncio.run(run_bare(llm))
    finally:
        print(json.dumps({"step_ms": step_ms(device, max_batch)}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], float(sys.argv[4]), int(sys.argv[5]))

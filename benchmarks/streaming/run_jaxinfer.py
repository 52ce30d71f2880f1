"""jaxinfer on a model that memory does not hold: `run_jaxinfer.py MODEL OPTIONS`, OPTIONS a JSON object.

Options: batch, prompt, passes; others go to `LLM`. Prints one JSON object: the greedy tokens of each sequence, the
seconds of each pass, the first over the prompts, what streaming was seen to take after that first pass, and the most
bytes of layers on the devices.
"""

import json
import sys
import time
from typing import Any

import jax

from benchmarks.peers.streaming_prompts import prompts
from jaxinfer import LLM, SamplingParams
from jaxinfer.models.leaves import layer_of
from jaxinfer.streaming.prefetch import Prefetcher


def main(model: str, given: dict[str, Any]) -> None:
    batch, length, passes = given.pop("batch"), given.pop("prompt"), given.pop("passes")
    sizes = {"chunk_size": length, "token_budget": batch * length} | given
    llm = LLM(model, max_batch=batch, **sizes)
    shapes = {leaf.shape for name, leaf in llm.model.shapes.items() if layer_of(name) == 0 and len(leaf.shape) > 1}
    peak, computing = 0, Prefetcher.computing

    def counting(prefetcher: Prefetcher, result: Any) -> None:
        nonlocal peak
        computing(prefetcher, result)
        there = (x.nbytes for x in jax.live_arrays() if x.shape in shapes and x.sharding.memory_kind == "device")
        peak = max(peak, sum(there))

    Prefetcher.computing = counting  # type: ignore[assignment]
    engine, ids = llm.engine, prompts(batch, length)
    engine.compile_ahead()
    params = SamplingParams(temperature=0, max_tokens=passes, ignore_eos=True)
    sequences = [sequence for prompt in ids for sequence in engine.prepare(prompt, params).sequences()]
    engine.add(sequences)
    seconds = []
    while not all(sequence.finished for sequence in sequences):
        begun = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - begun)
        if len(seconds) == 1 and llm.streaming is not None:
            llm.streaming.clear()
    statistics = llm.streaming
    assert statistics is not None
    print(
        json.dumps(
            {
                "tokens": [sequence.token_ids[length:] for sequence in sequences],
                "seconds": seconds,
                "placement": str(llm.model.placement),  # type: ignore[attr-defined]
                "bytes": dict(statistics.bytes),
                "layer_bytes": llm.model.placement.layer_bytes,  # type: ignore[attr-defined]
                "bandwidth": {tier: statistics.bandwidth(tier) for tier in statistics.bytes},
                "overlap": statistics.overlap,
                "fetch_seconds": sum(statistics.fetch_seconds.values()),
                "compute_seconds": statistics.compute_seconds,
                "reader_cpu_seconds": statistics.cpu_seconds,
                "layers": statistics.layers,
                "layer_bytes_on_device": peak,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))

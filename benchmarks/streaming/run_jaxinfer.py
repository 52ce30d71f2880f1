"""jaxinfer on a model larger than memory: `run_jaxinfer.py MODEL OPTIONS`, OPTIONS a JSON object.

Options: batch, prompt, passes, count_layers; others go to `LLM`. Prints one JSON object: the greedy tokens of each, the
seconds of each pass, the first over the prompts, streaming's statistics after that first pass, and the peak bytes of
layers on the devices.
"""

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax

from benchmarks.peers.streaming_prompts import prompts
from jaxinfer import LLM, SamplingParams
from jaxinfer.models.leaves import layer_of
from jaxinfer.streaming.prefetch import Prefetcher


def run(model: str, given: dict[str, Any]) -> dict[str, Any]:
    """Run the model and return the object that the module's docstring describes."""
    given = dict(given)
    counts = given.pop("count_layers", False)
    batch, length, passes = given.pop("batch"), given.pop("prompt"), given.pop("passes")
    sizes = {"chunk_size": length, "token_budget": batch * length} | given
    llm = LLM(model, max_batch=batch, **sizes)
    engine, ids = llm.engine, prompts(batch, length)
    engine.compile_ahead()
    params = SamplingParams(temperature=0, max_tokens=passes, ignore_eos=True)
    sequences = [sequence for prompt in ids for sequence in engine.prepare(prompt, params).sequences()]
    engine.add(sequences)
    seconds = []
    statistics = llm.streaming
    assert statistics is not None
    assert llm.placement is not None
    with _most_layers(llm) if counts else contextlib.nullcontext([0]) as most:
        while not all(sequence.finished for sequence in sequences):
            begun = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - begun)
            if len(seconds) == 1:
                statistics.clear()
    return {
        "tokens": [sequence.token_ids[length:] for sequence in sequences],
        "seconds": seconds,
        "placement": str(llm.placement),
        "bytes": dict(statistics.bytes),
        "layer_bytes": llm.placement.layer_bytes,
        "bandwidth": {tier: statistics.bandwidth(tier) for tier in statistics.bytes},
        "overlap": statistics.overlap,
        "fetch_seconds": sum(statistics.fetch_seconds.values()),
        "compute_seconds": statistics.compute_seconds,
        "reader_cpu_seconds": statistics.cpu_seconds,
        "layers": statistics.layers,
        "layer_bytes_on_device": max(most),
    }


@contextlib.contextmanager
def _most_layers(llm: LLM) -> Iterator[list[int]]:
    """Record the bytes of layers' matrices that JAX says are on the devices, while each layer is computed."""
    shapes = {leaf.shape for name, leaf in llm.model.shapes.items() if layer_of(name) == 0 and len(leaf.shape) > 1}
    counted, computing = [0], Prefetcher.computing

    def counting(prefetcher: Prefetcher, *sent: Any) -> None:
        computing(prefetcher, *sent)
        there = (x.nbytes for x in jax.live_arrays() if x.shape in shapes and x.sharding.memory_kind == "device")
        counted.append(sum(there))

    with mock.patch.object(Prefetcher, "computing", counting):
        yield counted


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1], json.loads(sys.argv[2]))))

"""The cost of layers that stay: a model so small that calls show, all on the device against all but one layer.

It also runs in a process of its own: `residents.py MODEL` prints one JSON object.
"""

import collections
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.report import Report
from benchmarks.streaming.models import write_hf
from benchmarks.streaming.settings import Settings
from benchmarks.workers import run_module
from jaxinfer import LLM, SamplingParams
from jaxinfer.generation.execution.placement import DeviceBytes
from jaxinfer.models.files.conversion import convert
from jaxinfer.models.files.loading import open_model
from jaxinfer.streaming.config import MemoryConfig

LAYERS = 32
SMALL = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 384,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 1152,
    "vocab_size": 1024,
}
"""Sizes for a pass of less than 10 ms: 7 MB a layer in float32."""
PASSES = 64
PROCESSES, ROUNDS = 7, 9
SIZES: dict[str, Any] = {"max_batch": 1, "context": 128, "token_budget": 16, "chunk_size": 16, "max_decode_passes": 1}


def residents(report: Report, settings: Settings) -> None:
    """Compare a decode pass at batch 1 with one layer from the host's memory with one of the whole model.

    The check's value is the greater of the ratios of CPU seconds and of wall seconds, each the median of processes: the
    place of the weights in a process's memory changes both models' passes by some percent.
    """
    write_hf(settings.folder / "small-hf", SMALL)
    model = settings.folder / "small"
    convert(settings.folder / "small-hf", model)
    ratios: dict[str, list[float]] = {"cpu": [], "wall": []}
    for _ in range(1 if settings.quick else PROCESSES):
        result = run_module("benchmarks.streaming.residents", str(model))
        report.row(figure="residents", **result)
        for kind, values in ratios.items():
            values.append(result[f"streamed_{kind}_ms"] / result[f"whole_{kind}_ms"])
    overhead = max(map(statistics.median, ratios.values()))
    report.check("residents_overhead", overhead, "x the whole model's pass", target=1.15, better="lower")


def measure(model: Path) -> dict[str, float]:
    """Measure milliseconds of a pass: medians of rounds in which both ways take turns, after one that warms up."""
    whole, streamed = LLM(model, **SIZES), all_but_one(model)
    times: dict[str, list[float]] = collections.defaultdict(list)
    for _ in range(1 + ROUNDS):
        tokens = []
        for name, llm in (("whole", whole), ("streamed", streamed)):
            cpu, wall, token_ids = seconds_of_pass(llm)
            times[f"{name}_cpu_ms"].append(1e3 * cpu)
            times[f"{name}_wall_ms"].append(1e3 * wall)
            tokens.append(token_ids)
        assert tokens[0] == tokens[1], "the same model gave other tokens"
    return {name: round(statistics.median(values[1:]), 3) for name, values in times.items()}


def all_but_one(model: Path) -> LLM:
    """Load the model with one layer from the host's memory, by a limit of the device's memory."""
    config = LLM(model, weights="host", **SIZES).engine.config
    memory = MemoryConfig(weights="host", device_memory=1 << 40, prefetch=1)
    needs = DeviceBytes(open_model(model), config, memory)
    limit = needs.of_streamed(LAYERS + 1, needs.cache) + needs.layer // 2  # one of them on its way
    llm = LLM(model, weights="host", device_memory=limit, prefetch=1, **SIZES)
    assert llm.placement is not None
    assert llm.placement.tiers.count("device") == LAYERS - 1
    return llm


def seconds_of_pass(llm: LLM) -> tuple[float, float, list[int]]:
    """Measure CPU and wall seconds of a decode pass, averaged over a request; return them and its tokens."""
    engine = llm.engine
    (sequence,) = engine.prepare(
        [1, 2, 3], SamplingParams(temperature=0, max_tokens=PASSES, ignore_eos=True)
    ).sequences()
    engine.executor.compile_ahead([sequence])
    engine.add([sequence])
    engine.step()  # the prompt
    cpu, wall = time.process_time(), time.perf_counter()
    while not sequence.finished:
        engine.step()
    engine.drain()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return cpu / (PASSES - 1), wall / (PASSES - 1), sequence.token_ids


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]))))

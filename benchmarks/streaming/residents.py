"""What layers that stay cost: a model so small that calls show, all on the device against all but one layer."""

import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.report import Report
from benchmarks.streaming.models import write_hf
from benchmarks.streaming.settings import Settings
from jaxinfer import LLM, SamplingParams
from jaxinfer.generation.execution.placement import DeviceBytes
from jaxinfer.models.conversion import convert
from jaxinfer.models.loading import open_model
from jaxinfer.streaming.config import MemoryConfig

LAYERS = 32
SMALL = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 640,
    "vocab_size": 1024,
}
"""A pass of few milliseconds: 2.6 MiB a layer in float32."""
PASSES = 64
ROUNDS = 15
SIZES: dict[str, Any] = {"max_batch": 1, "context": 128, "token_budget": 16, "chunk_size": 16, "max_decode_passes": 1}


def residents(report: Report, settings: Settings) -> None:
    """A decode pass at batch 1 with one layer from the host's memory, against one of the whole model.

    The check's value is the greater of the ratios of CPU seconds and of wall seconds, each of medians of rounds in
    which both take turns.
    """
    write_hf(settings.folder / "small-hf", SMALL)
    model = settings.folder / "small"
    convert(settings.folder / "small-hf", model)
    whole, streamed = LLM(model, **SIZES), all_but_one(model)
    assert streamed.placement is not None
    assert streamed.placement.tiers.count("host") == 1
    found: dict[str, list[tuple[float, float]]] = {"whole": [], "streamed": []}
    tokens = {}
    for _ in range(1 + (3 if settings.quick else ROUNDS)):
        for name, llm in (("whole", whole), ("streamed", streamed)):
            cpu, wall, tokens[name] = seconds_of_pass(llm)
            found[name].append((cpu, wall))
        assert tokens["whole"] == tokens["streamed"], "the same model gave other tokens"
    cpu, wall = ({name: median(rounds[1:], at) for name, rounds in found.items()} for at in (0, 1))
    for name in found:
        report.row(
            figure="residents", layers=name, cpu_ms=round(1e3 * cpu[name], 3), wall_ms=round(1e3 * wall[name], 3)
        )
    overhead = max(seconds["streamed"] / seconds["whole"] for seconds in (cpu, wall))
    report.check("residents_overhead", overhead, "x the whole model's pass", target=1.15, better="lower")


def all_but_one(model: Path) -> LLM:
    """One layer from the host's memory, as a limit of the device's memory asks for it."""
    config = LLM(model, weights="host", **SIZES).engine.config
    memory = MemoryConfig(weights="host", device_memory=1 << 40)
    needs = DeviceBytes(open_model(model), config, memory)
    limit = needs.of_streamed(LAYERS + 1, needs.cache) + needs.layer // 2  # one of them on its way
    llm = LLM(model, weights="host", device_memory=limit, **SIZES)
    assert llm.placement is not None
    assert llm.placement.tiers.count("device") == LAYERS - 1
    return llm


def seconds_of_pass(llm: LLM) -> tuple[float, float, list[int]]:
    """CPU and wall seconds of a decode pass, on average over a request, and its tokens."""
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


def median(rounds: list[tuple[float, float]], at: int) -> float:
    return statistics.median(one[at] for one in rounds)

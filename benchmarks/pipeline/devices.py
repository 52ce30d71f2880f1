"""Two CPU devices of a thread each as stages: tokens queued against drained; a prompt in chunks against one device.

Devices and threads are fixed when JAX starts, so that one device and two have processes of their own, which take turns.
In a tick without work a stage computes all the same, as all devices run one program.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from benchmarks.pipeline.steps import STRIDES, decode, read_prompt
from benchmarks.report import Report
from benchmarks.workers import ONE_THREAD, EngineError, run_module
from jaxinfer import LLM, MeshConfig
from jaxinfer.models import Decoder, DecoderConfig, WeightFormat
from jaxinfer.models import config as c
from jaxinfer.models.files.loading import save_model
from jaxinfer.sharding.schedules import chunk_speedup, queued_gain

STAGES, ROWS, TOKENS = 2, 4, 50
"""Two cohorts of two rows, which get 50 tokens after the first."""
CHUNKS, CHUNK = 8, 256
VOCAB = 4096
MOST_OTHERS = 0.1
"""Of the cores, that other processes may take."""
REPEATS = 2
"""How often a process measures everything, after once to compile and to warm up."""
WAYS = {
    "one device, whole": {"chunk_size": CHUNKS * CHUNK, "token_budget": CHUNKS * CHUNK},
    "one device, chunks in one step": {"chunk_size": CHUNK, "token_budget": CHUNKS * CHUNK},
    "one device, a chunk a step": {"chunk_size": CHUNK, "token_budget": CHUNK},
}
"""How one device reads the prompt; in one step all chunks go through each layer together."""
PIPELINE = "two devices, chunks"


def config() -> DecoderConfig:
    """A Llama of 57 M parameters, of which a tick of each stage takes several milliseconds."""
    return DecoderConfig(
        vocab=VOCAB,
        embed=768,
        layers=8,
        context=CHUNKS * CHUNK + 64,
        pattern=(
            c.LayerConfig(
                mixer=c.AttentionConfig(
                    q_heads=12,
                    kv_heads=4,
                    head_dim=64,
                    positions=c.PositionsConfig(kind=c.PositionKind.ROTARY, rotary_dim=64),
                ),
                mlp=c.MlpConfig(hidden=2048, activation=c.Activation.SILU, gated=True),
            ),
        ),
        norm=c.NormConfig(kind=c.NormKind.RMS),
    )


def _tokens(*shape: int) -> Any:
    return np.random.default_rng(0).integers(3, VOCAB, shape).tolist()


def measure_two(path: Path) -> dict[str, Any]:
    """Measure decoding at both strides, in turns, and a prompt in chunks; return seconds and tokens by way."""
    shared: dict[str, Any] = {"mesh": MeshConfig(pipeline=STAGES), "page_size": 64, "prefix_caching": False}
    seconds, tokens = defaultdict[str, list[float]](list), {}
    with LLM(path, max_batch=ROWS, context=128, max_decode_passes=TOKENS, **shared) as llm:
        for name, stride in list(STRIDES.items()) * (1 + REPEATS):
            steps = decode(llm, _tokens(ROWS, 8), TOKENS, stride)
            seconds[name].append(steps.seconds)
            tokens[name] = steps.tokens
    with LLM(path, max_batch=1, chunk_size=CHUNK, token_budget=CHUNKS * CHUNK, **shared) as llm:
        for _ in range(1 + REPEATS):
            steps = read_prompt(llm, _tokens(CHUNKS * CHUNK))
            seconds[PIPELINE].append(steps.seconds)
            tokens[PIPELINE] = steps.tokens
    return {"seconds": {name: values[1:] for name, values in seconds.items()}, "tokens": tokens}


def measure_alone(path: Path) -> dict[str, Any]:
    """Measure how one device of one thread reads the prompt, in every way, in turns."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    shared: dict[str, Any] = {"max_batch": 1, "page_size": 64, "prefix_caching": False}
    llms = {way: LLM(path, **options, **shared) for way, options in WAYS.items()}
    seconds, tokens = defaultdict[str, list[float]](list), {}
    for way, llm in list(llms.items()) * (1 + REPEATS):
        steps = read_prompt(llm, _tokens(CHUNKS * CHUNK))
        seconds[way].append(steps.seconds)
        tokens[way] = steps.tokens
    return {"seconds": {name: values[1:] for name, values in seconds.items()}, "tokens": tokens}


PROCESSES = {"alone": (measure_alone, 1), "two": (measure_two, STAGES)}
"""What a process measures, on how many devices."""


class Others:
    """What share of the machine's cores other processes than this one and its children take from now on."""

    def __init__(self) -> None:
        self._start = self._seconds()

    def share(self) -> float:
        """The share so far, from 0 to 1."""
        cores, busy, own = (now - then for now, then in zip(self._seconds(), self._start, strict=True))
        return max(0.0, busy - own) / cores

    @staticmethod
    def _seconds() -> tuple[float, float, float]:
        """The seconds of all cores, those that they worked in, and those that they did so for us."""
        ticks = [int(count) for count in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        idle, unit = ticks[3] + ticks[4], os.sysconf("SC_CLK_TCK")
        return sum(ticks) / unit, (sum(ticks) - idle) / unit, sum(os.times()[:4])


def measure_rounds(path: Path, rounds: int) -> dict[str, list[float]]:
    """Measure in all processes, in turns; return the seconds of all ways. Raises EngineError if tokens differ."""
    seconds = defaultdict[str, list[float]](list)
    for _ in range(rounds):
        tokens: dict[str, Any] = {}
        for name, (_, devices) in PROCESSES.items():
            count = str(devices)
            environment = ONE_THREAD | {"NPROC": count, "JAX_NUM_CPU_DEVICES": count, "JAX_PLATFORMS": "cpu"}
            environment["JAXINFER_CACHE"] = str(path.with_name("cache"))  # costs of strides that no engine has
            measured = run_module(__name__, name, str(path), **environment)
            for way, values in measured["seconds"].items():
                seconds[way] += values
            tokens |= measured["tokens"]
        if tokens["queued"] != tokens["drained"] or any(tokens[way] != tokens[PIPELINE] for way in WAYS):
            raise EngineError(f"Schedules, or devices, have chosen different tokens: {tokens}")
    return dict(seconds)


def rows_of(seconds: dict[str, list[float]]) -> list[dict[str, Any]]:
    """The row of each way: tokens per second, medians and all."""
    rows = []
    for way, values in seconds.items():
        count, figure = (ROWS * TOKENS, "decode") if way in STRIDES else (CHUNKS * CHUNK, "prompt")
        rates = [round(count / value, 2) for value in values]
        rows.append({"figure": figure, "way": way, "tokens_per_s": round(statistics.median(rates), 2), "all": rates})
    return rows


def add_checks(report: Report, rows: list[dict[str, Any]], others: float) -> None:
    """Check queued over drained, and the chunks in stages over the better way of one device.

    others: the share of the cores that other processes took. Two devices wait for one another at every tick, so that
    with others on their cores they say nothing.
    """
    rates = {row["way"]: row["tokens_per_s"] for row in rows}
    best = max(rates[way] for way in WAYS)
    invalid = f"other processes took {others:.0%} of the cores" if others > MOST_OTHERS else ""
    for name, value, target in (
        ("queued_vs_drained_measured", rates["queued"] / rates["drained"], 1.3),
        ("chunk_pipeline_measured", rates[PIPELINE] / best, 1.5),
    ):
        report.check(name, value, "x", target=target, invalid=invalid)
    report.row(
        figure="closed forms",
        queued_vs_drained=round(queued_gain(STAGES, TOKENS), 4),
        chunk_pipeline=round(chunk_speedup(STAGES, CHUNKS), 4),
        others=round(others, 3),
    )


def run(report: Report, args: argparse.Namespace) -> None:
    """Measure in as many rounds as are asked for."""
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "model"
        save_model(path, Decoder(config(), WeightFormat(), rngs=nnx.Rngs(0)), family="llama")
        others = Others()
        rows = rows_of(measure_rounds(path, args.rounds))
        add_checks(report, rows, others.share())
    report.rows += rows


if __name__ == "__main__":
    measure, _ = PROCESSES[sys.argv[1]]
    print(json.dumps(measure(Path(sys.argv[2]))))

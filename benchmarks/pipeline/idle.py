"""Idle slots of schedules against their closed forms, those that compiled rings record, and what hybrid ones gain.

A slot is a tick of a stage. P stages have M micro-batches, of which each makes G tokens (DeepSpeed Inference, section
IV-C1). Rings run on virtual CPU devices, in a process of their own.
"""

import argparse
import dataclasses
import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flax import nnx

from benchmarks.pipeline.steps import STRIDES, Steps, decode, read_prompt
from benchmarks.report import Report
from benchmarks.workers import QUICK, run_module
from jaxinfer import LLM, MeshConfig
from jaxinfer.generation.engine.buckets import MICRO_BATCHES_PER_STAGE as PER_STAGE
from jaxinfer.models import Decoder, DecoderConfig, WeightFormat
from jaxinfer.models import config as c
from jaxinfer.models.files.loading import save_model
from jaxinfer.sharding import schedules
from jaxinfer.sharding.schedules import Schedule

STAGES = (2, 3, 4, 5)
"""From the two of the paper's 175B model to the five of its 530B model."""
TOKENS = 50
"""That the paper generates, after prompts of 512."""
PROMPT = 512
CHUNK = 4
SHOWN_STAGES, SHOWN_TOKENS, SHOWN_CHUNKS = 4, 3, 8
"""Of the rings that are drawn: those of the paper's Fig. 2."""


def idle_row(
    name: str, schedule: Schedule, closed_form: int, sizes: Mapping[str, int], *, recorded: bool = False
) -> dict[str, Any]:
    """The row of a schedule, planned or recorded. sizes: P, M and so on."""
    return {
        "figure": "idle",
        "schedule": name,
        **sizes,
        "recorded": recorded,
        "slots": schedule.slots,
        "idle": schedule.idle_slots,
        "closed_form": closed_form,
        "exact": schedule.idle_slots == closed_form,
    }


def planned() -> Iterator[dict[str, Any]]:
    """Count the idle slots of all schedules as data, at all settings."""
    for p in STAGES:
        for m in sorted({1, p - 1, p, PER_STAGE * p}):
            sizes = {"P": p, "M": m, "G": TOKENS}
            queued, drained = (make(p, m, TOKENS) for make in (schedules.queued, schedules.drained))
            yield idle_row("queued", queued, schedules.queued_idle(p, m, TOKENS), sizes)
            yield idle_row("drained", drained, schedules.drained_idle(p, TOKENS), sizes)
            hybrid = schedules.hybrid(p, PER_STAGE * p, m, TOKENS)
            prompts, rest = (
                schedules.queued_idle(p, PER_STAGE * p, 1),
                schedules.queued_idle(p, m, TOKENS - 1),
            )
            yield idle_row("hybrid", hybrid, prompts + rest, {**sizes, "prompt_M": PER_STAGE * p})
        for chunks in (1, 2, 4, 8, 16):
            ticks = schedules.chunked(p, [1.0] * chunks)
            yield idle_row("chunks", ticks, schedules.queued_idle(p, chunks, 1), {"P": p, "M": chunks, "G": 1})


def recorded() -> Iterator[dict[str, Any]]:
    """Count the idle slots that compiled rings record: decoding at both strides, and prompts in chunks."""
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "model"
        save_model(path, Decoder(tiny_config(), WeightFormat(), rngs=nnx.Rngs(0)), family="llama")
        for p in STAGES:
            chunks = PER_STAGE * p
            llm = LLM(
                path,
                mesh=MeshConfig(pipeline=p),
                max_batch=p,
                context=128,
                page_size=64,
                chunk_size=CHUNK,
                token_budget=chunks * CHUNK,
                max_decode_passes=TOKENS,
                prefix_caching=False,
            )
            yield from _recorded_decoding(llm, p)
            for count in sorted({p - 1, p, 2 * p, chunks}):
                ticks, idle = read_prompt(llm, [3] * (count * CHUNK)).schedule, schedules.queued_idle(p, count, 1)
                yield idle_row("chunks", ticks, idle, {"P": p, "M": count, "G": 1}, recorded=True)
            llm.close()


def _recorded_decoding(llm: LLM, p: int) -> Iterator[dict[str, Any]]:
    for m in sorted({1, p - 1, p}):
        prompts = [[3 + row] * CHUNK for row in range(m)]
        closed_forms = {
            "queued": schedules.queued_idle(p, m, TOKENS),
            "drained": schedules.drained_idle(p, TOKENS),
        }
        for name, closed_form in closed_forms.items():
            ticks = decode(llm, prompts, TOKENS, STRIDES[name]).schedule
            yield idle_row(name, ticks, closed_form, {"P": p, "M": m, "G": TOKENS}, recorded=True)
    if p == SHOWN_STAGES:
        for name, stride in STRIDES.items():
            shown = decode(llm, [[3 + row] * CHUNK for row in range(p)], SHOWN_TOKENS, stride)
            yield _ring_row(name, shown)
        yield _ring_row("chunks", read_prompt(llm, [3] * (SHOWN_CHUNKS * CHUNK)))


def _ring_row(name: str, steps: Steps) -> dict[str, Any]:
    assert steps.ticks is not None
    return {"figure": "ring", "schedule": name, "ticks": steps.ticks.tolist()}


def tiny_config() -> DecoderConfig:
    """A Llama of a layer for each stage, of which only ticks count."""
    return DecoderConfig(
        vocab=64,
        embed=16,
        layers=STAGES[-1],
        context=128,
        pattern=(
            c.LayerConfig(
                mixer=c.AttentionConfig(
                    q_heads=2,
                    kv_heads=1,
                    head_dim=8,
                    positions=c.PositionsConfig(kind=c.PositionKind.ROTARY, rotary_dim=8),
                ),
                mlp=c.MlpConfig(hidden=32, activation=c.Activation.SILU, gated=True),
            ),
        ),
        norm=c.NormConfig(kind=c.NormKind.RMS),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PaperModel:
    """A model on A100s of 40 GB, with a batch that fits beside it (DeepSpeed Inference, Figs. 8 and 10b).

    A stage takes as long for a micro-batch's tokens as for reading its weights, and as long for prompts as their
    products take, however they are divided: section IV-C1. What each takes are fits to the paper's latencies: 0.95 of
    1.555 TB/s, 0.76 of 312 TFLOP/s.

    Attributes:
      parameters: all of them, in billions; two bytes each.
      stages: P. slices: devices that share each stage.
      sequences: of prompts of 512 tokens, that generate 50.
    """

    parameters: float
    stages: int
    slices: int
    sequences: int

    @property
    def decode_seconds(self) -> float:
        """The seconds of a tick of generation: until a device has read its weights."""
        return 2 * self._of_device / (0.95 * 1.555e12)

    @property
    def prompt_seconds(self) -> float:
        """The seconds that a stage takes for all prompts."""
        return 2 * self._of_device * self.sequences * PROMPT / (0.76 * 312e12)

    @property
    def _of_device(self) -> float:
        return self.parameters * 1e9 / (self.stages * self.slices)

    def gain(self) -> dict[str, Any]:
        """The row of this model: how long each schedule takes, in seconds, and hybrid over drained."""
        units, p = self.prompt_seconds / self.decode_seconds, self.stages
        lengths = {
            "drained": schedules.drained(p, p, TOKENS, prompt_units=units).length,
            "queued": schedules.queued(p, p, TOKENS, prompt_units=units).length,
            "hybrid": schedules.hybrid(p, PER_STAGE * p, p, TOKENS, prompt_units=units).length,
        }
        return {
            "figure": "hybrid",
            "parameters_b": self.parameters,
            "P": p,
            "sequences": self.sequences,
            "prompt_s": round(self.prompt_seconds, 4),
            "decode_s": round(self.decode_seconds, 5),
            **{f"{name}_s": round(length * self.decode_seconds, 3) for name, length in lengths.items()},
            "gain": round(lengths["drained"] / lengths["hybrid"], 4),
        }


FIG_8 = PaperModel(parameters=175, stages=2, slices=8, sequences=24)
FIG_10B = PaperModel(parameters=530, stages=5, slices=8, sequences=60)
"""The model whose gains by pipeline optimisations the paper breaks down; 69 sequences fit beside its weights."""


def run(report: Report, args: argparse.Namespace) -> None:
    """Check idle slots, planned and recorded, and the gain of hybrid scheduling."""
    report.rows += [*planned(), *_in_process()]
    exact = [row["exact"] for row in report.rows if row["figure"] == "idle"]
    report.check("idle_exact", statistics.mean(exact), "of the schedules", target=1)
    rows = [model.gain() for model in (FIG_8, FIG_10B)]
    report.rows += rows
    report.check("hybrid_gain_model", rows[-1]["gain"], "x drained", target=1.5)


def _in_process() -> list[dict[str, Any]]:
    devices = str(STAGES[-1])
    environment = {"JAX_PLATFORMS": "cpu", "NPROC": "32", "JAX_NUM_CPU_DEVICES": devices, "XLA_FLAGS": QUICK}
    return run_module(__name__, **environment)["rows"]


if __name__ == "__main__":
    print(json.dumps({"rows": list(recorded())}))

"""Public measurements of today's systems, next to the planner's predictions. Nothing is fitted to them.

Constants are those that `jaxinfer plan` takes: DeepSpeed's of 2022 on A100s.
"""

import dataclasses
import tomllib
from collections.abc import Iterator
from typing import Any

from benchmarks.report import ROOT
from jaxinfer.sharding.planner import Catalogue, Device, ModelShape, Plan, System, Ways, Workload, predict
from jaxinfer.sharding.planner.costs import Format, Runner
from jaxinfer.sharding.planner.exchanges import Exchange
from jaxinfer.sharding.planner.plans import missing

FILE = ROOT / "benchmarks/data/public_points.toml"
FP8 = Format(weight_bytes=1.0, eight_bit=True, kv_bytes=1.0)
BATCHES = tuple(sorted({round(2 ** (power / 4)) for power in range(49)}))
"""Requests at the same time; the best number that fits is taken, as maximum load means."""
CHUNK = 8192
"""Tokens of prompts in a step: TensorRT-LLM's default."""
EXACT = System(name="wire", bandwidth_share=1.0, flops_share=1.0, layer_s=0.0)
"""A system without overheads, for what the wire alone takes."""


def rows() -> list[dict[str, Any]]:
    """Return what was measured, and what is predicted, of all tables."""
    tables = tomllib.loads(FILE.read_text())
    made = [*loads(tables["tensorrt-llm"]), *_pipelines(tables["sglang"]), *_exchanges(tables["deepep"])]
    return [{"figure": "public", **row, "predicted": float(f"{row['predicted']:.4g}")} for row in made]


def loads(table: dict[str, Any]) -> Iterator[dict[str, Any]]:
    device = Catalogue.read().device(table["device"])
    for model, data, tensor, prompt, generate, measured in table["rows"]:
        shape, ways = Catalogue.read().model(model), Ways(data=data, tensor=tensor)
        rate = max(_rate(shape, device, ways, Workload(batch=n, prompt=prompt, generate=generate)) for n in BATCHES)
        what = f"{model}, {ways.size} H200, {prompt}/{generate}"
        yield {"of": "TensorRT-LLM", "name": what, "unit": "tokens/s", "measured": measured, "predicted": rate}


def _rate(shape: ModelShape, device: Device, ways: Ways, work: Workload) -> float:
    plan = Plan(ways=ways, schedule="cohorts", chunk=CHUNK)
    made = predict(shape, device, _system(shape), FP8, plan, work)
    return 0.0 if missing(device, plan, made.memory) or work.batch < ways.data else made.tokens_per_s


def _system(shape: ModelShape) -> System:
    """Return the constants for another system than jaxinfer, which sends tokens to experts by an all-to-all."""
    return dataclasses.replace(Catalogue.read().system(shape, FP8), exchange="pcc", drops=True)


def _pipelines(table: dict[str, Any]) -> Iterator[dict[str, Any]]:
    catalogue, work = Catalogue.read(), Workload(batch=1, prompt=table["prompt"], generate=1)
    model, device = catalogue.model(table["model"]), catalogue.device(table["device"])

    def seconds(ways: Ways) -> float:
        plan = Plan(ways=ways, schedule="chunks", chunk=table["chunk"])
        return predict(model, device, _system(model), FP8, plan, work).first.total

    one = seconds(Ways(tensor=8))
    for pipeline, tensor, measured in table["rows"]:
        speedup = one / seconds(Ways(pipeline=pipeline, tensor=tensor))
        what = f"{table['model']}, {pipeline * tensor} H20, PP {pipeline} x TP {tensor} over TP 8"
        yield {"of": "SGLang", "name": what, "unit": "x", "measured": measured, "predicted": speedup}


def _exchanges(table: dict[str, Any]) -> Iterator[dict[str, Any]]:
    catalogue = Catalogue.read()
    model, device = catalogue.model(table["model"]), catalogue.device(table["device"])
    chosen = max(layer.chosen for layer in model.layers)
    for devices, *measured in table["rows"]:
        runner = Runner(model=model, device=device, system=EXACT, ways=Ways(data=devices), format=FP8)
        for name, microseconds, size in zip(("dispatch", "combine"), measured, (1, 2), strict=True):
            rows = table["tokens"] * chosen * model.hidden * size
            wire = 1e6 * runner.exchanged([Exchange("all-to-all", ("data",), devices, rows)]).total
            what = f"{name} to {devices} H800"
            yield {"of": "DeepEP", "name": what, "unit": "us", "measured": microseconds, "predicted": wire}

"""The paper's ratios (Figs. 8, 10b and 13), as the planner predicts them.

A throughput is that of the batch with the most tokens a second of those that fit, as in Fig. 8. FasterTransformer
drains its pipeline after each token; its prompts are in as many micro-batches as there are stages.
"""

import functools
from collections.abc import Iterator
from typing import Any

from benchmarks.deepspeed_figures.points import read
from jaxinfer.sharding.planner import Catalogue, Plan, Ways, Workload, predict
from jaxinfer.sharding.planner.plans import Schedule, Tier, missing
from jaxinfer.sharding.planner.search import FORMATS, PER_STAGE

OURS, THEIRS = "deepspeed-fp16", "fastertransformer"
LARGEST_BATCH = 256
PROMPTS = 24
"""Requests of Fig. 13."""
SIXTEEN, FORTY = Ways(pipeline=2, tensor=8), Ways(pipeline=5, tensor=8)
OF_SLICES = {"lm-175b": Ways(tensor=16), "lm-530b": Ways(tensor=32)}
"""Meshes without stages. Of 40 devices, 32 share the heads of the 530B model; the paper does not say how many did."""


@functools.cache
def throughput(model: str, system: str, ways: Ways, schedule: Schedule, tier: Tier = "device") -> float:
    """Return the tokens a second of the best batch that fits."""
    rates = []
    for batch in range(1, LARGEST_BATCH):
        made = _predicted(model, system, ways, schedule, batch, tier)
        if not missing(_device(), made.plan, made.memory):
            rates.append(made.tokens_per_s)
    return max(rates)


def prompt_seconds(system: str, ways: Ways, schedule: Schedule) -> float:
    """Return the seconds of all prompts of Fig. 13."""
    return _predicted("lm-175b", system, ways, schedule, PROMPTS, "device").first.total


def _device() -> Any:
    return Catalogue.read().device(read()["ratios"]["device"])


def _predicted(model: str, system: str, ways: Ways, schedule: Schedule, batch: int, tier: Tier) -> Any:
    catalogue, table = Catalogue.read(), read()["ratios"]
    prompts = ways.pipeline * (PER_STAGE[-1] if schedule == "hybrid" else 1)
    plan = Plan(
        ways=ways,
        schedule=schedule,
        prompt_micro_batches=min(prompts, batch),
        micro_batches=min(ways.pipeline, batch),
        cache=tier,
    )
    workload = Workload(batch=batch, prompt=table["prompt"], generate=table["generate"])
    return predict(catalogue.model(model), _device(), catalogue.systems[system], FORMATS[None], plan, workload)


def predicted() -> Iterator[float]:
    """Yield the predicted ratios, in the order of the data file."""
    for model, ways in (("lm-175b", SIXTEEN), ("lm-530b", FORTY)):
        rivals = [throughput(model, THEIRS, OF_SLICES[model], "drained")]
        if model == "lm-175b":  # of 530B, FasterTransformer ran without stages only
            rivals.append(throughput(model, THEIRS, ways, "drained"))
        yield throughput(model, OURS, ways, "hybrid") / max(rivals)
    drained, scheduled = (throughput("lm-530b", THEIRS, FORTY, kind) for kind in ("drained", "hybrid"))
    offloaded = max(scheduled, throughput("lm-530b", THEIRS, FORTY, "hybrid", "host"))
    yield from (scheduled / drained, offloaded / drained, offloaded / drained)  # copies are not modelled apart
    yield max(throughput("lm-530b", OURS, FORTY, "hybrid", tier) for tier in ("device", "host")) / drained
    ours = prompt_seconds(OURS, SIXTEEN, "hybrid")
    for ways in (SIXTEEN, OF_SLICES["lm-175b"]):
        yield prompt_seconds(THEIRS, ways, "drained") / ours


def rows() -> list[dict[str, Any]]:
    """Return what was measured, and what is predicted."""
    return [
        {"figure": "ratio", "of": number, "name": name, "measured": measured, "predicted": round(ratio, 3)}
        for (number, name, measured), ratio in zip(read()["ratios"]["rows"], predicted(), strict=True)
    ]

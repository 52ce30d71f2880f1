"""Which plans there are for a number of devices, and which of those that fit are best."""

import bisect
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Literal

from jaxinfer.sharding.planner.costs import Format, System
from jaxinfer.sharding.planner.hardware import Device, Ways
from jaxinfer.sharding.planner.plans import Plan, Prediction, Workload, memory_of, missing, predict
from jaxinfer.sharding.planner.shapes import ModelShape
from jaxinfer.sharding.planner.tiers import Tier

PER_STAGE = (1, 2, 4)
"""Micro-batches of prompts per stage."""
CHUNKS = (512, 2048, 8192)
"""Tokens of a prompt's chunk, or of the prompts in a step of cohorts."""
MOST_DEVICES = 1024
"""Devices up to which `NothingFitsError` looks for what would fit."""
FORMATS = {None: Format(), "int8": Format(weight_bytes=1.0, eight_bit=True), "int4": Format(weight_bytes=0.5)}
"""Formats by the name that `--quantize` has for them; products of int4 weights run in 16 bits."""

Order = Literal["throughput", "ttft", "tpot"]


class NothingFitsError(ValueError):
    """No plan fits the devices; the message says what would."""


def meshes(model: ModelShape, devices: int) -> Iterator[Ways]:
    """Yield all meshes of so many devices into which the model divides."""
    for slices in _divisors(math.gcd(devices, model.heads)):
        for pipeline in _divisors(devices // slices):
            data = devices // slices // pipeline
            if pipeline > model.depth or (pipeline > 1 and not model.has_stages):
                continue
            for expert in _divisors(slices) if model.experts else (1,):
                if not model.experts or model.experts % (data * expert) == 0:
                    yield Ways(data=data, pipeline=pipeline, expert=expert, tensor=slices // expert)


def plans(model: ModelShape, devices: int, workload: Workload) -> Iterator[Plan]:
    """Yield all plans: schedules in each mesh, with weights and the KV cache in each tier."""
    for ways in meshes(model, devices):
        if ways.data > workload.batch:
            continue
        for plan in _schedules(ways, workload):
            yield from _tiers(model, plan, workload)


def _tiers(model: ModelShape, plan: Plan, workload: Workload) -> Iterator[Plan]:
    """Yield a plan with weights, the cache and known prompts in each tier that jaxinfer's engine has for it."""
    ways, weights = plan.ways, list[Tier](["device"])
    if ways.pipeline == 1 and (ways.size == 1 or not model.experts):
        weights += ["host", "disk"]
    for tier in weights:
        placed = dataclasses.replace(plan, weights=tier)
        yield placed
        if tier != "device" and model.has_equal_pages:
            yield dataclasses.replace(placed, cache="host")
        if workload.hit_rate and plan.schedule == "cohorts" and not model.has_states:
            for prefixes in ("host", "disk"):
                yield dataclasses.replace(placed, prefixes=prefixes)


def _schedules(ways: Ways, workload: Workload) -> Iterator[Plan]:
    sequences, stages = math.ceil(workload.batch / ways.data), ways.pipeline
    queued = min(stages, sequences)
    for per_stage in PER_STAGE:
        if per_stage == 1 or per_stage * stages <= sequences:
            yield Plan(ways=ways, prompt_micro_batches=min(per_stage * stages, sequences), micro_batches=queued)
    for chunk in CHUNKS:
        if stages > 1 and chunk < workload.prompt:
            yield Plan(ways=ways, schedule="chunks", chunk=chunk, micro_batches=queued)
    for chunk in CHUNKS:
        yield Plan(ways=ways, schedule="cohorts", chunk=chunk, micro_batches=queued)


def rank(
    model: ModelShape,
    device: Device,
    devices: int,
    system: System,
    form: Format,
    workload: Workload,
    *,
    by: Order = "throughput",
) -> list[Prediction]:
    """Predict all plans that fit, best first. Where not all requests have room, some wait.

    Raises NothingFitsError, which says what would.
    """
    fitting, reason = _fitting(model, device, devices, system, form, workload)
    if not fitting:
        advice = _advice(model, device, devices, system, form, workload)
        raise NothingFitsError(
            f"{model.name} does not fit on {devices} {device.name} with {workload.batch} requests of "
            f"{workload.prompt + workload.generate} tokens: the nearest plan needs {reason}. "
            f"{'It would fit ' + '; '.join(advice) if advice else 'Nothing that was tried would fit'}."
        )
    keys: dict[Order, Callable[[Prediction], float]] = {
        "throughput": lambda made: -made.tokens_per_s,
        "ttft": lambda made: made.first.total,
        "tpot": lambda made: made.each.total,
    }
    return sorted(fitting, key=lambda made: (keys[by](made), made.first.total))


def _fitting(
    model: ModelShape, device: Device, devices: int, system: System, form: Format, workload: Workload
) -> tuple[list[Prediction], str]:
    """Return the predictions that fit, and what the smallest of the others lacks."""
    fitting, smallest = list[Prediction](), math.inf
    reason = f"another number of devices: no mesh of {devices} divides its {model.heads} heads"

    def lacking(plan: Plan) -> str:
        return missing(device, plan, memory_of(model, device, system, form, plan, workload))

    for plan in plans(model, devices, workload):
        if lacking(plan) and plan.schedule == "cohorts":
            plan = _most_at_once(plan, workload, lacking)
        made = predict(model, device, system, form, plan, workload)
        if not (lacks := missing(device, plan, made.memory)):
            fitting.append(made)
        elif made.memory.device < smallest:
            smallest, reason = made.memory.device, lacks
    return fitting, reason


def _most_at_once(plan: Plan, workload: Workload, lacking: Callable[[Plan], str]) -> Plan:
    """Make a plan run as many requests at once as have room, at least one."""

    def limited(count: int) -> Plan:
        return dataclasses.replace(plan, at_once=count, micro_batches=min(plan.micro_batches, count))

    requests = math.ceil(workload.batch / plan.ways.data)
    most = bisect.bisect_left(range(1, requests), True, key=lambda count: bool(lacking(limited(count))))
    return limited(max(most, 1))


def _advice(
    model: ModelShape, device: Device, devices: int, system: System, form: Format, workload: Workload
) -> list[str]:
    """Say what would fit: smaller weights, more devices."""

    def fits(devices: int = devices, form: Format = form) -> bool:
        least = (dataclasses.replace(plan, at_once=1) for plan in plans(model, devices, workload))
        return any(
            plan.schedule == "cohorts"
            and not missing(device, plan, memory_of(model, device, system, form, plan, workload))
            for plan in least
        )

    advice = []
    for name, smaller in FORMATS.items():
        if name and smaller.weight_bytes < form.weight_bytes and fits(form=smaller):
            advice.append(f"with --quantize {name}")
            break
    more = 2 * devices
    while more <= MOST_DEVICES and not fits(devices=more):
        more *= 2
    if more <= MOST_DEVICES:
        advice.append(f"on {device.name}:{more}")
    return advice


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]

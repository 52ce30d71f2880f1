"""Predictions of a plan: its memory, the seconds until the first token and between tokens, its tokens a second.

A plan is a mesh, a schedule of micro-batches, and where weights and the KV cache are. Schedules:

- `hybrid` (DeepSpeed Inference, section IV-C1): all prompts in some micro-batches, then generation in others, queued.
- `drained`: the same, but the pipeline drains after each token (the paper's baseline).
- `chunks` (SGLang's chunked pipeline): prompts in chunks that follow one another through the stages; then as `hybrid`.
- `cohorts` (vLLM): requests come and go. A stage's step has the rows of one cohort and a share of the prompts; one more
  batch than there are stages is in flight, so sending takes no time of its own. With one stage this is continuous
  batching.

The first three take a batch of requests from its beginning to its end; `cohorts` is a steady state.

The KV cache of running requests can be on the host (`kv_offload`): of streamed weights, a layer then runs on slices of
the rows. Prompts that the devices forget can be kept there or on disk (`host_kv`, `disk_kv`): of `cohorts`, those that
come again are read back.
"""

import dataclasses
import functools
import math
from typing import Literal

from jaxinfer.sharding.planner.costs import Fetched, Format, Runner, Seconds, System, Tokens, overlapped
from jaxinfer.sharding.planner.hardware import Device, Ways
from jaxinfer.sharding.planner.memory import (
    Memory,
    Step,
    kept_bytes,
    kv_bytes,
    outer_bytes,
    request_bytes,
    state_slots,
    weight_bytes,
    work_bytes,
)
from jaxinfer.sharding.planner.shapes import ModelShape
from jaxinfer.sharding.planner.tiers import SLICES, Restored, Tier, disk_rate, rate, restore
from jaxinfer.sharding.schedules import chunk_sizes, drained_stride, queued_stride

USABLE = 0.9
"""Share of a device's memory, or of a host's, that a plan may take; the rest is for the runtime and fragments."""
BUFFERS = 2
"""Layers in a device's memory while weights are streamed: one computes, one is fetched."""

Schedule = Literal["hybrid", "drained", "chunks", "cohorts"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests that run at the same time.

    Attributes:
      batch: how many.
      prompt: tokens of each prompt.
      generate: tokens that each generates.
      hit_rate: share of a prompt's tokens, its first, that earlier requests had and the devices have forgotten.
    """

    batch: int
    prompt: int
    generate: int
    hit_rate: float = 0.0

    def __post_init__(self) -> None:
        for name in ("batch", "prompt", "generate"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f"Workload.{name} must be an integer >= 1, got {value}.")
        if not 0 <= self.hit_rate < 1:
            raise ValueError(f"Workload.hit_rate must be in [0, 1), got {self.hit_rate}.")

    @property
    def known(self) -> float:
        """The tokens of a prompt that earlier requests had."""
        return self.hit_rate * self.prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """One way to run a model.

    Attributes:
      prompt_micro_batches: of a lane's prompts.
      micro_batches: of generation in a lane.
      chunk: tokens of a prompt's chunk; of `cohorts`, of all prompts in a step.
      at_once: requests of a lane that have room at the same time, of `cohorts`; the others wait. 0: all have.
      weights: where the layers are.
      cache: where the KV cache of running requests is.
      prefixes: where prompts stay that the devices forget; "device": nowhere.
    """

    ways: Ways
    schedule: Schedule = "hybrid"
    prompt_micro_batches: int = 1
    micro_batches: int = 1
    chunk: int = 0
    at_once: int = 0
    weights: Tier = "device"
    cache: Tier = "device"
    prefixes: Tier = "device"

    @property
    def tiers(self) -> tuple[Tier, Tier, Tier]:
        """Where weights, the cache and forgotten prompts are."""
        return self.weights, self.cache, self.prefixes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prediction:
    """The prediction for a plan.

    Attributes:
      first: seconds until all requests have their first token; of `cohorts`, until a new request has it.
      each: seconds between two tokens of a request.
      seconds: from the first prompt to the last token of the batch, without queueing.
      tokens_per_s: generated tokens a second of all devices.
    """

    plan: Plan
    memory: Memory
    first: Seconds
    each: Seconds
    seconds: float
    tokens_per_s: float


def predict(
    model: ModelShape, device: Device, system: System, form: Format, plan: Plan, workload: Workload
) -> Prediction:
    """Predict a plan, whether or not it fits."""
    return _Predictor(model, device, system, form, plan, workload).prediction()


def memory_of(
    model: ModelShape, device: Device, system: System, form: Format, plan: Plan, workload: Workload
) -> Memory:
    """Predict only the memory of a plan."""
    return _Predictor(model, device, system, form, plan, workload).memory()


def missing(device: Device, plan: Plan, memory: Memory) -> str:
    """Say what a plan has too little of, or ""."""
    nodes = math.ceil(plan.ways.size / device.node)
    for needed, there, what in (
        (memory.device, device.memory, "a device's memory"),
        (memory.host, nodes * device.host_memory, "host memory"),
        (memory.disk, nodes * device.disk_bytes, "disks"),
    ):
        if needed > USABLE * there:
            return f"{needed / 1e9:,.1f} GB of {what}, of which {USABLE * there / 1e9:,.1f} are usable"
    return ""


def kept_room(runner: Runner, made: Prediction, workload: Workload) -> float:
    """Compute the bytes of each node that the tier of known prompts may take: all that nothing else needs.

    runner: the model on the plan's devices.
    """
    plan, device = made.plan, runner.device
    size, used = (
        (device.host_memory, made.memory.host) if plan.prefixes == "host" else (device.disk_bytes, made.memory.disk)
    )
    others = used - _running_prefixes(runner, workload)
    return USABLE * size - others / math.ceil(plan.ways.size / device.node)


def _running_prefixes(runner: Runner, workload: Workload) -> float:
    """Compute the bytes of the running requests' known prompts in a tier, which it keeps at least."""
    return workload.batch * workload.known * kept_bytes(runner)


@dataclasses.dataclass(frozen=True)
class _Predictor:
    model: ModelShape
    device: Device
    system: System
    form: Format
    plan: Plan
    workload: Workload

    @property
    def stages(self) -> int:
        return self.plan.ways.pipeline

    @functools.cached_property
    def requests(self) -> int:
        """Requests of a lane."""
        return math.ceil(self.workload.batch / self.plan.ways.data)

    @functools.cached_property
    def sequences(self) -> int:
        """The requests of a lane that have room."""
        return min(self.requests, self.plan.at_once or self.requests)

    @functools.cached_property
    def resident(self) -> Runner:
        """The model, as if all of it were on its devices."""
        return Runner(model=self.model, device=self.device, system=self.system, ways=self.plan.ways, format=self.form)

    @functools.cached_property
    def runner(self) -> Runner:
        """The model, with what comes to its devices in each pass."""
        plan, fetched = self.plan, Fetched(slices=self.slices)
        if plan.cache != "device":
            fetched = dataclasses.replace(fetched, cache=rate(self.device, plan.ways, plan.cache))
        if plan.weights != "device":
            from_tier = rate(self.device, plan.ways, plan.weights)
            layers = sum(layer.count * self.resident.shared_bytes(layer) for layer in self.model.layers)
            fetched = dataclasses.replace(fetched, layers_s=layers / from_tier, experts=from_tier)
        return dataclasses.replace(self.resident, fetched=fetched)

    def prediction(self) -> Prediction:
        if self.plan.schedule == "cohorts":
            first, each, generating = self._cohorts()
            rate = self.workload.batch * generating / each.total
            seconds = first.total + (self.workload.generate - 1) * each.total
        else:
            first = self._chunks() if self.plan.schedule == "chunks" else self._prompts()
            each, rest = self._generation()
            seconds = first.total + rest
            rate = self.workload.batch * self.workload.generate / seconds
        return Prediction(
            plan=self.plan, memory=self.memory(), first=first, each=each, seconds=seconds, tokens_per_s=rate
        )

    def _prompts(self) -> Seconds:
        """The seconds of all prompts in micro-batches of whole prompts."""
        count, prompt = self.plan.prompt_micro_batches, self.workload.prompt
        rows = self.sequences / count
        batch = Tokens(count=rows * prompt, sequences=rows, context=prompt / 2)
        tick = self.runner.stage([batch], rows=rows) + self.runner.hop(batch.count)
        return tick * count + Seconds(bubble=tick.total * (self.stages - 1))

    def _chunks(self) -> Seconds:
        """The seconds of all prompts in chunks, each of which sees the ones before."""
        seconds, longest, start = Seconds(), 0.0, 0
        for size in self._sizes():
            batch = Tokens(count=size, sequences=1, context=start + size / 2)
            tick = self.runner.stage([batch], rows=1) + self.runner.hop(size)
            seconds, longest, start = seconds + tick * self.sequences, max(longest, tick.total), start + size
        return seconds + Seconds(bubble=longest * (self.stages - 1))

    def _sizes(self) -> tuple[int, ...]:
        """The tokens of a prompt's chunks, such that they take equally long."""
        chunks = math.ceil(self.workload.prompt / self.plan.chunk)
        active = sum(layer.count * layer.active_params for layer in self.model.layers)
        pair = sum(layer.count * layer.pair_flops for layer in self.model.layers if layer.window is None)
        return chunk_sizes(self.workload.prompt, chunks, per_token=2.0 * active, per_pair=float(pair))

    def _generation(self) -> tuple[Seconds, float]:
        """The seconds between two tokens, and of all tokens but the first."""
        count, passes = self.plan.micro_batches, self.workload.generate - 1
        rows = math.ceil(self.sequences / count)
        tick = self._rows(rows) + self.runner.hop(rows)
        stride = (drained_stride if self.plan.schedule == "drained" else queued_stride)(self.stages, count)
        each = tick * count + Seconds(bubble=tick.total * (stride - count))
        # The last token of the last micro-batch leaves stages - 1 ticks after it entered.
        ticks = (passes - 1) * stride + count + self.stages - 1 if passes else 0
        return each, ticks * tick.total

    def _rows(self, rows: int) -> Seconds:
        return self.runner.stage([self._generated(rows)], rows=rows)

    def _generated(self, rows: float) -> Tokens:
        """Make rows of generation, in the middle of what they generate."""
        return Tokens(count=rows, sequences=rows, context=self.workload.prompt + self.workload.generate / 2)

    def _cohorts(self) -> tuple[Seconds, Seconds, float]:
        """Return the seconds until a new request's first token and between tokens, and the share that generates.

        In a steady state as many prompts begin as end. A step reads at most `chunk` tokens of prompts: if they bring
        more, or have no room, requests wait, and fewer than the cohort's generate.
        """
        work, back, restored = self.workload, self.restored, self.workload.known * self.restored.share
        computed = work.prompt - restored  # as is what a device computes while the rest is read
        after = work.prompt - (work.known if back.share else 0.0)
        cohort, size = math.ceil(self.requests / self.stages), min(after, self.plan.chunk)
        rows = min(math.ceil(self.sequences / self.stages), self.plan.chunk * work.generate / computed)
        new = rows / work.generate  # prompts that begin in a step
        prompts = Tokens(count=new * computed, sequences=new, context=restored + computed / 2)
        each = self._in_flight([self._generated(rows), prompts], rows)
        each = overlapped(each + Seconds(fetch=new * back.write), new * back.read) * self.stages
        part = Tokens(count=size, sequences=1, context=work.prompt - after / 2)
        chunk = self._in_flight([self._generated(rows), part], rows)
        first = chunk * math.ceil(after / size) + Seconds(fetch=back.wait, bubble=chunk.total * (self.stages - 1))
        return first + each * ((cohort - rows) / new), each, rows / cohort

    @functools.cached_property
    def restored(self) -> Restored:
        """The part of a prompt's known tokens that comes back."""
        known = self.workload.known
        if not known or self.plan.prefixes == "device":
            return Restored()
        size = known * kv_bytes(self.resident, 1, 0)
        compute = self.runner.turn([Tokens(count=known, sequences=1, context=known / 2)], rows=1).total
        ways, device = self.plan.ways, self.device
        read = size / disk_rate(device, ways) if self.plan.prefixes == "disk" else 0.0
        return restore(compute=compute, read=read, write=size / rate(device, ways, "host"))

    def _in_flight(self, batch: list[Tokens], rows: float) -> Seconds:
        """The seconds of a step while another batch is being sent."""
        tick, hop = self.runner.stage(batch, rows=rows), self.runner.hop(sum(part.count for part in batch))
        return hop if hop.total > tick.total else tick

    def memory(self) -> Memory:
        """The bytes that the plan needs."""
        runner, plan = self.resident, self.plan
        cache = kv_bytes(runner, self.sequences * self._length, state_slots(self.sequences))
        of_all = dict.fromkeys(("device", "host", "disk"), 0.0)
        if plan.weights != "device":  # a copy in each node, or one over several
            copies = max(1, plan.ways.size // max(plan.ways.slices, self.device.node))
            of_all[plan.weights] += copies * self.model.params * self.form.weight_bytes
        of_all[plan.cache] += cache * plan.ways.size
        of_all[plan.prefixes] += _running_prefixes(runner, self.workload)
        there = cache if plan.cache == "device" else self._layers_there * self._row_bytes
        return dataclasses.replace(self._beside_cache, cache=there, host=of_all["host"], disk=of_all["disk"])

    @functools.cached_property
    def slices(self) -> int:
        """In how many slices of the rows a streamed layer runs, if the cache is on the host: as few as have room."""
        if self.plan.weights == "device" or self.plan.cache == "device":
            return 1
        room = USABLE * self.device.memory - self._beside_cache.device
        rows = min(max(int(room / (SLICES * self._row_bytes)), 1), self.sequences)
        return math.ceil(self.sequences / rows)

    @property
    def _layers_there(self) -> int:
        """The caches on a device if the others are on the host, each of a layer and a request.

        With the weights on the device, those of a micro-batch compute and others come (DeepSpeed Inference, IV-C2).
        """
        if self.plan.weights == "device":
            return BUFFERS * math.ceil(self.sequences / self.plan.micro_batches)
        return SLICES * math.ceil(self.sequences / self.slices)

    @property
    def _row_bytes(self) -> float:
        """The bytes of a request's cache in a layer, on one device."""
        return kv_bytes(self.resident, self._length, 1) / math.ceil(self.model.depth / self.stages)

    @property
    def _length(self) -> int:
        return self.workload.prompt + self.workload.generate

    @functools.cached_property
    def _beside_cache(self) -> Memory:
        """The bytes of a device that do not depend on where the cache is."""
        runner, step = self.resident, self._step()
        weights = weight_bytes(runner)
        if self.plan.weights != "device":
            weights = outer_bytes(runner) + BUFFERS * max(map(runner.streamed_bytes, self.model.layers))
        requests = request_bytes(runner, step, slots=self.sequences, context=self._length)
        return Memory(weights=weights, cache=0.0, requests=requests, work=work_bytes(runner, step))

    def _step(self) -> Step:
        """Make the largest step of a lane."""
        schedule, prompt = self.plan.schedule, self.workload.prompt
        if schedule == "cohorts":
            tokens = min(self.plan.chunk, self.sequences * prompt)
        elif schedule == "chunks":
            tokens = max(self._sizes())
        else:
            tokens = math.ceil(self.sequences / self.plan.prompt_micro_batches) * prompt
        return Step(rows=self.sequences, chunks=1, tokens=tokens, micro_batches=self.plan.micro_batches)

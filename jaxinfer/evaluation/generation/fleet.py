"""Sizes a fleet: which mesh a replica has, and how many replicas keep a latency objective at a rate of requests.

The planner ranks many configurations by arithmetic; the best are simulated on a share of the trace, with fewer and more
replicas. A replica is an engine of jaxinfer. Requests go to the replicas in turn.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence

from jaxinfer.compiled import Costs
from jaxinfer.compiled.costs import Key
from jaxinfer.evaluation.generation.replay import Replayed, TokenRequest
from jaxinfer.evaluation.generation.simulator import simulate
from jaxinfer.evaluation.generation.step_times import PlannedTimes
from jaxinfer.evaluation.serving.arrivals import TracedRequest, at_rate
from jaxinfer.evaluation.serving.figures import Objective, summarise
from jaxinfer.generation.engine.config import SNAPSHOTS_PER_SEQUENCE, EngineConfig
from jaxinfer.generation.execution.plan import Plan, Way
from jaxinfer.generation.execution.platforms import buckets_of
from jaxinfer.sharding.planner import Device, ModelShape, NothingFitsError, Prediction, Runner, System, Tokens, Workload
from jaxinfer.sharding.planner import Plan as PlannedSchedule
from jaxinfer.sharding.planner.costs import Format
from jaxinfer.sharding.planner.memory import kv_bytes
from jaxinfer.sharding.planner.plans import USABLE, missing, predict
from jaxinfer.sharding.planner.search import CHUNKS, meshes

BATCHES = (8, 16, 32, 64, 128, 256, 512)
"""Requests that a lane of a replica can run at once."""
FINALISTS = 5
"""Configurations that are simulated, each with a mesh of its own."""
KEPT = 0.99
"""The share of requests that must keep the objective."""
JUDGED = 300
"""Requests of a simulation that are judged."""
MOST_WARM = 2000
"""Most requests before these."""
PAGE, CHUNK = 16, 128
"""Tokens of a page and of a chunk."""
PRECISION = 1.1
"""The number of replicas is found to this factor."""
IDLE = 32
"""A replica with so small a part of the requests that it can bear is idle."""
HOURS_TO_FAILURE = 50_000.0
"""Mean of a device: Llama 3 405B met 419 unexpected interruptions in 54 days on 16,384 H100s (arXiv:2407.21783)."""
HOURS_TO_REPAIR = 24.0
"""Hours until a device is there again; an assumption."""
AVAILABLE = 0.999
"""The share of the time in which spares are enough."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """A model on a kind of device, and who runs it.

    Attributes:
      model, device, system, form: as the planner takes them.
    """

    model: ModelShape
    device: Device
    system: System
    form: Format


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replica:
    """A configuration of one engine.

    Attributes:
      target: the model and its devices.
      made: what the planner predicts, with the trace's mean lengths and a full batch.
      batch: requests of each lane at once.
    """

    target: PlannedModel
    made: Prediction
    batch: int

    @property
    def devices(self) -> int:
        """The devices of its mesh."""
        return self.made.plan.ways.size

    @property
    def device_seconds(self) -> float:
        """Device-seconds for a generated token, with a full batch."""
        return self.devices / self.made.tokens_per_s

    def requests_per_s(self, generate: float) -> float:
        """Compute the requests a second that generate so many tokens, with a full batch."""
        return self.made.tokens_per_s / generate

    @functools.cached_property
    def runner(self) -> Runner:
        """The model on its devices."""
        target = self.target
        ways = self.made.plan.ways
        return Runner(model=target.model, device=target.device, system=target.system, ways=ways, format=target.form)

    @property
    def num_snapshots(self) -> int:
        """The snapshots of recurrent states of a lane; 0: the model has no states."""
        return SNAPSHOTS_PER_SEQUENCE * self.batch if self.target.model.has_states else 0

    @functools.cached_property
    def num_pages(self) -> int:
        """The pages of a lane's cache that fit."""
        memory = self.made.memory
        states = kv_bytes(self.runner, 0, self.batch + 1 + self.num_snapshots)
        used = memory.weights + memory.requests + memory.work + states
        return int((USABLE * self.target.device.memory - used) / kv_bytes(self.runner, PAGE, 0))

    def simulate(self, requests: Sequence[TokenRequest], workload: Workload) -> Replayed:
        """Run requests on it. Raises ValueError for one that could never run."""
        ways, chunk = self.made.plan.ways, self.made.plan.chunk
        longest = max(len(request.prompt) + request.output_tokens for request in requests)
        config = EngineConfig(
            max_batch=self.batch,
            context=longest,
            page_size=PAGE,
            token_budget=chunk,
            chunk_size=min(CHUNK, chunk),
        )
        plan = Plan(
            way=Way.RING if ways.pipeline > 1 else Way.WHOLE,
            buckets=buckets_of(config, "gpu", stages=ways.pipeline),
            stages=ways.pipeline,
            num_pages=self.num_pages,
        )
        costs = self._costs(plan, workload)
        return simulate(
            requests,
            config,
            plan,
            PlannedTimes(self.runner),
            costs=costs,
            platform="gpu",
            lanes=ways.data,
            num_snapshots=self.num_snapshots,
        )

    def _costs(self, plan: Plan, workload: Workload) -> Costs:
        """The seconds of decode passes, by which the scheduler chooses how many a step has."""
        known: dict[Key, float] = {}
        for rows in plan.decoder_buckets.decode_rows:
            parts = min(plan.stages, rows)
            each = -(-rows // parts)
            tokens = Tokens(count=each, sequences=each, context=workload.prompt + workload.generate / 2)
            tick = (self.runner.stage([tokens], rows=each) + self.runner.hop(each)).total
            sizes = {"batch": parts * each, "speculative": 0}
            if plan.stages > 1:
                sizes |= {"chunks": 0, "micro_batches": parts}
            known[plan.way.value, tuple(sizes.items())] = tick * max(plan.stages, parts)
        return Costs.fixed(known)


def replicas(target: PlannedModel, most: int, workload: Workload) -> Iterator[Replica]:
    """Yield the configurations of a replica that fit: meshes, batches and budgets of prompts.

    Args:
      target: the model and its devices.
      most: devices of the largest replica; smaller ones have a divisor of it.
      workload: the mean lengths; its batch does not matter.
    """
    for devices in [count for count in range(1, most + 1) if most % count == 0]:
        for ways, batch, chunk in itertools.product(meshes(target.model, devices), BATCHES, CHUNKS):
            if ways.data > 1 and not target.model.experts:  # each lane can be a replica of its own
                continue
            plan = PlannedSchedule(ways=ways, schedule="cohorts", chunk=chunk, micro_batches=min(ways.pipeline, batch))
            work = dataclasses.replace(workload, batch=batch * ways.data)
            made = predict(target.model, target.device, target.system, target.form, plan, work)
            if not missing(target.device, plan, made.memory):
                yield Replica(target=target, made=made, batch=batch)


def ranked(target: PlannedModel, most: int, traffic: "Traffic", objective: Objective) -> list[Replica]:
    """Rank the configurations that are predicted to keep an objective, the cheapest per token first.

    Raises NothingFitsError if none fits, or none is fast enough; the message says what is nearest.
    """
    workload, longest = traffic.workload, traffic.longest
    fitting = [each for each in replicas(target, most, workload) if each.num_pages * PAGE >= longest]
    where = f"{target.model.name} on up to {most} {target.device.name}"
    if not fitting:
        raise NothingFitsError(
            f"{where}: no mesh has memory for {BATCHES[0]} requests of {workload.prompt + workload.generate} tokens, "
            f"of which one may have {longest}; name more devices, such as --devices {target.device.name}:{2 * most}, "
            "or --quantize."
        )
    kept = [each for each in fitting if _is_kept(each, objective)]
    if not kept:
        first, each = (min(getattr(replica.made, name).total for replica in fitting) for name in ("first", "each"))
        raise NothingFitsError(
            f"{where}: no mesh keeps the objective. The shortest TTFT is predicted as {1e3 * first:,.1f} ms, the "
            f"shortest TPOT as {1e3 * each:,.1f} ms; name more devices, --quantize, or a longer time in --slo."
        )
    return sorted(kept, key=lambda each: each.device_seconds)


def _is_kept(replica: Replica, objective: Objective) -> bool:
    first, each = 1e3 * replica.made.first.total, 1e3 * replica.made.each.total
    return (objective.ttft_ms is None or first <= objective.ttft_ms) and (
        objective.tpot_ms is None or each <= objective.tpot_ms
    )


def finalists(order: Sequence[Replica], count: int = FINALISTS) -> list[Replica]:
    """Take the best configurations of different meshes, best first."""
    best: dict[object, Replica] = {}
    for each in order:
        best.setdefault(each.made.plan.ways, each)
    return list(best.values())[:count]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Traffic:
    """The requests of a fleet, over and over.

    Attributes:
      trace: at the fleet's rate; all have their lengths.
      rate: requests a second.
    """

    trace: list[TracedRequest]
    rate: float

    @classmethod
    def from_trace(cls, trace: list[TracedRequest], rate: float, *, prompt: int, generate: int) -> "Traffic":
        """Stretch a trace to a rate. prompt, generate: the tokens of requests without lengths."""
        given = [
            dataclasses.replace(
                item, prompt_tokens=item.prompt_tokens or prompt, output_tokens=item.output_tokens or generate
            )
            for item in at_rate(trace, rate)
        ]
        return cls(trace=given, rate=rate)

    @functools.cached_property
    def workload(self) -> Workload:
        """The mean lengths."""
        count = len(self.trace)
        prompt = sum(item.prompt_tokens or 0 for item in self.trace) / count
        generate = sum(item.output_tokens or 0 for item in self.trace) / count
        return Workload(batch=1, prompt=max(1, round(prompt)), generate=max(1, round(generate)))

    @functools.cached_property
    def longest(self) -> int:
        """The tokens of the longest request."""
        return max((item.prompt_tokens or 0) + (item.output_tokens or 0) for item in self.trace)

    def share(self, ways: int, count: int) -> list[TokenRequest]:
        """Take the first requests of one of so many replicas. Prompts have nothing in common."""
        made = []
        for index in range(count):
            rounds, place = divmod(index * ways, len(self.trace))
            item = self.trace[place]
            assert item.prompt_tokens is not None
            assert item.output_tokens is not None
            prompt = [1 + index, *[0] * (item.prompt_tokens - 1)]
            arrival = item.arrival + rounds * len(self.trace) / self.rate
            made.append(TokenRequest(arrival=arrival, prompt=prompt, output_tokens=item.output_tokens))
        return made


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fleet:
    """A number of replicas that keeps the objective.

    Attributes:
      replica: the configuration of each.
      count: how many serve.
      spares: how many more, for those that fail.
      percentiles: of the judged requests' latencies, as in `LoadSummary`.
      kept: the share of them that kept the objective.
      preemptions: of the whole simulation.
    """

    replica: Replica
    count: int
    spares: int
    percentiles: dict[str, dict[str, float]]
    kept: float
    preemptions: int

    @property
    def devices(self) -> int:
        """All devices, spares included."""
        return (self.count + self.spares) * self.replica.devices

    def dollars(self, traffic: Traffic, price: float) -> float:
        """Compute the dollars for a million generated tokens. price: of a device and hour."""
        return self.devices * price / 3600 / (traffic.rate * traffic.workload.generate) * 1e6


def size_fleet(replica: Replica, traffic: Traffic, objective: Objective) -> Fleet:
    """Find the fewest replicas, to `PRECISION`, with which the share `KEPT` of requests keeps the objective.

    None bears more than a full batch does: a simulation may be too short to show how a queue grows.

    Raises NothingFitsError if so many that each has little to do are too few.
    """
    count = enough = max(1, math.ceil(traffic.rate / replica.requests_per_s(traffic.workload.generate)))
    low, best = count - 1, None  # too few, and enough
    while best is None or best.count > max(low + 1, PRECISION * low):
        tried = _try(replica, traffic, objective, count)
        if tried.kept >= KEPT:
            best = tried
        elif count > IDLE * enough:
            raise NothingFitsError(
                f"{replica.target.model.name} on {replica.devices} {replica.target.device.name} "
                f"({replica.made.plan.ways}): on idle replicas, {tried.kept:.0%} of the requests keep the objective; "
                f"{KEPT:.0%} must. Name more devices, or a longer time in --slo."
            )
        else:
            low = count
        count = 2 * low if best is None else (low + best.count) // 2
    return best


def _try(replica: Replica, traffic: Traffic, objective: Objective, count: int) -> Fleet:
    """Simulate one of so many replicas: requests that fill it, those that are judged, and some that keep it full."""
    running = traffic.rate / count * replica.made.seconds  # Little's law
    warm = math.ceil(min(2 * running, 2 * replica.batch * replica.made.plan.ways.data, MOST_WARM))
    done = replica.simulate(traffic.share(count, warm + JUDGED + warm // 2), traffic.workload)
    judged = done.records[warm : warm + JUDGED]
    return Fleet(
        replica=replica,
        count=count,
        spares=spares(count, replica.devices),
        percentiles=summarise(judged, objective).percentiles,
        kept=sum(map(objective.is_kept, judged)) / len(judged),
        preemptions=done.preemptions,
    )


def spares(count: int, devices: int) -> int:
    """Compute how many more replicas leave `count` whole, in the share `AVAILABLE` of the time.

    A replica is down while one of its devices is. Replicas fail independently.

    >>> spares(1, 1), spares(100, 8)
    (0, 3)
    """
    down = 1 - (1 - HOURS_TO_REPAIR / (HOURS_TO_FAILURE + HOURS_TO_REPAIR)) ** devices
    more = 0
    while sum(_binomial(count + more, lost, down) for lost in range(more + 1)) < AVAILABLE:
        more += 1
    return more


def _binomial(count: int, hits: int, chance: float) -> float:
    """Compute the probability of so many hits; numbers of ways can be too large for a float."""
    ways = math.lgamma(count + 1) - math.lgamma(hits + 1) - math.lgamma(count - hits + 1)
    return math.exp(ways + hits * math.log(chance) + (count - hits) * math.log1p(-chance))

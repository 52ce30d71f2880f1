"""Forecasts before a system is started: the simulator on its placement, and how to divide its memory."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence, Set

from jaxinfer.evaluation.experts.memory_search import Window, search_memory
from jaxinfer.evaluation.experts.simulator import SimulatedRun, Simulator
from jaxinfer.evaluation.experts.workloads import TraceRequest
from jaxinfer.experts.errors import ConfigError
from jaxinfer.experts.opened import OpenedSystem
from jaxinfer.experts.scheduling.policy import Policy
from jaxinfer.experts.scheduling.profile import Profiles
from jaxinfer.experts.scheduling.scheduler import Scheduler
from jaxinfer.progress import long_work

KEEPS_UP = 0.9
"""Share of the arrival rate that a system must reach not to be busy all the time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecast:
    """The predicted run of a trace.

    Attributes:
      scheduler: the scheduler's final state.
      placed: each pool's experts at the start, by its index.
      bound: minimum number of loads of any scheduler.
    """

    outcome: SimulatedRun
    scheduler: Scheduler
    placed: Mapping[int, Sequence[str]]
    bound: int


def forecast(
    opened: OpenedSystem, profiles: Profiles, trace: Sequence[TraceRequest], *, policy: Policy | None = None
) -> Forecast:
    """Run a trace on the simulated clock.

    Args:
      profiles: the experts' costs.
      policy: replaces the config's.
    """
    scheduler = opened.make_scheduler(profiles, policy=policy, may_refuse=False)
    return _run(scheduler, trace)


def compulsory_loads(used: Iterable[str], resident: Set[str]) -> int:
    """Count the minimum of loads if requests may run in any order: one for each used expert that is not loaded."""
    return len(set(used) - resident)


def _run(scheduler: Scheduler, trace: Sequence[TraceRequest]) -> Forecast:
    placed = scheduler.manager.place()
    used = {name for item in trace for name in item.experts}
    resident = {name for names in placed.values() for name in names}
    return Forecast(
        outcome=Simulator(scheduler).run(trace),
        scheduler=scheduler,
        placed=placed,
        bound=compulsory_loads(used, resident),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryAdvice:
    """Advice on dividing the memory of all executors.

    Attributes:
      windows: the numbers of experts tried.
      experts: the best of them to have room for.
      expert_bytes: each executor's bytes for experts, in order.
      activation_bytes: the rest, for batches.
    """

    windows: Sequence[Window]
    experts: int
    expert_bytes: Sequence[int]
    activation_bytes: Sequence[int]


def advise_memory(opened: OpenedSystem, profiles: Profiles, trace: Sequence[TraceRequest]) -> MemoryAdvice:
    """Search for the best share of memory for experts, by simulation (paper section 4.4).

    The executors' memory for experts and for activations is divided again: each gets room for its part of the most used
    experts, and batches get the rest. Raises ConfigError where not one expert and one request fit, and where inputs
    arrive so slowly that any division would do.
    """
    executors = opened.make_scheduler(profiles).executors
    configs = [executor.config for executor in executors]
    totals = [config.expert_bytes + (config.activation_bytes or 0) for config in configs]
    experts = opened.graph.experts
    largest = max(expert.bytes for expert in experts.values())
    room = list(itertools.accumulate(experts[name].bytes for name in opened.graph.by_usage))
    request = max(profile.activations(1) for profile in profiles.values()) or 1

    def divided(count: int) -> list[int]:
        """Each executor's room for `count` experts together; each has room for the largest."""
        return [max(largest, math.ceil(room[count - 1] * total / sum(totals))) for total in totals]

    def fits(count: int) -> bool:
        return all(total - part >= request for total, part in zip(totals, divided(count), strict=True))

    limit = max((count for count in range(1, len(experts) + 1) if fits(count)), default=0)
    if not limit:
        raise ConfigError(
            f"an executor has no room for an expert of {largest} bytes beside a request of {request} bytes; "
            "give it more memory."
        )

    def throughput(count: int) -> float:
        work.update(what=f"simulating room for {count} experts")
        parts = [
            dataclasses.replace(config, expert_bytes=part, activation_bytes=total - part)
            for config, part, total in zip(configs, divided(count), totals, strict=True)
        ]
        scheduler = Scheduler(opened.graph, profiles, parts, opened.config.policy, host_bytes=opened.host_bytes)
        return _run(scheduler, trace).outcome.throughput

    rate = len(trace) / trace[-1].arrival if trace and trace[-1].arrival else math.inf
    with long_work("simulating") as work:
        if throughput(limit) > KEEPS_UP * rate:
            raise ConfigError(f"experts keep up with {rate:.4g} inputs a second anyhow; try inputs that come faster.")
        windows = search_memory(opened.graph.usage.values(), throughput, limit=limit).windows
    best = max(windows, key=lambda window: window.throughput).experts[1]  # rather than one that was not tried
    parts = divided(best)
    rest = [total - part for total, part in zip(totals, parts, strict=True)]
    return MemoryAdvice(windows=windows, experts=best, expert_bytes=parts, activation_bytes=rest)

"""The paper's offline profiler (section 4.5), which measures experts' costs into the one record of costs."""

import dataclasses
import logging
import threading
import time
from collections.abc import Sequence

import numpy as np

from jaxinfer.compiled import Costs
from jaxinfer.execution.forward import batch_sizes
from jaxinfer.experts.errors import ProfileError
from jaxinfer.experts.execution.architectures import (
    PROGRAM,
    ArchitecturePrograms,
    architecture_costs,
    cost_of,
)
from jaxinfer.experts.execution.loader import ExpertLoader
from jaxinfer.experts.scheduling.profile import MIN_R_SQUARED, Profile, Tier, choose_max_batch, fit_latency
from jaxinfer.experts.scheduling.request import Eviction, Load
from jaxinfer.progress import LongWork, long_work

log = logging.getLogger(__name__)

REPEATS = 5
ATTEMPTS = 3
"""Attempts at latencies that are linear in the batch size, which fail on a machine that does other things."""
EVICT = "evict"
"""The name of a copy to the host's memory in the record of costs; a load's is "load_disk" or "load_host"."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """The measurements of an architecture at a place.

    Attributes:
      r_squared: fit of the line through the latencies; 0: not a line.
      workspace: a batch's bytes of each device by its size.
    """

    profile: Profile
    r_squared: float
    workspace: dict[int, int]


def measure(
    programs: ArchitecturePrograms,
    loader: ExpertLoader,
    pool: int,
    expert: str,
    *,
    max_batch: int,
    sharers: int = 1,
    remeasure: bool = False,
) -> Measured:
    """Read an architecture's profile at a place from the record of costs, and measure missing parts.

    Args:
      programs: the architecture's programs at the place.
      loader: loads the expert.
      pool: an empty pool at the place.
      expert: an expert of the architecture.
      max_batch: inputs of the largest batch to measure in each lane.
      sharers: number of executors that share the place; all run while one is measured.
      remeasure: measure all again.
    Raises LoadError if the expert cannot be loaded.
    """
    costs = architecture_costs(
        programs.architecture, programs.place, sharers=sharers, disk=loader.disk(expert), kernels=programs.kernels
    )
    lanes = programs.place.lanes
    sizes, largest = batch_sizes(max(2, max_batch), lanes), lanes * max_batch
    programs.compile_ahead(sizes[-1])
    known = all((cost := cost_of(costs, size)) and cost.calls >= REPEATS for size in sizes)
    if remeasure or not known:
        _run(programs, loader, pool, expert, costs, sharers=sharers)
    for _ in range(ATTEMPTS - 1):
        if _fit(costs, sizes, largest).r_squared >= MIN_R_SQUARED:
            break
        _run(programs, loader, pool, expert, costs, sharers=sharers)
    latency, k, b, r_squared = dataclasses.astuple(_fit(costs, sizes, largest))
    if r_squared < MIN_R_SQUARED:
        log.warning(
            "the latency of %s is no line over batch sizes, so that K is taken from the largest batch; measure again "
            "on a quiet machine: jaxinfer experts profile --remeasure",
            programs.architecture.name,
        )
    best = max(size for size in latency if size <= largest)
    workspace = {size: programs.forward.workspace_bytes(size) for size in sizes}
    one_more = (workspace[sizes[-1]] - workspace[sizes[0]]) // (sizes[-1] - sizes[0])
    profile = Profile(
        k=k,
        b=b,
        max_batch=best,
        load={"disk": _median(costs, "load_disk"), "host": _median(costs, "load_host")},
        evict=_median(costs, EVICT),
        activation_bytes=max(one_more, 1),
        latency={size: seconds for size, seconds in latency.items() if size <= best},
        workspace={size: number for size, number in workspace.items() if size <= best},
    )
    costs.save()
    return Measured(profile=profile, r_squared=r_squared, workspace=workspace)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Fit:
    latency: dict[int, float]
    k: float
    b: float
    r_squared: float


def _fit(costs: Costs, sizes: Sequence[int], largest: int) -> _Fit:
    """Fit a line through the latencies of the batch sizes worth making, at least two.

    Where they are no line (small models, whose batches cost as much as one input), K is a request's part of the largest
    batch, B the rest of the smallest batch's latency, and R^2 is 0.
    """
    known = {size: cost.p50 for size in sizes if (cost := cost_of(costs, size))}
    best = choose_max_batch({size: seconds for size, seconds in known.items() if size <= largest})
    latency = {size: seconds for size, seconds in known.items() if size <= max(best, sizes[1])}
    try:
        k, b, r_squared = fit_latency(latency)
    except ProfileError:
        k, r_squared = latency[max(latency)] / max(latency), 0.0
        b = max(latency[sizes[0]] - k * sizes[0], 0.0)
    return _Fit(latency=latency, k=k, b=b, r_squared=r_squared)


def _median(costs: Costs, name: str) -> float:
    cost = costs.for_sizes(name)
    assert cost is not None, "it was measured"
    return cost.p50


def _run(
    programs: ArchitecturePrograms, loader: ExpertLoader, pool: int, expert: str, costs: Costs, *, sharers: int
) -> None:
    """Load the expert from every tier, run batches of all sizes, and record their times."""
    steps = (1 + REPEATS) * (1 + len(programs.forward.sizes))
    with long_work(f"measuring {programs.architecture.name}", total=steps) as work:
        _run_loads(loader, pool, expert, costs, work)
        _load(loader, pool, expert, "disk", costs)
        _run_batches(programs, loader.leaves(pool, expert), costs, work, sharers=sharers)
        loader.begin_eviction(pool, [Eviction(expert=expert, to_host=False)], ())()


def _run_loads(loader: ExpertLoader, pool: int, expert: str, costs: Costs, work: LongWork) -> None:
    for _ in range(1 + REPEATS):  # the first call of each does not count
        for tier in ("disk", "host"):
            _load(loader, pool, expert, tier, costs)
            begun = time.perf_counter()
            loader.begin_eviction(pool, [Eviction(expert=expert, to_host=tier == "disk")], ())()
            if tier == "disk":
                costs.record(EVICT, (), time.perf_counter() - begun)
        work.advance()


def _run_batches(
    programs: ArchitecturePrograms, leaves: Sequence, costs: Costs, work: LongWork, *, sharers: int
) -> None:
    for size in programs.forward.sizes:
        inputs = [np.zeros(programs.architecture.shape, programs.architecture.dtype)] * size
        ended = threading.Event()
        others = [
            threading.Thread(target=_keep_running, args=(programs, leaves, inputs, ended)) for _ in range(sharers - 1)
        ]
        for thread in others:
            thread.start()
        try:
            for _ in range(1 + REPEATS):
                begun = time.perf_counter()
                programs.run(leaves, inputs)
                costs.record(PROGRAM, (("batch", size),), time.perf_counter() - begun)
                work.advance()
        finally:
            ended.set()
            for thread in others:
                thread.join()


def _load(loader: ExpertLoader, pool: int, expert: str, tier: Tier, costs: Costs) -> None:
    begun = time.perf_counter()
    loader.prepare(Load(executor=0, pool=pool, expert=expert, tier=tier))()
    costs.record(f"load_{tier}", (), time.perf_counter() - begun)


def _keep_running(
    programs: ArchitecturePrograms, leaves: Sequence, inputs: list[np.ndarray], ended: threading.Event
) -> None:
    while not ended.is_set():
        programs.run(leaves, inputs)

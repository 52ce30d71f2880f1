"""The scheduler on a simulated clock: what a system would do, given its experts' costs.

It runs the decisions that real executors run. With `act` every load and batch is also really done, at the moment when
it begins on the simulated clock.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from jaxinfer.evaluation.experts.workloads import TraceRequest
from jaxinfer.experts.scheduling.executor_state import ExpertStatistics
from jaxinfer.experts.scheduling.profile import Tier
from jaxinfer.experts.scheduling.request import Action, Batch, Evict, Failure, Load, Request
from jaxinfer.experts.scheduling.scheduler import Scheduler
from jaxinfer.progress import long_work
from jaxinfer.serving.errors import ServingError
from jaxinfer.serving.simulation import Simulation


class Hardware(Protocol):
    """The duration of loads and batches."""

    def load(self, architecture: str, size: int, processor: str, tier: Tier, now: float) -> float:
        """Return when a load that begins now ends."""
        ...

    def execute(self, architecture: str, processor: str, batch: int) -> float:
        """Compute the seconds of a batch."""
        ...


class ProfiledHardware:
    """Hardware as in the profiles. One expert at a time is read from disk, as fast as if it were alone.

    Args:
      scheduler: the scheduler whose profiles count.
    """

    def __init__(self, scheduler: Scheduler):
        self._profiles, self._disk_free = scheduler.profiles, 0.0

    def load(self, architecture: str, size: int, processor: str, tier: Tier, now: float) -> float:
        seconds = self._profiles[architecture, processor].load_seconds(tier)
        if tier == "host":
            return now + seconds
        self._disk_free = max(now, self._disk_free) + seconds
        return self._disk_free

    def execute(self, architecture: str, processor: str, batch: int) -> float:
        return self._profiles[architecture, processor].seconds(batch)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulatedRun:
    """The result of a simulated trace.

    Attributes:
      seconds: seconds from the first arrival to the last result.
      finished: number of inputs with a result.
      failed: number of inputs that ended with an error.
      latencies: seconds of each input from its arrival to its result.
      statistics: the scheduler's counters.
      decision_seconds: real time of each call into the scheduler to assign a request or to poll.
      busy_seconds: simulated time that executors spent on batches.
    """

    seconds: float
    finished: int
    failed: int
    latencies: Sequence[float]
    statistics: ExpertStatistics
    decision_seconds: np.ndarray
    busy_seconds: float

    @property
    def throughput(self) -> float:
        """Inputs with a result per second; 0 if there were none."""
        return self.finished / self.seconds if self.seconds else 0.0


class Simulator:
    """Simulator of a scheduler on a trace.

    Args:
      scheduler: a scheduler without requests.
      hardware: the duration of loads and batches; None: as in the scheduler's profiles.
      act: has an action really done.
    """

    def __init__(
        self, scheduler: Scheduler, hardware: Hardware | None = None, *, act: Callable[[Action], object] | None = None
    ):
        self._scheduler, self._hardware = scheduler, hardware or ProfiledHardware(scheduler)
        self._act = act or (lambda action: None)
        self._simulation = Simulation[Load | Batch | Request]()
        self._inputs: Sequence[TraceRequest] = ()
        self._ends: dict[int, float] = {}  # end of each input with a result, in the order of the results
        self._failed = 0
        self._decisions: list[float] = []
        self._busy = 0.0
        self._leaving: dict[int, float] = {}  # per executor: when evictions for its next batch end

    def run(self, trace: Iterable[TraceRequest]) -> SimulatedRun:
        """Run until nothing is left to do."""
        self._inputs = list(trace)
        for number, item in enumerate(self._inputs):
            self._simulation.arrive(item.arrival, Request(id=number, expert=item.experts[0], arrival=item.arrival))
        with long_work("simulating inputs", total=len(self._inputs)) as work:

            def handle(event: Load | Batch | Request) -> None:
                self._handle(event)
                work.update(done=len(self._ends) + self._failed)

            self._simulation.run(handle, self._begin)
        start, end = self._inputs[0].arrival if self._inputs else 0.0, max(self._ends.values(), default=0.0)
        return SimulatedRun(
            seconds=end - start if self._ends else 0.0,
            finished=len(self._ends),
            failed=self._failed,
            latencies=[self._ends[number] - self._inputs[number].arrival for number in sorted(self._ends)],
            statistics=self._scheduler.statistics,
            decision_seconds=np.array(self._decisions),
            busy_seconds=self._busy,
        )

    def _handle(self, event: Load | Batch | Request) -> None:
        """Tell the scheduler of an event."""
        now = self._simulation.now
        match event:
            case Request():
                self._submit(event)
            case Load():
                self._failed += len(self._scheduler.loaded(event, now))
            case Batch():
                self._scheduler.executed(event, now)
                for request in event.requests:
                    self._follow(request)

    def _follow(self, request: Request) -> None:
        """Submit an input to its next expert, or end it."""
        now, stage, experts = self._simulation.now, request.stage + 1, self._inputs[request.id].experts
        if stage < len(experts):
            self._submit(Request(id=request.id, expert=experts[stage], stage=stage, arrival=now))
        else:
            self._ends[request.id] = now

    def _submit(self, request: Request) -> None:
        begun = time.perf_counter()
        try:
            self._scheduler.submit(request, self._simulation.now)
        except (ServingError, ValueError):
            self._failed += 1
        finally:
            self._decisions.append(time.perf_counter() - begun)

    def _begin(self) -> None:
        """Begin all actions that may begin."""
        begun = time.perf_counter()
        actions = self._scheduler.poll(self._simulation.now)
        self._decisions.append(time.perf_counter() - begun)
        for action in actions:
            self._act(action)
            match action:
                case Load():
                    self._load(action)
                case Batch():
                    self._execute(action)
                case Evict():
                    self._leaving[action.executor] = self._simulation.now + self._leave(action)
                case Failure():
                    self._failed += 1

    def _load(self, load: Load) -> None:
        """Load an expert after the evictions that make room for it."""
        expert, processor = self._scheduler.graph.experts[load.expert], self._processor(load)
        begun = self._simulation.now + self._leave(load)
        end = self._hardware.load(expert.architecture, expert.bytes, processor, load.tier, begun)
        self._simulation.end(end, load)

    def _execute(self, batch: Batch) -> None:
        """Run a batch after the evictions that give it their memory."""
        now, expert = self._simulation.now, self._scheduler.graph.experts[batch.expert]
        seconds = self._hardware.execute(expert.architecture, self._processor(batch), len(batch.requests))
        self._busy += seconds
        self._simulation.end(max(now, self._leaving.pop(batch.executor, now)) + seconds, batch)

    def _leave(self, action: Load | Evict) -> float:
        """Compute the seconds of an action's evictions."""
        scheduler, processor = self._scheduler, self._processor(action)
        leaving = [scheduler.graph.experts[x.expert].architecture for x in action.evictions if x.to_host]
        return sum(scheduler.profiles[architecture, processor].evict for architecture in leaving)

    def _processor(self, action: Load | Batch | Evict) -> str:
        return self._scheduler.executors[action.executor].config.processor

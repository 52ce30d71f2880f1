"""The scheduler on a simulated clock: what a system would do, from what its experts cost.

It runs the same decisions as real executors do. With `act` it also has every load and every batch really done, at the
moment when the simulated clock says that it begins.
"""

import dataclasses
import heapq
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from jaxinfer.evaluation.experts.workloads import TraceRequest
from jaxinfer.experts.errors import CollaborationError
from jaxinfer.experts.scheduling.executor_state import Statistics
from jaxinfer.experts.scheduling.profile import Tier
from jaxinfer.experts.scheduling.request import Action, Batch, Evict, Failure, Load, Request
from jaxinfer.experts.scheduling.scheduler import Scheduler


class Hardware(Protocol):
    """How long things take."""

    def load(self, architecture: str, size: int, processor: str, tier: Tier, now: float) -> float:
        """When a load ends that begins now."""
        ...

    def execute(self, architecture: str, processor: str, batch: int) -> float:
        """Seconds of a batch."""
        ...


class ProfiledHardware:
    """Takes what the profiles say. One expert is read from disk at a time, as fast as if it were alone.

    Args:
      scheduler: whose profiles.
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
class Outcome:
    """What came of a trace.

    Attributes:
      seconds: from the first arrival to the last result.
      finished: inputs that have a result. failed: those that ended with an error.
      latencies: seconds of each input from its arrival to its result.
      statistics: the scheduler's.
      decision_seconds: real time of each call into the scheduler that assigned a request or asked what may begin.
      busy_seconds: simulated time that executors spent on batches.
    """

    seconds: float
    finished: int
    failed: int
    latencies: Sequence[float]
    statistics: Statistics
    decision_seconds: np.ndarray
    busy_seconds: float

    @property
    def throughput(self) -> float:
        """Inputs with a result for each second; 0 if there were none."""
        return self.finished / self.seconds if self.seconds else 0.0


class Simulator:
    """Runs a trace through a scheduler.

    Args:
      scheduler: one without requests.
      hardware: how long things take; None: as the scheduler's profiles say.
      act: has an action really done.
    """

    def __init__(
        self, scheduler: Scheduler, hardware: Hardware | None = None, *, act: Callable[[Action], object] | None = None
    ):
        self._scheduler, self._hardware = scheduler, hardware or ProfiledHardware(scheduler)
        self._act = act or (lambda action: None)
        self._events: list[tuple[float, int, int, Load | Batch | Request]] = []
        self._count = itertools.count()
        self._decisions: list[float] = []
        self._busy = 0.0
        self._leaving: dict[int, float] = {}  # of executors, until when experts leave for their next batch

    def run(self, trace: Iterable[TraceRequest]) -> Outcome:
        """Run until nothing is left to do."""
        inputs, latencies, failed, end = list(trace), dict[int, float](), 0, 0.0
        for number, item in enumerate(inputs):
            request = Request(id=number, expert=item.experts[0], arrival=item.arrival)
            self._push(item.arrival, request)
        while self._events:
            now = self._events[0][0]
            while self._events and self._events[0][0] == now:
                event = heapq.heappop(self._events)[-1]
                match event:
                    case Request():
                        failed += self._submit(event, now)
                    case Load():
                        failed += len(self._scheduler.loaded(event, now))
                    case Batch():
                        self._scheduler.executed(event, now)
                        for request in event.requests:
                            experts = inputs[request.id].experts
                            if request.stage + 1 < len(experts):
                                failed += self._submit(_following(request, experts, now), now)
                            else:
                                latencies[request.id], end = now - inputs[request.id].arrival, now
            failed += self._begin(now)
        start = inputs[0].arrival if inputs else 0.0
        return Outcome(
            seconds=end - start if latencies else 0.0,
            finished=len(latencies),
            failed=failed,
            latencies=[latencies[number] for number in sorted(latencies)],
            statistics=self._scheduler.statistics,
            decision_seconds=np.array(self._decisions),
            busy_seconds=self._busy,
        )

    def _submit(self, request: Request, now: float) -> int:
        """Submit a request; 1 if it is refused."""
        begun = time.perf_counter()
        try:
            self._scheduler.submit(request, now)
        except CollaborationError:
            return 1
        finally:
            self._decisions.append(time.perf_counter() - begun)
        return 0

    def _begin(self, now: float) -> int:
        """Begin what may begin; returns how many requests have failed."""
        begun = time.perf_counter()
        actions = self._scheduler.poll(now)
        self._decisions.append(time.perf_counter() - begun)
        failed = 0
        for action in actions:
            self._act(action)
            match action:
                case Load():
                    expert = self._scheduler.graph.experts[action.expert]
                    processor = self._scheduler.executors[action.executor].config.processor
                    begun = now + self._leave(action, processor)
                    end = self._hardware.load(expert.architecture, expert.bytes, processor, action.tier, begun)
                    self._push(end, action)
                case Batch():
                    expert = self._scheduler.graph.experts[action.expert]
                    processor = self._scheduler.executors[action.executor].config.processor
                    seconds = self._hardware.execute(expert.architecture, processor, len(action.requests))
                    self._busy += seconds
                    self._push(max(now, self._leaving.pop(action.executor, now)) + seconds, action)
                case Evict():
                    processor = self._scheduler.executors[action.executor].config.processor
                    self._leaving[action.executor] = now + self._leave(action, processor)
                case Failure():
                    failed += 1
        return failed

    def _leave(self, action: Load | Evict, processor: str) -> float:
        """Seconds until the experts have left that make room."""
        scheduler = self._scheduler
        leaving = [scheduler.graph.experts[x.expert].architecture for x in action.evictions if x.to_host]
        return sum(scheduler.profiles[architecture, processor].evict for architecture in leaving)

    def _push(self, at: float, event: Load | Batch | Request) -> None:
        order = 0 if isinstance(event, Load | Batch) else 1  # what ends comes before what arrives at the same moment
        heapq.heappush(self._events, (at, order, next(self._count), event))


def _following(request: Request, experts: tuple[str, ...], now: float) -> Request:
    """The next stage of a request."""
    stage = request.stage + 1
    return Request(id=request.id, expert=experts[stage], stage=stage, arrival=now)

"""The scheduler's view of executors, and its statistics."""

import dataclasses
from collections import Counter
from collections.abc import Mapping

from jaxinfer.experts.errors import ConfigError
from jaxinfer.experts.scheduling.pool import ModelPool
from jaxinfer.experts.scheduling.profile import Tier
from jaxinfer.experts.scheduling.queue import ExecutorQueue
from jaxinfer.experts.scheduling.request import Batch
from jaxinfer.serving.statistics import Statistics


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExecutorConfig:
    """An executor and its memory.

    Attributes:
      name: a name for people.
      processor: its processor as profiles name it: "gpu", "cpu", with the axes of a mesh "gpu data=2".
      device: its device or mesh; executors on the same one can share a pool.
      expert_bytes: bytes of its pool on each device.
      activation_bytes: bytes of each device for a batch on top; None: limited by the profile's `max_batch` alone.
    """

    name: str
    processor: str
    device: str
    expert_bytes: int
    activation_bytes: int | None = None

    def __post_init__(self) -> None:
        for name in ("expert_bytes", "activation_bytes"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ConfigError(f"executor {self.name!r}: {name} must be at least 1, got {value}.")

    @property
    def on_host(self) -> bool:
        """Whether its pool is in the host's memory."""
        return self.processor.split()[0] == "cpu"


@dataclasses.dataclass(eq=False)
class ExecutorState:
    """The scheduler's view of an executor.

    Attributes:
      batch: the batch taken from the queue that has not ended.
      executing: whether the batch runs; otherwise it waits for its expert.
      loading: the expert being loaded.
      ends: when the batch is expected to end.
      alive: whether it takes requests.
    """

    index: int
    config: ExecutorConfig
    pool: ModelPool
    queue: ExecutorQueue
    batch: Batch | None = None
    executing: bool = False
    loading: str | None = None
    ends: float = 0.0
    alive: bool = True

    def total(self, now: float) -> float:
        """Predict the seconds until all its work is done (paper section 4.2)."""
        return (max(self.ends - now, 0.0) if self.batch else 0.0) + self.queue.latency


@dataclasses.dataclass(kw_only=True)
class ExpertStatistics(Statistics):
    """Counters of a scheduler, and where time went, in seconds.

    Attributes:
      loads: experts loaded to a pool after the start (the paper's expert switches), by their source.
      prefetched: the number of them that began before their batch needed them.
      evictions: experts that left a pool.
      requests: requests that were executed, each a stage of an input.
      scheduling_seconds: CPU time of assigning requests.
      managing_seconds: CPU time of all other decisions: which batches and loads begin, which experts leave.
      running_seconds: time of batches, summed over executors.
      loading_seconds: time of loads, summed over executors.
      usage: the share of recent inputs that reaches each expert, in any mode.
    """

    loads: Counter[Tier] = dataclasses.field(default_factory=Counter)
    prefetched: int = 0
    evictions: int = 0
    requests: int = 0
    scheduling_seconds: float = 0.0
    managing_seconds: float = 0.0
    running_seconds: float = 0.0
    loading_seconds: float = 0.0
    usage: Mapping[str, float] = dataclasses.field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        loads = f"{self.switches} loads ({self.loads['disk']} from disk, {self.loads['host']} from the host)"
        return f"{super().__str__()}; {self.batches} batches; {loads}"

    @property
    def switches(self) -> int:
        """The number of loads."""
        return self.loads.total()

    @property
    def management_share(self) -> float:
        """The paper's overhead of expert management ("overhead analysis"): per second of executors' work."""
        return self.managing_seconds / (self.running_seconds + self.loading_seconds) if self.running_seconds else 0.0

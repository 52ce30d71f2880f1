"""What the scheduler knows of executors, and what it has done with them."""

import dataclasses
from collections import Counter

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
      name: for people.
      processor: what it runs on, as profiles name it: "gpu", "cpu".
      device: executors on the same device can share a pool.
      expert_bytes: of its pool.
      activation_bytes: what a batch may take beside that; None: no limit but the profile's `max_batch`.
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


@dataclasses.dataclass(eq=False)
class ExecutorState:
    """What the scheduler knows of an executor.

    Attributes:
      batch: taken from the queue, and not done.
      executing: whether its expert runs; otherwise it is waited for.
      loading: the expert that its loader brings.
      ends: when the batch should end.
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
        """Seconds until all that it has is done (paper section 4.2)."""
        return (max(self.ends - now, 0.0) if self.batch else 0.0) + self.queue.latency


@dataclasses.dataclass(kw_only=True)
class ExpertStatistics(Statistics):
    """What a scheduler has done, and where the time of those who do it went, in seconds.

    Attributes:
      loads: experts that came to a pool after the start (the paper's expert switches), by where they came from.
      prefetched: how many of them came before their batch needed them.
      evictions: experts that left a pool.
      requests: that were executed, each a stage of an input.
      scheduling_seconds: of the CPU, in assigning requests.
      managing_seconds: of the CPU, in all other decisions: which batches and loads begin, which experts leave.
      running_seconds: batches, all executors together.
      loading_seconds: loads, all executors together.
    """

    loads: Counter[Tier] = dataclasses.field(default_factory=Counter)
    prefetched: int = 0
    evictions: int = 0
    requests: int = 0
    scheduling_seconds: float = 0.0
    managing_seconds: float = 0.0
    running_seconds: float = 0.0
    loading_seconds: float = 0.0

    @property
    def switches(self) -> int:
        """All loads."""
        return self.loads.total()

    @property
    def management_share(self) -> float:
        """The paper's overhead of expert management ("overhead analysis"): for each second of executors' work."""
        return self.managing_seconds / (self.running_seconds + self.loading_seconds) if self.running_seconds else 0.0

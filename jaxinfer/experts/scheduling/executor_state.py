"""What the scheduler knows of executors, and what it has done with them."""

import dataclasses
from collections import Counter

from jaxinfer.experts.errors import ConfigError
from jaxinfer.experts.scheduling.pool import ModelPool
from jaxinfer.experts.scheduling.profile import Tier
from jaxinfer.experts.scheduling.queue import ExecutorQueue
from jaxinfer.experts.scheduling.request import Batch


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
class Statistics:
    """What a scheduler has done.

    Attributes:
      loads: experts that came to a pool after the start (the paper's expert switches), by where they came from.
      prefetched: how many of them came before their batch needed them.
      evictions: experts that left a pool.
      batches, requests: that were executed.
      failed: requests that ended with an error.
    """

    loads: Counter[Tier] = dataclasses.field(default_factory=Counter)
    prefetched: int = 0
    evictions: int = 0
    batches: int = 0
    requests: int = 0
    failed: int = 0

    @property
    def switches(self) -> int:
        """All loads."""
        return self.loads.total()

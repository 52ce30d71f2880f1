"""Requests, and the actions for executors."""

import dataclasses

from jaxinfer.experts.scheduling.profile import Tier


@dataclasses.dataclass(eq=False, kw_only=True)
class Request:
    """A stage of an input: a request to an expert to judge it.

    Attributes:
      id: the input's id, shared by its stages.
      stage: 0 for the first expert.
      expert: the expert's name.
      arrival: when it was submitted, in seconds of the scheduler's clock.
      deadline: when its expert must have begun.
      latency: the additional inference latency predicted for it (paper section 4.2).
      requeued: whether it was moved from an executor that could not run it.
    """

    id: int
    expert: str
    arrival: float
    stage: int = 0
    deadline: float | None = None
    latency: float = 0.0
    requeued: bool = False


@dataclasses.dataclass(eq=False)
class Batch:
    """Requests for one expert that an executor runs together.

    Attributes:
      executor: the executor's index.
      began: when it was taken from the queue.
    """

    executor: int
    expert: str
    requests: list[Request]
    began: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eviction:
    """An expert that leaves a pool; with `to_host` it stays in the host cache."""

    expert: str
    to_host: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evict:
    """An action: evict experts from a pool, to give a batch their memory.

    Attributes:
      executor: the executor of the batch.
      pool: the pool's index.
      evictions: the experts.
      dropped: experts that leave the host cache to make room for them.
    """

    executor: int
    pool: int
    evictions: tuple[Eviction, ...]
    dropped: tuple[str, ...]


@dataclasses.dataclass(eq=False, kw_only=True)
class Load:
    """An action: load an expert to a pool.

    Attributes:
      executor: the executor whose loader loads it.
      pool: the pool's index.
      tier: its source.
      source: the pool whose copy is used; None: the host cache, or a file.
      evictions: experts that leave the pool first.
      dropped: experts that leave the host cache to make room for them.
      prefetched: whether it begins before its batch needs it.
    """

    executor: int
    pool: int
    expert: str
    tier: Tier
    source: int | None = None
    evictions: tuple[Eviction, ...] = ()
    dropped: tuple[str, ...] = ()
    prefetched: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Failure:
    """A request that ends with an error."""

    request: Request
    error: Exception


Action = Load | Batch | Evict | Failure

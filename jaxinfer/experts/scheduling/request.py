"""Requests, and what executors are told to do with them."""

import dataclasses

from jaxinfer.experts.scheduling.profile import Tier


@dataclasses.dataclass(eq=False, kw_only=True)
class Request:
    """One stage of an input: an expert is to judge it.

    Attributes:
      id: of the input; all stages have the same.
      stage: 0 for the first expert.
      expert: its name.
      arrival: when the scheduler got it, in seconds of its clock.
      deadline: by when its expert must have begun.
      latency: the additional inference latency that it was predicted to cost (paper section 4.2).
      requeued: whether its executor could not run it, so that another one got it.
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
    """Requests that an executor's expert runs together.

    Attributes:
      executor: its index.
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
    """Experts that leave a pool, to give a batch their memory.

    Attributes:
      executor: whose batch.
      pool: which one.
      evictions: the experts.
      dropped: experts that leave the host cache, to make room for those.
    """

    executor: int
    pool: int
    evictions: tuple[Eviction, ...]
    dropped: tuple[str, ...]


@dataclasses.dataclass(eq=False, kw_only=True)
class Load:
    """An expert that comes to a pool.

    Attributes:
      executor: whose loader brings it. pool: which pool.
      tier: where it comes from.
      source: the pool whose copy it is, None: the host cache, or a file.
      evictions: experts that leave the pool first.
      dropped: experts that leave the host cache, to make room for those.
      prefetched: whether it comes before its batch needs it.
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

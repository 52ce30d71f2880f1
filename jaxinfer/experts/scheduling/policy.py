"""Scheduling policies: CoServe's, those it is compared with, and ours."""

import dataclasses
from typing import Annotated, Any, Literal

from msgspec import Meta

from jaxinfer.experts.errors import ConfigError
from jaxinfer.fields import Positive, Size, check_fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policy:
    """The choices of a scheduler.

    Attributes:
      assign: "makespan", as in paper section 4.2, or "round_robin".
      arrange: whether a request queues behind those for its expert, rather than behind all.
      evict: order of eviction: CoServe's two stages; two stages with queued experts last; least recently used;
        first in, first out.
      max_batch: the largest batch, whatever the profile allows.
      one_executor: whether only the first executor runs, with the memory of all that share its device.
      host_cache: whether evicted experts stay in the host's memory; loads then also use copies in CPUs' pools.
      share_pools: whether executors on the same device have one pool.
      prefetch: number of groups ahead whose experts are loaded while another one runs.
      resident_first: whether groups whose experts are in the pool run first, while the others collect requests.
      counts_batches: whether the prediction counts B for each batch of a group, not once per group.
      avoids_padding: whether a batch shrinks to the next smaller compiled size, rather than compute more than
        25% padding.
      max_age: a request does not overtake one that arrived more than this many seconds earlier, so that none starves;
        None: no limit (the paper's "window" has no end).
      learns_usage: whether experts leave by their usage in recent inputs, rather than by the configured one.
      by_deadline: whether a group whose deadline can be met, but not in its turn, runs first, earliest deadline first.
    """

    assign: Literal["makespan", "round_robin"] = "makespan"
    arrange: bool = True
    evict: Literal["two_stage", "queue_aware", "lru", "fifo"] = "two_stage"
    max_batch: Size | None = None
    one_executor: bool = False
    host_cache: bool = False
    share_pools: bool = False
    prefetch: Annotated[int, Meta(ge=0, le=64, description="an integer in [0, 64]")] = 0
    resident_first: bool = False
    counts_batches: bool = False
    avoids_padding: bool = False
    max_age: Positive | None = None
    learns_usage: bool = False
    by_deadline: bool = False

    def __post_init__(self) -> None:
        check_fields(self, error=ConfigError)


_SAMBA = Policy(assign="round_robin", arrange=False, evict="lru", max_batch=1, one_executor=True, host_cache=True)
_PARALLEL = dataclasses.replace(_SAMBA, one_executor=False)
_GROUPING: dict[str, Any] = {"arrange": True, "max_batch": None}
_NONE = Policy(assign="round_robin", arrange=False, evict="fifo")

POLICIES = {
    "samba": _SAMBA,  # Samba-CoE: in the order of arrival, evicting the least recently used expert
    "fifo": dataclasses.replace(_SAMBA, evict="fifo"),  # Samba-CoE FIFO
    "parallel": _PARALLEL,  # Samba-CoE Parallel
    "samba_grouping": dataclasses.replace(_SAMBA, **_GROUPING),  # collecting requests for one expert,
    "parallel_grouping": dataclasses.replace(_PARALLEL, **_GROUPING),  # as servers that swap models do
    "none": _NONE,  # the ablations of paper section 5.3
    "em": dataclasses.replace(_NONE, evict="two_stage"),  # expert management
    "em_ra": dataclasses.replace(_NONE, evict="two_stage", arrange=True),  # with request arranging
    "paper": Policy(),  # with request assignment: CoServe
    "best": Policy(
        evict="queue_aware",
        host_cache=True,
        share_pools=True,
        prefetch=4,
        resident_first=True,
        avoids_padding=True,
        max_age=30.0,
        learns_usage=True,
        by_deadline=True,
    ),
}
"""The policies by name."""


def policy_of(mode: str, **changes: Any) -> Policy:
    """The policy of this name, with changes. Raises ConfigError."""
    if mode not in POLICIES:
        raise ConfigError(f"mode={mode!r} is not known; known: {', '.join(POLICIES)}.")
    known = {field.name for field in dataclasses.fields(Policy)}
    if unknown := sorted(changes.keys() - known):
        raise ConfigError(f"a policy has no {', '.join(unknown)}; known: {', '.join(sorted(known))}.")
    return dataclasses.replace(POLICIES[mode], **changes)

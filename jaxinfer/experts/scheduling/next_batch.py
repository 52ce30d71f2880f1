"""The next work of an executor: a group of its queue, the size of its batch, and the experts needed after it."""

import math

from jaxinfer.experts.scheduling.executor_state import ExecutorState
from jaxinfer.experts.scheduling.policy import Policy
from jaxinfer.experts.scheduling.profile import Profile
from jaxinfer.experts.scheduling.queue import Group
from jaxinfer.experts.scheduling.request import Request

MAX_PADDING = 0.25
"""Share of a batch that may be padding, where the policy avoids padding."""


def next_group(
    executor: ExecutorState, policy: Policy, now: float, *, deadlines: bool
) -> tuple[Group, Request | None] | None:
    """Choose the first group, or one that may overtake it, for a request's deadline or because its expert is loaded.

    deadlines: whether any request has one; otherwise the queue is not searched for them.

    Returns the group, and the request that must be in its next batch, whatever its place in the group, or None. Returns
    None for an empty queue.
    """
    queue, first = executor.queue, executor.queue.first()
    if first is None:
        return None
    urgent = _urgent(executor, now) if policy.by_deadline and deadlines else None
    if urgent is not None and queue.may_overtake(urgent[1], first.first):
        return urgent
    if urgent is None and policy.resident_first and not executor.pool.is_ready(first.expert):
        ready = next((group for group in queue.groups() if executor.pool.is_ready(group.expert)), None)
        if ready is not None and queue.may_overtake(ready.first, first.first):
            return ready, None
    return first, None


def _urgent(executor: ExecutorState, now: float) -> tuple[Group, Request] | None:
    """The request with the earliest deadline among those that can be met, but may not be in their turn."""
    urgent, earliest, before = None, math.inf, 0.0
    for group in executor.queue.groups():
        before += group.latency
        if (entry := group.most_urgent) is not None:
            deadline, request = entry
            if now + request.latency <= deadline < min(now + before, earliest):
                urgent, earliest = (group, request), deadline
    return urgent


def batch_size(executor: ExecutorState, profile: Profile, policy: Policy, waiting: int) -> int:
    """Return how many of the waiting requests form a batch; 0 if not even one fits the memory for activations."""
    count, limit = min(waiting, max_batch(profile, policy)), executor.config.activation_bytes
    while count and limit is not None and profile.activations(count) > limit:
        count -= 1
    if not policy.avoids_padding or count == 0:
        return count
    padded = profile.padded(count)
    smaller = max((size for size in profile.latency if size <= count), default=count)
    return smaller if (padded - count) / padded > MAX_PADDING else count


def max_batch(profile: Profile, policy: Policy) -> int:
    """Return the largest batch of an expert."""
    return min(profile.max_batch, policy.max_batch or profile.max_batch)


def next_experts(executor: ExecutorState, policy: Policy) -> list[str]:
    """Return the experts that will run next, at most as many as the policy prefetches."""
    experts, limit = executor.queue.experts(), policy.prefetch
    if policy.resident_first:
        resident = executor.pool.resident
        ready = [name for name in experts if name in resident][:limit]
        experts = [*ready, *(name for name in experts if name not in ready)] if len(ready) < limit else ready
    return experts[:limit]

"""Orders in which experts leave a pool (paper section 4.3): CoServe's, and those it is compared with."""

from collections.abc import Callable, Iterable, Mapping, Set

from jaxinfer.experts.scheduling.experts import ExpertGraph


def two_stage(free: Iterable[str], resident: Set[str], graph: ExpertGraph, usage: Mapping[str, float]) -> list[str]:
    """Sort experts in CoServe's order of eviction.

    Subsequent experts without a predecessor in the pool come first, the largest first: nothing can lead to them soon.
    Then come the others, the least used first. Ties go to the less used, the larger, then by name.

    Args:
      free: the experts that may leave.
      resident: all experts in the pool, or expected there.
      graph: the experts' predecessors and bytes.
      usage: a number for each expert, larger for those that are used more.
    """
    free, experts = list(free), graph.experts
    independent = [name for name in free if graph.predecessors[name] and not graph.predecessors[name] & resident]
    first = sorted(independent, key=lambda name: (-experts[name].bytes, usage[name], name))
    others = sorted(set(free) - set(first), key=lambda name: (usage[name], -experts[name].bytes, name))
    return first + others


def queue_aware(order: list[str], queued: Mapping[str, int]) -> list[str]:
    """Move queued experts behind all others, the ones needed soonest last.

    Args:
      queued: the places in the queue of the experts that wait there.
    """
    return sorted(order, key=lambda name: -queued.get(name, len(queued)))


def first_in(free: Iterable[str], loaded: Callable[[str], int]) -> list[str]:
    """Sort experts by when they were loaded, the first one first (the baselines' FIFO)."""
    return sorted(free, key=loaded)

"""Which experts leave a pool first (paper section 4.3), and the orders that it is compared with."""

from collections.abc import Callable, Iterable, Mapping, Set

from jaxinfer.experts.scheduling.experts import ExpertGraph


def two_stage(free: Iterable[str], resident: Set[str], graph: ExpertGraph) -> list[str]:
    """CoServe's order.

    First come subsequent experts of whose predecessors none is in the pool, the largest first: nothing can lead to them
    soon. Then the others, the least used first. Equals: the less used, the larger, then by name.

    Args:
      free: experts that may leave.
      resident: all experts in the pool.
      graph: what leads to them, and how often they are used.
    """
    free, experts, usage = list(free), graph.experts, graph.usage
    independent = [name for name in free if graph.predecessors[name] and not graph.predecessors[name] & resident]
    first = sorted(independent, key=lambda name: (-experts[name].bytes, usage[name], name))
    others = sorted(set(free) - set(first), key=lambda name: (usage[name], -experts[name].bytes, name))
    return first + others


def queue_aware(order: list[str], queued: Mapping[str, int]) -> list[str]:
    """The order, with experts that wait in a queue behind all others: those that will be needed last go first.

    queued: of experts that will be needed, their places in the queue.
    """
    return sorted(order, key=lambda name: -queued.get(name, len(queued)))


def first_in(free: Iterable[str], loaded: Callable[[str], int]) -> list[str]:
    """The one that was loaded first goes first (the baselines' FIFO)."""
    return sorted(free, key=loaded)

"""How few loads any scheduler could do with."""

from collections.abc import Iterable, Sequence, Set


def compulsory_loads(used: Iterable[str], resident: Set[str]) -> int:
    """The least if requests may run in any order: every expert that is used and not there yet, once."""
    return len(set(used) - resident)


def belady_loads(order: Sequence[str], slots: int, resident: Iterable[str] = ()) -> int:
    """The least if requests run in this order and experts have one size: the one needed last leaves (Belady 1966).

    Args:
      order: the experts of the requests.
      slots: how many experts there is room for.
      resident: those that are there at the start, at most `slots`.
    """
    next_use, last = [len(order)] * len(order), dict[str, int]()
    for place in range(len(order) - 1, -1, -1):
        next_use[place] = last.get(order[place], len(order))
        last[order[place]] = place
    there = {name: last.get(name, len(order)) for name in resident}
    assert len(there) <= slots
    loads = 0
    for place, name in enumerate(order):
        if name not in there:
            loads += 1
            if len(there) == slots:
                del there[max(there, key=lambda other: (there[other], other))]
        there[name] = next_use[place]
    return loads

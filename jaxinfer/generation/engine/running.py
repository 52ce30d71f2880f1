"""The sequences that run, in order."""

import bisect
import operator
from collections.abc import Iterator

from jaxinfer.generation.engine.allocation import Allocation

_order = operator.attrgetter("order")


class RunningSequences:
    """Allocations with a slot, always in ascending order: a step neither sorts them nor looks for some among all.

    Attributes:
      decoding: those that decode.
      prefilling: those whose prompt is not computed yet.
      num_constrained: how many need a bitmask that depends on the token before.
    """

    def __init__(self) -> None:
        self.decoding: list[Allocation] = []
        self.prefilling: list[Allocation] = []
        self.num_constrained = 0

    def __len__(self) -> int:
        return len(self.decoding) + len(self.prefilling)

    def __iter__(self) -> Iterator[Allocation]:
        """Yield those that decode, then the others."""
        yield from self.decoding
        yield from self.prefilling

    @property
    def last(self) -> Allocation:
        """The last in order."""
        return max((group[-1] for group in (self.decoding, self.prefilling) if group), key=_order)

    def add(self, allocation: Allocation) -> None:
        """Add an allocation that has just got its slot."""
        bisect.insort(self._group(allocation), allocation, key=_order)
        self.num_constrained += allocation.sequence.matcher is not None

    def remove(self, allocation: Allocation) -> None:
        """Remove an allocation that still has its slot."""
        _remove(self._group(allocation), allocation)
        self.num_constrained -= allocation.sequence.matcher is not None

    def begin_decoding(self, allocation: Allocation) -> None:
        """Note that an allocation was in prefill and is so no longer."""
        _remove(self.prefilling, allocation)
        bisect.insort(self.decoding, allocation, key=_order)

    def _group(self, allocation: Allocation) -> list[Allocation]:
        return self.prefilling if allocation.prefilling else self.decoding

    def check_integrity(self) -> None:
        """Raise AssertionError unless all are in their place."""
        for group in (self.decoding, self.prefilling):
            assert group == sorted(group, key=_order)
            assert all(self._group(allocation) is group for allocation in group)
        assert self.num_constrained == sum(a.sequence.matcher is not None for a in self)


def _remove(group: list[Allocation], allocation: Allocation) -> None:
    at = bisect.bisect_left(group, allocation.order, key=_order)
    assert group[at] is allocation
    del group[at]

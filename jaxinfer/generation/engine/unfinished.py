"""The sequences that have not left the scheduler, whether they wait or run."""

from collections.abc import Iterable

from jaxinfer.generation.engine.allocation import Allocation
from jaxinfer.generation.engine.request import Sequence


class UnfinishedSequences:
    """The allocations of all unfinished sequences.

    Args:
      allocations: those that it begins with.

    Attributes:
      allocations: by sequence. Only this object writes to it.
    """

    def __init__(self, allocations: Iterable[Allocation] = ()):
        self.allocations: dict[Sequence, Allocation] = {}
        self._by_request: dict[str, dict[Sequence, Allocation]] = {}
        for allocation in allocations:
            self.add(allocation)

    def add(self, allocation: Allocation) -> None:
        """Add a sequence that arrives."""
        sequence = allocation.sequence
        self.allocations[sequence] = allocation
        self._by_request.setdefault(sequence.request_id, {})[sequence] = allocation

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence that leaves."""
        siblings = self._by_request[sequence.request_id]
        del self.allocations[sequence], siblings[sequence]
        if not siblings:
            del self._by_request[sequence.request_id]

    def of_request(self, request_id: str) -> list[Allocation]:
        """List the allocations of a request's sequences; none if all have left."""
        return list(self._by_request.get(request_id, {}).values())

    def check_integrity(self) -> None:
        """Raise AssertionError unless both ways to find an allocation agree."""
        assert len(self.allocations) == sum(map(len, self._by_request.values()))
        assert all(self._by_request[s.request_id][s] is a for s, a in self.allocations.items())
        assert all(self._by_request.values())

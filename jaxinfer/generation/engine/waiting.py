"""A queue of waiting items, in order."""

import heapq
from collections.abc import Callable, Iterator


class WaitingQueue[Item]:
    """Items in ascending order, any of which can leave; adding and removing take logarithmic time.

    Args:
      order: returns an item's place in the queue: unique, and constant while the item waits.
    """

    def __init__(self, order: Callable[[Item], tuple[int, int]]):
        self._order = order
        self._heap: list[tuple[tuple[int, int], Item]] = []  # the first one has not left
        self._left: set[tuple[int, int]] = set()  # the orders of items that have left and are still in the heap

    def __len__(self) -> int:
        return len(self._heap) - len(self._left)

    def __iter__(self) -> Iterator[Item]:
        """Yield the items in order; costs grow with the number of items read. The queue must not change meanwhile."""
        heap = self._heap
        frontier = [(heap[0][0], 0)] if heap else []
        while frontier:
            order, at = heapq.heappop(frontier)
            if order not in self._left:
                yield heap[at][1]
            for child in range(2 * at + 1, min(2 * at + 3, len(heap))):
                heapq.heappush(frontier, (heap[child][0], child))

    @property
    def first(self) -> Item | None:
        """The item with the smallest order, or None."""
        return self._heap[0][1] if self._heap else None

    def add(self, item: Item) -> None:
        """Add an item to the queue."""
        order = self._order(item)
        if order in self._left:  # the item is still in the heap
            self._left.remove(order)
        else:
            heapq.heappush(self._heap, (order, item))

    def remove(self, item: Item) -> None:
        """Remove a waiting item."""
        self._left.add(self._order(item))
        while self._heap and self._heap[0][0] in self._left:
            self._left.remove(heapq.heappop(self._heap)[0])
        if 2 * len(self._left) > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[0] not in self._left]
            heapq.heapify(self._heap)
            self._left.clear()

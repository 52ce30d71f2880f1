"""A memory of limited size: its items, the pinned ones, and the order of eviction."""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator


@dataclasses.dataclass
class _Resident[Value]:
    value: Value
    size: int
    pins: int = 0


def least_recently_used[Key](keys: list[Key]) -> Iterable[Key]:
    """The keys unchanged: they come least recently used first."""
    return keys


class Residents[Key: Hashable, Value]:
    """Items in a memory of limited size, such as adapters on a device.

    Args:
      budget: the size of the memory, in the unit of the items' sizes.
      order: sorts the keys of unpinned items, which come least recently used first: returns those that may go, in
        the order of eviction.
      keeps_last: whether an item larger than the budget is kept until the next one comes, rather than refused.

    Attributes:
      used: the total size of all items.
    """

    def __init__(
        self,
        budget: int,
        *,
        order: Callable[[list[Key]], Iterable[Key]] = least_recently_used,
        keeps_last: bool = False,
    ):
        self.budget, self._order, self._keeps_last = budget, order, keeps_last
        self._items: dict[Key, _Resident[Value]] = {}  # least recently used first
        self.used = 0

    def add(self, key: Key, value: Value, size: int = 1) -> bool:
        """Add a new item, evicting others to make room.

        Returns False, and changes nothing, if pinned items leave no room, or it is larger than the budget.
        """
        assert key not in self._items
        if self.victims(size) is None:
            return False
        self.evict(size)
        self._items[key] = _Resident(value, size)
        self.used += size
        return True

    def victims(self, size: int) -> list[Key] | None:
        """The items to evict for this size, without evicting them; None if even that leaves too little room."""
        chosen, room = [], self.budget - self.used
        if room >= size:
            return chosen
        free = self.unpinned
        for key in self._order(free) if free else ():
            if room >= size:
                break
            chosen.append(key)
            room += self._items[key].size
        alone = self._keeps_last and len(chosen) == len(self._items)
        return chosen if room >= size or alone else None

    @property
    def unpinned(self) -> list[Key]:
        """The items without pins, least recently used first."""
        items = list(self._items.items())  # at once: another thread may change them
        return [key for key, item in items if not item.pins]

    def has_room(self, size: int) -> bool:
        """Check whether an item of this size can fit, if others go."""
        return self.victims(size) is not None

    def evict(self, size: int) -> dict[Key, Value]:
        """Evict items until there is room for this size, and return them; evict none if that is impossible."""
        return {key: self.remove(key) for key in self.victims(size) or ()}

    def remove(self, key: Key) -> Value:
        """Remove an item without pins, and return it."""
        item = self._items.pop(key)
        assert not item.pins
        self.used -= item.size
        return item.value

    def get(self, key: Key) -> Value | None:
        """Return an item and mark it as used now; None if it is missing."""
        if key not in self._items:
            return None
        self.touch(key)
        return self._items[key].value

    def touch(self, key: Key) -> None:
        """Mark an item as used now."""
        self._items[key] = self._items.pop(key)

    def pin(self, key: Key) -> Value:
        """Keep an item until as many `unpin`s, and return it."""
        self._items[key].pins += 1
        return self._items[key].value

    def pinned(self, key: Key) -> Value:
        """An item that has pins."""
        assert self._items[key].pins
        return self._items[key].value

    def unpin(self, key: Key) -> None:
        """Undo one `pin`; mark the item as used now. Raises ValueError for one without pins."""
        if key not in self._items or not self._items[key].pins:
            raise ValueError(f"{key!r} was unpinned more often than pinned.")
        self._items[key].pins -= 1
        self.touch(key)

    def clear(self) -> None:
        """Forget all items, pinned ones too."""
        self._items.clear()
        self.used = 0

    def __contains__(self, key: object) -> bool:
        return key in self._items

    def __iter__(self) -> Iterator[Key]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def values(self) -> list[Value]:
        """All items, least recently used first."""
        return [item.value for item in self._items.values()]

    def check_integrity(self) -> None:
        """Check that the items fit the budget. Raises AssertionError."""
        assert self.used == sum(item.size for item in self._items.values())
        assert self.used <= self.budget or (self._keeps_last and len(self._items) == 1)
        assert all(item.pins >= 0 for item in self._items.values())

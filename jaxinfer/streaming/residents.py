"""What is kept in a memory of limited size: which items are there, which must stay, and which go first."""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator


@dataclasses.dataclass
class _Resident[Value]:
    value: Value
    size: int
    pins: int = 0


def least_recently_used[Key](keys: list[Key]) -> Iterable[Key]:
    """The order in which the one used longest ago goes first: they come so."""
    return keys


class Residents[Key: Hashable, Value]:
    """Items in a memory of limited size, such as adapters on a device.

    Args:
      budget: how much there is room for, in the unit of the items' sizes.
      order: of the keys of items without pins, which come the one used longest ago first: those that may go, the first
        one first.
      keeps_last: whether an item that is larger than the budget is kept until the next one comes, rather than refused.

    Attributes:
      used: the sizes of all items together.
    """

    def __init__(
        self,
        budget: int,
        *,
        order: Callable[[list[Key]], Iterable[Key]] = least_recently_used,
        keeps_last: bool = False,
    ):
        self.budget, self._order, self._keeps_last = budget, order, keeps_last
        self._items: dict[Key, _Resident[Value]] = {}  # the one used longest ago first
        self.used = 0

    def add(self, key: Key, value: Value, size: int = 1) -> bool:
        """Put an item there, which is not yet, after others have made room.

        False if items with pins leave no room, or it is larger than the budget; then nothing has changed.
        """
        assert key not in self._items
        if self.victims(size) is None:
            return False
        self.evict(size)
        self._items[key] = _Resident(value, size)
        self.used += size
        return True

    def victims(self, size: int) -> list[Key] | None:
        """Who goes if an item of this size comes; None if even then there is no room. Nothing changes."""
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
        """The items that need not stay, the one used longest ago first."""
        items = list(self._items.items())  # at once: another thread may change them
        return [key for key, item in items if not item.pins]

    def has_room(self, size: int) -> bool:
        """Whether an item of this size can be there, if others go."""
        return self.victims(size) is not None

    def evict(self, size: int) -> dict[Key, Value]:
        """Have items go until there is room for this size; returns them. If there cannot be, none goes."""
        return {key: self.remove(key) for key in self.victims(size) or ()}

    def remove(self, key: Key) -> Value:
        """Have an item go, which has no pins; returns it."""
        item = self._items.pop(key)
        assert not item.pins
        self.used -= item.size
        return item.value

    def get(self, key: Key) -> Value | None:
        """The item, which has been used now; None if it is not there."""
        if key not in self._items:
            return None
        self.touch(key)
        return self._items[key].value

    def touch(self, key: Key) -> None:
        """Say that an item has been used now."""
        self._items[key] = self._items.pop(key)

    def pin(self, key: Key) -> Value:
        """Have an item stay until as many `unpin`s; returns it."""
        self._items[key].pins += 1
        return self._items[key].value

    def unpin(self, key: Key) -> None:
        """Undo one `pin`; the item has been used until now. Raises ValueError for one without pins."""
        if key not in self._items or not self._items[key].pins:
            raise ValueError(f"{key!r} was released more often than acquired.")
        self._items[key].pins -= 1
        self.touch(key)

    def clear(self) -> None:
        """Forget all items, those with pins too."""
        self._items.clear()
        self.used = 0

    def __contains__(self, key: object) -> bool:
        return key in self._items

    def __iter__(self) -> Iterator[Key]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def values(self) -> list[Value]:
        """All items, the one used longest ago first."""
        return [item.value for item in self._items.values()]

    def check_integrity(self) -> None:
        """Raise AssertionError unless the items fit the budget."""
        assert self.used == sum(item.size for item in self._items.values())
        assert self.used <= self.budget or (self._keeps_last and len(self._items) == 1)
        assert all(item.pins >= 0 for item in self._items.values())

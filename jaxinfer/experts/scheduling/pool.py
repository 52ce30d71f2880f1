"""A model pool: the experts in the memory of an executor, or of several that share a device (paper section 4.3)."""

from collections.abc import Callable, Iterable, Set

from jaxinfer.streaming.residents import Residents

EvictionOrder = Callable[[list[str], "ModelPool"], list[str]]
"""Function that sorts experts that may leave in the order of eviction.

Its arguments are these experts, least recently used first, and their pool.
"""


class ModelPool:
    """Experts in a memory or on their way to it; their bytes never exceed the budget.

    Args:
      index: its index among the pools.
      budget: in bytes.
      order: the order of eviction.

    Attributes:
      loading: the experts being loaded.
    """

    def __init__(self, index: int, budget: int, order: EvictionOrder):
        self.index, self.loading = index, set[str]()
        self._given, self._own, self._order, self._keep = budget, budget, order, frozenset[str]()
        self._residents: Residents[str, None] = Residents(budget, order=self._may_leave)
        self._loads: dict[str, int] = {}  # sequence number of each load, from 0
        self._reserved: dict[str, int] = {}

    @property
    def budget(self) -> int:
        """The budget in bytes."""
        return self._residents.budget

    def limit(self, size: int | None) -> None:
        """Limit the budget, not below the bytes used; None: all that is not lent."""
        self._residents.budget = self._own if size is None else min(self._own, size)

    def lend(self, rest: int, *, keep: Iterable[str] = ()) -> list[str] | None:
        """Keep only so many bytes of the budget until `take_back`; return the evicted experts.

        Returns None, and changes nothing, if experts in use, being loaded, or in `keep` take more.
        """
        victims = self._make_room(max(self.budget - rest, 0), keep)
        if victims is not None:
            self._own = rest
            self.limit(self.budget)
        return victims

    def take_back(self) -> None:
        """Have the full budget again."""
        self._own = self._given
        self.limit(None)

    @property
    def used(self) -> int:
        """Bytes of all that is loaded, being loaded or reserved."""
        return self._residents.used

    @property
    def free(self) -> int:
        """The free bytes."""
        return self.budget - self.used

    @property
    def resident(self) -> Set[str]:
        """The loaded experts."""
        return {name for name in self._residents if name not in self.loading and name not in self._reserved}

    @property
    def expected(self) -> Set[str]:
        """The experts that are loaded or being loaded and, while room is made, those that it is made for."""
        return {name for name in self._residents if name not in self._reserved} | self._keep

    @property
    def unused(self) -> list[str]:
        """The loaded experts that nothing needs now."""
        return self._residents.unpinned

    def has(self, name: str) -> bool:
        """Check whether an expert is loaded or being loaded."""
        return name in self._residents

    def is_ready(self, name: str) -> bool:
        """Check whether an expert is loaded."""
        return name in self._residents and name not in self.loading

    def load_order(self, name: str) -> int:
        """A number that grows with each load: experts loaded later have larger ones."""
        return self._loads[name]

    def victims(self, size: int) -> list[str] | None:
        """The experts to evict for this many bytes, without evicting them; None if that is not enough."""
        return self._residents.victims(size)

    def begin_load(self, name: str, size: int, *, keep: Iterable[str] = ()) -> list[str] | None:
        """Make room for an expert and begin to load it; return the evicted experts.

        Returns None, and changes nothing, if there is no room besides experts in use, being loaded, or in `keep`.
        """
        victims = self._make_room(size, [name, *keep])
        if victims is not None:
            self._residents.add(name, None, size)
            self._residents.pin(name)
            self.loading.add(name)
        return victims

    def end_load(self, name: str, *, loaded: bool, pinned: bool = False) -> None:
        """Note that an expert is loaded, for good if `pinned`; or that its load failed, and its room is free again."""
        self.loading.discard(name)
        if loaded:
            self._loads[name] = len(self._loads) and max(self._loads.values()) + 1
        if not (loaded and pinned):
            self._residents.unpin(name)
        if not loaded:
            self._residents.remove(name)

    def drop(self, name: str) -> None:
        """Remove an expert that nothing uses."""
        self._residents.remove(name)
        del self._loads[name]

    def pin(self, name: str) -> None:
        """Keep an expert until `unpin`."""
        self._residents.touch(name)
        self._residents.pin(name)

    def unpin(self, name: str) -> None:
        """Undo `pin`."""
        self._residents.unpin(name)

    def reserve(self, owner: str, size: int, *, spare_bytes: int = 0, keep: Iterable[str] = ()) -> list[str] | None:
        """Reserve bytes for something other than experts until `give_back`; return the evicted experts, None: no room.

        Args:
          spare_bytes: bytes to leave free, for the expert that will be loaded.
        """
        victims = self._make_room(size + spare_bytes, keep)
        if victims is not None:
            self._residents.add(owner, None, size)
            self._residents.pin(owner)
            self._reserved[owner] = size
        return victims

    def give_back(self, owner: str) -> None:
        """Undo `reserve`, if there was one."""
        if self._reserved.pop(owner, None) is not None:
            self._residents.unpin(owner)
            self._residents.remove(owner)

    def check_integrity(self) -> None:
        """Check that everything fits the budget. Raises AssertionError."""
        self._residents.check_integrity()
        assert self.loading <= set(self._residents)

    def _make_room(self, size: int, keep: Iterable[str]) -> list[str] | None:
        self._keep = frozenset(keep)
        victims = self.victims(size)
        for victim in victims or ():
            self._residents.remove(victim)
            del self._loads[victim]
        self._keep = frozenset()
        return victims

    def _may_leave(self, free: list[str]) -> list[str]:
        return self._order([name for name in free if name not in self._keep], self)

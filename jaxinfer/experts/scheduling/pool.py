"""A model pool: the experts in the memory of an executor, or of several that share a device (paper section 4.3)."""

from collections.abc import Callable, Iterable, Set

from jaxinfer.streaming.residents import Residents

EvictionOrder = Callable[[list[str], "ModelPool"], list[str]]
"""Of experts that may leave, the one used longest ago first, and their pool: in which order they leave."""


class ModelPool:
    """Experts that are in a memory, or on their way to it; their bytes never exceed the budget.

    Args:
      index: its place among the pools.
      budget: in bytes.
      order: which experts leave first.

    Attributes:
      loading: experts that are on their way.
    """

    def __init__(self, index: int, budget: int, order: EvictionOrder):
        self.index, self.loading = index, set[str]()
        self._given, self._order, self._keep = budget, order, frozenset[str]()
        self._residents: Residents[str, None] = Residents(budget, order=self._may_leave)
        self._loads: dict[str, int] = {}  # when each was loaded: the first is 0
        self._reserved: dict[str, int] = {}

    @property
    def budget(self) -> int:
        """Bytes."""
        return self._residents.budget

    def limit(self, size: int | None) -> None:
        """Have a smaller budget, not less than what is there; None: the one that was given."""
        self._residents.budget = self._given if size is None else min(self._given, size)

    @property
    def used(self) -> int:
        """Bytes of all that is there or on its way."""
        return self._residents.used

    @property
    def free(self) -> int:
        """Bytes."""
        return self.budget - self.used

    @property
    def resident(self) -> Set[str]:
        """The experts that are there."""
        return {name for name in self._residents if name not in self.loading and name not in self._reserved}

    @property
    def unused(self) -> list[str]:
        """The experts that are there and that nothing needs now."""
        return self._residents.unpinned

    def has(self, name: str) -> bool:
        """Whether an expert is there, or on its way."""
        return name in self._residents

    def is_ready(self, name: str) -> bool:
        """Whether an expert is there."""
        return name in self._residents and name not in self.loading

    def load_order(self, name: str) -> int:
        """A number that is larger for an expert that was loaded later."""
        return self._loads[name]

    def victims(self, size: int) -> list[str] | None:
        """Who would leave for this many bytes; None if even then there is no room. Nothing changes."""
        return self._residents.victims(size)

    def begin_load(self, name: str, size: int, *, keep: Iterable[str] = ()) -> list[str] | None:
        """Make room for an expert and have it on its way; returns those that left.

        None: there is no room, because of experts that are in use, on their way, or in `keep`; nothing has changed.
        """
        victims = self._make_room(size, keep)
        if victims is not None:
            self._residents.add(name, None, size)
            self._residents.pin(name)
            self.loading.add(name)
        return victims

    def end_load(self, name: str, *, loaded: bool, pinned: bool = False) -> None:
        """An expert has come, for good if `pinned`; or cannot come, and its room is free again."""
        self.loading.discard(name)
        if loaded:
            self._loads[name] = len(self._loads) and max(self._loads.values()) + 1
        if not (loaded and pinned):
            self._residents.unpin(name)
        if not loaded:
            self._residents.remove(name)

    def drop(self, name: str) -> None:
        """Have an expert leave that nothing uses."""
        self._residents.remove(name)
        del self._loads[name]

    def use(self, name: str) -> None:
        """Have an expert stay until `release`."""
        self._residents.touch(name)
        self._residents.pin(name)

    def release(self, name: str) -> None:
        """Undo `use`."""
        self._residents.unpin(name)

    def reserve(self, owner: str, size: int, *, beside: int = 0, keep: Iterable[str] = ()) -> list[str] | None:
        """Take bytes for something else than experts until `give_back`; returns experts that left, None: no room.

        beside: bytes that are free then, for the expert that will be loaded.
        """
        victims = self._make_room(size + beside, keep)
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
        """Raise AssertionError unless all fits the budget."""
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

"""Memory budgets: one per device and one for the host, shared by all owners in this process."""

import functools
import math
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.filesize import decimal

from jaxinfer.models.devices import (
    device_available_bytes,
    device_total_bytes,
    host_available_bytes,
    host_total_bytes,
)

if TYPE_CHECKING:
    from rich.table import Table

HOST = "the host"
"""The name of the host's memory, which CPU devices share."""

MAX_WAITING, WAITING_BYTES = 10_000, 512 << 20
"""Defaults of the maximum number of waiting requests, and of the bytes of their inputs."""

_lock = threading.RLock()  # for all reservations; reentrant, as a signal's handler may take it again
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


class Offer(NamedTuple):
    """Memory that a tenant could give back.

    Attributes:
      bytes: the number of bytes.
      seconds: seconds to restore their content.
    """

    bytes: int
    seconds: float


class Holding(NamedTuple):
    """An owner's part of a memory for one of its tenants.

    Attributes:
      owner: the owner's name, such as "LLM demo_model".
      tenant: the use of the memory, such as "KV pages".
      bytes: all its bytes.
      offer: the part it could give back, which excludes pinned memory.
    """

    owner: str
    tenant: str
    bytes: int
    offer: Offer

    def __str__(self) -> str:
        evictable = self.offer.bytes
        pinned = f"{decimal(self.bytes - evictable)} pinned and {decimal(evictable)} evictable"
        return f"{self.owner}, {self.tenant}: {decimal(self.bytes)}, {pinned}"


class BudgetError(MemoryError):
    """Too little of a memory is free; the text lists its owners and their bytes."""


class Budget:
    """The memory of a device or of the host, and each owner's part of it.

    Args:
      name: the memory's name, such as "gpu:0" or "the host".
      capacity: bytes, which reservations never exceed; None: unknown, without a limit.
      available: returns the bytes that the system has free now, whoever uses the others; None: unknown.
    """

    def __init__(self, name: str, capacity: int | None, *, available: Callable[[], int] | None = None):
        if capacity is not None and capacity < 0:
            raise ValueError(f"the capacity of {name} must be at least 0 bytes, got {capacity}.")
        self.name, self.capacity, self._available = name, capacity, available
        # Weak, so that a dropped reservation is given back; replaced and never changed, so that reading needs no lock.
        self._reservations: tuple[weakref.ref[Reservation], ...] = ()

    def limit(self, capacity: int) -> None:
        """Set the capacity to at most so many bytes."""
        self.capacity = capacity if self.capacity is None else min(self.capacity, capacity)

    @property
    def reserved(self) -> int:
        """The bytes of all owners together."""
        return sum(size for _, _, size in self._held())

    @property
    def free(self) -> int | None:
        """The bytes that nobody has reserved; None: unknown."""
        return None if self.capacity is None else self.capacity - self.reserved

    @property
    def available(self) -> int | None:
        """The bytes that the system has free now; None: unknown."""
        return None if self._available is None else self._available()

    @property
    def holdings(self) -> list[Holding]:
        """Each owner's part for each of its tenants, in the order of reservation."""
        return [reservation.holding(self, tenant, size) for reservation, tenant, size in self._held()]

    def table(self) -> "Table":
        """Make a table of owners and their bytes for `rich` to print."""
        from rich.table import Table

        table = Table("owner, tenant", title=f"{self.name}: {self._summary()}", title_justify="left")
        for column in ("bytes", "pinned", "evictable", "s to have again"):
            table.add_column(column, justify="right")
        last = None
        for reservation, tenant, size in self._held():
            if reservation is not last:  # others may have the same name
                table.add_row(reservation.owner)
            last, (evictable, seconds) = reservation, reservation.holding(self, tenant, size).offer
            cost = f"{seconds:.3g}" if evictable else ""
            table.add_row(f"  {tenant}", *map(decimal, (size, size - evictable, evictable)), cost)
        return table

    def _held(self) -> Iterator[tuple["Reservation", str, int]]:
        for reference in self._reservations:
            if (reservation := reference()) is not None:
                for (budget, tenant), size in reservation.sizes.items():
                    if budget is self:
                        yield reservation, tenant, size

    def _admit(self, reservation: "Reservation") -> None:
        """Count a reservation from now on; under the lock."""
        there = [held for reference in self._reservations if (held := reference()) is not None and held.sizes]
        if reservation not in there:
            there.append(reservation)
        self._reservations = tuple(map(weakref.ref, there))

    def _summary(self) -> str:
        reserved = f"{decimal(self.reserved)} reserved"
        return reserved if self.capacity is None else f"{reserved} of {decimal(self.capacity)}"

    @property
    def report(self) -> str:
        """The owners and their bytes for the end of an error, after a line break; empty if nobody has any."""
        return f"\n{self}" if self.holdings else ""

    def __str__(self) -> str:
        return "\n".join([f"{self.name}: {self._summary()}", *(f"  {held}" for held in self.holdings)])


Sizes = Mapping[tuple[Budget, str], int]
"""Bytes of memories by budget and tenant."""
Offers = Mapping[tuple[Budget, str], Callable[[], Offer]]
"""Functions that return the present offers, by budget and tenant."""


class Reservation:
    """An owner's part of any number of memories, until it is released, or dropped with its owner.

    Args:
      owner: the owner's name, such as "LLM demo_model".
    """

    def __init__(self, owner: str):
        self.owner = owner
        self._sizes: Sizes = {}
        self._offers: Offers = {}
        self._released = False

    @property
    def sizes(self) -> Sizes:
        """Reserved bytes by budget and tenant; empty after `release`."""
        return {} if self._released else self._sizes

    @property
    def budgets(self) -> dict[str, Budget]:
        """The budgets with reserved bytes, by name."""
        return {budget.name: budget for budget, _ in self.sizes}

    def resize(
        self,
        sizes: Sizes,
        *,
        offers: Offers | None = None,
        unused: bool = False,
        remedy: str = "close one of those who have it, or ask for less",
    ) -> None:
        """Reserve these bytes in place of those before: of all memories or, if one has too little, of none.

        Args:
          sizes: bytes by budget and tenant; tenants with 0 bytes are left out.
          offers: the offers of tenants whose memory is not pinned.
          unused: whether new bytes are not in use yet, and so must be free in the system, too.
          remedy: advice for the error if the bytes do not fit.

        Raises BudgetError, which says who has how much, ValueError for less than 0 bytes, NaN and infinity, or after
        `release`.
        """
        for (budget, tenant), size in sizes.items():
            if not size < math.inf:  # NaN, too
                raise ValueError(
                    f"{self.owner} must take a finite number of bytes of {budget.name} for {tenant}, got {size}."
                )
            if size < 0:
                raise ValueError(f"{self.owner} must take at least 0 bytes of {budget.name} for {tenant}, got {size}.")
        needed = {place: size for place, size in sizes.items() if size}
        available = {budget: budget.available if unused else None for budget, _ in needed}
        with _lock:
            if self._released:
                raise ValueError(f"{self.owner} has released its memory; only a new reservation can take some.")
            more = by_budget(needed)
            more.subtract(by_budget(self.sizes))
            lacking = [budget for budget in available if _lacks(more[budget], budget.free, available[budget])]
            if not lacking:
                for budget in available:
                    budget._admit(self)
                self._sizes, self._offers = needed, dict(offers or {})
        if lacking:
            raise BudgetError(self._refusal(lacking[0], needed, more[lacking[0]], remedy))

    def _refusal(self, budget: Budget, sizes: Sizes, more: int, remedy: str) -> str:
        parts = ", ".join(f"{tenant} {decimal(size)}" for (where, tenant), size in sizes.items() if where is budget)
        rooms = []
        if budget.free is not None:
            rooms.append(f"{decimal(budget.free)} are not reserved")
        if budget.available is not None:
            rooms.append(f"the system has {decimal(budget.available)} free")
        return (
            f"{self.owner} would take {decimal(more)} more of {budget.name} (in all: {parts}), where "
            f"{' and '.join(rooms)}: {remedy}.{budget.report}"
        )

    def release(self) -> None:
        """Give all bytes back, for good; again it does nothing. Takes no lock, so that it may be called anywhere."""
        self._released = True

    def holding(self, budget: Budget, tenant: str, size: int) -> Holding:
        """Its part of a budget for a tenant of this size, with its present offer."""
        offer = self._offers.get((budget, tenant), lambda: Offer(0, 0.0))
        return Holding(self.owner, tenant, size, offer())


def by_budget(sizes: Sizes) -> Counter[Budget]:
    """Sum bytes over tenants."""
    total = Counter[Budget]()
    for (budget, _), size in sizes.items():
        total[budget] += size
    return total


def _lacks(more: int, *rooms: int | None) -> bool:
    return more > 0 and any(room is not None and more > room for room in rooms)


def default_max_waiting(input_bytes: int) -> int:
    """The requests that may wait by default: `MAX_WAITING`, or as many as have inputs of `WAITING_BYTES`.

    Args:
      input_bytes: the bytes of one request's input. Even if it is larger than `WAITING_BYTES`, one may wait.
    """
    return max(1, min(MAX_WAITING, WAITING_BYTES // input_bytes))


# The budgets of this process

_budgets: dict[str, Budget] = {}


def host_budget() -> Budget:
    """The budget of the host's memory."""
    return _budget(HOST, host_total_bytes, host_available_bytes)


def budget_of(device: Any) -> Budget:
    """The budget of a device's memory; a CPU shares the host's."""
    if device.platform == "cpu":
        return host_budget()
    total = functools.partial(device_total_bytes, device)
    return _budget(f"{device.platform}:{device.id}", total, functools.partial(device_available_bytes, device))


def all_budgets() -> list[Budget]:
    """The budgets that were asked for so far."""
    return list(_budgets.values())


def _budget(name: str, total: Callable[[], int | None], available: Callable[[], int]) -> Budget:
    with _lock:
        if name not in _budgets:
            _budgets[name] = Budget(name, total(), available=available)
        return _budgets[name]


def sizes_of(
    devices: Iterable[Any], each: Mapping[str, int], *, host: Mapping[str, int] | None = None
) -> Counter[tuple[Budget, str]]:
    """Sum the bytes to reserve, by budget and tenant.

    Args:
      devices: devices that memory is taken from; several may share one.
      each: bytes of each device, by tenant.
      host: bytes of the host's memory, by tenant.
    """
    sizes = Counter[tuple[Budget, str]]()
    for device in devices:
        sizes.update({(budget_of(device), tenant): size for tenant, size in each.items()})
    sizes.update({(host_budget(), tenant): size for tenant, size in (host or {}).items()})
    return sizes

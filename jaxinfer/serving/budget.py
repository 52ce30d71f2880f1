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

_SOON = 1e-3
"""Seconds that the next use is away at least, for costs."""

MAX_WAITING, WAITING_BYTES = 10_000, 512 << 20
"""Defaults of the maximum number of waiting requests, and of the bytes of their inputs."""

_lock = threading.RLock()  # for all reservations; reentrant, as a signal's handler may take it again
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


class Offer(NamedTuple):
    """Memory that a tenant could give back now: without its floor, and what is pinned or in flight.

    Attributes:
      bytes: the number of bytes.
      seconds: seconds to restore their content.
      next_use: seconds until their content is expected to be used; infinity: nobody knows.
    """

    bytes: int
    seconds: float
    next_use: float = math.inf

    @property
    def cost(self) -> tuple[float, float]:
        """The cost of taking a byte: seconds to restore it, over the time until then; among equals, those seconds."""
        each = self.seconds / max(self.bytes, 1)
        return each / max(self.next_use, _SOON), each


class Lender(NamedTuple):
    """How a tenant lends memory.

    Attributes:
      offer: returns what it could give now.
      give: frees about so many bytes, at most what was offered, and shrinks the reservation by them. It frees nothing
        if they are in use by now. Called without the ledger's lock, in the thread that asks; it must wait for nobody
        who may be asking himself.
    """

    offer: Callable[[], Offer]
    give: Callable[[int], None]


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
            last, offer = reservation, reservation.holding(self, tenant, size).offer
            cost = f"{offer.seconds:.3g}" if offer.bytes else ""
            table.add_row(f"  {tenant}", *map(decimal, (size, size - offer.bytes, offer.bytes)), cost)
        return table

    def offers(self, asker: "Reservation") -> Iterator[tuple["Reservation", Lender, Offer]]:
        """Yield the lenders of other owners, with what they offer."""
        for reservation in {held: None for held, _, _ in self._held()}:
            if reservation is not asker:
                for lender in reservation.lenders_of(self):
                    if (offer := lender.offer()).bytes > 0:
                        yield reservation, lender, offer

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
Lenders = Mapping[tuple[Budget, str], Lender]
"""How memory is lent, by budget and tenant."""


class Reservation:
    """An owner's part of any number of memories, until it is released, or dropped with its owner.

    Args:
      owner: the owner's name, such as "LLM demo_model".
    """

    def __init__(self, owner: str):
        self.owner = owner
        self._sizes: Sizes = {}
        self._lenders: Lenders = {}
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
        lenders: Lenders | None = None,
        unused: bool = False,
        remedy: str = "close one of those who have it, or ask for less",
    ) -> None:
        """Reserve these bytes in place of those before: of all memories or, if one has too little, of none.

        Where too little is free, other owners lend: those first whose memory costs least (`Offer.cost`). If all of them
        together offer too little, none gives anything. If several owners ask at the same time, what one is given may go
        to another. At least one of them has its bytes in the end, and one that is refused may have been given some.

        Args:
          sizes: bytes by budget and tenant; tenants with 0 bytes are left out.
          lenders: how tenants lend whose memory is not pinned.
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
        unwilling = set[Lender]()
        while True:
            with _lock:
                lacking = self._lacking(needed, available)
                if not lacking:
                    for budget in available:
                        budget._admit(self)
                    self._sizes, self._lenders = needed, dict(lenders or {})
                    return
            if not self._borrow(lacking, available, unwilling):
                break
        budget = next(iter(lacking))
        raise BudgetError(self._refusal(budget, needed, remedy))

    def _lacking(self, needed: Sizes, available: Mapping[Budget, int | None]) -> Counter[Budget]:
        """The bytes that these sizes take beyond what is free. Raises ValueError after `release`.

        available: the bytes of each budget that the system has free; None: they need not be.
        """
        if self._released:
            raise ValueError(f"{self.owner} has released its memory; only a new reservation can take some.")
        lacking = by_budget(needed)
        lacking.subtract(by_budget(self.sizes))
        for budget, more in lacking.items():
            rooms = [room for room in (budget.free, available.get(budget)) if room is not None]
            lacking[budget] = more - min(rooms, default=more) if more > 0 else 0
        return +lacking

    def _borrow(self, lacking: Counter[Budget], available: dict[Budget, int | None], unwilling: set[Lender]) -> bool:
        """Have the cheapest lender give some of what is lacking; return False if all offer too little together.

        Args:
          available: as of `_lacking`; grows by what is given, which the system may not count as free yet.
          unwilling: lenders that gave nothing although they had offered; is added to.
        """
        chosen: tuple[Reservation, Lender, int] | None = None
        for budget, size in lacking.items():
            offers = [each for each in budget.offers(self) if each[1] not in unwilling]
            if sum(offer.bytes for _, _, offer in offers) < size:
                return False
            owner, lender, offer = min(offers, key=lambda each: each[2].cost)
            chosen = owner, lender, min(size, offer.bytes)
        assert chosen is not None, "something is lacking"
        owner, lender, size = chosen
        before = by_budget(owner.sizes)
        lender.give(size)
        given = before - by_budget(owner.sizes)
        if not given:
            unwilling.add(lender)
        for budget, room in available.items():
            available[budget] = None if room is None else room + given[budget]
        return True

    def lenders_of(self, budget: Budget) -> list[Lender]:
        """The lenders among its tenants of a budget."""
        return [each for (where, _), each in self._lenders.items() if where is budget]

    def lacking(self, sizes: Sizes) -> Counter[Budget]:
        """The bytes that `resize` would lack, beyond what is free and what others would lend."""
        lacking = self._lacking(sizes, {})
        for budget in lacking:
            lacking[budget] -= sum(offer.bytes for _, _, offer in budget.offers(self))
        return +lacking

    def _refusal(self, budget: Budget, sizes: Sizes, remedy: str) -> str:
        parts = ", ".join(f"{tenant} {decimal(size)}" for (where, tenant), size in sizes.items() if where is budget)
        more, rooms = by_budget(sizes)[budget] - by_budget(self.sizes)[budget], []
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
        self._lenders = {}

    def holding(self, budget: Budget, tenant: str, size: int) -> Holding:
        """Its part of a budget for a tenant of this size, with its present offer."""
        lender = self._lenders.get((budget, tenant))
        return Holding(self.owner, tenant, size, Offer(0, 0.0) if lender is None else lender.offer())


def by_budget(sizes: Sizes) -> Counter[Budget]:
    """Sum bytes over tenants."""
    total = Counter[Budget]()
    for (budget, _), size in sizes.items():
        total[budget] += size
    return total


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
